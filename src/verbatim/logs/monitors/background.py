"""Sends a run's reports to a service from a thread, so that the run never waits for the service.

```
put(call) -> a queue of at most 1000 calls -> thread: handle = open(); call(handle) ...; finish(handle)
```
A failure of the service only causes a warning. If the queue is full, calls are dropped and counted. A call that raises
does not affect the others. Closing has a deadline.
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
"""Maximum number of calls in the queue. Further calls are dropped."""
OPEN_SECONDS = 30.0
"""Timeout in seconds for opening the record."""
FINISH_SECONDS = 30.0
"""Timeout in seconds for sending the remaining calls after the run has ended."""

Handle = TypeVar("Handle")


class Background(Generic[Handle]):
    """A thread that talks to one service.

    Args:
        service: Name of the service, used as the prefix of warnings.
        open: Opens the run's record at the service. Called on the thread, possibly before this constructor has
            returned. If it raises, the run has no record at the service.
        finish: Closes the record.
        how_to_recover: Returns how the user can recover the data that was not delivered, as the end of a sentence.
        retry_seconds: Seconds between attempts to open the record, during which calls wait in the queue; None for a
            single attempt.
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
        # One more than MAX_CALLS, so that `close` can always put the None that ends the thread.
        self._calls: queue.Queue[Callable[[Handle], object] | None] = queue.Queue(MAX_CALLS + 1)
        self._num_dropped = self._num_refused = 0
        self._is_lost = False
        self._retry_seconds = retry_seconds
        self._is_closing = threading.Event()
        self.thread = threading.Thread(target=self._work, daemon=True, name=service)
        self.thread.start()

    def put(self, call: Callable[[Handle], object]) -> None:
        """Queue a call and return immediately. The thread makes the calls in order, with the open record as the
        argument."""
        if self._is_lost:
            return
        if self._calls.qsize() >= MAX_CALLS:
            self._num_dropped += 1
            if self._num_dropped == 1:
                self.warn(
                    f"{MAX_CALLS} records are waiting for the service; further ones are dropped until it catches up"
                )
            return
        self._calls.put_nowait(call)

    def close(self) -> None:
        """Wait until all calls have been made or the timeouts are reached."""
        self._calls.put_nowait(None)
        self._is_closing.set()
        self.thread.join(OPEN_SECONDS + FINISH_SECONDS)
        if self.thread.is_alive():
            self.warn(f"did not finish within {OPEN_SECONDS + FINISH_SECONDS:.0f} seconds; {self._how_to_recover()}")
        if self._num_dropped:
            self.warn(f"{self._num_dropped} records were dropped because the service did not keep up")

    def warn(self, message: str) -> None:
        """Log a warning with the service's name."""
        warn(self._service, message)

    def _opened(self) -> Handle | None:
        """Open the record and return its handle; None if the service cannot be used. After `close` there is one more
        attempt, in case the service is back."""
        was_told = False
        while True:
            is_last = self._retry_seconds is None or self._is_closing.is_set()
            try:
                return self._open()
            except Exception as error:  # noqa: BLE001  the library and its service may raise any exception
                if is_last:
                    self._is_lost = True
                    self.warn(f"the record could not be opened, and the run goes on without it: {reason(error)}")
                    return None
                if not was_told:
                    self.warn(
                        f"the record could not be opened; trying again every {self._retry_seconds:.0f} s: "
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
                    self.warn(f"a record was refused, and others may be too: {reason(error)}")
        try:
            self._finish(handle)
        except Exception as error:  # noqa: BLE001
            self.warn(f"the record is not complete: {reason(error)}; {self._how_to_recover()}")


def warn(service: str, message: str) -> None:
    """Log a warning with the service's name."""
    logger.warning("%s: %s", service, message)


def reason(error: Exception) -> str:
    """The type and the first line of an error, without secrets."""
    text = without_secrets(str(error)).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else 'no reason given'}"
