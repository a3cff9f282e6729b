"""The power goes out at any moment of a run: it can be resumed, and comes to the same end."""

from __future__ import annotations

import itertools
import random
import stat
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from campaigns import sized
from faults.lost_power import MODES, after_loss
from faults.recorded_runs import STEPS, Recorded, resume, resumed_run, run_of, run_of_two_processes, what_differs
from faults.recorder import Op
from faults.struck import Server

WHOLE = ("nothing", "names", "journal", "random")
SHORT = ("nothing", "names", "random")
"""What survives of what was not synced, at each moment that is tried."""


# ---- the model of a disk, on traces that can be read


FILE, FOLDER = stat.S_IFREG, stat.S_IFDIR
WRITTEN: list[Op] = [("sync", 0), ("add", 0, ".a.tmp", 1, FILE, None), ("data", 1, b"new")]
RENAMED: list[Op] = [*WRITTEN, ("move", 0, ".a.tmp", 0, "a", 1)]


def disk(ops: Sequence[Op], mode: str, seed: int = 0) -> dict[str, bytes]:
    tree = after_loss(ops, mode, random.Random(seed))
    return {name: tree.contents.get(node, b"folder") for name, node in tree.files()}


def test_what_is_not_synced_may_be_gone_or_empty_or_zeros():
    assert disk(RENAMED, "all") == {"a": b"new"}
    assert disk(RENAMED, "nothing") == {}
    assert disk(RENAMED, "names") == {"a": b""}
    assert disk(RENAMED, "zeros") == {"a": b"\0\0\0"}
    assert disk([*WRITTEN, ("sync", 1), ("sync", 0)], "nothing") == {".a.tmp": b"new"}
    found = {tuple(sorted(disk(RENAMED, "random", seed).items())) for seed in range(200)}
    assert {(), ((".a.tmp", b"new"),), (("a", b""),), (("a", b"ne"),), (("a", b"new"),)} <= found


def test_what_is_synced_in_the_right_order_is_there_in_every_mode():
    for mode, seed in itertools.product(MODES, range(20)):
        synced = [*WRITTEN, ("sync", 1), RENAMED[-1], ("sync", 0)]
        assert disk(synced, mode, seed) == {"a": b"new"}
        again: list[Op] = [("add", 0, ".a.tmp", 2, FILE, None), ("data", 2, b"newer"), ("sync", 2)]
        later = [*synced, *again, ("move", 0, ".a.tmp", 0, "a", 2)]
        assert disk(later, mode, seed)["a"] in (b"new", b"newer")
    assert disk([*WRITTEN, RENAMED[-1], ("sync", 0)], "names") == {"a": b""}  # the file was not synced


def test_what_a_sync_has_put_on_the_disk_never_shrinks_to_what_was_there_before():
    log: list[Op] = [("add", 0, "log", 1, FILE, None), ("data", 1, b""), ("data", 1, b"one"), ("sync", 1), ("sync", 0)]
    appended: list[Op] = [*log, ("data", 1, b"one two")]
    found = {disk(appended, mode, seed)["log"] for mode, seed in itertools.product(MODES, range(200))}
    assert all(content.startswith(b"one") for content in found) and {b"one", b"one two", b"one\0\0\0\0"} <= found


def test_a_name_in_a_folder_whose_name_was_not_synced_is_gone_with_it():
    made: list[Op] = [("add", 0, "f", 1, FOLDER, None), ("add", 1, "a", 2, FILE, None), ("data", 2, b"x")]
    ops: list[Op] = [*made, ("sync", 2), ("sync", 1)]
    assert disk(ops, "nothing") == {}
    assert disk([*ops, ("sync", 0)], "nothing") == {"f": b"folder", "f/a": b"x"}


def test_an_appended_file_keeps_what_was_synced():
    begun: list[Op] = [("add", 0, "log", 1, FILE, None), ("sync", 0), ("data", 1, b"one "), ("sync", 1)]
    ops: list[Op] = [*begun, ("data", 1, b"one two ")]
    seen = {disk(ops, mode, seed)["log"] for mode, seed in itertools.product(MODES, range(40))}
    assert all(content.startswith(b"one ") for content in seen)
    assert {b"one ", b"one two ", b"one \0\0\0\0", b"one tw"} <= seen


