"""A component's name and parameters are checked against its own signature."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest

from verbatim.algorithms.losses import Loss
from verbatim.config import BackendSettings, ComponentTables, dump_config, import_object, load_config, resolve
from verbatim.config.schema import ComponentConfig
from verbatim.core.errors import ComponentError, ConfigError

if TYPE_CHECKING:
    from torch import Tensor  # as in a loss: the annotation exists for the type checker only


def scaled(inputs: Tensor, *, scale: float = 1.0, window: int = 3, mode: Literal["sum", "mean"] = "sum") -> float:
    return float(inputs) * scale  # type: ignore[arg-type]


def needy(inputs: Any, *, target: int) -> int:
    return target


def open_ended(inputs: Any, **parameters: Any) -> dict[str, Any]:
    return parameters


class Unknown:
    """Nothing that pydantic knows."""


def odd(inputs: Any, *, weights: Tensor | None = None, path: Unknown | None = None) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Rule:
    threshold: float = 0.5
    action: Literal["drop", "monitor"] = "drop"

    def __post_init__(self) -> None:
        if self.threshold < 0:
            raise ValueError(f"threshold = {self.threshold}, expected at least 0")

    def __call__(self, value: float) -> bool:
        return value > self.threshold


@dataclass(frozen=True)
class Record:
    function: Callable[..., Any]
    level: str = "token"
    parameters: dict[str, Any] = field(default_factory=dict)


TABLE = {
    "scaled": scaled,
    "needy": needy,
    "open": open_ended,
    "odd": odd,
    "rule": Rule,
    "record": Record(scaled, "chunk"),
}


def resolved(kind: str, **parameters: Any) -> Any:
    return resolve(ComponentConfig(type=kind, **parameters), TABLE, what="loss", where="trainer.loss")


def error_of(kind: str, **parameters: Any) -> str:
    with pytest.raises(ComponentError) as caught:
        resolved(kind, **parameters)
    return str(caught.value)


def test_a_function_gets_its_parameters():
    assert resolved("scaled", scale=2.5)(2) == 5.0


def test_a_table_may_hold_import_paths():
    loss = resolve(ComponentConfig(type="root"), {"root": "math:sqrt"}, what="loss", where="trainer.loss")
    assert loss(9.0) == 3.0


def test_an_integer_is_a_valid_number():
    assert resolved("scaled", scale=2).keywords == {"scale": 2.0}


def test_a_class_becomes_an_instance():
    assert resolved("rule", threshold=0.25) == Rule(threshold=0.25)


def test_a_record_keeps_its_level_and_gets_its_parameters():
    assert resolved("record", window=5) == Record(scaled, "chunk", {"window": 5})


def test_a_parameter_that_a_record_sets_need_not_be_given():
    table = {"set": Record(needy, parameters={"target": 3}), "bare": Record(needy)}
    found = resolve(ComponentConfig(type="set"), table, what="loss", where="trainer.loss")
    assert found == Record(needy, parameters={"target": 3})
    with pytest.raises(ComponentError, match=r"trainer\.loss\.target: missing"):
        resolve(ComponentConfig(type="bare"), table, what="loss", where="trainer.loss")


def test_an_unknown_name_lists_the_names_and_the_nearest():
    assert error_of("scald") == (
        "trainer.loss.type: there is no loss 'scald'; did you mean \"scaled\"? There are "
        "needy, odd, open, record, rule, scaled; or import your own: type = "
        '"my_module.name"'
    )


def test_an_unknown_parameter_lists_the_parameters_and_the_nearest():
    assert error_of("scaled", scal=1) == (
        'trainer.loss.scal: unknown parameter "scal"; did you mean "scale"? '
        "The parameters of loss scaled: scale, window, mode"
    )


def test_the_data_parameter_is_no_parameter():
    assert 'unknown parameter "inputs"' in error_of("scaled", inputs=1)


@pytest.mark.parametrize(
    ("parameter", "value", "expected"),
    [
        ("window", "5", 'found "5", expected a valid integer'),
        ("window", True, "found true, expected a valid integer"),
        ("scale", "x", 'found "x", expected a valid number'),
        ("mode", "max", "found \"max\", expected 'sum' or 'mean'"),
    ],
)
def test_a_parameter_of_the_wrong_type_is_refused(parameter: str, value: Any, expected: str):
    assert (
        error_of("scaled", **{parameter: value})
        == f"trainer.loss.{parameter}: {expected} for this parameter of loss scaled"
    )


def test_a_missing_parameter_is_named():
    assert error_of("needy") == "trainer.loss.target: missing: loss needy needs this parameter"


def test_all_wrong_parameters_are_named_at_once():
    assert error_of("scaled", window="5", bogus=1).count("trainer.loss.") == 2


def test_a_function_of_any_keywords_takes_any():
    assert resolved("open", a=1)(None) == {"a": 1}


@pytest.mark.parametrize("parameter", ["weights", "path"])
def test_a_parameter_whose_type_cannot_be_checked_is_passed_on_as_it_is(parameter: str):
    assert resolved("odd", **{parameter: [1]}).keywords == {parameter: [1]}


def test_a_class_that_refuses_its_parameters_is_named():
    assert error_of("rule", threshold=-1.0) == (
        "trainer.loss: loss Rule refuses {'threshold': -1.0}: threshold = -1.0, expected at least 0"
    )


# -- custom components


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A current directory with modules of a user's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    (tmp_path / "my_losses.py").write_text("def plain(inputs, beta=0.5):\n    return inputs * beta\n")
    (tmp_path / "my_broken.py").write_text("x = 1\ny = x / 0\n")
    (tmp_path / "my_needs.py").write_text("import nowhere_to_be_found\n")
    yield tmp_path
    for name in ("my_losses", "my_broken", "my_needs"):
        sys.modules.pop(name, None)


def custom(import_path: str, **kwargs: Any) -> ComponentConfig:
    return ComponentConfig(type="custom", import_path=import_path, kwargs=kwargs)


@pytest.mark.usefixtures("here")
def test_a_custom_function_comes_from_the_current_directory():
    loss = resolve(custom("my_losses.plain", beta=0.25), {}, what="loss", where="trainer.loss")
    assert isinstance(loss, functools.partial)
    assert loss(8) == 2.0


@pytest.mark.parametrize(
    ("import_path", "expected"),
    [
        ("my_losses.plian", "has no 'plian'; did you mean \"plain\"?"),
        ("nowhere.loss", "there is no module 'nowhere'; looked in the current directory"),
        ("my_losses.inner.loss", "there is no module 'my_losses.inner'"),
        ("my_needs.loss", "importing my_needs failed: ModuleNotFoundError: No module named 'nowhere_to_be_found' ("),
        ("my_broken.loss", "importing my_broken failed: ZeroDivisionError: division by zero"),
        ("loss", "import_path 'loss' names a module only; expected module.name"),
        ("sys.path", "trainer.loss.import_path: sys.path is list, expected a function or a class"),
    ],
)
@pytest.mark.usefixtures("here")
def test_an_import_that_fails_says_why(import_path: str, expected: str):
    with pytest.raises(ComponentError) as caught:
        resolve(custom(import_path), {}, what="loss", where="trainer.loss")
    assert str(caught.value).startswith("trainer.loss.import_path: ")
    assert expected in str(caught.value)


@pytest.mark.usefixtures("here")
def test_a_module_that_raises_is_named_with_the_line():
    with pytest.raises(ComponentError, match=r"my_broken\.py:2\)"):
        import_object("my_broken.loss")


@pytest.mark.usefixtures("here")
def test_custom_parameters_are_named_inside_kwargs():
    with pytest.raises(ComponentError, match=r'^trainer.loss.kwargs.bta: unknown parameter "bta"; did you mean "beta"'):
        resolve(custom("my_losses.plain", bta=1), {}, what="loss", where="trainer.loss")


# -- a whole file


def pack(samples: object, *, micro_batch_tokens: int, keep_whole: bool) -> list[object]:
    return []


def backend(inputs: object, settings: BackendSettings) -> None: ...


TABLES = ComponentTables(
    losses=TABLE,
    advantages=TABLE,
    filters=TABLE,
    strategies=TABLE,
    environments={"game": Rule},
    monitors=TABLE,
    packers={"auto": pack},
    samplers={"torch": backend},
    runners={"local": backend},
    renderers=("auto", "qwen3"),
)

FILE = """\
[model]
name = "x"
[orchestrator]
trajectory_strategy = "scaled"
filters = []
[orchestrator.advantage]
type = "open"
[[orchestrator.train.env]]
id = "game"
[trainer.loss]
type = "scaled"
window = 4
"""


def problems_of(tmp_path: Path, text: str, *overrides: str) -> str:
    file = tmp_path / "run.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(file, overrides, TABLES)
    return str(caught.value).replace(str(file), "FILE")


def test_a_file_whose_components_exist_is_loaded(tmp_path: Path):
    (tmp_path / "run.toml").write_text(FILE)
    assert load_config(tmp_path / "run.toml", tables=TABLES).trainer.loss.parameters == {"window": 4}


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("window = 4", "windw = 4", 'FILE:12: trainer.loss.windw: unknown parameter "windw"; did you mean "window"?'),
        ('id = "game"', 'id = "gme"', "FILE:9: orchestrator.train.env.0.id: there is no environment 'gme'"),
        (
            'id = "game"',
            'id = "game"\nargs = { thresold = 1 }',
            'FILE:10: orchestrator.train.env.0.args.thresold: unknown parameter "thresold"; did you mean "threshold"?',
        ),
        (
            '"scaled"\nfilters',
            '"scald"\nfilters',
            "FILE:4: orchestrator.trajectory_strategy: there is no trajectory strategy 'scald'",
        ),
        (
            "filters = []",
            'filters = [{ type = "rule" }, { type = "rul" }]',
            "FILE:5: orchestrator.filters.1.type: there is no filter 'rul'",
        ),
        (
            'id = "game"',
            'id = "game"\nadvantage = { type = "needy" }',
            "FILE:10: orchestrator.train.env.0.advantage.target: missing",
        ),
    ],
)
def test_a_wrong_component_is_named_with_file_and_line(tmp_path: Path, old: str, new: str, expected: str):
    assert old in FILE
    assert problems_of(tmp_path, FILE.replace(old, new)).startswith(expected)


def test_a_wrong_component_of_an_override_is_named_by_it(tmp_path: Path):
    message = problems_of(tmp_path, FILE, "--trainer.loss.type", "scald")
    assert message.startswith("--trainer.loss.type scald: trainer.loss.type: there is no loss 'scald'")


def test_nothing_is_constructed_by_the_check(tmp_path: Path):
    """-1 is refused by `Rule` itself; the check looks at names and types only."""
    (tmp_path / "run.toml").write_text(FILE.replace('id = "game"', 'id = "game"\nargs = { threshold = -1 }'))
    assert load_config(tmp_path / "run.toml", tables=TABLES).orchestrator.train.env[0].args == {"threshold": -1}


# -- losses, by what their record says of them

LOSSES = {
    "both": Loss(scaled, level="token", reward_weight="scale", teacher_weight="window"),  # type: ignore[arg-type]
    "follow": Loss(scaled, level="token", training_mode="opd"),  # type: ignore[arg-type]
    "copy": Loss(scaled, level="token", training_mode="sft"),  # type: ignore[arg-type]
    "default": Loss(scaled, level="token"),  # type: ignore[arg-type]
}
TEACHER = '[orchestrator.teacher]\nmodel = "t"\nbase_url = "http://127.0.0.1:1/v1"\n'


@pytest.mark.parametrize(
    ("loss", "mode", "teacher", "expected"),
    [
        ('type = "both"', "rl", "", None),
        ('type = "both"\nscale = 0.0\nwindow = 1', "rl", TEACHER, None),
        ('type = "both"\nwindow = 1', "rl", "", "trainer.loss.window: it needs an [orchestrator.teacher] table"),
        (
            'type = "both"\nscale = 0.0\nwindow = 0',
            "rl",
            TEACHER,
            "trainer.loss.scale: found 0, which learns nothing;"
            " expected a number above 0, or a teacher to follow instead: an [orchestrator.teacher] table and "
            "trainer.loss.window = 1.0",
        ),
        ('type = "default"\nscale = 0.0', "rl", "", None),  # its record does not say that this parameter weighs rewards
        ('type = "follow"', "opd", TEACHER, None),
        ("", "opd", TEACHER, None),
        ('type = "follow"', "rl", TEACHER, 'trainer.loss.type: found "follow" and training_mode = "rl"'),
        ('type = "both"', "opd", TEACHER, 'trainer.loss.type: found "both" and training_mode = "opd"'),
        ('type = "copy"', "sft", TEACHER, None),
        ('type = "copy"', "rl", "", 'trainer.loss.type: found "copy", which imitates every rollout'),
        ('type = "both"', "sft", TEACHER, 'trainer.loss.type: found "both", but training_mode = "sft" brings its own'),
        ("", "sft", "", 'training_mode = "sft" needs an [orchestrator.teacher] table with model and base_url'),
        ("", "opd", "", 'training_mode = "opd" needs an [orchestrator.teacher] table with a model'),
    ],
)
def test_what_a_loss_can_be_used_for_is_read_from_its_record(
    tmp_path: Path, loss: str, mode: str, teacher: str, expected: str | None
):
    text = FILE.replace("[orchestrator]\n", f'[orchestrator]\ntraining_mode = "{mode}"\n')
    (tmp_path / "run.toml").write_text(text[: text.index("[trainer.loss]")] + f"{teacher}[trainer.loss]\n{loss}\n")
    tables = replace(TABLES, losses=LOSSES)
    if expected is None:
        load_config(tmp_path / "run.toml", tables=tables)
        return
    with pytest.raises(ConfigError, match=re.escape(expected)):
        load_config(tmp_path / "run.toml", tables=tables)


# -- monitors, whose tables are named by their keys

MONITOR = '[monitor]\nsave_trajectories = false\n[monitor.scaled]\nscale = 2.0\n[monitor.own]\ntype = "custom"\n'


def test_a_table_of_monitor_is_a_component_by_its_key(tmp_path: Path):
    (tmp_path / "run.toml").write_text(FILE + MONITOR + 'import_path = "os.path.join"\n')
    monitor = load_config(tmp_path / "run.toml").monitor
    assert not monitor.save_trajectories
    assert {name: (m.type, m.parameters) for name, m in monitor.components.items()} == {
        "scaled": ("scaled", {"scale": 2.0}),
        "own": ("custom", {}),
    }


def test_monitors_survive_the_dump_and_overrides(tmp_path: Path):
    file = tmp_path / "run.toml"
    file.write_text(FILE)
    config = load_config(file, ["--monitor.scaled.window", "5", "--monitor.open.tags", '["a"]'], TABLES)
    assert config.monitor.components["scaled"].parameters == {"window": 5}
    file.write_text(dump_config(config))
    assert load_config(file, tables=TABLES) == config
    assert load_config(file, ["--monitor.scaled", "null"], TABLES).monitor.components.keys() == {"open"}


@pytest.mark.parametrize(
    ("toml", "expected"),
    [
        ("[monitor.scald]\n", "FILE:13: monitor.scald: there is no monitor 'scald'; did you mean \"scaled\"?"),
        (
            "[monitor.scaled]\nwindw = 4\n",
            'FILE:14: monitor.scaled.windw: unknown parameter "windw"; did you mean "window"?',
        ),
        (
            "[monitor]\nsave_trajectory = true\n",
            'FILE:14: monitor.save_trajectory: unknown key "save_trajectory" in '
            '[monitor]; did you mean "save_trajectories"?',
        ),
        ("[monitor]\nscaled = true\n", "FILE:14: monitor.scaled: found true (a boolean), expected a table"),
        ("monitor = 3\n", "FILE:13: trainer.loss.monitor: unknown parameter"),
    ],
)
def test_a_wrong_monitor_is_named_with_file_and_line(tmp_path: Path, toml: str, expected: str):
    assert problems_of(tmp_path, FILE + toml).startswith(expected)


def test_a_wrong_monitor_of_an_override_is_named_by_it(tmp_path: Path):
    message = problems_of(tmp_path, FILE, "--monitor.scald.window", "4")
    assert message.startswith("FILE (with --monitor.scald.window 4): monitor.scald: there is no monitor 'scald'")


# -- alarms, which are on unless they are switched off

ALARM_TABLES = replace(TABLES, alarms={"rule": Rule, "scaled": scaled})


def alarm_problems(tmp_path: Path, toml: str) -> str:
    file = tmp_path / "run.toml"
    file.write_text(FILE + toml)
    with pytest.raises(ConfigError) as caught:
        load_config(file, (), ALARM_TABLES)
    return str(caught.value).replace(str(file), "FILE")


def test_an_alarm_is_set_switched_off_or_imported_by_its_key(tmp_path: Path):
    file = tmp_path / "run.toml"
    file.write_text(
        FILE + '[monitor.alarms]\nstop = ["scaled"]\nrule = false\n[monitor.alarms.scaled]\nwindow = 9\n'
        '[monitor.alarms.mine]\ntype = "os.path.join"\n'
    )
    config = load_config(file, tables=ALARM_TABLES)
    assert {name: (a.type, a.enabled, a.parameters) for name, a in config.monitor.alarms.components.items()} == {
        "rule": ("rule", False, {}),
        "scaled": ("scaled", True, {"window": 9}),
        "mine": ("os.path.join", True, {}),
    }
    assert config.monitor.alarms.stop == ("scaled",) and config.monitor.components == {}
    file.write_text(dump_config(config))
    assert load_config(file, tables=ALARM_TABLES) == config


@pytest.mark.parametrize(
    ("toml", "expected"),
    [
        (
            "[monitor.alarms]\nrul = false\n",
            "FILE:14: monitor.alarms.rul: there is no alarm 'rul'; did you mean \"rule\"? There are rule, scaled; or "
            'import your own: type = "my_module.name"',
        ),
        (
            "[monitor.alarms.scaled]\nwindw = 4\n",
            'FILE:14: monitor.alarms.scaled.windw: unknown parameter "windw"; did you mean "window"?',
        ),
        ("[monitor.alarms]\nrule = 3\n", "FILE:14: monitor.alarms.rule: found 3 (an integer), expected a table"),
        (
            '[monitor.alarms]\nstop = ["rul"]\n',
            'FILE:14: monitor.alarms.stop.0: "rul" is not an alarm; did you mean "rule"? The alarms are rule, scaled',
        ),
        (
            '[monitor.alarms]\nstop = ["rule"]\nrule = false\n',
            'FILE:14: monitor.alarms.stop.0: "rule" is switched off. The alarms are scaled',
        ),
        (
            '[monitor.alarms]\nstop = ["rule"]\nenabled = false\n',
            'FILE:14: monitor.alarms.stop.0: "rule" is switched off.',
        ),
    ],
)
def test_a_wrong_alarm_is_named_with_file_and_line(tmp_path: Path, toml: str, expected: str):
    assert alarm_problems(tmp_path, toml).startswith(expected)
