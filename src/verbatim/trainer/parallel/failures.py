"""Spreads the first fatal failure of a rank to all ranks, so that all ranks end promptly and for the same reason.

A failure at a point where ranks exchange results anyway is raised on all of them together (`Ranks.agree`), without this
module. Any other failure leaves the other ranks waiting in a collective that the failed rank never joins. So the failed
rank writes its reason to the rendezvous store; a thread on every other rank polls the store twice a second and ends its
process.
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
"""Time in seconds that the other ranks have to report their own failures once a rank has failed."""
_LEAVE_SECONDS = 3.0
"""Time in seconds that the other ranks have to end once they know of the failure."""
_POLL = 0.05
"""Seconds between two polls of the store while this rank waits for an answer."""
_LOOK_SECONDS = 0.5
"""Seconds between two polls of the watching thread."""
_FIRST = "failure"
"""Store key: the rank that failed first."""

Kind = Literal["run", "usage", "component", "sampler", "interrupted"]
KINDS: Mapping[str, type[VerbatimError]] = {
    "run": RunStopped,
    "usage": UsageError,
    "component": ComponentError,
    "sampler": SamplerFault,
    "interrupted": RunStopped,
}
"""The error type that other ranks raise for each kind of failure."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a rank cannot continue."""

    rank: int
    """The rank that failed."""
    said: str
    """The reason, in one line."""
    kind: Kind
    """The key in `KINDS` of the error type that other ranks raise."""

    def error(self, name: str) -> VerbatimError:
        """The error that other ranks raise. `name` is the failed rank's name (`Failures.name`)."""
        return KINDS[self.kind](f"{name} failed: {self.said}")


