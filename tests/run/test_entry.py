"""`verbatim.run` and `verbatim.train` do what the command does, in a script, a notebook and a test."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import verbatim
from e2e.tiny_runs import LOTS, TOML, train_lines, workplace
from stored_runs import light_runs, tiny_model
from verbatim.cli.main import main
from verbatim.config import import_object, load_config, make_config
from verbatim.core.errors import CheckpointError, ComponentError, ConfigError, NothingTrained, UsageError
from verbatim.logs.monitors import Monitor
from verbatim.run.result import MetricColumns
from verbatim.run.tables import component_tables

SETTINGS = {
    "orchestrator": {
        "batch_size": 8,
        "group_size": 4,
        "seq_len": 384,
        "max_async_level": 0,
        "sampling": {"max_tokens": 8},
        "filters": [{"type": "zero_advantage"}],
    },
    "trainer": {"separate_process": False, "optim": {"lr": 1e-2}},
    "inference": {"torch": {"max_batch_size": 8, "deterministic": True}},
}
"""Those of `TOML`, and deterministic: on a busy machine other requests meet in a batch, which changes the last bit."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory)


@pytest.fixture
def place(model: Path, tmp_path: Path) -> Iterator[Path]:
    with workplace(tmp_path / "work", {"lots": LOTS}) as folder, light_runs():
        toml = TOML.format(model=model).replace("max_batch_size = 8\n", "max_batch_size = 8\ndeterministic = true\n")
        (folder / "run.toml").write_text(toml + 'import_path = "lots.Lots"\n')
        yield folder


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def figures(run: Path) -> list[dict[str, float]]:
    """The metrics of each step without those that tell the time."""
    times = re.compile(r"time/|loop/lag|per_second|seconds")
    return [
        {name: value for name, value in line["metrics"].items() if not times.search(name)} for line in train_lines(run)
    ]


HOLDS_ITSELF: dict[str, object] = {}
HOLDS_ITSELF["optim"] = HOLDS_ITSELF


class Heard(Monitor):
    def __init__(self, interrupt_after: int | None = None):
        self.steps, self.closed, self._interrupt_after = [], 0, interrupt_after

    def on_step(self, step, metrics, distributions):
        self.steps.append(step)
        if step == self._interrupt_after:
            os.kill(os.getpid(), signal.SIGINT)

    def close(self):
        self.closed += 1


# ---- the same run


@pytest.mark.slow
def test_a_scripts_run_is_the_commands_run_bit_for_bit_and_leaves_the_interpreter_as_it_was(place, capfd):
    assert main(["rl", "run.toml", "--run-dir", "command"]) == 0
    root, ours = logging.getLogger(), logging.getLogger("verbatim")
    before = (list(root.handlers), root.level, ours.level, signal.getsignal(signal.SIGINT))
    capfd.readouterr()
    heard = Heard()
    result = verbatim.run("run.toml", run_dir="script", monitors=[heard], quiet=True)
    assert (list(root.handlers), root.level, ours.level, signal.getsignal(signal.SIGINT)) == before
    assert capfd.readouterr().out == ""
    assert weights(result.model_path) == weights(place / "command" / "final")
    assert figures(place / "script") == figures(place / "command")
    assert result.folder == place / "script"
    assert result.summary["steps"] == 2
    assert (heard.steps, heard.closed) == ([1, 2], 1)


@pytest.mark.slow
def test_tables_in_python_are_the_file(place, model):
    tables = {
        "model": {"name": model},
        "max_steps": 2,
        **SETTINGS,
        "orchestrator.train.env": [{"import_path": "lots.Lots"}],
    }
    assert load_config("run.toml", [], component_tables()) == make_config(tables, tables=component_tables())
    from_file = verbatim.run("run.toml", quiet=True)
    from_tables = verbatim.run(tables, quiet=True)
    trained = verbatim.train(model=model, environment="lots.Lots", max_steps=2, quiet=True, **SETTINGS)
    assert weights(from_file.model_path) == weights(from_tables.model_path) == weights(trained.model_path)
    assert from_file.folder.parent == place / "runs" / "run"
    assert from_tables.folder.parent == place / "runs" / "lots.Lots"


