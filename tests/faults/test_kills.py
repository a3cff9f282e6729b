"""A run that is killed at any event of its files, in either process, goes on and ends as if nothing had happened."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from campaigns import sized
from faults.struck import Server
from faults.tiny_places import COUNTED, Place, differences, imbalances
from waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.realtime]

LONGEST = 5
"""Kills that one run survives at most."""
KEEPS_LINES = (
    "import types, verbatim.logs.monitors.restore as restore; restore.os = types.SimpleNamespace(truncate=print)"
)
"""A planted fault: a run that goes on leaves in its logs what stands behind the checkpoint."""


def spread(numbers: Sequence[int], count: int) -> list[int]:
    """`count` of the numbers, evenly, each from the middle of its part."""
    count = min(count, len(numbers))
    return [numbers[(2 * i + 1) * len(numbers) // (2 * count)] for i in range(count)]


KILLED = [
    ("one", "orchestrator", 8, 110),
    ("two", "trainer", 5, 40),
    ("two", "orchestrator", 3, 35),
    ("overlapping", "trainer", 2, 30),
    ("overlapping", "orchestrator", 2, 30),
]
"""The kind of a run, which process is killed, and the number of cases: of the short part, of the whole."""


@pytest.mark.campaign
def test_a_run_that_was_killed_ends_as_the_one_that_was_never_stopped(place: Place, expected: Path, each, campaign):
    """Each case: killed at the n-th event; of the whole, killed again at a random one of the process that goes on, and
    so on."""
    wrong = []
    for kind, role, short, long in KILLED:
        events = place.events(each, kind, role)
        cases = spread(range(1, len(events) + 1), sized(short, long))
        row = campaign(f"kills of {kind}, {role}")
        ends = each(functools.partial(killed, place, expected, kind, role, len(events), sized(1, LONGEST), {}), cases)
        for at, (kills, found) in zip(cases, ends, strict=True):
            row.cases += kills
            row.wrong += bool(found)
            if found:
                wrong.append(f"{kind}, {role}, event {at}, {' '.join(events[at - 1])}: {'; '.join(found)}")
    assert not wrong, "\n".join(wrong)


def killed(
    place: Place,
    expected: Path,
    kind: str,
    role: str,
    num_events: int,
    longest: int,
    plant: dict[str, str],
    server: Server,
    first: int,
) -> tuple[int, list[str]]:
    """Kills, and what was wrong with the end, of a run that is killed at the `first` event and at most `longest`
    times; `plant` is a fault of the run, or {}."""
    chance, run, kills, at = random.Random(first), place.new(), 0, first
    while True:
        strike = {"role": role, "do": "kill", "at": at, **plant} if kills < longest else plant or None
        ended = place.run(server, kind, run, strike=strike)
        if ended.hung:
            return kills, [f"hung: {ended.said[-500:]}"]
        if ended.status != -signal.SIGKILL and "was ended by SIGKILL" not in ended.said:
            break
        kills += 1
        at = chance.randint(1, num_events)
    if ended.status != 0:
        return kills, [f"after {kills} kills, status {ended.status}: {ended.said[-1500:]}"]
    return kills, imbalances(run) if kind == "overlapping" else differences(run, expected)


def test_a_run_that_goes_on_behind_its_checkpoint_is_found(place: Place, expected: Path, each):
    """The campaign can fail."""
    num_events = len(place.events(each, "one", "orchestrator"))
    case = functools.partial(killed, place, expected, "one", "orchestrator", num_events, 1, {"plant": KEEPS_LINES})
    assert any(each(case, [at])[0][1] for at in spread(range(1, num_events + 1), 8))


SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGSTOP", "twice")


@pytest.mark.campaign
def test_a_signal_at_any_moment_ends_the_run_with_its_status_and_it_goes_on(
    place: Place, expected: Path, each, campaign
):
    """A moment is a call of a function. SIGSTOP is followed by SIGCONT; "twice" is two times Ctrl-C, the second as soon
    as the first was sent."""
    wrong = []
    for kind, short, long in (("one", 12, 60), ("two", 8, 60)):
        calls = place.calls(each, kind, "orchestrator", "signal", COUNTED)
        row, count = campaign(f"signals to {kind}"), sized(short, long)
        cases = list(enumerate(spread(range(1, len(calls) + 1), count)))
        for found in each(functools.partial(signalled, place, expected, kind), cases):
            row.add(wrong=bool(found))
            wrong += found
    assert not wrong, "\n".join(wrong)


def signalled(place: Place, expected: Path, kind: str, server: Server, case: tuple[int, int]) -> list[str]:
    """What was wrong with a run that sent itself a signal at a call, and then went on; `case` is the number of the
    signal and that of the call."""
    number, at = case
    run, name = place.new(), SIGNALS[number % len(SIGNALS)]
    note = place.folder / f"note-{next(place.numbers)}"

    def go_on(pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            if name == "SIGSTOP":
                wait_until(lambda: state_of(pid) in "TZ")
                os.kill(pid, signal.SIGCONT)
            elif name == "twice":
                wait_until(lambda: (note.exists() and note.read_text()) or state_of(pid) == "Z")
                os.kill(pid, signal.SIGINT)

    order = {
        "role": "orchestrator",
        "do": "signal",
        "signal": "SIGINT" if name == "twice" else name,
        "modules": COUNTED,
        "at": at,
        "note": str(note),
    }
    ended = place.run(server, kind, run, strike=order, meanwhile=go_on)
    allowed = {"SIGINT": (0, 130), "SIGTERM": (0, 130), "twice": (0, 130), "SIGSTOP": (0,)}
    deadly = (0, -getattr(signal, name, 0))
    if ended.hung or ended.status not in allowed.get(name, deadly) or "Traceback" in ended.said:
        return [f"{kind} {number}, {name}: status {ended.status}{' (hung)' * ended.hung}: {ended.said[-1500:]}"]
    if ended.status != 0:
        ended = place.run(server, kind, run)
    found = differences(run, expected) if ended.status == 0 else [f"resumed: {ended.said[-1500:]}"]
    return [f"{kind} {number}, {name}, call {at}: {'; '.join(found)}"] if found else []


def state_of(pid: int) -> str:
    """The letter of a process's state; "Z" where it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "Z"
