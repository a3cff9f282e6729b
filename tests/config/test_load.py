"""A file and overrides become one valid configuration, or an error that says what to type."""

from __future__ import annotations

import json
import typing
from pathlib import Path

import pytest
from pydantic import BaseModel

from verbatim.config import RunConfig, dump_config, load_config
from verbatim.core.errors import ConfigError
from verbatim.run.tables import component_tables

MINIMAL = """\
[model]
name = "some/model"
[orchestrator]
batch_size = 32
group_size = 8
[[orchestrator.train.env]]
id = "guess_number"
args = { low = 1, delta = inf }
max_turns = 4
[trainer.loss]
delta = inf
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(MINIMAL)
    return path


def error_of(file: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(file, overrides)
    return str(caught.value)


def edited(file: Path, old: str, new: str) -> Path:
    assert old in MINIMAL
    file.write_text(MINIMAL.replace(old, new))
    return file


def test_the_file_overrides_the_defaults_and_the_command_line_the_file(file: Path):
    config = load_config(file, ["--orchestrator.batch-size", "64", "--orchestrator.train.env.0.max-turns=5"])
    assert config.orchestrator.seq_len == 2048
    assert config.orchestrator.group_size == 8
    assert config.orchestrator.batch_size == 64
    assert config.orchestrator.train.env[0].max_turns == 5
    assert config.orchestrator.train.env[0].args["low"] == 1


def test_a_bare_option_switches_a_boolean_on(file: Path):
    assert load_config(file, ["--trainer.gradient-checkpointing"]).trainer.gradient_checkpointing is True


def test_a_bare_option_of_another_type_needs_a_value(file: Path):
    assert (
        error_of(file, "--max-steps")
        == "--max-steps: needs a value: Number of steps; each trains on one batch and publishes the new weights."
    )


def test_null_brings_the_default_back(file: Path):
    assert load_config(file, ["--orchestrator.batch-size", "null"]).orchestrator.batch_size == 128


def test_null_for_an_absent_table_does_not_switch_it_on(file: Path):
    assert load_config(file, ["--warm-start.data", "null"]).warm_start is None


def test_a_text_that_reads_as_a_number_is_a_text_where_the_schema_wants_one(file: Path):
    config = load_config(file, ["--name", "2024", "--run-dir=7"])
    assert config.name == "2024"
    assert config.run_dir == Path("7")


@pytest.mark.parametrize("name", ["../x", "a/b", "/tmp/x", "", ".", "..", "a\0b", "a\nb"])
def test_a_name_that_is_not_one_plain_folder_name_is_refused(file: Path, name: str):
    file.write_text(f"name = {json.dumps(name)}\n{MINIMAL}")
    assert error_of(file).startswith(f"{file}:1: name: found {name!r}, expected the name of one folder, such as")
    with pytest.raises(ConfigError, match="name is missing, and the default is not a folder name: found"):
        load_config(edited(file, "[model]", "[model]")).named(name)


def test_a_run_is_named_by_its_file_where_it_has_no_name(file: Path):
    config = load_config(file)
    assert (config.named("run").name, config.named("run").named("other").name) == ("run", "run")
    assert load_config(file, ["--name", "first try, v1.2"]).named("run").name == "first try, v1.2"


def test_a_misspelt_key_names_line_table_and_nearest_key(file: Path):
    message = error_of(edited(file, "batch_size", "bach_size"))
    assert message.startswith(
        f'{file}:4: orchestrator.bach_size: unknown key "bach_size" in [orchestrator]; did you '
        'mean "batch_size"? The keys of [orchestrator] are train, eval, batch_size'
    )


def test_a_misspelt_override_names_itself(file: Path):
    message = error_of(file, "--orchestrator.bach-size", "64")
    assert message.startswith('--orchestrator.bach-size 64: orchestrator.bach_size: unknown key "bach_size"')
    assert 'did you mean "batch_size"?' in message


def test_a_misspelt_key_is_refused_even_when_it_is_unset(file: Path):
    assert 'unknown key "bach_size"' in error_of(file, "--orchestrator.bach-size", "null")


def test_a_key_of_another_table_says_where_it_belongs(file: Path):
    assert "it belongs to [orchestrator.sampling]" in error_of(file, "--orchestrator.temperature", "1")


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (
            "batch_size = 32",
            'batch_size = "32"',
            ':4: orchestrator.batch_size: found "32" (a string), expected a valid integer',
        ),
        (
            "batch_size = 32",
            "batch_size = true",
            ":4: orchestrator.batch_size: found true (a boolean), expected a valid integer",
        ),
        (
            "batch_size = 32",
            "batch_size = 0",
            ":4: orchestrator.batch_size: found 0 (an integer), expected greater than or equal to 1",
        ),
        (
            "max_turns = 4",
            "max_turns = 1.5",
            ":9: orchestrator.train.env.0.max_turns: found 1.5 (a number), expected a valid integer",
        ),
        ("[[orchestrator.train.env]]", "[orchestrator.train.env]", ":6: orchestrator.train.env: found"),
        ("[model]", "[modle]", 'unknown key "modle" in the top level; did you mean "model"?'),
    ],
)
def test_a_wrong_type_names_line_key_found_and_expected(file: Path, old: str, new: str, expected: str):
    assert expected in error_of(edited(file, old, new))


def test_a_plain_table_where_a_list_belongs_is_told_its_notation(file: Path):
    message = error_of(edited(file, "[[orchestrator.train.env]]", "[orchestrator.train.env]"))
    assert message.endswith("(a table), expected a list, or [[orchestrator.train.env]] tables")


def test_a_wrong_choice_lists_the_choices_and_the_nearest(file: Path):
    message = error_of(file, "--trainer.optim.schedule", "cosin")
    assert message == (
        "--trainer.optim.schedule cosin: trainer.optim.schedule: found \"cosin\" (a string), expected 'constant', "
        "'linear' or 'cosine'; did you mean \"cosine\"?"
    )


@pytest.mark.parametrize(
    ("option", "value"),
    [("lr", "inf"), ("lr", "nan"), ("eps", "inf"), ("weight_decay", "inf"), ("beta1", "1.0"), ("beta2", "1")],
)
def test_an_optimizer_setting_that_adamw_cannot_step_with_is_refused(file: Path, option: str, value: str):
    assert f"trainer.optim.{option}: found" in error_of(file, f"--trainer.optim.{option}", value)


@pytest.mark.parametrize("key", ["seed", "orchestrator.eval.seed"])
def test_a_negative_seed_is_refused(file: Path, key: str):
    with pytest.raises(ConfigError, match=f"{key}: found -1 .*, expected greater than or equal to 0"):
        load_config(file, ["--" + key, "-1"])


@pytest.mark.parametrize("temperature", ["1e-9", "-1", "1e39", "inf", "nan"])
def test_a_temperature_that_no_engine_takes_is_refused(file: Path, temperature: str):
    message = error_of(file, "--orchestrator.sampling.temperature", temperature)
    assert f"found {float(temperature)}, expected 0, or a number from 1e-06 to 1000000" in message


@pytest.mark.parametrize(
    ("option", "found", "message"),
    [
        (
            "orchestrator.rollout.backend",
            "rya",
            "there is no rollout backend 'rya'; did you mean \"ray\"? There are local, processes, ray",
        ),
        ("orchestrator.rollout.workers", "0", "found 0 (an integer), expected greater than or equal to 1"),
        ("cluster.worker.cpus", "-1", "found -1 (an integer), expected greater than or equal to 0"),
        ("cluster.port", "70000", "found 70000 (an integer), expected less than or equal to 65535"),
    ],
)
def test_where_episodes_are_played_is_checked_before_anything_starts(file: Path, option: str, found: str, message: str):
    with pytest.raises(ConfigError) as caught:
        load_config(file, (f"--{option}", found), component_tables())
    assert message in str(caught.value)


EXAMPLE = ' For example: [[orchestrator.train.env]] and below it id = "guess_number"'


def test_a_missing_table_is_described(file: Path):
    file.write_text('[model]\nname = "x"\n')
    assert error_of(file) == f"{file}: orchestrator is missing: rollouts and batches.{EXAMPLE}"


def test_a_missing_model_says_what_to_type(file: Path):
    file.write_text('[[orchestrator.train.env]]\nid = "guess_number"\n')
    expected = 'model is missing: the model. For example: [model] and below it name = "Qwen/Qwen3-0.6B"'
    assert error_of(file) == f"{file}: {expected}"


@pytest.mark.parametrize(
    ("line", "key", "name", "expected"),
    [
        ("[trainer]\nloss = 'ppo'", "trainer.loss", "ppo", '[trainer.loss] and below it type = "ppo"'),
        ("[orchestrator]\nadvantage = 'rloo'", "orchestrator.advantage", "rloo",
         '[orchestrator.advantage] and below it type = "rloo"'),
        ("[orchestrator]\nfilters = ['truncated']", "orchestrator.filters.0", "truncated", '{ type = "truncated" }'),
        ("[orchestrator]\nrollout = 'ray'", "orchestrator.rollout", "ray",
         '[orchestrator.rollout] and below it backend = "ray"'),
        ("[orchestrator.eval]\nenv = ['delegate']", "orchestrator.eval.env.0", "delegate", '{ id = "delegate" }'),
        ("\nmodel = 'mine'", "model", "mine", '[model] and below it name = "mine"'),
    ],
)  # fmt: skip
def test_a_name_in_place_of_its_table_says_what_to_type(line: str, key: str, name: str, expected: str, file: Path):
    rest = "" if key == "model" else '[model]\nname = "mine"\n'
    file.write_text(f'{line}\n{rest}[[orchestrator.train.env]]\nid = "guess_number"\n')
    assert error_of(file) == f'{file}:2: {key}: found "{name}" (a string), expected a table: {expected}'


def test_a_name_in_place_of_its_table_as_an_option_says_what_to_type(file: Path):
    file.write_text('[model]\nname = "mine"\n[[orchestrator.train.env]]\nid = "guess_number"\n')
    said = error_of(file, "--trainer.loss", "ppo")
    assert said.endswith('expected a table: [trainer.loss] and below it type = "ppo"')


def test_a_missing_key_has_the_line_of_its_table(file: Path):
    file.write_text('[model]\nname = "x"\n[orchestrator]\nbatch_size = 16\n')
    assert error_of(file) == f"{file}:3: orchestrator.train is missing: the training environments.{EXAMPLE}"


def test_an_impossible_combination_names_the_overrides_that_may_have_made_it(file: Path):
    message = error_of(file, "--orchestrator.batch-size", "30")
    assert message == (
        f"{file}:3 (with --orchestrator.batch-size 30): orchestrator: batch_size = 30 is not a "
        "multiple of group_size = 8; for example batch_size = 24"
    )


def test_greedy_sampling_is_refused_for_training(file: Path):
    assert "orchestrator.sampling.temperature = 0: greedy" in error_of(file, "--orchestrator.sampling.temperature", "0")


def test_all_mistakes_are_listed_at_once(file: Path):
    message = error_of(edited(file, "max_turns = 4", "max_turn = 4"), "--trainer.dtype", "x", "--seed", "zero")
    assert message.startswith(f"3 errors in {file}:\n")
    for part in (f"{file}:9: ", "--trainer.dtype x: ", '--seed zero: seed: found "zero"'):
        assert part in message
    assert "at least one element" not in message


def test_broken_toml_names_line_and_column(file: Path):
    file.write_text("seed = 1\nname = hello\n")
    assert error_of(file).startswith(f"{file}:2:8: not valid TOML: Invalid value; a string needs quotes")


def test_toml_that_ends_too_early_names_the_last_line(file: Path):
    file.write_text("seed = 1\nlist = [1,")
    assert error_of(file).startswith(f"{file}:2:")


def test_a_missing_file_names_the_nearest_one(file: Path):
    wrong = file.parent / "rnu.toml"
    with pytest.raises(ConfigError) as caught:
        load_config(wrong)
    assert str(caught.value) == f"there is no file {wrong}; did you mean {file}?"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            'import_path = ""',
            "train.env.0.import_path: import_path is empty; expected module.name, for example my_module",
        ),
        (
            'id = "guess_number"\n[trainer.loss]\ntype = "custom"\nimport_path = ""',
            'type = "custom" needs import_path = ',
        ),
    ],
)
def test_an_empty_import_path_is_refused(file: Path, lines: str, message: str):
    file.write_text(f'[model]\nname = "x"\n[[orchestrator.train.env]]\n{lines}\n')
    with pytest.raises(ConfigError) as caught:
        load_config(file, tables=component_tables())
    assert message in str(caught.value)


def test_a_missing_file_with_nearly_the_name_of_a_recipe_names_that(file: Path, monkeypatch):
    monkeypatch.chdir(file.parent)
    with pytest.raises(ConfigError, match=r"there is no file guess; did you mean the recipe guess_number\?"):
        load_config("guess")


def test_a_folder_is_no_file(file: Path):
    with pytest.raises(ConfigError, match="is a folder, expected a TOML file; did you mean"):
        load_config(file.parent)


def test_binary_files_are_refused(file: Path):
    file.write_bytes(b"\xff\xfe\x00")
    assert "is not UTF-8 text" in error_of(file)


def test_the_printed_configuration_reads_back_equal(file: Path, tmp_path: Path):
    config = load_config(file, ["--run-dir", "some/where", "--orchestrator.advantage.gamma", "0.5"])
    printed = tmp_path / "printed.toml"
    printed.write_text(dump_config(config))
    assert load_config(printed) == config
    assert load_config(printed).trainer.loss.parameters == {"delta": float("inf")}


def test_every_optional_key_has_no_value_by_default():
    """TOML has no null: a key that is absent from the printed configuration must mean None."""

    def sections(model: type[BaseModel]) -> list[type[BaseModel]]:
        inner = [a for f in model.model_fields.values() for a in (f.annotation, *typing.get_args(f.annotation))]
        records = [a for a in inner if isinstance(a, type) and issubclass(a, BaseModel)]
        return [model, *(s for record in records for s in sections(record))]

    found = {
        f"{section.__name__}.{name}": field.get_default(
            call_default_factory=True, validated_data={"formulate_mode": None}
        )
        for section in sections(RunConfig)
        for name, field in section.model_fields.items()
        if type(None) in typing.get_args(field.annotation)
    }
    assert len(found) > 5
    assert set(found.values()) == {None}


BOTH = """
[model]
name = "m"
[orchestrator]
sampling = {{ {run} }}
[[orchestrator.train.env]]
id = "guess_number"
[[orchestrator.train.env]]
id = "calculator"
sampling = {{ {other} }}
[orchestrator.eval]
[[orchestrator.eval.env]]
id = "guess_number"
sampling = {{ {evaluated} }}
[inference]
backend = "vllm"
"""


@pytest.mark.parametrize(
    ("run", "other", "evaluated", "where"),
    [
        ("top_k = 9", "top_k = 512, top_p = 0.9", "temperature = 0.0", None),
        ("top_p = 0.9", "top_k = 9", "top_k = 9", "orchestrator.sampling"),
        ("top_k = 9", "min_p = 0.1", "top_k = 9", "orchestrator.train.env.1.sampling"),
        ("top_k = 9", "temperature = 0.7", "top_k = 9", "orchestrator.train.env.1.sampling"),
        ("top_k = 9", "top_k = 9", "temperature = 0.7", "orchestrator.eval.env.0.sampling"),
        ("temperature = 0.7", "temperature = 1.0", "top_p = 0.9", None),
        ("top_p = 0.9, accept_truncation_mismatch = true", "temperature = 0.7", "top_p = 0.9", None),
    ],
)
def test_where_vllm_returns_kept_sets_every_sampling_has_a_top_k(
    tmp_path: Path, run: str, other: str, evaluated: str, where: str | None
):
    """It takes no other request; greedy ones are sent with 1, and what is only evaluated needs no sets."""
    file = tmp_path / "run.toml"
    file.write_text(BOTH.format(run=run, other=other, evaluated=evaluated))
    if where is None:
        load_config(file)
    else:
        assert f"{where}.top_k = 0, and this run trains on a cut distribution" in error_of(file)
        assert "set top_k = 512" in error_of(file)
        load_config(file, ["--inference.backend", "torch"])
