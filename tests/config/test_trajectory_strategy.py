"""One strategy under two names, on the command line and for each environment."""

import re

import pytest

from verbatim.config import dump_config, load_config
from verbatim.core.errors import ConfigError
from verbatim.run.tables import component_tables

TOML = """\
[model.build]
[orchestrator]
batch_size = 8
group_size = 4
{orchestrator}
[[orchestrator.train.env]]
id = "guess_number"
{env}
"""


@pytest.fixture
def write(tmp_path):
    def write(orchestrator="", env=""):
        file = tmp_path / "run.toml"
        file.write_text(TOML.format(orchestrator=orchestrator, env=env))
        return file

    return write


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("", "interleaved"),
        ('formulate_mode = "traj"', "interleaved"),
        ('formulate_mode = "step"', "branching"),
        ('trajectory_strategy = "branching"', "branching"),
        ('formulate_mode = "step"\ntrajectory_strategy = "branching"', "branching"),
    ],
)
def test_both_names_set_the_strategy_of_a_run_and_of_an_environment(write, given, expected):
    config = load_config(write(orchestrator=given), tables=component_tables()).orchestrator
    assert (config.trajectory_strategy, config.train.env[0].trajectory_strategy) == (expected, None)
    env = load_config(write(env=given), tables=component_tables()).orchestrator.train.env[0]
    assert env.trajectory_strategy == (expected if given else None)


def test_what_is_printed_reads_back(write, tmp_path):
    config = load_config(write('formulate_mode = "step"\non_break = "error"', 'formulate_mode = "traj"'))
    again = tmp_path / "again.toml"
    again.write_text(dump_config(config))
    assert load_config(again) == config


def test_two_names_that_disagree_are_refused(write):
    both = 'formulate_mode = "step"\ntrajectory_strategy = "interleaved"'
    message = (
        'formulate_mode = "step" means trajectory_strategy = "branching", found trajectory_strategy = '
        '"interleaved"; give one of the two'
    )
    with pytest.raises(ConfigError, match=rf"run.toml:2: orchestrator: {re.escape(message)}"):
        load_config(write(orchestrator=both))
    with pytest.raises(ConfigError, match=rf"orchestrator.train.env.0: {re.escape(message)}"):
        load_config(write(env=both))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ('formulate_mode = "steps"', "expected 'traj' or 'step'; did you mean \"step\""),
        ('on_break = "stop"', "expected 'split' or 'error'"),
        ('trajectory_strategy = "branch"', "there is no trajectory strategy 'branch'"),
    ],
)
def test_unknown_values_are_refused_with_the_known_ones(write, given, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_config(write(orchestrator=given), tables=component_tables())