@pytest.mark.slow
def test_a_python_caller_is_told_what_to_type_in_python(place):
    with pytest.raises(UsageError, match=r"there is no run .* \(in Python resume=FOLDER\)"):
        verbatim.run("run.toml", resume=True, quiet=True)
    verbatim.run("run.toml", run_dir="mine", max_steps=1, quiet=True)
    with pytest.raises(UsageError, match=r"\(in Python resume=True\) .* --run-dir FOLDER \(in Python run_dir=FOLDER\)"):
        verbatim.run("run.toml", run_dir="mine", quiet=True)


@pytest.mark.slow
@pytest.mark.parametrize(("env", "name"), [("../x", "..-x"), ("hard/sums", "hard-sums")])
def test_the_name_of_an_environment_that_names_the_run_leads_to_no_other_folder(place, model, env, name):
    tables = [{"id": "lots.Lots", "name": env}]
    result = verbatim.train(model=model, environment=tables, max_steps=1, quiet=True, **SETTINGS)
    assert result.folder.parent == place / "runs" / name


@pytest.mark.slow
def test_a_run_inside_a_running_event_loop_has_its_own(place):
    async def notebook():
        loop = asyncio.get_running_loop()
        result = verbatim.run("run.toml", quiet=True)
        assert asyncio.get_running_loop() is loop
        return result

    inside = asyncio.run(notebook())
    assert weights(inside.model_path) == weights(verbatim.run("run.toml", quiet=True).model_path)


@pytest.mark.slow
@pytest.mark.realtime
def test_the_trainers_process_imports_what_this_one_can(place, model, monkeypatch, capfd):
    (place / "modules").mkdir()
    (place / "lots.py").rename(place / "modules" / "far_lots.py")
    monkeypatch.syspath_prepend(place / "modules")
    settings = {**SETTINGS, "trainer": {"optim": {"lr": 1e-2}}, "warm_start": {"steps": 1, "data": "shown.jsonl"}}
    (place / "shown.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
    )
    environment = import_object("far_lots.Lots")
    result = verbatim.train(model=model, environment=environment, max_steps=1, quiet=True, **settings)
    assert (result.folder / "logs" / "trainer.log").is_file()
    assert 'import_path = "far_lots.Lots"' in (result.folder / "config.toml").read_text()
    assert capfd.readouterr().out == ""


# ---- results


@pytest.mark.slow
def test_metrics_are_columns(place):
    result = verbatim.run("run.toml", quiet=True, **{"orchestrator.eval": {"interval": 2, "episodes": 5}})
    lines = train_lines(result.folder)
    assert result.metrics["step"].tolist() == [1, 2]
    assert result.metrics["loss"].dtype == np.float64
    assert result.metrics["loss"].tolist() == [line["metrics"]["loss"] for line in lines]
    assert result.evals["lots.Lots"]["step"].tolist() == [0, 2]
    assert result.evals["lots.Lots"]["episodes"].tolist() == [5.0, 5.0]


@pytest.mark.extras  # pandas comes with `data`
def test_a_data_frame_needs_pandas_and_says_so(monkeypatch):
    columns = MetricColumns([(1, {"loss": 0.5}), (2, {"loss": "Infinity", "lr": 0.1})])
    frame = columns.to_pandas()
    assert frame.loc[2, "loss"] == np.inf
    assert (frame.index.name, list(frame.columns)) == ("step", ["loss", "lr"])
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UsageError, match=r"pip install pandas"):
        columns.to_pandas()


@pytest.mark.slow
def test_resume_goes_on_where_the_run_ended(place):
    whole = verbatim.run("run.toml", max_steps=3, quiet=True)
    heard = Heard()
    result = verbatim.run("run.toml", monitors=[heard], quiet=True).resume(max_steps=3)
    assert heard.steps == [1, 2, 3]
    assert weights(result.model_path) == weights(whole.model_path)
    assert result.metrics["loss"].tolist() == whole.metrics["loss"].tolist()


@pytest.mark.slow
def test_a_resume_that_is_refused_leaves_the_runs_configuration_as_it_was(place):
    result = verbatim.run("run.toml", quiet=True)
    stored = (result.folder / "config.toml").read_bytes()
    with pytest.raises(CheckpointError, match="has done 2 steps, and max_steps = 1; expected at least 2"):
        result.resume(max_steps=1)
    assert (result.folder / "config.toml").read_bytes() == stored
    assert result.resume().metrics["step"].tolist() == [1, 2]


