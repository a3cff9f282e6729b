"""Tells all ranks of the first failure that ends them, so that all of them end at once and for the same reason.

What fails where ranks meet anyway is raised by all of them in step (`Ranks.agree`) and needs none of this. Any other
failure leaves ranks in a collective that one of them will not come to. The rank that fails writes its reason to the
store by which ranks found each other; a thread of each other rank reads that twice a second, and ends its process.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch.distributed as dist

from verbatim.core.errors import ComponentError, RunStopped, SamplerFault, UsageError, VerbatimError
from verbatim.core.machine_faults import describe, is_machine_fault, is_out_of_memory

GRACE = 10.0
"""Seconds that the other ranks have to say what went wrong with them, once one has failed."""
_LEAVE_SECONDS = 3.0
"""The same to end, once they were told."""
_POLL = 0.05
_LOOK_SECONDS = 0.5
_FIRST = "failure"

Kind = Literal["run", "usage", "component", "sampler", "interrupted"]
KINDS: Mapping[str, type[VerbatimError]] = {
    "run": RunStopped,
    "usage": UsageError,
    "component": ComponentError,
    "sampler": SamplerFault,
    "interrupted": RunStopped,
}
"""The errors that a rank can tell the others of: anything but a mistake of the user stops the run."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a rank cannot go on."""

    rank: int
    said: str
    """The reason, in one line."""
    kind: Kind

    def error(self, name: str) -> VerbatimError:
        """What other ranks raise, with the rank's name."""
        return KINDS[self.kind](f"{name} failed: {self.said}")