class Failures:
    """The failures of ranks, shared through the rendezvous store.

    Args:
        store: The rendezvous store of the ranks.
        rank: This process's rank.
        size: Number of ranks.
        deadline: Rank timeout in seconds (`trainer.parallel.deadline`).
        ended: Returns the ranks whose processes are known to have ended, and how, for example "was ended by SIGKILL".
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
        """Register this process in the store, and wait until all ranks have done so.

        Raises:
            VerbatimError: a rank failed, ended, or did not register within the deadline; the message names the rank.
        """
        self._store.set(_key("process", self._rank), f"{os.getpid()} on {socket.gethostname()}")
        until = time.monotonic() + self._deadline
        while missing := [rank for rank in range(self._size) if not self._store.check([_key("process", rank)])]:
            ended = self._ended()  # before the failures: a rank records its failure, then ends
            if (failure := self.first()) is not None:
                raise failure.error(self.name(failure.rank))
            if ended:
                raise RunStopped(self.named(ended))
            if time.monotonic() > until:
                raise RunStopped(
                    f"{', '.join(map(self.name, missing))} did not start within {self._deadline:g} s "
                    "(trainer.parallel.deadline)"
                )
            time.sleep(_POLL)

    def name(self, rank: int) -> str:
        """A rank's name for messages, with its process id and host once it has registered."""
        key = _key("process", rank)
        process = f" (process {self._store.get(key).decode()})" if self._store.check([key]) else ""
        return f"rank {rank} of the trainer{process}"

    def tell(self, error: BaseException) -> None:
        """Record why this rank ends. All ranks end for the first recorded reason. If this rank has only lost its
        connection to the others, this loss is recorded too, but not as the reason, because it is a consequence of
        another failure."""
        failure = None if is_lost(error) else Failure(rank=self._rank, said=one_line(error), kind=kind_of(error))
        about = {"lost": True} if failure is None else {"said": failure.said, "kind": failure.kind}
        with contextlib.suppress(dist.DistError):  # the store may be gone with rank 0
            # The reason first: a reader that finds `_FIRST` must find the reason too.
            self._store.set(_key("fault", self._rank), json.dumps(about))
            if failure is not None:
                self._store.compare_set(_FIRST, "", str(self._rank))

    def first(self) -> Failure | None:
        """The first recorded failure, for which all ranks end; None if there is none."""
        if not self._store.check([_FIRST]):
            return None
        rank = int(self._store.get(_FIRST))
        about = self._reported(rank)
        assert about is not None
        return Failure(rank=rank, said=about["said"], kind=about["kind"])

    def cause(self, error: BaseException) -> BaseException:
        """The cause of an error on rank 0: the error itself, or, if rank 0 only lost its peers, the failure of another
        rank."""
        if not is_lost(error):
            return error
        others = range(1, self._size)
        until = time.monotonic() + GRACE
        while True:
            ended = dict(self._ended())
            reported = {rank: self._reported(rank) for rank in others}
            first = self.first()
            silent = [rank for rank in others if rank not in ended and reported[rank] is None]
            killed = {rank: how for rank, how in ended.items() if reported[rank] is None}
            if first or killed or not silent or time.monotonic() > until:
                break
            time.sleep(_POLL)
        if first is not None and first.rank != self._rank:
            return first.error(self.name(first.rank))
        if killed:
            return RunStopped(self.named(killed))
        if silent:  # neither ended nor reported anything within `GRACE`
            return RunStopped(
                f"{', '.join(map(self.name, silent))} kept the other processes waiting for "
                f"{self._deadline:g} s (trainer.parallel.deadline), or is gone"
            )
        return RunStopped(f"the trainer's processes lost each other: {one_line(error)}")

    def wait_for_first(self) -> Failure | None:
        """Wait for the first recorded failure; None if no failure is recorded in time."""
        until = time.monotonic() + 2 * GRACE  # rank 0 itself may wait `GRACE` before it records a cause
        with contextlib.suppress(dist.DistError):  # the store ends with rank 0
            while time.monotonic() < until:
                if (first := self.first()) is not None:
                    return first
                time.sleep(_POLL)
        return None

    def leave(self) -> None:
        """On ranks other than 0: record that this process ends now."""
        with contextlib.suppress(dist.DistError):
            self._store.set(_key("left", self._rank), "")

    def wait_until_left(self) -> None:
        """On rank 0: wait up to `_LEAVE_SECONDS` for the other ranks to end. This process may serve the store from
        which they read the failure, so it must not end before them."""
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
        """Context manager: while the block runs, a thread polls for failures of other ranks.

        Args:
            end: Ends this process. Arguments: (1) the failure because of which this process ends, or None if the store
                is gone (then rank 0 or the launcher, which served it, is gone too); (2) `Failures` on the thread's own
                connection.
            patience: Time in seconds that the block has to end on its own once another rank has failed or the store is
                gone.
        """
        over = threading.Event()
        # The thread needs its own connection: the block may be waiting on the other one.
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
        """The failure of a rank other than this one: of a rank whose process has ended, or else of the rank that
        recorded the first failure; None if there is no such rank."""
        for rank, how in self._ended().items():
            return Failure(rank=rank, said=f"it {how}", kind="run")
        first = self.first()
        return first if first is not None and first.rank != self._rank else None

    def _reported(self, rank: int) -> dict[str, Any] | None:
        """The record that a rank made with `tell`; None if the rank made no record."""
        key = _key("fault", rank)
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def named(self, ended: Mapping[int, str]) -> str:
        """A list, for a message, of the ranks that have ended and how they ended."""
        return "; ".join(f"{self.name(rank)} {how}" for rank, how in ended.items())


def kind_of(error: BaseException) -> Kind:
    """The key in `KINDS` of the error type with which other ranks raise this error. As for a command's exit status, a
    fault of the machine (a full disk) does not count as the user's mistake, even if the error is a `UsageError`."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, SamplerFault):
        return "sampler"
    if not isinstance(error, UsageError) or is_machine_fault(error):
        return "run"
    return "component" if isinstance(error, ComponentError) else "usage"


def is_lost(error: BaseException) -> bool:
    """True if an error means that other ranks did not answer, and so is only a consequence of another failure."""
    if isinstance(error, dist.DistError):
        return True
    # gloo raises bare RuntimeErrors: only the text of such an error shows that it comes from gloo.
    said = str(error).lower()
    signs = ("gloo", "nccl", "closed by peer", "connection reset")
    return isinstance(error, RuntimeError) and not is_out_of_memory(error) and any(sign in said for sign in signs)


def one_line(error: BaseException) -> str:
    """The message of an error in one line."""
    if isinstance(error, VerbatimError | OSError) or is_out_of_memory(error):
        return describe(error)
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _key(what: str, rank: int) -> str:
    """The store key for a rank's "process", "fault" or "left"."""
    return f"{what}/{rank}"
