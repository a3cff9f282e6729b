"""`--trajectory-strategy`, on the commands that train, is an override in short."""

import pytest

from verbatim.cli.main import parse
from verbatim.cli.rl_command import load

TOML = """\
[model.build]
[orchestrator]
batch_size = 8
group_size = 4
[[orchestrator.train.env]]
id = "guess_number"
"""


@pytest.mark.parametrize("command", ["rl", "orchestrator", "trainer"])
@pytest.mark.parametrize(
    "typed",
    [
        ["--trajectory-strategy", "branching", "{file}"],
        ["{file}", "--trajectory-strategy=branching", "--max-steps", "3"],
        ["{file}", "--orchestrator.trajectory-strategy", "branching"],
    ],
)
def test_it_reaches_the_configuration_wherever_it_stands(tmp_path, command, typed):
    file = tmp_path / "run.toml"
    file.write_text(TOML)
    args = parse([command, *(word.format(file=file) for word in typed)])
    config = load(args)
    assert config.orchestrator.trajectory_strategy == "branching"
    assert config.max_steps == (3 if "--max-steps" in typed else 100)
