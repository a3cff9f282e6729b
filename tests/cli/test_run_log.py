"""One trajectory that cannot be written costs its own record."""

from verbatim import Trajectory
from verbatim.cli.run_log import NOT_WRITTEN, RunLog
from verbatim.monitors.trajectory_log import TrajectoryLog, read_trajectories


def test_a_trajectory_that_is_not_json_is_logged_without_what_is_not_and_the_log_goes_on(tmp_path, caplog):
    log = object.__new__(RunLog)  # what writes trajectories, without a run around it
    log._num_incomplete = 0
    written = TrajectoryLog(tmp_path / "trajectories.jsonl")
    nested: list = []
    nested.append(nested)
    for name, message in (("a", {}), ("b", {"seen": {1}}), ("c", {"seen": nested}), ("d", {})):
        messages = ({"role": "user", "content": "go", **message},)
        log._write(written, 1, Trajectory(example_id="x", trajectory_id=name, messages=messages, reward=1.0))
    written.close()
    read = [trajectory for _, trajectory in read_trajectories(tmp_path / "trajectories.jsonl")]
    assert [(t.trajectory_id, len(t.messages), t.reward) for t in read] == [
        ("a", 1, 1.0), ("b", 0, 1.0), ("c", 0, 1.0), ("d", 1, 1.0)
    ]
    assert read[1].info[NOT_WRITTEN] == (
        "messages and info were not written: TypeError: Object of type set is not JSON serializable"
    )
    assert log._num_incomplete == 2
    assert len(caplog.records) == 1
