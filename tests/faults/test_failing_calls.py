"""A call that fails, in either process, ends the run with one message and status 1, or costs only what it was for; the
run goes on afterwards and ends as if nothing had happened."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from campaigns import sized
from faults.strikes import CHANGES, FULL_DISK, READS, error_number
from faults.struck import Ended, Server
from faults.test_kills import spread
from faults.tiny_places import ENGINE, LOOP, STEPS, TRAINER, Place, differences, imbalances

pytestmark = [pytest.mark.slow, pytest.mark.realtime]

DISK: dict[str, dict[str, Any]] = {
    "ENOSPC": {"ops": FULL_DISK, "lasts": True},
    "EIO": {"ops": CHANGES + READS},
    "EMFILE": {"ops": ("open", "read", "list")},
    "EACCES": {"ops": ("open", "mkdir", "rename"), "lasts": True},
}
MEMORY = {
    "memory, trainer": ("memory", TRAINER),
    "memory, loop": ("memory", LOOP),
    "memory, engine": ("memory", ENGINE),
    "torch, trainer": ("torch", TRAINER),
    "torch, engine": ("torch", ENGINE),
}

OUT_OF_MEMORY = "out of memory|the sampler's thread has ended; standard error shows why"
"""The message; a thread that cannot even begin is one line above it."""


def what_is_wrong_with_the_end(ended: Ended, run: Path, allowed: tuple[int, ...]) -> list[str]:
    """Of a run that a fault was put into."""
    said = ended.said + "".join(log.read_text() for log in run.glob("logs/*.log"))
    found = ["hung"] if ended.hung else []
    if "Traceback" in said:
        found.append(f"a traceback: {said[said.index('Traceback') :][:3000]}")
    if ended.status not in allowed:
        found.append(f"status {ended.status}: {ended.said[-800:]}")
    messages = re.findall(r"^(?:stopped|error|trained nothing|interrupted): .*", ended.said, re.MULTILINE)
    if len(messages) != (ended.status != 0):
        found.append(f"status {ended.status} with the messages {messages}: {ended.said[-800:]}")
    return found


def failed(
    place: Place,
    expected: Path,
    kind: str,
    order: Mapping[str, Any],
    allowed: tuple[int, ...],
    told: str,
    base: Path | None,
    server: Server,
    at: int,
) -> list[str]:
    """What was wrong with a run that a fault was put into at the event `at`, and with the run that then went on.

    Args:
        place, expected: The fixtures.
        kind: Of the run.
        order: What strikes, without `at`.
        allowed: Exit statuses.
        told: A pattern that the message must match, where the run stopped.
        base: A run that is gone on with; None = a new one.
        server: Where it runs.
        at: The number of the event.
    """
    run = place.copy(base)
    ended = place.run(server, kind, run, strike={**order, "at": at})
    found = what_is_wrong_with_the_end(ended, run, allowed)
    message = re.split(r"^(?:stopped|error): ", ended.said, flags=re.MULTILINE)[-1] if ended.status else ""
    if ended.status and not re.search(told, message):
        found.append(f"{told!r} is not in the message: {message}")
    elif ended.status and order["do"] == "error" and not re.search(rf"{run.name}|checkpoint|weights", message):
        found.append(f"no file is named: {message}")
    went_on = ended.status == 0
    if not went_on:
        ended = place.run(server, kind, run)
        found += [f"resumed, {wrong}" for wrong in what_is_wrong_with_the_end(ended, run, (0,))]
    if ended.status != 0:
        return found
    if order["do"] != "error":  # an episode may have failed
        return found + imbalances(run, lost_in_the_engine=True)
    if not went_on:
        return found + differences(run, expected)
    name = "final/model.safetensors"  # what a log could not take is missing there
    return found + ([] if (run / name).read_bytes() == (expected / name).read_bytes() else ["other weights"])


def all_wrong(row, each, case, cases) -> list[str]:
    wrong = []
    for at, found in zip(cases, each(case, cases), strict=True):
        row.add(wrong=bool(found))
        wrong += [f"{row.name}, event {at}: {'; '.join(found)}"] if found else []
    return wrong


DISK_CASES = [("one", "orchestrator", 20), ("two", "orchestrator", 12), ("two", "trainer", 16)]
"""The kind of a run, in which process calls fail, and the number of cases of each error in the whole; the short part
has two of each in `SHORT_CASES`."""
SHORT_CASES = {"ENOSPC": DISK_CASES, "EIO": DISK_CASES[::2], "EMFILE": DISK_CASES[:2], "EACCES": DISK_CASES[:1]}
"""Every error in a run of one process, and one or two in each process of a run of two."""


@pytest.mark.campaign
def test_a_call_of_the_system_that_fails_is_one_message_or_costs_only_what_it_was_for(
    place: Place, expected: Path, each, campaign
):
    wrong = []
    for name, settings in DISK.items():
        for kind, role, count in sized(SHORT_CASES[name], DISK_CASES):
            events = place.events(each, kind, role, ops=settings["ops"])
            number = error_number(name)
            order = {"role": role, "do": "error", "errno": number, **settings}
            allowed = (0, 1, 2) if name == "EACCES" else (0, 1)
            case = functools.partial(failed, place, expected, kind, order, allowed, os.strerror(number), None)
            cases = spread(range(1, len(events) + 1), sized(2, count))
            wrong += all_wrong(campaign(f"{name} in {kind}, {role}"), each, case, cases)
    assert not wrong, "\n".join(wrong)


@pytest.mark.campaign
def test_a_call_that_fails_when_a_run_goes_on(place: Place, expected: Path, each, campaign):
    """It has one checkpoint, after half of its steps."""
    base = place.copy(expected)
    for gone in (base / "checkpoints" / f"step_{STEPS:06d}", base / "final"):
        shutil.rmtree(gone)
    wrong = []
    for name, short, long in (("EMFILE", 2, 12), ("EIO", 1, 16), ("ENOSPC", 1, 8)):
        events = place.events(each, "one", "orchestrator", base=base, ops=DISK[name]["ops"])
        order = {"role": "orchestrator", "do": "error", "errno": error_number(name), **DISK[name]}
        allowed = (0, 1, 2) if name == "EIO" else (0, 1)  # its one checkpoint cannot be read
        case = functools.partial(failed, place, expected, "one", order, allowed, os.strerror(error_number(name)), base)
        cases = spread(range(1, len(events) + 1), sized(short, long))
        wrong += all_wrong(campaign(f"{name} in one that goes on"), each, case, cases)
    assert not wrong, "\n".join(wrong)


def test_a_message_that_does_not_say_why_is_found(place: Place, expected: Path, each):
    """The campaign can fail."""
    plant = "import verbatim.cli.main as main; main.describe = lambda *_: 'it did not work'"
    events = place.events(each, "one", "orchestrator", ops=DISK["ENOSPC"]["ops"])
    order = {"role": "orchestrator", "do": "error", "errno": error_number("ENOSPC"), "plant": plant, **DISK["ENOSPC"]}
    case = functools.partial(failed, place, expected, "one", order, (0, 1), os.strerror(order["errno"]), None)
    assert any(each(case, [at])[0] for at in spread(range(1, len(events) + 1), 4))


def test_the_modules_in_whose_calls_memory_runs_out_are_there():
    """One that is renamed would leave the campaign without a word."""
    assert all(map(importlib.util.find_spec, (*TRAINER, *LOOP, *ENGINE)))


@pytest.mark.campaign
def test_memory_that_runs_out_is_one_message_or_costs_an_episode(place: Place, expected: Path, each, campaign):
    wrong = []
    for name, (do, modules) in MEMORY.items():
        for kind, count in sized((("one", 4),), (("one", 12), ("two", 10))):
            role = "trainer" if kind == "two" and modules is TRAINER else "orchestrator"
            events = place.calls(each, kind, role, do, modules)
            order = {"role": role, "do": do, "modules": modules}
            case = functools.partial(failed, place, expected, kind, order, (0, 1), OUT_OF_MEMORY, None)
            cases = spread(range(1, len(events) + 1), count)
            wrong += all_wrong(campaign(f"no {name}, {kind}"), each, case, cases)
    assert not wrong, "\n".join(wrong)
