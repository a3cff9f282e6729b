"""Run with `pytest`: the environment passes all checks, and a perfect agent always succeeds."""

from verbatim.inspection.envcheck import CheckSettings, check_environment


def test_nothing_is_wrong_with_the_environment() -> None:
    report = check_environment("my_env.MyEnv", {}, CheckSettings())
    assert report.findings == ()
    assert report.players["solution"].success == 1.0
    assert report.players["random"].success < 1.0