class Failures:
    """What ranks tell each other of their failures, as one of them sees it.

    Args:
        store: Where ranks find each other.
        rank: This process.
        size: Processes in all.
        deadline: Seconds that ranks wait for each other.
        ended: Ranks whose processes have ended and how, "was ended by SIGKILL", where that is known.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        *,
        deadline: float = 600.0,
        ended: Callable[[], Mapping[int, str]] = dict,
    ) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._deadline, self._ended = deadline, ended

    def introduce(self) -> None:
        """Say which process this rank is, and wait until all ranks have.

        Raises:
            VerbatimError: a rank failed, ended, or did not come within the deadline; names it.
        """
        self._store.set(_key("process", self._rank), f"{os.getpid()} on {socket.gethostname()}")
        until = time.monotonic() + self._deadline
        while missing := [rank for rank in range(self._size) if not self._store.check([_key("process", rank)])]:
            if (failure := self.first()) is not None:
                raise failure.error(self.name(failure.rank))
            if ended := self._ended():
                raise RunStopped(self.named(ended))
            if time.monotonic() > until:
                raise RunStopped(
                    f"{', '.join(map(self.name, missing))} did not start within {self._deadline:g} s "
                    "(trainer.parallel.deadline)"
                )
            time.sleep(_POLL)

    def name(self, rank: int) -> str:
        """A rank with its process and host."""
        key = _key("process", rank)
        process = f" (process {self._store.get(key).decode()})" if self._store.check([key]) else ""
        return f"rank {rank} of the trainer{process}"

    def tell(self, error: BaseException) -> None:
        """Write down why this rank ends. The first one who does so is what all end for; one who has only lost the
        others says so, and ends for the reason of another."""
        failure = None if is_lost(error) else Failure(rank=self._rank, said=one_line(error), kind=kind_of(error))
        about = {"lost": True} if failure is None else {"said": failure.said, "kind": failure.kind}
        with contextlib.suppress(dist.DistError):
            self._store.set(_key("fault", self._rank), json.dumps(about))
            if failure is not None:
                self._store.compare_set(_FIRST, "", str(self._rank))

    def first(self) -> Failure | None:
        """What all ranks end for."""
        if not self._store.check([_FIRST]):
            return None
        rank = int(self._store.get(_FIRST))
        about = self._told(rank)
        assert about is not None
        return Failure(rank=rank, said=about["said"], kind=about["kind"])

    def cause(self, error: BaseException) -> BaseException:
        """What is behind an error of rank 0: itself, or what happened to another rank."""
        if not is_lost(error):
            return error
        others = range(1, self._size)
        until = time.monotonic() + GRACE
        while True:
            ended = dict(self._ended())
            told = {rank: self._told(rank) for rank in others}
            first = self.first()
            silent = [rank for rank in others if rank not in ended and told[rank] is None]
            killed = {rank: how for rank, how in ended.items() if told[rank] is None}
            if first or killed or not silent or time.monotonic() > until:
                break
            time.sleep(_POLL)
        if first is not None and first.rank != self._rank:
            return first.error(self.name(first.rank))
        if killed:
            return RunStopped(self.named(killed))
        if silent:
            return RunStopped(
                f"{', '.join(map(self.name, silent))} kept the other processes waiting for "
                f"{self._deadline:g} s (trainer.parallel.deadline), or is gone"
            )
        return RunStopped(f"the trainer's processes lost each other: {one_line(error)}")

    def wait_for_first(self) -> Failure | None:
        """What all end for, as soon as it is known; None where it is not told in time."""
        until = time.monotonic() + 2 * GRACE
        with contextlib.suppress(dist.DistError):  # the store ends with rank 0
            while time.monotonic() < until:
                if (first := self.first()) is not None:
                    return first
                time.sleep(_POLL)
        return None

    def leave(self) -> None:
        """Another rank: say that this process ends now."""
        with contextlib.suppress(dist.DistError):
            self._store.set(_key("left", self._rank), "")

    def wait_until_left(self) -> None:
        """Rank 0: let the others end, which the store that this process may hold has told of the failure."""
        until = time.monotonic() + _LEAVE_SECONDS
        with contextlib.suppress(dist.DistError):
            while time.monotonic() < until:
                ended = self._ended()
                if all(rank in ended or self._store.check([_key("left", rank)]) for rank in range(1, self._size)):
                    return
                time.sleep(_POLL)

    @contextlib.contextmanager
    def watched(
        self, end: Callable[[Failure | None, Failures], None], *, patience: float = _LOOK_SECONDS
    ) -> Iterator[None]:
        """Context manager: look on a thread whether another rank has failed, while the block runs.

        Args:
            end: Ends this process: is called with what it has to end for, None where the store is gone, and with it
                rank 0 or the launcher; and with these failures by a connection of the thread's own, because the block
                may wait at the other one.
            patience: Seconds that the block has to end by itself, once another rank has failed or the store is gone.
        """
        over = threading.Event()
        here = Failures(self._store.clone(), self._rank, self._size, ended=self._ended)

        def look() -> None:
            while not over.wait(_LOOK_SECONDS):
                try:
                    found = here._of_another()
                except dist.DistError:
                    found = None
                else:
                    if found is None:
                        continue
                if not over.wait(patience):
                    end(found, here)
                return

        watch = threading.Thread(target=look, daemon=True, name="failures of other ranks")
        watch.start()
        try:
            yield
        finally:
            over.set()

    def _of_another(self) -> Failure | None:
        for rank, how in self._ended().items():
            return Failure(rank=rank, said=f"it {how}", kind="run")
        first = self.first()
        return first if first is not None and first.rank != self._rank else None

    def _told(self, rank: int) -> dict[str, Any] | None:
        key = _key("fault", rank)
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def named(self, ended: Mapping[int, str]) -> str:
        """Ranks that have ended, and how."""
        return "; ".join(f"{self.name(rank)} {how}" for rank, how in ended.items())


def kind_of(error: BaseException) -> Kind:
    """Which of `KINDS` an error is for the other ranks; as for a command's exit status, a fault of the machine is no
    mistake of the user."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, SamplerFault):
        return "sampler"
    if not isinstance(error, UsageError) or is_machine_fault(error):
        return "run"
    return "component" if isinstance(error, ComponentError) else "usage"


def is_lost(error: BaseException) -> bool:
    """Whether an error says that other ranks did not answer, and so is a consequence of something else."""
    if isinstance(error, dist.DistError):
        return True
    said = str(error).lower()
    signs = ("gloo", "nccl", "closed by peer", "connection reset")
    return isinstance(error, RuntimeError) and not is_out_of_memory(error) and any(sign in said for sign in signs)


def one_line(error: BaseException) -> str:
    """An error's reason."""
    if isinstance(error, VerbatimError | OSError) or is_out_of_memory(error):
        return describe(error)
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _key(what: str, rank: int) -> str:
    """What the store has of a rank: "process", "fault" or "left"."""
    return f"{what}/{rank}"
