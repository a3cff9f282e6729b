"""A side of a run has all cores once the other one has been idle for as long as a pass takes."""

import multiprocessing

import pytest

from verbatim.models.native import cores
from verbatim.models.native.cores import FIRST_PASS, CoreShare
from waiting import HANGS


class Clock:
    now = 1000.0


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(cores.time, "monotonic", lambda: clock.now)
    return clock


@pytest.fixture
def sides(tmp_path, clock):
    return tuple(CoreShare(tmp_path / "cores", side, 4) for side in ("sampler", "trainer"))


def test_a_side_has_its_share_while_the_other_one_computes(sides):
    sampler, trainer = sides
    assert (sampler.threads_for_pass(), trainer.threads_for_pass()) == (4, 4)
    sampler.compute(True)
    assert (sampler.threads_for_pass(), trainer.threads_for_pass()) == (4, 2)
    trainer.compute(True)
    assert (sampler.threads_for_pass(), trainer.threads_for_pass()) == (2, 2)


def test_cores_are_taken_once_they_were_idle_for_as_long_as_the_last_pass_took(sides, clock):
    """The trainer's passes take 0.2 s. The sampler ends its last one in the middle of such a pass."""
    sampler, trainer = sides
    sampler.compute(True)
    trainer.compute(True)
    assert trainer.threads_for_pass() == 2
    clock.now += 0.15
    sampler.compute(False)
    clock.now += 0.05
    assert trainer.threads_for_pass() == 2, "idle for 0.05 s, after a pass of 0.2 s"
    clock.now += 0.2
    assert trainer.threads_for_pass() == 4, "idle for 0.25 s, after a pass of 0.2 s"
    sampler.compute(True)
    clock.now += 0.1
    assert trainer.threads_for_pass() == 2


def test_short_passes_take_cores_soon(sides, clock):
    """The sampler's passes take 5 ms."""
    sampler, trainer = sides
    trainer.compute(True)
    sampler.compute(True)
    sampler.threads_for_pass()
    clock.now += 0.005
    assert sampler.threads_for_pass() == 2
    trainer.compute(False)
    clock.now += 0.004
    assert sampler.threads_for_pass() == 4


def test_before_a_pass_was_measured_it_is_taken_to_last_a_while(sides, clock):
    sampler, trainer = sides
    trainer.compute(True)
    trainer.compute(False)
    clock.now += FIRST_PASS / 2
    assert sampler.threads_for_pass() == 2
    sampler.compute(True)
    sampler.compute(False)  # the time until its next pass is not a pass's
    clock.now += FIRST_PASS
    assert sampler.threads_for_pass() == 4


def test_to_compute_on_does_not_change_since_when(sides, clock):
    sampler, trainer = sides
    sampler.compute(True)
    sampler.compute(True)
    assert trainer.threads_for_pass() == 2


def test_there_is_always_a_thread(tmp_path):
    one, other = (CoreShare(tmp_path / "cores", side, 1) for side in ("sampler", "trainer"))
    one.compute(True)
    assert other.threads_for_pass() == 1


def _compute(path, begun, end):
    share = CoreShare(path, "trainer", 2)
    share.compute(True)
    begun.set()
    end.wait()
    share.compute(False)


@pytest.mark.realtime
def test_it_is_seen_from_another_process(tmp_path, clock):
    context = multiprocessing.get_context("spawn")
    sampler, begun, end = CoreShare(tmp_path / "cores", "sampler", 2), context.Event(), context.Event()
    process = context.Process(target=_compute, args=(tmp_path / "cores", begun, end))
    process.start()
    assert begun.wait(HANGS)
    assert sampler.threads_for_pass() == 1
    end.set()
    process.join(HANGS)
    assert process.exitcode == 0
    clock.now = 1e12  # far after the other process's clock
    assert CoreShare(tmp_path / "cores", "sampler", 2).threads_for_pass() == 2


def test_a_side_that_starts_again_does_not_compute(tmp_path):
    sampler = CoreShare(tmp_path / "cores", "sampler", 2)
    CoreShare(tmp_path / "cores", "trainer", 2).compute(True)
    CoreShare(tmp_path / "cores", "trainer", 2)
    assert sampler.threads_for_pass() == 2
