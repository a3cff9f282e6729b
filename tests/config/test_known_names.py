"""Names that other frameworks have are answered with what they are called here, and every answer can be typed."""

from __future__ import annotations

import inspect
import re

import pytest

from verbatim.config import load_config, resolve
from verbatim.config.backends import schema_with_backends
from verbatim.config.fields import keys
from verbatim.config.known_keys import FOREIGN
from verbatim.config.known_names import _ANSWERS, known_elsewhere
from verbatim.config.schema import ComponentConfig
from verbatim.core.errors import ComponentError, ConfigError
from verbatim.core.imports import import_object
from verbatim.run.tables import component_tables


def refusal(what: str, name: str) -> str:
    tables = component_tables()
    table, where = (tables.losses, "trainer.loss") if what == "loss" else (tables.advantages, "orchestrator.advantage")
    with pytest.raises(ComponentError) as error:
        resolve(ComponentConfig(type=name), table, what=what, where=where)
    return str(error.value)


@pytest.mark.parametrize(
    ("name", "loss", "advantage"),
    [
        ("grpo", "ppo", "normalized"),
        ("GRPO", "ppo", "normalized"),
        ("grpo_loss", "ppo", "normalized"),
        ("dapo", "ppo", "normalized"),
        ("dr_grpo", "ppo", "default"),
        ("Dr-GRPO", "ppo", "default"),
        ("drgrpo", "ppo", "default"),
        ("reinforce", "tis", "rloo"),
        ("reinforce++", "tis", "default"),
        ("ipa_chunk", "ipa", "chunk_returns"),
        ("step_reinforce", "ipa", "chunk_returns"),
    ],
)
@pytest.mark.parametrize("what", ["loss", "advantage"])
def test_a_name_of_another_framework_is_answered_with_loss_and_advantage(what, name, loss, advantage):
    said = refusal(what, name)
    assert f"there is no {what} {name!r}: here it is " in said
    answer = said.partition("here it is ")[2].partition(". There are ")[0]
    assert re.search(rf'"{loss}".* under \[trainer.loss\]', answer)
    assert re.search(rf'"{advantage}".* under \[orchestrator.advantage\]', answer)
    assert "gspo" not in answer


def test_a_misspelt_name_still_gets_the_nearest_one():
    assert 'did you mean "cispo"?' in refusal("loss", "cispoo")
    assert "here it is" not in refusal("loss", "cispoo")


def test_nothing_is_said_of_other_components():
    assert known_elsewhere("filter", "grpo") is None


def test_every_answer_names_what_there_is():
    tables = component_tables()
    for answer in set(_ANSWERS.values()):
        for name in re.findall(r'"(\w+)"', answer.replace('training_mode = "opd"', "")):
            assert name in tables.losses or name in tables.advantages, answer


def ours() -> set[str]:
    """Every key and every table of ours, and the parameters of all losses and advantages."""
    tables = component_tables()
    schema, _ = schema_with_backends({"inference": {"backend": "vllm"}}, tables)
    found = {key for key, _ in keys(schema)}
    for key in [*found]:
        parts = key.split(".")
        found |= {".".join(parts[:n]) for n in range(1, len(parts))}
    found |= {key.replace(".0", "") for key in found}
    for table, where in ((tables.losses, "trainer.loss"), (tables.advantages, "orchestrator.advantage")):
        for entry in table.values():
            component = import_object(entry) if isinstance(entry, str) else entry
            function = getattr(component, "function", component)
            found |= {f"{where}.{name}" for name in inspect.signature(function).parameters}
    return found


def test_every_key_of_an_answer_is_one_of_ours_and_each_row_has_a_key_or_a_reason():
    there = ours()
    for row in FOREIGN:
        assert row.keys or row.why
        assert {*row.keys.split()} <= there, row
        for name in re.findall(r"\b[a-z]+\.[a-z_.]+[a-z]\b", row.why):
            assert name in there or name.startswith(("my_module.", "monitor.")), row