UNREACHED = 100_000


@pytest.mark.slow
@pytest.mark.parametrize("inside_a_loop", [False, True])
def test_ctrl_c_ends_after_the_step_and_says_how_to_go_on(place, inside_a_loop):
    """Ctrl-C may be heard some steps later."""

    async def notebook():
        verbatim.run("run.toml", max_steps=UNREACHED, monitors=[Heard(interrupt_after=1)], quiet=True)

    with pytest.raises(KeyboardInterrupt) as caught:
        if inside_a_loop:
            asyncio.run(notebook())
        else:
            verbatim.run("run.toml", max_steps=UNREACHED, monitors=[Heard(interrupt_after=1)], quiet=True)
    typed = re.search(r"verbatim\.run\('(.*)', resume='(.*)'\)", str(caught.value))
    steps = len(train_lines(Path(typed[2]))) + 2
    went_on = verbatim.run(typed[1], resume=typed[2], max_steps=steps, quiet=True)
    assert weights(went_on.model_path) == weights(verbatim.run("run.toml", max_steps=steps, quiet=True).model_path)


@pytest.mark.slow
def test_what_fails_in_the_middle_says_how_to_go_on(place, model):
    (place / "lots.py").write_text(LOTS.replace("return self.reward", "raise ValueError('no')"))
    with pytest.raises(verbatim.core.errors.RunStopped) as caught:
        verbatim.run("run.toml", quiet=True)
    assert caught.value.__context__ is None
    assert re.search(r"to continue:  verbatim\.run\('.*/config\.toml', resume='.*'\)", caught.value.__notes__[0])
    lots = import_object("lots.Lots")()
    with pytest.raises(verbatim.core.errors.RunStopped) as caught:
        verbatim.train(model=model, environment=lots, max_steps=4, quiet=True, **SETTINGS | {"trainer": {}})
    assert caught.value.__notes__[0].endswith("', environments={'Lots': ...})")


@pytest.mark.slow
def test_a_run_that_learned_nothing_is_an_error(place):
    (place / "lots.py").write_text(LOTS.replace("seed % 100 / 100", "0.5"))
    with pytest.raises(NothingTrained):
        verbatim.run("run.toml", quiet=True)


# ---- environments and monitors that are objects


@pytest.mark.slow
def test_an_environment_that_is_an_object_stays_in_this_process(place, model):
    lots_class = import_object("lots.Lots")
    settings = {**SETTINGS, "trainer": {"optim": {"lr": 1e-2}}}
    result = verbatim.train(
        model=model,
        environment=[lots_class(), {"id": lots_class(0.001), "max_turns": 2}],
        max_steps=1,
        quiet=True,
        **settings,
    )
    stored = (result.folder / "config.toml").read_text()
    assert 'id = "Lots"' in stored
    assert 'id = "Lots_2"' in stored
    assert "separate_process = false" in stored
    assert result.resume(max_steps=2).metrics["step"].tolist() == [1, 2]
    assert main(["rl", str(result.folder / "config.toml"), "--resume", str(result.folder)]) == 2


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"orchestrator.rollout.backend": "processes"}, "creates it again in worker processes"),
        ({"trainer.separate_process": True}, "leave that key out"),
        ({"cluster.address": "local"}, "[cluster] starts processes that read the configuration again; leave it out"),
    ],
)
def test_an_object_cannot_go_to_another_process(place, model, settings, expected):
    lots = import_object("lots.Lots")()
    with pytest.raises(ConfigError) as caught:
        verbatim.train(model=model, environment=lots, quiet=True, **settings)
    assert expected in str(caught.value)
    assert 'environment="my_module.Lots"' in str(caught.value)
    assert not (place / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"environment": 3}, r"environment: found 3 \(int\), expected a bundled id"),
        ({"environment": "lots.Lots", "model": 3}, r"model: found 3 \(int\), expected a folder or hub id"),
        ({"environment": "gess_number"}, r'no environment .gess_number.; did you mean "guess_number"'),
        ({"environment": "lots.Lots", "orchestrator": {"train": {}}}, "give one of them"),
        ({"environment": "lots.Lots", "callbacks": []}, r"monitors=\[my_monitor\]"),
        ({"environment": "lots.Lots", "trainer": {"loss": {"type": print}}}, r'trainer.loss.type: found .*"type": "my'),
        ({"environment": "lots.Lots", "resume": 3}, r"resume: found 3 \(int\), expected True .* or a run folder"),
        ({"environment": "lots.Lots", "name": "a\udc80"}, "name: found .*UTF-8"),
        ({"environment": "lots.Lots", "trainer": HOLDS_ITSELF}, "contains itself"),
        ({"environment": "lots.Lots", "batch_size": 8}, r'batch_size: unknown key "batch_size".*\[orchestrator\]'),
    ],
)
def test_what_train_cannot_use_is_refused_with_what_to_type(place, model, arguments, expected):
    with pytest.raises(ConfigError, match=expected):
        verbatim.train(**{"model": model, "quiet": True, **arguments})


