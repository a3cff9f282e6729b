"""Connects the ranks of one trainer: commands from rank 0, collectives of small values, arrays sent from one rank to
another."""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
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
"""Timeout for waiting for an order, practically unlimited: rollouts may take any amount of time, and if rank 0 dies,
the watching thread of `Failures` ends the waiting rank."""


class Ranks:
    """The ranks of one trainer, seen from one of them.

    All ranks must call the collective methods, in the same order. If a rank keeps the others waiting for longer than
    the deadline, the waiting ranks fail.

    Args:
        store: The rendezvous store, served by rank 0's process or by a launcher.
        rank: This process's rank; rank 0 leads.
        size: Number of ranks.
        local_rank: This process's number on its machine, which is its CUDA device.
        use_cuda: True if the parameters are on CUDA devices.
        deadline: Rank timeout in seconds; on expiry the run stops and names the slow rank.
        ended: Returns the ranks whose processes are known to have ended, and how, for example "was ended by SIGKILL".
        root: The run's folder on this rank's host. Orders name folders in it relative to it, because other hosts may
            have the run's folder under another path. None if all ranks see the same paths.
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
        root: Path | None = None,
    ) -> None:
        self.rank, self.size, self.local_rank = rank, size, local_rank
        self._root = root
        self._store, self._ended, self.deadline = store, ended, deadline
        self._orders = 0
        self._in_step = False
        """True if the current error was raised on all ranks together, so that they can continue."""
        self._broken: str | None = None
        """Why the ranks can no longer work together."""
        self.failures = Failures(store, rank, size, deadline=deadline, ended=ended)
        if use_cuda:
            torch.cuda.set_device(local_rank)
        # This comes before the process group is set up: during its setup, a rank that never starts could only be
        # reported as a timeout.
        self.failures.introduce()
        # gloo is used on CUDA too, because orders, small values and micro-batches are on the CPU.
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
        """True on rank 0."""
        return self.rank == 0

    @property
    def are_broken(self) -> bool:
        """True once rank 0 knows that the ranks can no longer work together."""
        return self._broken is not None

    # ---- orders

    @contextlib.contextmanager
    def lead(self, do: str, **what: Any) -> Iterator[None]:
        """On rank 0, a context manager that sends an order to the other ranks; the block does rank 0's part.

        Args:
            do: The name of the order, which the other ranks get from `next_order`.
            what: The arguments of the order: paths, and plain JSON values.

        Raises:
            RunStopped: another rank failed, is gone, or keeps the others waiting; the message names that rank. The
                ranks can no longer work together, and every later order raises the same error.
            VerbatimError: an error that all ranks raised together (`agree`); they can continue.
        """
        if self._broken is not None:
            raise RunStopped(f"the trainer's processes have ended: {self._broken}")
        self._orders += 1
        arguments = {name: _relative(value, self._root) for name, value in what.items()}
        self._store.set(f"order/{self._orders}", json.dumps({"do": do, **arguments}))
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
        """On ranks other than 0: wait for the next order of rank 0, without a timeout."""
        self._orders += 1
        key = f"order/{self._orders}"
        self._store.wait([key], NO_DEADLINE)
        order: dict[str, Any] = json.loads(self._store.get(key))
        self._in_step = False
        return {name: _absolute(value, self._root) for name, value in order.items()}

    def follow(self, obey: Callable[[dict[str, Any]], None]) -> None:
        """On ranks other than 0: execute the orders of rank 0 until it sends "end"."""
        while (order := self.next_order())["do"] != "end":
            try:
                obey(order)
            except VerbatimError:
                if not self._in_step:  # otherwise rank 0 raised this error too, and decides what happens
                    raise

    def look(self) -> None:
        """On rank 0, between two commands to the other ranks: check that all other ranks are still running.

        Raises:
            VerbatimError: a rank has ended or failed; the message names the rank.
        """
        if ended := self._ended():
            self._broken = self.failures.named(ended)
            raise RunStopped(self._broken)
        if (first := self.failures.first()) is not None:
            self._broken = first.said
            raise first.error(self.failures.name(first.rank))

    def end(self) -> None:
        """On rank 0: tell the other ranks to end."""
        with contextlib.suppress(RunStopped), self.lead("end"):
            pass

    # ---- small values

    def gather(self, value: Any) -> list[Any]:
        """Gather a plain JSON value from each rank. All ranks get all values, in the order of ranks."""
        mine = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(mine)]))
        longest = max(int(length) for length in lengths)  # all_gather needs tensors of equal size: pad
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(mine)] = mine
        all_of_them = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(all_of_them, padded)
        return [
            json.loads(bytes(found[: int(length)].numpy())) for found, length in zip(all_of_them, lengths, strict=True)
        ]

    def agree(self, do: Callable[[], Any]) -> list[Any]:
        """Call `do` on each rank. All ranks return the results of all ranks, which must be plain JSON values.

        Args:
            do: Must not contain a collective: if it failed on one rank only, the others would hang in it.

        Raises:
            VerbatimError: `do` raised a VerbatimError or OSError on a rank. All ranks raise it together and can
                continue. The error names the rank and the rank's host, unless all ranks failed in the same way.
        """
        error: Exception | None = None
        value = None
        try:
            value = do()
        except (VerbatimError, OSError) as raised:
            error = raised
        return self.share(value, error)

    def share(self, value: Any, error: Exception | None = None) -> list[Any]:
        """The second half of `agree`: exchange a result or an error that this rank already has."""
        answer = {"value": value} if error is None else {"error": [kind_of(error), describe(error)]}
        answers = self.gather(answer)
        failed = [(rank, answer["error"]) for rank, answer in enumerate(answers) if "error" in answer]
        if failed:
            self._in_step = True
            rank, (kind, said) = failed[0]
            # A sampler fault already names its replica, so the rank that observed it does not matter.
            if kind != "sampler" and any(answer != answers[0] for answer in answers):
                said = f"{self.failures.name(rank)}: {said}"
            raise KINDS[kind](said) from error
        return [answer["value"] for answer in answers]

    def most(self, *numbers: int) -> list[int]:
        """The maximum of each number over all ranks."""
        found = torch.tensor(numbers, dtype=torch.int64)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return [int(number) for number in found]

    def total(self, values: Tensor) -> Tensor:
        """Sum `values` over all ranks, in place."""
        dist.all_reduce(values)
        return values

    def anywhere(self, flags: Tensor) -> Tensor:
        """Set each flag that is set on any rank: uint8, in place."""
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        return flags

    # ---- arrays

    def send(self, head: Any, arrays: Sequence[np.ndarray], to: int) -> None:
        """Send a plain JSON value and arrays to one rank, which must call `receive`. Contiguous arrays are not
        copied."""
        about = {"head": head, "arrays": [[array.dtype.name, list(array.shape)] for array in arrays]}
        text = torch.frombuffer(bytearray(json.dumps(about).encode()), dtype=torch.uint8)
        dist.send(torch.tensor([len(text)]), to)
        dist.send(text, to)
        for array in arrays:
            if array.size:
                dist.send(_as_tensor(np.ascontiguousarray(array)), to)

    def receive(self, source: int) -> tuple[Any, list[np.ndarray]]:
        """Receive the value and the arrays that rank `source` sends with `send`."""
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
    """Same as `Ranks.lead` if there are several processes; otherwise a context manager that does nothing."""
    return contextlib.nullcontext() if ranks is None else ranks.lead(do, **what)


def _relative(value: Any, root: Path | None) -> Any:
    """A path as JSON: `{"path": "weights/v000012"}` below the root, a string elsewhere. Other values are unchanged."""
    if not isinstance(value, Path):
        return value
    if root is not None and value.is_relative_to(root):
        return {"path": value.relative_to(root).as_posix()}
    return str(value)


def _absolute(value: Any, root: Path | None) -> Any:
    """The inverse of `_relative` with this rank's root; a path is returned as a string."""
    if isinstance(value, dict) and value.keys() == {"path"}:
        assert root is not None, "an order names a folder below the root of rank 0, but this rank has no root"
        return str(root / value["path"])
    return value


def _as_tensor(array: np.ndarray) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable.*")  # the tensor is only sent, never written
        return torch.from_numpy(array)
