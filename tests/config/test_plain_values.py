"""Values that no configuration can hold are refused with their key, wherever they come from."""

import pytest

from verbatim.config import load_config, make_config
from verbatim.core.errors import ConfigError

TOML = 'max_steps = 2\n[model]\nname = "some/model"\n[[orchestrator.train.env]]\nid = "guess_number"\n'
X = "orchestrator.train.env.0.args.x"
DIGITS, HALF = "a number of more than 4,300 digits", "contains half a character or an invalid byte; expected UTF-8"
DEEP = "nested deeper than 100 levels"


def refused(tmp_path, *options, toml=TOML):
    (tmp_path / "run.toml").write_text(toml)
    with pytest.raises(ConfigError) as told:
        load_config(tmp_path / "run.toml", list(options))
    return str(told.value)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("0x" + "f" * 9000, DIGITS),
        ("9" * 9000, DIGITS),
        ("-0b1" + "0" * 20_000, "not valid TOML"),
        ("[" * 101 + "]" * 101, DEEP),
        ("[" * 5000 + "]" * 5000, DEEP),
        ("{a = " * 5000 + "1" + "}" * 5000, DEEP),
    ],
)
def test_of_a_file(tmp_path, value, why):
    told = refused(tmp_path, toml=f"{TOML}args.x = {value}\n")
    assert f"{tmp_path}/run.toml" in told and why in told and len(told) < 1000


def test_tables_of_a_file_in_each_other(tmp_path):
    assert DEEP in refused(tmp_path, toml=f"{TOML}[a{'.a' * 1000}]\nx = 1\n")


@pytest.mark.parametrize(
    ("option", "value", "why"),
    [
        (f"--{X}", "0x" + "f" * 9000, DIGITS),
        (f"--{X}", "[" * 5000, DEEP),
        (f"--{X}", '{"a":' * 5000, DEEP),
        (f"--{X}", "[" * 101 + "]" * 101, DEEP),
        (f"--{X}", r'{"a": "\ud800"}', HALF),
        (f"--{X}", r'{"\ud800": 1}', HALF),
        ("--name", "a\udcffb", HALF),
        ("--model.name", "a\udcffb", HALF),
        ("--run-dir", "a\udcffb", HALF),
        (f"--{'a.' * 1000}b", "1", DEEP),
    ],
)
def test_of_the_command_line(tmp_path, option, value, why):
    told = refused(tmp_path, option, value)
    assert option[:9] in told and why in told


def test_of_python(tmp_path):
    given = {"model": {"name": "some/model"}, "orchestrator": {"train": {"env": [{"id": "guess_number"}]}}}
    for value, why in ((16**5000, DIGITS), ({"a": [1, 10**5000]}, DIGITS)):
        given["orchestrator"]["train"]["env"][0]["args"] = {"x": value}
        with pytest.raises(ConfigError, match=why):
            make_config(given)


def test_what_can_be_held_is(tmp_path):
    value = "[" * 90 + "1" + "]" * 90
    (tmp_path / "run.toml").write_text(f'{TOML}args.x = {value}\nargs.y = {2**62}\nargs.z = "\\U0001F642"\n')
    args = load_config(tmp_path / "run.toml").orchestrator.train.env[0].args
    assert (args["y"], args["z"]) == (2**62, "\U0001f642")
