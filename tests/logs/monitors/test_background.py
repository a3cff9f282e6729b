"""Whatever a service does, the run that reports to it is neither stopped nor slowed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import pytest

from verbatim.logs.monitors import background
from verbatim.logs.monitors.background import Background
from waiting import HANGS, wait_until

pytestmark = pytest.mark.realtime

KEY = "0123456789abcdef0123456789abcdef01234567"


def refuse(*args: object) -> None:
    raise ConnectionError(f"401 for key {KEY}\nmore")


def work(
    heard: list[int],
    open: Callable[[], list[int]] | None = None,
    finish: Callable[[list[int]], object] = len,
    retry_seconds: float | None = None,
) -> Background[list[int]]:
    return Background(
        "Service",
        open=open or (lambda: heard),
        finish=finish,
        how_to_recover=lambda: "type x",
        retry_seconds=retry_seconds,
    )


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_calls_come_in_their_order_and_the_end_comes_last(caplog):
    heard: list[int] = []
    service = work(heard, finish=lambda record: record.append(-1))
    for number in range(5):
        service.put(lambda record, number=number: record.append(number))
    service.close()
    assert heard == [0, 1, 2, 3, 4, -1]
    assert warnings(caplog) == []


def test_a_call_that_raises_costs_no_other_and_is_told_once_without_its_key(caplog):
    heard: list[int] = []
    service = work(heard, finish=refuse)
    for number in range(4):
        service.put(refuse if number in (1, 2) else lambda record, number=number: record.append(number))
    service.close()
    assert heard == [0, 3]
    assert warnings(caplog) == [
        "Service: a record was refused, and others may be too: ConnectionError: 401 for key [redacted]",
        "Service: the record is not complete: ConnectionError: 401 for key [redacted]; type x",
    ]


def test_a_service_that_cannot_be_opened_is_one_warning(caplog):
    service = work([], open=refuse)
    for _ in range(3 * background.MAX_CALLS):
        service.put(len)
    service.close()
    (told,) = [text for text in warnings(caplog) if "opened" in text]
    assert told == (
        "Service: the record could not be opened, and the run goes on without it: ConnectionError: 401 for "
        "key [redacted]"
    )


def test_a_service_that_comes_later_hears_what_waited(caplog):
    heard: list[int] = []
    tries = iter([refuse, refuse, lambda: heard])
    service = work([], open=lambda: next(tries)(), retry_seconds=0.01)
    for number in range(3):
        service.put(lambda record, number=number: record.append(number))
    wait_until(lambda: len(heard) == 3)
    service.close()
    assert heard == [0, 1, 2]
    (told,) = warnings(caplog)
    assert told.startswith("Service: the record could not be opened; trying again every 0 s: ConnectionError")


def test_a_service_that_never_comes_is_tried_a_last_time_at_the_end(caplog):
    tried: list[int] = []

    def never() -> list[int]:
        tried.append(1)
        raise ConnectionError("no")

    service = work([], open=never, retry_seconds=1e6)
    wait_until(lambda: tried)
    service.close()
    assert not service.thread.is_alive()  # it has not waited for the next try
    assert len(tried) == 2
    first, last = warnings(caplog)
    assert "trying again every 1000000 s: ConnectionError: no" in first
    assert last == "Service: the record could not be opened, and the run goes on without it: ConnectionError: no"


def test_a_service_that_hangs_holds_up_nothing_and_no_more_memory_than_its_queue(monkeypatch, caplog):
    monkeypatch.setattr(background, "MAX_CALLS", 5)
    monkeypatch.setattr(background, "OPEN_SECONDS", 0.1)
    monkeypatch.setattr(background, "FINISH_SECONDS", 0.2)
    released, hangs = threading.Event(), threading.Event()
    heard: list[int] = []

    def slow(record: list[int]) -> None:
        hangs.set()
        assert released.wait(HANGS)
        record.append(0)

    service = work(heard)
    service.put(slow)
    assert hangs.wait(HANGS)
    for number in range(1, 101):
        service.put(lambda record, number=number: record.append(number))
    service.close()
    assert service.thread.is_alive()  # it still hangs, and was not waited for
    assert warnings(caplog) == [
        "Service: 5 records are waiting for the service; further ones are dropped until it catches up",
        "Service: did not finish within 0 seconds; type x",
        "Service: 95 records were dropped because the service did not keep up",
    ]
    released.set()
    service.thread.join(HANGS)
    assert heard == [0, 1, 2, 3, 4, 5]
