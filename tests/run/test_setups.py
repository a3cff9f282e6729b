"""What stands in the file reaches the parts of a run."""

from __future__ import annotations

import asyncio
from pathlib import Path

from verbatim.config import load_config
from verbatim.run.environments import make_environments
from verbatim.run.rollouts import make_setups
from verbatim.run.tables import component_tables

FILE = """\
[model]
name = "some/model"
[orchestrator]
{settings}
[[orchestrator.train.env]]
id = "guess_number"
"""


def configured(folder: Path, settings: str = ""):
    (folder / "run.toml").write_text(FILE.format(settings=settings))
    return load_config(folder / "run.toml", [], component_tables())


def test_the_limits_of_episodes_are_those_of_the_file(tmp_path: Path):
    config = configured(tmp_path, 'tool_error = "stop"\nmax_malformed_retries = 0\ntool_timeout = 3.0')
    made = make_environments(config).train
    setups = make_setups(config.orchestrator, made, None, None, asyncio.Semaphore(1))
    limits = setups["guess_number"].limits
    assert (limits.tool_error, limits.max_malformed_retries, limits.tool_timeout) == ("stop", 0, 3.0)