# ---- recorded runs


@pytest.mark.slow
@pytest.mark.realtime
def test_the_trace_holds_everything_that_the_run_left(plain: Recorded, tmp_path: Path):
    """Nothing that changed the folder escaped the recorder: done again from the trace, it is the same folder."""
    after_loss(plain.ops, "all", random.Random(0)).write(tmp_path)
    assert what_differs(run_of(tmp_path), plain) is None
    assert [op[1] for op in plain.ops if op[0] == "promise"] == [0, 1, 2, 3, "finished"]


def lose_power(
    run: Recorded, prefixes: Sequence[int], modes: Sequence[str], place: Path
) -> Iterator[tuple[str, str | None]]:
    """Each state of the disk that is not like an earlier one: what it is, and what went wrong."""
    rng, seen = random.Random(0), set[int]()
    for prefix, (number, mode) in itertools.product(prefixes, enumerate(modes)):
        tree = after_loss(run.ops[:prefix], mode, rng)
        promised = run.promised(prefix)
        key = hash((tree.fingerprint(), promised))
        if key not in seen:
            seen.add(key)
            disk = place / f"{prefix}-{mode}-{number}"
            disk.mkdir()
            tree.write(disk)
            yield disk.name, resume(disk, promised, run)


@pytest.fixture(scope="module")
def runs(plain: Recorded, prepared: Recorded, each, tmp_path_factory) -> dict[str, Recorded]:
    def rest(server: Server, place: Path) -> Recorded:
        return resumed_run(server, place, plain)

    return {
        "a run": plain,
        "a run that builds its model": prepared,
        "a run of two processes": each(run_of_two_processes, [tmp_path_factory.mktemp("two")])[0],
        "a resumed run": each(rest, [tmp_path_factory.mktemp("resumed")])[0],
    }


@pytest.mark.slow
@pytest.mark.realtime
@pytest.mark.campaign
@pytest.mark.parametrize(
    ("name", "many"),
    [("a run", 40), ("a run that builds its model", 25), ("a run of two processes", 25), ("a resumed run", 25)],
)
def test_a_run_whose_power_goes_out_is_resumed_to_the_same_end(
    runs: dict[str, Recorded], tmp_path: Path, campaign, name: str, many: int
):
    row, wrong = campaign(f"power loss: {name}"), []
    prefixes = runs[name].moments(sized(2, many))
    for state, fault in lose_power(runs[name], prefixes, sized(SHORT, WHOLE), tmp_path):
        row.add(wrong=fault is not None)
        wrong += [f"{state}: {fault}"] if fault else []
    row.note = f"states of the disk at {len(prefixes)} moments"
    assert wrong == []


@pytest.mark.slow
@pytest.mark.realtime
def test_a_run_that_syncs_nothing_is_found(plain: Recorded, tmp_path: Path):
    """The campaign can fail."""
    began = plain.ops.index(("start",))
    careless = replace(plain, ops=[op for n, op in enumerate(plain.ops) if n < began or op[0] != "sync"])
    assert any(fault for _, fault in lose_power(careless, careless.moments(4)[::-1], ["names"], tmp_path))


@pytest.mark.slow
@pytest.mark.realtime
def test_weights_whose_file_lost_its_name_are_no_longer_there(runs: dict[str, Recorded], tmp_path: Path):
    """The folder of the version survives, and the renaming in it by safetensors does not."""
    run = runs["a run of two processes"]
    after_loss(run.ops[: run.after(STEPS)], "all", random.Random(0)).write(tmp_path)
    version = run_of(tmp_path) / "weights" / f"v{STEPS:06d}"
    (version / "model.safetensors").rename(version / ".tmpeWRBik")
    assert resume(tmp_path, STEPS, run) is None
