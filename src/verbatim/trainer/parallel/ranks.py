"""Connects the processes of one trainer: orders of rank 0, small values from all to all, arrays between two."""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from verbatim.core.errors import RunStopped, VerbatimError
from verbatim.core.machine_faults import describe
from verbatim.trainer.parallel.failures import KINDS, Failures, kind_of

NO_DEADLINE = timedelta(days=365)
"""For an order: rollouts take as long as they take, and a rank ends with rank 0."""


class Ranks:
    """The processes of one trainer, as one of them sees them.

    Collective methods are called by all ranks in the same order. A rank that keeps the others waiting for longer than
    the deadline makes them fail.

    Args:
        store: Where ranks find each other; rank 0's process, or a launcher's, serves it.
        rank: This process: 0 leads.
        size: Processes in all.
        local_rank: This process among those of its machine: its CUDA device.
        use_cuda: Whether parameters lie on CUDA devices.
        deadline: Seconds that ranks wait for each other.
        ended: Ranks whose processes have ended and how, "was ended by SIGKILL", where that is known.
    """

    def __init__(
        self,
        store: Any,
        *,
        rank: int,
        size: int,
        local_rank: int = 0,
        use_cuda: bool = False,
        deadline: float = 600.0,
        ended: Callable[[], Mapping[int, str]] = dict,
    ) -> None:
        self.rank, self.size, self.local_rank = rank, size, local_rank
        self._store, self._ended, self.deadline = store, ended, deadline
        self._orders = 0
        self._in_step = False
        self._broken: str | None = None
        self.failures = Failures(store, rank, size, deadline=deadline, ended=ended)
        if use_cuda:
            torch.cuda.set_device(local_rank)
        self.failures.introduce()
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if use_cuda else "gloo",
            store=store,
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=deadline),
        )
        self.device = torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")
        self.mesh: DeviceMesh = init_device_mesh("cuda" if use_cuda else "cpu", (size,))

    @property
    def leads(self) -> bool:
        return self.rank == 0

    @property
    def are_broken(self) -> bool:
        """Whether rank 0 knows that nothing can be done together any more."""
        return self._broken is not None

    # ---- orders

    @contextlib.contextmanager
    def lead(self, do: str, **what: Any) -> Iterator[None]:
        """Rank 0: have all ranks do this, which the block does here.

        Args:
            do: What; the others get it from `next_order`, with the rest as plain JSON values.

        Raises:
            RunStopped: another rank failed, is gone, or keeps the others waiting: names it. Nothing can be done
                together any more, and every later order raises this again.
            VerbatimError: what all ranks raised together, in step; they can go on.
        """
        if self._broken is not None:
            raise RunStopped(f"the trainer's processes have ended: {self._broken}")
        self._orders += 1
        self._store.set(f"order/{self._orders}", json.dumps({"do": do, **what}))
        try:
            yield
        except BaseException as error:
            if self._in_step:
                self._in_step = False
                raise
            found = self.failures.cause(error)
            self._broken = str(found)
            self.failures.tell(found)
            if found is error:
                raise
            raise found from error

    def next_order(self) -> dict[str, Any]:
        """Another rank: wait, for as long as it takes, for what rank 0 has to be done."""
        self._orders += 1
        key = f"order/{self._orders}"
        self._store.wait([key], NO_DEADLINE)
        order: dict[str, Any] = json.loads(self._store.get(key))
        self._in_step = False
        return order

    def follow(self, obey: Callable[[dict[str, Any]], None]) -> None:
        """Another rank: do what rank 0 orders, until it says that it is over."""
        while (order := self.next_order())["do"] != "end":
            try:
                obey(order)
            except VerbatimError:
                if not self._in_step:  # rank 0 has raised it too, and decides
                    raise

    def look(self) -> None:
        """Rank 0, between two orders: notice that another rank has ended, or failed.

        Raises:
            VerbatimError: names it.
        """
        if ended := self._ended():
            self._broken = self.failures.named(ended)
            raise RunStopped(self._broken)
        if (first := self.failures.first()) is not None:
            self._broken = first.said
            raise first.error(self.failures.name(first.rank))

    def end(self) -> None:
        """Rank 0: let the others end."""
        with contextlib.suppress(RunStopped), self.lead("end"):
            pass

    # ---- small values

    def gather(self, value: Any) -> list[Any]:
        """Each rank's plain JSON value, in the order of ranks, on all ranks."""
        mine = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(mine)]))
        longest = max(int(length) for length in lengths)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(mine)] = mine
        all_of_them = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(all_of_them, padded)
        return [
            json.loads(bytes(found[: int(length)].numpy())) for found, length in zip(all_of_them, lengths, strict=True)
        ]

    def agree(self, do: Callable[[], Any]) -> list[Any]:
        """Do something on each rank; the results of all, plain JSON values, on all ranks.

        Args:
            do: Takes no part in a collective itself: where it fails on one rank alone, the others would be left in it.

        Raises:
            VerbatimError: one rank raised an error of ours, or of the system: then all raise it, in step. It names the
                rank and its host, unless all failed alike.
        """
        error: Exception | None = None
        value = None
        try:
            value = do()
        except (VerbatimError, OSError) as raised:
            error = raised
        return self.share(value, error)

    def share(self, value: Any, error: Exception | None = None) -> list[Any]:
        """`agree`, where it is known what came of it."""
        answer = {"value": value} if error is None else {"error": [kind_of(error), describe(error)]}
        answers = self.gather(answer)
        failed = [(rank, answer["error"]) for rank, answer in enumerate(answers) if "error" in answer]
        if failed:
            self._in_step = True
            rank, (kind, said) = failed[0]
            if kind != "sampler" and any(answer != answers[0] for answer in answers):  # that names a replica
                said = f"{self.failures.name(rank)}: {said}"
            raise KINDS[kind](said) from error
        return [answer["value"] for answer in answers]

    def most(self, *numbers: int) -> list[int]:
        """The largest of all ranks, of each number."""
        found = torch.tensor(numbers, dtype=torch.int64)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return [int(number) for number in found]

    def total(self, values: Tensor) -> Tensor:
        """The sum over ranks, in place."""
        dist.all_reduce(values)
        return values

    def anywhere(self, flags: Tensor) -> Tensor:
        """Whether a flag is set on any rank, in place: uint8."""
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        return flags

    # ---- arrays

    def send(self, head: Any, arrays: Sequence[np.ndarray], to: int) -> None:
        """Send plain JSON values and arrays to one rank, which calls `receive`. No array is copied."""
        about = {"head": head, "arrays": [[array.dtype.name, list(array.shape)] for array in arrays]}
        text = torch.frombuffer(bytearray(json.dumps(about).encode()), dtype=torch.uint8)
        dist.send(torch.tensor([len(text)]), to)
        dist.send(text, to)
        for array in arrays:
            if array.size:
                dist.send(_as_tensor(np.ascontiguousarray(array)), to)

    def receive(self, source: int) -> tuple[Any, list[np.ndarray]]:
        """What that rank sends."""
        length = torch.zeros(1, dtype=torch.int64)
        dist.recv(length, source)
        text = torch.empty(int(length), dtype=torch.uint8)
        dist.recv(text, source)
        about = json.loads(bytes(text.numpy()))
        arrays = []
        for dtype, shape in about["arrays"]:
            array = np.empty(shape, dtype=np.dtype(dtype))
            if array.size:
                dist.recv(torch.from_numpy(array), source)
            arrays.append(array)
        return about["head"], arrays


def together(ranks: Ranks | None, do: str, **what: Any) -> contextlib.AbstractContextManager[None]:
    """All ranks do this, rank 0 here in the block: `Ranks.lead`, where there are several processes."""
    return contextlib.nullcontext() if ranks is None else ranks.lead(do, **what)


def _as_tensor(array: np.ndarray) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable.*")  # it is only read
        return torch.from_numpy(array)
