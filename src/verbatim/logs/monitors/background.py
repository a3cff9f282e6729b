"""Passes what a run reports to a service on a thread, so that the run waits for nothing.

```
put(call) -> a queue of at most 1000 calls -> thread: handle = open(); call(handle) ...; finish(handle)
```
Whatever the service does is a warning: a call that does not fit into the queue is dropped and counted, one that raises
costs no other, and the end has a deadline.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from verbatim.core.redaction import without_secrets

logger = logging.getLogger(__name__)

MAX_CALLS = 1000
"""Steps and evaluations that wait for the service; further ones are dropped."""
OPEN_SECONDS = 30.0
"""Until a service that does not answer is given up."""
FINISH_SECONDS = 30.0
"""For what is left when the run is over."""

Handle = TypeVar("Handle")


class Background(Generic[Handle]):
    """A thread that talks to one service.

    Args:
        service: Its name, in front of warnings.
        open: Opens the record; called on the thread, perhaps before the caller has this object. Where it raises, the
            run has no record there.
        finish: Ends it.
        how_to_recover: What people can do about what was not delivered, as the end of a sentence.
        retry_seconds: Until a service that could not be opened is tried again, what was put meanwhile waiting in the
            queue; None: it is tried once.
    """

    def __init__(
        self,
        service: str,
        *,
        open: Callable[[], Handle],
        finish: Callable[[Handle], object],
        how_to_recover: Callable[[], str],
        retry_seconds: float | None = None,
    ) -> None:
        self._service, self._open, self._finish, self._how_to_recover = service, open, finish, how_to_recover
        self._calls: queue.Queue[Callable[[Handle], object] | None] = queue.Queue(MAX_CALLS + 1)  # 1 for the end
        self._num_dropped = self._num_refused = 0
        self._is_lost = False
        self._retry_seconds = retry_seconds
        self._is_closing = threading.Event()
        self.thread = threading.Thread(target=self._work, daemon=True, name=service)
        self.thread.start()

    def put(self, call: Callable[[Handle], object]) -> None:
        """Have this called with the open record, after what was put before. Returns at once."""
        if self._is_lost:
            return
        if self._calls.qsize() >= MAX_CALLS:
            self._num_dropped += 1
            if self._num_dropped == 1:
                self.warn(f"{MAX_CALLS} records wait for the service; further ones are dropped until it keeps up")
            return
        self._calls.put_nowait(call)

    def close(self) -> None:
        """Wait until everything is delivered, at most until the deadlines."""
        self._calls.put_nowait(None)
        self._is_closing.set()
        self.thread.join(OPEN_SECONDS + FINISH_SECONDS)
        if self.thread.is_alive():
            self.warn(f"did not finish within {OPEN_SECONDS + FINISH_SECONDS:.0f} seconds; {self._how_to_recover()}")
        if self._num_dropped:
            self.warn(f"{self._num_dropped} records were dropped: the service did not keep up")

    def warn(self, message: str) -> None:
        """Log a warning with the service's name."""
        warn(self._service, message)

    def _opened(self) -> Handle | None:
        """The open record; None where the service cannot be used."""
        was_told = False
        while True:
            is_last = self._retry_seconds is None or self._is_closing.is_set()
            try:
                return self._open()
            except Exception as error:  # noqa: BLE001  the library and its service may raise anything
                if is_last:
                    self._is_lost = True
                    self.warn(f"the record could not be opened, and the run goes on without it: {reason(error)}")
                    return None
                if not was_told:
                    self.warn(
                        f"the record could not be opened, and is tried again every {self._retry_seconds:.0f} s: "
                        f"{reason(error)}"
                    )
                was_told = True
            self._is_closing.wait(self._retry_seconds)

    def _work(self) -> None:
        if (handle := self._opened()) is None:
            return
        while (call := self._calls.get()) is not None:
            try:
                call(handle)
            except Exception as error:  # noqa: BLE001
                self._num_refused += 1
                if self._num_refused == 1:
                    self.warn(f"a record was refused, and so may be others: {reason(error)}")
        try:
            self._finish(handle)
        except Exception as error:  # noqa: BLE001
            self.warn(f"the record is not complete: {reason(error)}; {self._how_to_recover()}")


def warn(service: str, message: str) -> None:
    """Log a warning with the service's name."""
    logger.warning("%s: %s", service, message)


def reason(error: Exception) -> str:
    """The first line of an error, without secrets."""
    text = without_secrets(str(error)).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else 'no reason given'}"
