"""A run that is killed at any event of its files, in either process, goes on and ends as if nothing had happened."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from faults.tiny_places import Place, differences, imbalances
from faults.warm import Warm

pytestmark = pytest.mark.slow

LONGEST = 5
"""Kills that one run survives at most."""


def spread(numbers: Sequence[int], count: int) -> list[int]:
    """`count` of the numbers, evenly, each from the middle of its part."""
    count = min(count, len(numbers))
    return [numbers[(2 * i + 1) * len(numbers) // (2 * count)] for i in range(count)]


KILLED = [
    ("one", "orchestrator", 2, 110), ("two", "trainer", 1, 40), ("two", "orchestrator", 0, 35),
    ("overlapping", "trainer", 0, 30), ("overlapping", "orchestrator", 0, 30),
]  # fmt: skip
"""The kind of a run, which process is killed, and the number of cases: of the short part, of the whole."""


def test_a_run_that_was_killed_ends_as_the_one_that_was_never_stopped(
    place: Place, expected: Path, each, whole: bool, campaign
):
    """Each case: killed at the n-th event, killed again at a random one of the process that goes on, and so on."""
    wrong = []
    for kind, role, short, long in KILLED:
        if count := long if whole else short:
            events = place.events(each, kind, role)
            cases = spread(range(1, len(events) + 1), count)
            row = campaign(f"kills of {kind}, {role}")
            ends = each(functools.partial(killed, place, expected, kind, role, len(events), LONGEST if whole else 1),
                        cases)  # fmt: skip
            for at, (kills, found) in zip(cases, ends, strict=True):
                row.cases += kills
                row.wrong += bool(found)
                if found:
                    wrong.append(f"{kind}, {role}, event {at}, {' '.join(events[at - 1])}: {'; '.join(found)}")
    assert not wrong, "\n".join(wrong)


def killed(
    place: Place, expected: Path, kind: str, role: str, num_events: int, longest: int, warm: Warm, first: int
) -> tuple[int, list[str]]:
    """Kills, and what was wrong with the end, of a run that is killed at the `first` event and at most `longest`
    times."""
    chance, run, kills, at = random.Random(first), place.new(), 0, first
    while True:
        strike = {"role": role, "do": "kill", "at": at} if kills < longest else None
        ended = place.run(warm, kind, run, strike=strike)
        if ended.hung:
            return kills, [f"hung: {ended.said[-500:]}"]
        if ended.status != -signal.SIGKILL and "was ended by SIGKILL" not in ended.said:
            break
        kills += 1
        at = chance.randint(1, num_events)
    if ended.status != 0:
        return kills, [f"after {kills} kills, status {ended.status}: {ended.said[-1500:]}"]
    return kills, imbalances(run) if kind == "overlapping" else differences(run, expected)


SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGSTOP", "twice")


def test_a_signal_at_any_moment_ends_the_run_with_its_status_and_it_goes_on(
    place: Place, expected: Path, each, whole: bool, campaign
):
    """SIGSTOP is followed by SIGCONT; "twice" is two times Ctrl-C, a few milliseconds apart."""
    wrong = []
    for kind, count in (("one", 60), ("two", 60)) if whole else (("one", 1),):
        (usual,) = each(lambda warm, _, kind=kind: place.run(warm, kind, place.new()), [None])
        row = campaign(f"signals to {kind}")
        found = each(functools.partial(signalled, place, expected, kind, usual.seconds), range(count))
        for what in found:
            row.add(wrong=bool(what))
            wrong += what
    assert not wrong, "\n".join(wrong)


def signalled(place: Place, expected: Path, kind: str, seconds: float, warm: Warm, number: int) -> list[str]:
    """What was wrong with a run that was sent a signal at a random moment of its `seconds`, and then went on."""
    chance, run = random.Random(f"{kind} {number}"), place.new()
    name = SIGNALS[number % len(SIGNALS)]

    def send(pid: int) -> None:
        time.sleep(chance.uniform(0.1, max(0.2, seconds)))  # not before the command has begun
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGINT if name == "twice" else getattr(signal, name))
            if name in ("SIGSTOP", "twice"):
                time.sleep(chance.uniform(0.0, 0.3))
                os.kill(pid, signal.SIGCONT if name == "SIGSTOP" else signal.SIGINT)

    ended = place.run(warm, kind, run, meanwhile=send)
    allowed = {"SIGINT": (0, 130), "SIGTERM": (0, 130), "twice": (0, 130), "SIGSTOP": (0,)}
    deadly = (0, -getattr(signal, name, 0))
    if ended.hung or ended.status not in allowed.get(name, deadly) or "Traceback" in ended.said:
        return [f"{kind} {number}, {name}: status {ended.status}{' (hung)' * ended.hung}: {ended.said[-1500:]}"]
    if ended.status != 0:
        ended = place.run(warm, kind, run)
    found = differences(run, expected) if ended.status == 0 else [f"resumed: {ended.said[-1500:]}"]
    return [f"{kind} {number}, {name}: {'; '.join(found)}"] if found else []
