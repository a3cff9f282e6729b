"""Connects the processes of one trainer: orders of rank 0, small values from all to all, arrays between two."""

from __future__ import annotations

import contextlib
import json
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from verbatim.errors import ComponentError, RunStopped, SamplerFault, UsageError, VerbatimError
from verbatim.machine_faults import describe, is_out_of_memory

NO_DEADLINE = timedelta(days=365)
"""For an order: rollouts take as long as they take, and a rank ends with rank 0."""
GRACE = 10.0
"""Seconds that the other ranks have to say what went wrong with them, once one has failed."""


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
        self, store: Any, *, rank: int, size: int, local_rank: int = 0, use_cuda: bool = False,
        deadline: float = 600.0, ended: Callable[[], Mapping[int, str]] = dict,
    ) -> None:  # fmt: skip
        self.rank, self.size, self.local_rank = rank, size, local_rank
        self._store, self._ended, self.deadline = store, ended, deadline
        self._orders = 0
        self._in_step = False
        self._broken: str | None = None
        store.set(f"process/{rank}", str(os.getpid()))
        if use_cuda:
            torch.cuda.set_device(local_rank)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if use_cuda else "gloo", store=store, rank=rank,
            world_size=size, timeout=timedelta(seconds=deadline),
        )  # fmt: skip
        self.device = torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")
        self.mesh: DeviceMesh = init_device_mesh("cuda" if use_cuda else "cpu", (size,))

    @property
    def leads(self) -> bool:
        return self.rank == 0

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
            found = self._cause(error)
            self._broken = str(found)
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
        """Rank 0, between two orders: notice that another rank has ended.

        Raises:
            RunStopped: names it.
        """
        if ended := self._ended():
            self._broken = "; ".join(f"{self._name(rank)} {how}" for rank, how in ended.items())
            raise RunStopped(self._broken)

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
            json.loads(bytes(found[: int(length)].numpy()))
            for found, length in zip(all_of_them, lengths, strict=True)
        ]

    def agree(self, do: Callable[[], Any]) -> list[Any]:
        """Do something on each rank; the results of all, plain JSON values, on all ranks.

        Raises:
            VerbatimError: one rank raised an error of ours, or of the system: then all raise it, in step.
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
        answer = {"value": value} if error is None else {"error": [_kind(error), describe(error)]}
        answers = self.gather(answer)
        failed = [(rank, answer["error"]) for rank, answer in enumerate(answers) if "error" in answer]
        if failed:
            self._in_step = True
            _, (kind, said) = failed[0]
            raise _KINDS[kind](said) from error
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

    # ---- faults

    def report(self, error: BaseException) -> None:
        """Another rank: tell rank 0 why this process ends."""
        about = {"lost": True} if _is_lost(error) else {"said": _one_line(error)}
        with contextlib.suppress(dist.DistError):
            self._store.set(f"fault/{self.rank}", json.dumps(about))

    def _cause(self, error: BaseException) -> BaseException:
        """What is behind an error of rank 0: itself, or what happened to another rank."""
        if not _is_lost(error):
            return error
        others = range(1, self.size)
        until = time.monotonic() + GRACE
        while True:
            ended = dict(self._ended())
            said = {rank: self._fault(rank) for rank in others}
            faults = {rank: about["said"] for rank, about in said.items() if about and "said" in about}
            silent = [rank for rank in others if rank not in ended and said[rank] is None]
            killed = {rank: how for rank, how in ended.items() if said[rank] is None}
            if faults or killed or not silent or time.monotonic() > until:
                break
            time.sleep(0.05)
        if faults:
            return RunStopped("; ".join(f"{self._name(rank)} failed: {text}" for rank, text in faults.items()))
        if killed:
            return RunStopped("; ".join(f"{self._name(rank)} {how}" for rank, how in killed.items()))
        if silent:
            names = ", ".join(map(self._name, silent))
            return RunStopped(f"{names} kept the other processes waiting for {self.deadline:g} s "
                              "(trainer.parallel.deadline), or is gone")  # fmt: skip
        return RunStopped(f"the trainer's processes lost each other: {_one_line(error)}")

    def _fault(self, rank: int) -> dict[str, Any] | None:
        key = f"fault/{rank}"
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def _name(self, rank: int) -> str:
        key = f"process/{rank}"
        process = f" (process {self._store.get(key).decode()})" if self._store.check([key]) else ""
        return f"rank {rank} of the trainer{process}"


def together(ranks: Ranks | None, do: str, **what: Any) -> contextlib.AbstractContextManager[None]:
    """All ranks do this, rank 0 here in the block: `Ranks.lead`, where there are several processes."""
    return contextlib.nullcontext() if ranks is None else ranks.lead(do, **what)


_KINDS: Mapping[str, type[VerbatimError]] = {
    "run": RunStopped, "usage": UsageError, "component": ComponentError, "sampler": SamplerFault,
}  # fmt: skip


def _kind(error: Exception) -> str:
    if isinstance(error, ComponentError | SamplerFault):
        return "component" if isinstance(error, ComponentError) else "sampler"
    return "usage" if isinstance(error, UsageError) else "run"


def _is_lost(error: BaseException) -> bool:
    """Whether an error says that other ranks did not answer, and so is a consequence of something else."""
    if isinstance(error, dist.DistError):
        return True
    said = str(error).lower()
    signs = ("gloo", "nccl", "closed by peer", "connection reset")
    return isinstance(error, RuntimeError) and not is_out_of_memory(error) and any(sign in said for sign in signs)


def _one_line(error: BaseException) -> str:
    if isinstance(error, VerbatimError | OSError) or is_out_of_memory(error):
        return describe(error)
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _as_tensor(array: np.ndarray) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable.*")  # it is only read
        return torch.from_numpy(array)
