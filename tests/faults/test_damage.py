"""A checkpoint of which any file is damaged is not used: the one before is, or the run is refused."""

from __future__ import annotations

import functools
import itertools
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from campaigns import sized
from faults.struck import Server
from faults.tiny_places import STEPS, Place, differences

pytestmark = [pytest.mark.slow, pytest.mark.realtime]

NEWEST, BEFORE = f"step_{STEPS:06d}", f"step_{STEPS - 2:06d}"


def rewrite(path: Path, data: bytes) -> None:
    path.unlink()  # it may share its bytes with other names
    path.write_bytes(data)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    place = random.Random(len(data)).randrange(len(data))
    data[place] ^= 1 << place % 8
    rewrite(path, bytes(data))


def swap(path: Path) -> None:
    """With the same file of the checkpoint before."""
    other = Path(str(path).replace(NEWEST, BEFORE))
    mine, theirs = path.read_bytes(), other.read_bytes()
    rewrite(path, theirs)
    if mine == theirs:
        return  # such a file is right in both
    rewrite(other, theirs)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut": lambda path: rewrite(path, path.read_bytes().removesuffix(b"\n")[:-1]),  # JSON without its newline is whole
    "emptied": lambda path: rewrite(path, b""),
    "flipped": flip,
    "deleted": Path.unlink,
    "of the one before": swap,
}


def files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def damaged(place: Place, expected: Path, plant: str | None, server: Server, chosen: tuple[str, str]) -> list[str]:
    """What was wrong with a run that went on, of whose newest checkpoint a file was damaged."""
    name, damage = chosen
    run = place.new()
    shutil.copytree(expected, run)
    shutil.rmtree(run / "final")
    path = run / "checkpoints" / NEWEST / name
    before = path.read_bytes()
    DAMAGES[damage](path)
    changed = not path.exists() or path.read_bytes() != before
    ended = place.run(server, "one", run, strike=None if plant is None else {"plant": plant})
    if ended.status != 0 or ended.hung:
        return [f"status {ended.status}: {ended.said[-1000:]}"]
    used = "is damaged and not used" not in ended.said
    return ["it was used"] if used and changed else differences(run, expected)


@pytest.mark.campaign
def test_any_damage_to_any_file_of_the_newest_checkpoint_is_found(place: Place, expected: Path, each, campaign):
    newest = expected / "checkpoints" / NEWEST
    names = [name for name in files(newest) if (newest / name).stat().st_size]
    short = [*zip(names, itertools.cycle(DAMAGES), strict=False), ("weights/model.safetensors", "of the one before")]
    short += zip(names[:7], itertools.islice(itertools.cycle(DAMAGES), 2, None), strict=False)
    row = campaign("damaged checkpoints")
    chosen = sized(short, [(name, damage) for name in names for damage in DAMAGES])
    wrong = {}
    for pick, found in zip(chosen, each(functools.partial(damaged, place, expected, None), chosen), strict=True):
        row.add(wrong=bool(found))
        if found:
            wrong[pick] = found
    assert {damage for _, damage in chosen} == set(DAMAGES)
    assert not wrong, "\n".join(f"{name} {damage}: {'; '.join(found)}" for (name, damage), found in wrong.items())


def test_a_resume_that_checks_nothing_is_found(place: Place, expected: Path, each):
    """The campaign can fail."""
    plant = "import verbatim.logs.checkpoints.store as store; store.find_damage = lambda folder: None"
    chosen = ("weights/model.safetensors", "flipped")
    assert each(functools.partial(damaged, place, expected, plant), [chosen]) != [[]]


@pytest.mark.campaign
def test_whole_checkpoints_under_each_others_names_are_refused(place: Place, expected: Path, each, campaign):
    """What they hold is not what their names say."""
    run = place.new()
    shutil.copytree(expected, run)
    checkpoints = run / "checkpoints"
    (checkpoints / NEWEST).rename(checkpoints / "aside")
    (checkpoints / BEFORE).rename(checkpoints / NEWEST)
    (checkpoints / "aside").rename(checkpoints / BEFORE)
    (ended,) = each(lambda server, _: place.run(server, "one", run), [None])
    campaign("damaged checkpoints").add(wrong=ended.status != 2)
    assert ended.status == 2, ended.said
    assert "error: every checkpoint of this run is damaged" in ended.said
    assert "Traceback" not in ended.said