@pytest.mark.parametrize("monitor", [print, Heard, object()])
def test_what_is_no_monitor_is_refused(place, monitor):
    with pytest.raises(ComponentError, match=r"monitors\[0\] is .*; expected .*some of .*on_start, on_step"):
        verbatim.run("run.toml", monitors=[monitor])


class Unawaited(Monitor):
    async def on_step(self, step, metrics, distributions):
        raise AssertionError("never awaited")


@pytest.mark.parametrize(
    ("monitors", "expected"),
    [
        (None, "monitors: found None .* expected a list"),
        (Heard(), r"expected a list: monitors=\[my_monitor\]"),
        ([Unawaited()], r"monitors\[0\] is .*, which has an async method; expected plain functions"),
    ],
)
def test_monitors_that_would_hear_nothing_are_refused(place, monitors, expected):
    with pytest.raises(ComponentError, match=expected):
        verbatim.run("run.toml", monitors=monitors)
    assert not (place / "runs").exists()


@pytest.mark.parametrize(
    ("environments", "expected"),
    [
        ([print], r"environments: found .* \{\"words\": Words\(\)\}"),
        ({3: print}, r"environments: found \{3: "),
        ({"lotz": print}, r"no \[\[orchestrator.train.env\]\] .* has id = 'lotz'"),
    ],
)
def test_environments_that_would_not_be_played_are_refused(place, environments, expected):
    with pytest.raises(ConfigError, match=expected):
        verbatim.run("run.toml", environments=environments)
    assert not (place / "runs").exists()


def test_arguments_for_an_instance_are_refused_by_its_name(place, model):
    lots = import_object("lots.Lots")()
    with pytest.raises(
        ConfigError, match=r'unknown parameter "delay". The parameters of environment Lots, an instance: it has'
    ):
        verbatim.train(model=model, environment={"id": lots, "args": {"delay": 0.1}}, **SETTINGS)


@pytest.mark.slow
def test_a_second_run_at_the_same_time_is_refused_and_the_first_goes_on(place):
    class Starts(Monitor):
        refusals = 0

        def on_step(self, step, metrics, distributions):
            def second():
                try:
                    verbatim.run("run.toml", quiet=True)
                except UsageError as error:
                    assert "another run is active in this process" in str(error)
                    self.refusals += 1

            thread = threading.Thread(target=second)
            thread.start()
            thread.join()

    starts = Starts()
    assert verbatim.run("run.toml", monitors=[starts], quiet=True).metrics["step"].tolist() == [1, 2]
    assert starts.refusals == 2
    assert verbatim.run("run.toml", max_steps=1, quiet=True).summary["steps"] == 1
    assert len([*(place / "runs" / "run").glob("2*")]) == 2


# ---- the same mistakes


MISTAKES = [
    ("[orchestrator]\nbatchsize = 8", {"orchestrator": {"batchsize": 8}}),
    ('max_steps = "many"', {"max_steps": "many"}),
    ("seed = 1.5", {"seed": np.float64(1.5)}),
    ("[trainer]\noptim = 3", {"trainer": {"optim": 3}}),
    ("[trainer.optim]\nlr = -1.0", {"trainer.optim.lr": -1.0}),
    ("[trainer.loss]\ntype = 'defualt'", {"trainer": {"loss": {"type": "defualt"}}}),
    ("[trainer.loss]\ntau = 1.0", {"trainer": {"loss": {"tau": 1.0}}}),
    ("[orchestrator]\nbatch_size = 7", {"orchestrator": {"batch_size": 7}}),
    ("[orchestrator.train]\nenv = []", {"orchestrator.train.env": ()}),
]


