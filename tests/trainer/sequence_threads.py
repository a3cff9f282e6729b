"""A sequence group whose ranks are threads of this process: each with a model of its own, and real exchanges."""

import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from verbatim.trainer.parallel import sequence
from verbatim.trainer.parallel.sequence import SequenceGroup
from waiting import HANGS


class Meeting:
    """Where the ranks of a group give each other tensors, and what went over it."""

    def __init__(self, size):
        self.size = size
        self.barrier = threading.Barrier(size, timeout=HANGS)
        self.given = [None] * size
        self.exchanges = []
        """Bytes that rank 0 sends to others, for each exchange."""

    def all_to_all(self, out, x, rank):
        theirs = self._all(x, rank)
        for source, tensor in enumerate(theirs):
            out[source] = tensor[rank]
        if rank == 0:
            self.exchanges.append(x[1:].nbytes)
        self.barrier.wait()

    def total(self, values, rank):
        found = torch.stack(self._all(values.clone(), rank)).sum(0)
        self.barrier.wait()
        values.copy_(found)

    def _all(self, x, rank):
        self.given[rank] = x
        self.barrier.wait()
        return list(self.given)


class ThreadGroup(SequenceGroup):
    def __init__(self, meeting, rank):
        self.size, self.rank = meeting.size, rank
        self._group = (meeting, rank)


class FakeDist:
    """Stands for `torch.distributed`: a group is a meeting and a rank."""

    @staticmethod
    def all_to_all_single(out, x, group):
        group[0].all_to_all(out, x, group[1])

    @staticmethod
    def all_reduce(values, group):
        group[0].total(values, group[1])


def on_ranks(monkeypatch, size, do):
    """`do(group)` on each of `size` ranks at one time; their results, and the meeting."""
    monkeypatch.setattr(sequence, "dist", FakeDist)
    meeting = Meeting(size)

    def run(rank):
        try:
            return do(ThreadGroup(meeting, rank))
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        running = [pool.submit(run, rank) for rank in range(size)]
    errors = [r.exception() for r in running if r.exception() is not None]
    for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
        raise error
    return [r.result() for r in running], meeting
