"""The learning rates of a run that is resumed with other keys."""

import json
import logging
from dataclasses import asdict

import pytest

from verbatim.config.schema import OptimConfig
from verbatim.core.errors import CheckpointError
from verbatim.trainer.progress import read_progress, write_progress
from verbatim.trainer.schedule import Schedule

COSINE = OptimConfig(lr=1e-3, schedule="cosine", warmup_steps=1)


def after(config, total, *batches, planned=1):
    """A schedule after batches that took this many optimizer steps each."""
    schedule = Schedule(config, total)
    for taken in batches:
        for _ in range(taken):
            schedule.take()
        schedule.batch_is_over(planned)
    return schedule


def resumed(schedule, config, left):
    second = Schedule(config, 10**6)  # what the constructor says does not matter
    second.go_on(schedule.progress, left)
    return second


def test_a_run_that_is_made_longer_is_stretched_anew_and_its_jump_is_announced(caplog):
    # warm-up 1 of 4: 0.5, then (1 + cos(pi k / 3)) / 2 = 1, 3/4, 1/4; of 8, number 4: (1 + cos(3 pi / 7)) / 2 = 0.6113
    schedule = after(COSINE, 4, 1, 1, 1, 1)
    second = resumed(schedule, COSINE, 4)
    assert second.total == 8
    assert [record.getMessage() for record in caplog.records] == [
        "the learning rate jumps: optimizer step 5 of 8 is taken at 0.000611, but would be at 0 in the previous "
        "schedule of 4 steps; the last one was taken at 0.00025"
    ]
    assert second.take() == pytest.approx(0.6112604669781572e-3)


def test_a_resume_with_the_same_keys_changes_nothing_and_says_nothing(caplog):
    straight = after(COSINE, 6, 1, 1, 1)
    second = resumed(straight, COSINE, 3)
    assert [second.take() for _ in range(3)] == [straight.take() for _ in range(3)]
    assert not caplog.records


def test_batches_that_took_fewer_optimizer_steps_stay_planned_for():
    """So a resume is bit for bit the run that was not stopped: the schedule is not stretched over what is left."""
    straight = after(COSINE, 10, 2, 1, 0, planned=2)
    second = resumed(straight, COSINE, 4)
    assert (second.total, second.num_done) == (10, 3)
    assert second.take() == straight.take()
    assert second.progress.planned_optimizer_steps == 6


@pytest.mark.parametrize(("before", "now", "total"), [(1, 3, 4 + 6 * 3), (3, 1, 12 + 6)])
def test_another_number_of_optimizer_steps_on_each_batch_leaves_just_as_many_as_there_will_be(before, now, total):
    """10 steps, of which 4 are done."""
    schedule = after(OptimConfig(schedule="linear"), 10 * before, *[before] * 4, planned=before)
    second = resumed(schedule, OptimConfig(schedule="linear"), 6 * now)
    assert second.total == total
    for _ in range(6):
        for _ in range(now):
            second.take()
        second.batch_is_over(now)
    assert second.num_done == second.total
    with pytest.raises(AssertionError, match="of the schedule are done"):
        second.take()


def test_a_longer_warm_up_counts_from_the_first_optimizer_step_of_the_run(caplog):
    second = resumed(after(OptimConfig(lr=1.0), 10, 1, 1, 1), OptimConfig(lr=1.0, warmup_steps=7), 7)
    assert "optimizer step 4 of 10 is taken at 0.5, but would be at 1 in" in caplog.text
    assert second.take() == 0.5  # 4 of 8


def test_a_rate_that_does_not_change_is_not_announced(caplog):
    with caplog.at_level(logging.WARNING):
        resumed(after(OptimConfig(lr=1.0), 4, 1, 1), OptimConfig(lr=1.0), 50)
        resumed(after(COSINE, 2, 1, 1), COSINE, 0)  # nothing is left
    assert not caplog.records


def test_what_is_written_is_read(tmp_path):
    progress = after(COSINE, 8, 2, 1, planned=2).progress
    write_progress(tmp_path, progress, {"reference": "abc"})
    assert read_progress(tmp_path, {}) == (progress, {"reference": "abc"})
    assert asdict(progress) | {"last_lr": None, "next_lr": None} == {
        "num_optimizer_steps": 3,
        "planned_optimizer_steps": 4,
        "total_optimizer_steps": 8,
        "last_lr": None,
        "next_lr": None,
    }


@pytest.mark.parametrize(
    "changed",
    [
        {"num_optimizer_steps": -1},
        {"num_optimizer_steps": True},
        {"num_optimizer_steps": 4, "planned_optimizer_steps": 3},
        {"last_lr": "fast"},
        {"num_optimizer_steps": 2, "total_optimizer_steps": 1},
        {"next_lr": None},
        {"frozen": None},
    ],
)
def test_impossible_figures_are_no_trainer_state(tmp_path, changed):
    write_progress(tmp_path, after(COSINE, 8, 2, 1, planned=2).progress, {})
    path = tmp_path / "trainer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))
    with pytest.raises(CheckpointError, match="is not a trainer state"):
        read_progress(tmp_path, {})