def test_a_name_of_theirs_is_answered_once_and_is_not_one_of_ours():
    names = [name for row in FOREIGN for name in row.names.split()]
    assert len(names) == len(set(names)) > 150
    assert not {*names} & {key.rpartition(".")[2] for key in ours()}


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("--trainer.loss.beta", "trainer.loss.kl_ref_tau"),
        ("--trainer.loss.epsilon", "trainer.loss.eps_low"),
        ("--trainer.gradient-accumulation-steps", "trainer.micro_batch_tokens"),
        ("--mask-truncated-completions", "orchestrator.filters"),
        ("--orchestrator.num-generations", "orchestrator.group_size"),
        ("--orchestrator.rollouts-per-example", "orchestrator.group_size"),
        ("--trainer.optim.learning-rate", "trainer.optim.lr"),
        ("--orchestrator.rollout-batch-size", "orchestrator.batch_size"),
        ("--trainer.lora.rank", "trainer.lora.r"),
        ("--actor-rollout-ref.rollout.n", "model.name and trainer.optim.lr and inference.backend"),
        ("--ckpt.interval", "checkpoint.interval"),
        ("--trainer.nnodes", "trainer.parallel.processes and cluster.backend (the number of ranks; [cluster] places"),
        ("--trainer.n-gpus-per-node", "trainer.parallel.processes and cluster.backend"),
        ("--actor-num-nodes", "trainer.parallel.processes and cluster.backend"),
        ("--rollout-num-gpus", "cluster.replicas and inference.vllm.replicas"),
        ("--ray-kwargs.ray-init.num-cpus", "cluster.address"),
    ],
)
def test_a_key_of_another_framework_is_answered_with_ours(tmp_path, typed, said):
    file = tmp_path / "run.toml"
    file.write_text('[model]\nname = "m"\n[[orchestrator.train.env]]\nid = "guess_number"\n')
    with pytest.raises(ConfigError) as error:
        load_config(file, [typed, "1"], component_tables())
    assert f"; here it is {said}" in str(error.value)
    assert "did you mean" not in str(error.value)


@pytest.mark.parametrize(
    ("key", "now"), [("cpus_per_worker", "worker.cpus"), ("address", "address"), ("host", "host"), ("port", "port")]
)
def test_a_key_of_rollouts_on_ray_is_answered_with_the_one_of_the_cluster(tmp_path, key, now):
    file = tmp_path / "run.toml"
    file.write_text(f"""\
[model]
name = "m"
[[orchestrator.train.env]]
id = "guess_number"
[orchestrator.rollout]
backend = "ray"
[orchestrator.rollout.ray]
{key} = 1
""")
    said = f"orchestrator.rollout.ray.{key} is now cluster.{now}; with cluster.roles = [], only rollout workers"
    with pytest.raises(ConfigError) as error:
        load_config(file, [], component_tables())
    assert str(error.value).startswith(f"{file}:8: {said}")
    file.write_text(file.read_text().partition("[orchestrator.rollout.ray]")[0])
    with pytest.raises(ConfigError) as error:
        load_config(file, [f"--orchestrator.rollout.ray.{key}", "1"], component_tables())
    assert said in str(error.value)


def test_a_table_without_keys_says_so(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('[model]\nname = "m"\n[[orchestrator.train.env]]\nid = "guess_number"\n')
    with pytest.raises(ConfigError, match=r"\[orchestrator.rollout.ray\] has no keys$"):
        load_config(file, ["--orchestrator.rollout.ray.memory", "1"], component_tables())


def test_a_key_that_there_is_none_of_is_answered_with_the_reason(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(
        '[model]\nname = "m"\n[trainer]\nentropy_coeff = 0.1\n[[orchestrator.train.env]]\nid = "guess_number"\n'
        "args = { beta = 1 }\n"
    )
    with pytest.raises(ConfigError) as error:
        load_config(file, [], component_tables())
    assert "kl_ref_tau" not in str(error.value)  # an environment's arguments are its own
    file.write_text(file.read_text().replace("args = { beta = 1 }\n", ""))
    with pytest.raises(ConfigError, match=r"trainer\.entropy_coeff: .*; there is none here: no loss has an entropy"):
        load_config(file, [], component_tables())
