"""A backend is a name of a table or an import path, and its own settings are the keys of its own table."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from verbatim.config import BackendSettings, ComponentTables, dump_config, find_backend, load_config, settings_for
from verbatim.config.sections import PositiveInt
from verbatim.core.errors import ComponentError, ConfigError
from verbatim.run.tables import component_tables


class SmallSettings(BackendSettings):
    """Settings of the backend `small`."""

    speed: PositiveInt = 3
    """Tokens at a time."""
    label: str | None = None
    """A name."""


def small(inputs: Any, settings: SmallSettings) -> tuple[Any, SmallSettings]:
    return inputs, settings


class OtherSettings(BackendSettings):
    """Settings of the backend `other`."""

    depth: int = 1
    """Layers."""


@dataclass
class Other:
    inputs: Any
    settings: OtherSettings


def anything(inputs: Any = None) -> None: ...


def pack(samples: Any, *, micro_batch_tokens: int, keep_whole: bool) -> None: ...


TABLES = ComponentTables(
    losses={"default": anything},
    advantages={"default": anything},
    filters={},
    strategies={"interleaved": anything},
    environments={"game": anything},
    monitors={},
    packers={"auto": pack},
    samplers={"torch": small, "other": Other},
    runners={"local": small},
    renderers=("auto",),
)

FILE = """\
[model]
name = "x"
[orchestrator]
filters = []
[[orchestrator.train.env]]
id = "game"
[inference]
"""

OWN = """
from verbatim.config import BackendSettings

class MySettings(BackendSettings):
    steps: int = 2
    "How many."

class MySampler:
    def __init__(self, inputs, settings: MySettings):
        self.inputs, self.settings = inputs, settings

class canary_tolerance:
    def __init__(self, inputs, settings: MySettings): ...

def without_settings(inputs): ...
def plain_settings(inputs, settings: dict): ...
def unknown_settings(inputs, settings: "Nowhere"): ...
def third(inputs, settings: MySettings, more): ...
number = 3

class FarSettings(BackendSettings):
    url: str
    "Where the server is."

def far(inputs, settings: FarSettings): ...
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my_backends.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "run.toml").write_text(FILE)
    return tmp_path / "run.toml"