@pytest.mark.parametrize(("text", "settings"), MISTAKES)
def test_a_mistake_in_python_has_the_message_of_the_file(tmp_path, text, settings):
    base = {"model": {"name": "m"}, "orchestrator": {"train": {"env": [{"id": "guess_number"}]}}}
    if "orchestrator" in text:
        base.pop("orchestrator")
        settings = {"orchestrator.train.env": [{"id": "guess_number"}], **settings}
    env = "" if "train]" in text else '[[orchestrator.train.env]]\nid = "guess_number"\n'
    top, table = (text + "\n", "") if not text.startswith("[") else ("", text + "\n")
    (tmp_path / "run.toml").write_text(f'{top}[model]\nname = "m"\n{table}{env}')
    with pytest.raises(ConfigError) as of_file:
        load_config(tmp_path / "run.toml", [], component_tables())
    with pytest.raises(ConfigError) as of_python:
        verbatim.run({**base, **settings})
    without_place = re.sub(rf"{re.escape(str(tmp_path))}/run\.toml(:\d+)?: ", "", str(of_file.value))
    assert str(of_python.value) == f"verbatim.run(): {without_place}"


def test_a_missing_table_has_the_message_of_the_file(tmp_path):
    (tmp_path / "run.toml").write_text("max_steps = 1\n")
    with pytest.raises(ConfigError) as of_file:
        load_config(tmp_path / "run.toml", [], component_tables())
    with pytest.raises(ConfigError) as of_python:
        verbatim.run({"max_steps": 1})
    assert str(of_python.value) == str(of_file.value).replace(str(tmp_path / "run.toml"), "verbatim.run()")


def test_a_setting_over_a_file_is_named_where_it_is_wrong(place):
    with pytest.raises(ConfigError) as caught:
        verbatim.run("run.toml", trainer={"optim": {"lr": "fast"}})
    assert str(caught.value) == (
        'verbatim.run(trainer.optim.lr="fast"): trainer.optim.lr: found "fast" (a string), expected a valid number'
    )


SCRIPT = textwrap.dedent("""
    import verbatim
    assert callable(verbatim.run) and callable(verbatim.train)
    from verbatim.run.result import RunResult
    assert verbatim.RunResult is RunResult
    from verbatim import run, train
    assert run is verbatim.run and callable(run)
""")


def test_the_package_run_is_the_function_run():
    exec(SCRIPT, {})


# ---- the documentation


@pytest.mark.slow
def test_the_documented_examples_run_as_they_stand(place, model, capfd):
    page = (Path(__file__).parents[2] / "docs" / "python.md").read_text()
    text = "\n".join(re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL))
    sizes = '"batch_size": 8, "group_size": 4, "filters": [], "seq_len": 384'
    flat = "".join(f'"orchestrator.{pair}, ' for pair in sizes.replace('"', "").replace(": ", '": ').split(", "))
    for what, by in (
        ("Qwen/Qwen3-0.6B", str(model)),
        ("max_steps=20", "max_steps=2"),
        ("max_steps=40", "max_steps=3"),
        ("max_steps=5,", f"max_steps=1, orchestrator={{{sizes}}},"),
        ('"batch_size": 64, "group_size": 8', sizes),
        ('"trainer.optim.lr": 1e-5,', f'{flat}"orchestrator.sampling.max_tokens": 8,'),
    ):
        assert what in text
        text = text.replace(what, by)
    text = text.replace('"max_tokens": 32', '"max_tokens": 8')
    names = {"__name__": "__main__"}
    exec(compile(text, "docs/python.md", "exec"), names)
    assert re.search(r"from 0\.\d\d to 0\.\d\d, in ", capfd.readouterr().out)
    assert names["result"].metrics["step"].tolist() == [1, 2, 3]
    assert names["best"].best >= 0
