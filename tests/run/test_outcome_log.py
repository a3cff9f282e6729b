"""The thread that writes outcomes: what goes wrong on it is raised, and what else waits is written all the same."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from verbatim import Trajectory, Turn
from verbatim.core.trajectories import TrajectoryOutcome
from verbatim.logs.outcomes.files import OutcomeFolder
from verbatim.logs.outcomes.retention import EVERYTHING
from verbatim.run.outcome_log import OutcomeLog
from waiting import HANGS, wait_until


def test_a_bug_in_the_writing_of_a_step_is_raised_and_the_next_step_is_written_before_the_log_is_closed(
    tmp_path, monkeypatch
):
    write = OutcomeFolder.write

    def broken(self, step, outcomes):
        if step == 1:
            raise RuntimeError("a bug at step 1")
        write(self, step, outcomes)

    monkeypatch.setattr(OutcomeFolder, "write", broken)
    log = OutcomeLog(tmp_path / "trajectories", store=None, first_step=0, retention=EVERYTHING)
    outcome = TrajectoryOutcome.of_dropped(
        Trajectory(example_id="x", turns=[Turn(prompt_ids=[1], completion_ids=[2])]), "error"
    )
    for step in (1, 2):
        log.write(step, [outcome])
    with pytest.raises(RuntimeError, match="a bug at step 1"):
        log.close()
    assert [path.name for path in (tmp_path / "trajectories").iterdir()] == ["step-000002.parquet"]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("trajectories-writer")]


@pytest.mark.realtime
def test_two_may_wait_at_once_and_both_wait_until_it_is_written(tmp_path, monkeypatch):
    write, may_write = OutcomeFolder.write, threading.Event()

    def slow(self, step, outcomes):
        assert may_write.wait(HANGS)
        write(self, step, outcomes)

    monkeypatch.setattr(OutcomeFolder, "write", slow)
    log = OutcomeLog(tmp_path / "trajectories", store=None, first_step=0, retention=EVERYTHING)
    outcome = TrajectoryOutcome.of_dropped(
        Trajectory(example_id="x", turns=[Turn(prompt_ids=[1], completion_ids=[2])]), "error"
    )
    log.write(1, [outcome])
    with ThreadPoolExecutor(2) as others:
        marks = [others.submit(log.marks) for _ in range(2)]
        wait_until(lambda: len(log._waiting[0]._condition._waiters) == 2)
        may_write.set()
        assert [list(mark.result()) for mark in marks] == [["1"], ["1"]]
    log.close()