def refused(file: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(file, overrides, TABLES)
    return str(caught.value).replace(str(file), "FILE")


def settings_of(config: Any) -> BackendSettings:
    backend = find_backend(config.inference.backend, TABLES.samplers, what="inference backend")
    return settings_for(config.inference, config.inference.backend, backend)


def test_each_backend_of_the_table_has_a_table_of_its_own(file: Path):
    file.write_text(FILE + "[inference.torch]\nspeed = 7\n[inference.other]\ndepth = 5\n")
    config = load_config(file, ["--inference.other.depth", "6"], TABLES)
    assert settings_of(config) == SmallSettings(speed=7)
    assert settings_of(load_config(file, ["--inference.backend", "other"], TABLES)) == OtherSettings(depth=5)
    assert config.inference.other == OtherSettings(depth=6)


def test_the_printed_configuration_has_the_settings_of_the_backend_in_use_and_reads_back(file: Path):
    assert "[inference.torch]\nspeed = 3\n" in dump_config(load_config(file, tables=TABLES))
    config = load_config(file, ["--inference.torch.speed", "5", "--inference.backend", "other"], TABLES)
    printed = dump_config(config)
    assert "[inference.torch]\nspeed = 5\n" in printed and "[inference.other]\ndepth = 1\n" in printed
    file.write_text(printed)
    assert load_config(file, tables=TABLES) == config


def test_a_backend_of_ones_own_has_its_table_under_its_last_name(file: Path):
    file.write_text(FILE + 'backend = "my_backends.MySampler"\n[inference.MySampler]\nsteps = 4\n')
    config = load_config(file, tables=TABLES)
    assert settings_of(config).steps == 4  # type: ignore[attr-defined]
    file.write_text(dump_config(config))
    assert load_config(file, tables=TABLES) == config


@pytest.mark.parametrize(
    ("toml", "expected"),
    [
        ("speed = 4\n", "FILE:8: inference.speed is now inference.torch.speed"),
        ("spee = 4\n", 'FILE:8: inference.spee: unknown key "spee" in [inference]. The keys of [inference] are back'),
        (
            'backend = "trch"\n',
            "FILE:8: inference.backend: there is no inference backend 'trch'; did you mean "
            '"torch"? There are other, torch; or import your own: backend = "my_module.MyBackend"',
        ),
        ('backend = "my_backends.MySmpler"\n', "FILE:8: inference.backend: my_backends ("),
        ('backend = "my_backends.number"\n', "FILE:8: inference.backend: inference backend 'my_backends.number' is i"),
        (
            'backend = "my_backends.without_settings"\n',
            "FILE:8: inference.backend: inference backend "
            "'my_backends.without_settings' takes (inputs); expected a function or class that can be called as",
        ),
        (
            'backend = "my_backends.third"\n',
            "FILE:8: inference.backend: inference backend 'my_backends.third' takes (inputs, settings, more); expected",
        ),
        (
            'backend = "my_backends.plain_settings"\n',
            "FILE:8: inference.backend: inference backend "
            "'my_backends.plain_settings': settings is annotated with <class 'dict'>; expected a subclass of",
        ),
        (
            'backend = "my_backends.unknown_settings"\n',
            "FILE:8: inference.backend: inference backend "
            "'my_backends.unknown_settings': the annotation of settings cannot be read: name 'Nowhere'",
        ),
        (
            'backend = "my_backends.canary_tolerance"\n',
            "FILE:8: inference.backend: the table of "
            "'my_backends.canary_tolerance' would be [inference.canary_tolerance], a key shared by all backends; ",
        ),
        ('backend = "my_backends.far"\n', "FILE:7: inference.far.url is missing: where the server is."),
        (
            'backend = "my_backends.MySampler"\n[inference.MySampler]\nstep = 4\n',
            'FILE:10: inference.MySampler.step: unknown key "step" in [inference.MySampler]; did you mean "steps"?',
        ),
        (
            'backend = "my_backends.MySampler"\n[inference.MySampler]\nsteps = "4"\n',
            'FILE:10: inference.MySampler.steps: found "4" (a string), expected a valid integer',
        ),
        ("[inference.MySampler]\nsteps = 4\n", 'FILE:8: inference.MySampler: unknown key "MySampler" in [inference]'),
        (
            "[inference.torhc]\nspeed = 4\n",
            'FILE:8: inference.torhc: unknown key "torhc" in [inference]; did you mean "torch"?',
        ),
        ("[inference.torch]\nspeed = 0\n", "FILE:9: inference.torch.speed: found 0 (an integer), expected greater"),
        (
            "[inference.other]\nspeed = 4\n",
            'FILE:9: inference.other.speed: unknown key "speed" in [inference.other]; it belongs to [inference.torch].',
        ),
        ('backend = ["torch"]\n', 'FILE:8: inference.backend: found ["torch"] (a list), expected a valid string'),
        ("torch = 3\n", "FILE:8: inference.torch: found 3 (an integer), expected a table"),
        ("[inference]\nbackend = 3\n", None),
    ],
)
def test_a_mistake_names_file_line_key_and_what_to_type(file: Path, toml: str, expected: str | None):
    if expected is None:  # a section twice is no TOML; a backend that is no text is refused like any other key
        file.write_text(FILE + "backend = 3\n")
        assert refused(file).startswith("FILE:8: inference.backend: found 3 (an integer), expected a valid string")
        return
    file.write_text(FILE + toml)
    assert refused(file).startswith(expected)


def test_an_override_knows_the_types_of_a_backends_keys(file: Path):
    config = load_config(file, ["--inference.torch.label", "7"], TABLES)  # a text that reads as a number
    assert settings_of(config) == SmallSettings(label="7")
    assert refused(file, "--inference.torch.speed") == "--inference.torch.speed: needs a value: Tokens at a time."
    assert refused(file, "--inference.speed", "4").endswith(": inference.speed is now inference.torch.speed")
    load_config(file, ["--inference.torch", "null"], TABLES)


def test_the_old_flat_keys_of_a_run_say_where_they_are_now(file: Path):
    file.write_text(FILE.replace('id = "game"', 'id = "guess_number"') + "deterministic = true\nmax_batch_size = 8\n")
    with pytest.raises(ConfigError) as caught:
        load_config(file, ("--orchestrator.rollout.worker-memory-mb", "10"), component_tables())
    message = str(caught.value)
    assert "run.toml:8: inference.deterministic is now inference.torch.deterministic\n" in message
    assert "run.toml:9: inference.max_batch_size is now inference.torch.max_batch_size" in message
    assert "orchestrator.rollout.worker_memory_mb is now orchestrator.rollout.processes.worker_memory_mb" in message


def test_a_file_read_without_the_tables_keeps_a_backends_table_and_says_where_its_keys_belong(file: Path):
    file.write_text(FILE + "[inference.torch]\nspeed = 7\n")
    assert settings_of(load_config(file)) == SmallSettings(speed=7)
    file.write_text(FILE + "speed = 7\n")
    with pytest.raises(ConfigError, match=r"inference.speed: found 7 .*a table; a backend's own keys .*e.NAME]"):
        load_config(file)


def test_the_built_in_backends_load_nothing_heavy():
    for name in component_tables().runners:
        find_backend(name, component_tables().runners, what="rollout backend")
    assert find_backend("torch", component_tables().samplers, what="inference backend").settings.__name__ == (
        "TorchSettings"
    )


def test_a_name_without_a_dot_is_looked_up_and_one_with_is_imported():
    with pytest.raises(ComponentError, match="there is no module 'nowhere'"):
        find_backend("nowhere.Mine", {}, what="inference backend")
    with pytest.raises(ComponentError, match=r"^there is no inference backend 'nowhere'\. There are ; or import"):
        find_backend("nowhere", {}, what="inference backend")
