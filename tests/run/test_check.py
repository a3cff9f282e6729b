"""What can never start is refused alike by `verbatim config` and by `verbatim rl`, which then leaves nothing behind."""

from __future__ import annotations

import json
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import MambaConfig, MambaForCausalLM

from e2e.tiny_runs import LOTS, TOML, build_tiny_model, snapshot, train_lines, workplace
from inference.vllm.double_server import fake_python
from verbatim.cli.main import main
from verbatim.core.errors import UsageError
from verbatim.models.loading import load_tokenizer, save_model
from verbatim.run.environments import read_conversations

PLUG_INS = """
import math
from dataclasses import dataclass

from verbatim.algorithms.losses import Loss, LossOutputs

THRESHOLD = 3


def own_loss(inputs, scale=1.0): ...
def four_tensors(trainer_logprobs, inference_logprobs, advantages, loss_mask, clip=0.2): ...
def no_inputs(*, scale=1.0): ...
async def slow_loss(inputs): ...
RECORD = Loss(four_tensors, level="token")


class NotCallable:
    def loss(self, inputs): ...


@dataclass(frozen=True, kw_only=True)
class Long:
    limit: int = 8
    action: str = "drop"

    def __call__(self, trajectory):
        return len(trajectory.turns) > self.limit


@dataclass(frozen=True, kw_only=True)
class Short(Long):
    def __call__(self, trajectory):
        return True


def without_action(trajectory): ...
"""

ENVIRONMENTS = """
from lots import Lots


class Raises(Lots):
    def __init__(self):
        raise OSError("no such data set")


class Empty(Lots):
    def examples(self, split):
        return []


class Loud(Lots):
    def __init__(self):
        super().__init__()
        print("loading the data")


class Shy(Lots):
    def demonstrations(self, count, seed):
        return []
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("check") / "model")


@pytest.fixture
def place(tmp_path: Path, model: Path) -> Iterator[Path]:
    """A folder with `run.toml`, which trains on lots.Lots; the current directory."""
    with workplace(tmp_path, {"lots": LOTS, "plug_ins": PLUG_INS, "tasks": ENVIRONMENTS}):
        (tmp_path / "run.toml").write_text(TOML.format(model=model) + 'import_path = "lots.Lots"\n')
        (tmp_path / "bad.jsonl").write_text('{"messages": [{"role": "user", "content": "hi"}]}\n')
        yield tmp_path


ENV = "--orchestrator.train.env.0.import-path"
WARM = "--warm-start"


def custom(name: str, more: str = "") -> str:
    return f'{{ type = "custom", import_path = "plug_ins.{name}"{more} }}'


REFUSED = {
    "renderer": (["--orchestrator.renderer.name", "qwem3"],
                 ["orchestrator.renderer.name", "there is no renderer 'qwem3'; did you mean \"qwen3\"?"]),
    "renderer of another model": (["--orchestrator.renderer.name", "kimi-k2"],
                                  ['the tokenizer does not fit renderer "kimi-k2"']),
    "renderer of another model than the one to build": (
        ["--orchestrator.renderer.name", "kimi-k2", "--model", "{ build = { hidden_size = 32 } }", ENV, "null",
         "--orchestrator.train.env.0.id", "guess-number"], ['the tokenizer does not fit renderer "kimi-k2"']),
    "environment that raises": ([ENV, "tasks.Raises"], ["tasks.Raises", "OSError", "no such data set"]),
    "environment without examples": ([ENV, "tasks.Empty"], ['examples("train") is empty']),
    "environment without parameters to read": ([ENV, "builtins.dict"], ["has no readable signature"]),
    "no demonstrations": ([WARM, "{ steps = 1 }"], ["'lots.Lots' has no demonstrations"]),
    "empty demonstrations": ([ENV, "tasks.Shy", WARM, "{ steps = 1 }"], ["gave an empty list"]),
    "conversations with nothing to learn": ([WARM, '{ data = "bad.jsonl" }'], ["bad.jsonl:1", "no assistant message"]),
    "no conversations": ([WARM, '{ data = "none.jsonl" }'], ["there is no file none.jsonl"]),
    "loss of four tensors": (
        ["--trainer.loss", custom("four_tensors")],
        ["trainer.loss.import_path", "loss four_tensors needs inference_logprobs, advantages, loss_mask",
         "first parameter 'trainer_logprobs'"]),
    "record of a loss of four tensors": (["--trainer.loss", custom("RECORD")], ["loss four_tensors needs"]),
    "loss without an input": (["--trainer.loss", custom("no_inputs")], ["no_inputs(scale) takes no input"]),
    "loss that is async": (["--trainer.loss", custom("slow_loss")], ["loss slow_loss is async"]),
    "loss that is a number": (["--trainer.loss", custom("THRESHOLD")], ["is int, expected a function"]),
    "loss that is a class": (["--trainer.loss", custom("NotCallable")], ["is a class without __call__"]),
    "misspelt parameter of a loss": (
        ["--trainer.loss", custom("own_loss", ", kwargs = { scael = 2.0 }")], ['did you mean "scale"?']),
    "filter without an action": (["--orchestrator.filters", f"[{custom('without_action')}]"], ["has no action"]),
    "seq_len beyond the model's positions": (["--orchestrator.seq-len", "999"], ["seq_len = 999", "end at 384"]),
    "device that does not exist": (["--trainer.device", "gpu"], ["trainer.device", "there is no device 'gpu'"]),
    "teacher that is not there": (
        ["--orchestrator.training-mode", "opd", "--orchestrator.teacher", '{ model = "./nowhere" }'],
        ["there is no model folder './nowhere'"]),
    "teacher's address": (
        ["--orchestrator.training-mode", "opd", "--orchestrator.teacher", '{ model = "t", base_url = "localhost:8" }'],
        ["base_url 'localhost:8'; expected an address such as"]),
}  # fmt: skip


@pytest.mark.parametrize("command", ["config", "rl"])
@pytest.mark.parametrize(("arguments", "explained"), REFUSED.values(), ids=REFUSED)
def test_what_can_never_start_is_refused_and_nothing_is_made(place: Path, capsys, command, arguments, explained):
    before = snapshot(place)
    assert main([command, "run.toml", *arguments]) == 2
    said = "".join(capsys.readouterr())
    assert all(words in said for words in explained), said
    assert "--resume" not in said
    assert "Traceback" not in said
    assert snapshot(place) == before


@pytest.mark.parametrize("command", ["config", "rl"])
def test_a_reference_of_another_vocabulary_is_refused_before_a_warm_start(place: Path, model: Path, capsys, command):
    shutil.copytree(model, place / "wider", dirs_exist_ok=True)
    file = place / "wider" / "config.json"
    sizes = json.loads(file.read_text())
    file.write_text(json.dumps({**sizes, "vocab_size": sizes["vocab_size"] + 64}))
    before = snapshot(place)
    assert main([command, "run.toml", "--trainer.reference.model", "wider"]) == 2
    said = "".join(capsys.readouterr())
    assert f"trainer.reference.model: 'wider' has {sizes['vocab_size'] + 64} tokens, and model.name = " in said
    assert f" has {sizes['vocab_size']}: it cannot score the tokens that the policy samples" in said
    assert snapshot(place) == before


def test_a_model_folder_is_tried_without_its_weights(place: Path, model: Path, capsys):
    """Of another kind of model, without a chat template, and torn: known from small files and a file's first bytes."""
    shutil.copytree(model, place / "other")
    shutil.copytree(model, place / "torn")
    (place / "torn" / "model.safetensors").write_bytes(b"torn")
    file = place / "other" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "model_type": "vit", "architectures": ["ViTModel"]}))
    shutil.copytree(model, place / "mute")
    (place / "mute" / "chat_template.jinja").unlink()
    for name, explained in (
        ("other", "which is not a causal language model"),
        ("mute", "has no chat template"),
        ("torn", "torn/model.safetensors cannot be read as safetensors"),
    ):
        assert main(["config", "run.toml", "--model.name", name]) == 2
        assert explained in capsys.readouterr().err


def test_what_an_environment_prints_is_not_in_the_configuration(place: Path, capsys):
    assert main(["config", "run.toml", ENV, "tasks.Loud"]) == 0
    out, err = capsys.readouterr()
    assert tomllib.loads(out)["max_steps"] == 2
    assert "loading the data" in err


@pytest.mark.slow
def test_filters_of_ones_own_are_counted_each_under_its_own_name(place: Path):
    filters = ", ".join(
        [
            custom("Long", ", kwargs = { limit = 0, action = 'monitor' }"),
            custom("Short", ", kwargs = { action = 'monitor' }"),
            custom("Long", ", kwargs = { limit = 0, action = 'monitor' }"),
            '{ type = "gibberish", threshold = 0.0, action = "monitor" }',
            '{ type = "gibberish", threshold = -0.1, action = "monitor" }',
        ]
    )
    options = ["--run-dir", "run", "--max-steps", "1", "--orchestrator.filters", f"[{filters}]"]
    assert main(["rl", "run.toml", *options]) == 0
    (line,) = train_lines(place / "run")
    flagged = {key.split("/")[1]: value for key, value in line["metrics"].items() if key.endswith("/flagged")}
    assert flagged == {"Long": 8, "Short": 8, "Long_2": 8, "gibberish": 8, "gibberish_2": 8}


@pytest.mark.parametrize(
    ("options", "unread"),
    [
        ([], []),
        (
            ["--orchestrator.rollout.processes.worker-memory-mb", "900"],
            ['[orchestrator.rollout.processes] is not read: orchestrator.rollout.backend = "local"'],
        ),
        (["--orchestrator.rollout.processes.worker-memory-mb", "900", "--orchestrator.train.env.0.isolated"], []),
        (
            ["--orchestrator.rollout.ray", "{}", "--orchestrator.rollout.backend", "processes"],
            ['[orchestrator.rollout.ray] is not read: orchestrator.rollout.backend = "processes"'],
        ),
        (
            ["--inference.backend", "plug_ins.Sampler", "--inference.torch.deterministic", "true"],
            ['[inference.torch] is not read: inference.backend = "plug_ins.Sampler"'],
        ),
    ],
)
def test_the_table_of_a_backend_that_is_not_in_use_is_told(place: Path, caplog, options, unread):
    with (place / "plug_ins.py").open("a") as file:
        file.write(
            "from verbatim.config import BackendSettings\n\n\nclass Sampler:\n"
            "    def __init__(self, inputs, settings: BackendSettings): ...\n"
        )
    assert main(["config", "run.toml", *options]) == 0
    assert [message for message in caplog.messages if "is not read" in message] == unread


@pytest.mark.slow
@pytest.mark.parametrize("options", [["--run-dir", "mine"], []])
def test_a_model_that_the_sampler_refuses_leaves_no_run_behind(place: Path, model: Path, capsys, options):
    """What is wrong with a model is known when it is loaded, in the run's folder."""
    tokenizer = load_tokenizer(model)
    recurrent = MambaForCausalLM(MambaConfig(vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=1))
    save_model(recurrent, tokenizer, place / "mamba")
    assert main(["rl", "run.toml", "--model.name", "mamba", *options]) == 2
    assert "--resume" not in "".join(capsys.readouterr())
    assert not list(place.rglob("config.toml"))
    assert main(["rl", "run.toml", "--max-steps", "1", *options]) == 0


@pytest.mark.parametrize(
    ("options", "lost"),
    [
        ([], []),
        (["--trainer.loss.kl-ref-tau", "0.1"], ["the term of trainer.loss.kl_ref_tau holds"]),
        (["--orchestrator.advantage.type", "chunk_returns"], ['"chunk_returns" without a baseline learns from']),
        (["--orchestrator.advantage", '{ type = "chunk_returns", baseline = "group" }'], []),
    ],
)
def test_groups_that_are_filtered_though_they_have_a_gradient_are_told_of(place: Path, caplog, options, lost):
    filtering = ["--orchestrator.buffer.online-difficulty-filtering", "true"]
    assert main(["config", "run.toml", *filtering, *options]) == 0
    told = [record.getMessage() for record in caplog.records if "difficulty filtering drops" in record.getMessage()]
    assert len(told) == len(lost)
    assert all(text in message for text, message in zip(lost, told, strict=True))
    caplog.clear()
    assert main(["config", "run.toml", *options]) == 0
    assert "difficulty filtering" not in caplog.text


@pytest.mark.realtime
@pytest.mark.parametrize("command", ["config", "rl"])
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ["--inference.vllm.max-model-len", "100"],
            "inference.vllm.max_model_len = 100 is shorter than orchestrator.seq_",
        ),
        (
            ["--inference.vllm.weight-transfer", "http", "--inference.vllm.urls", "[]"],
            'inference.vllm.weight_transfer = "http" is for servers on other hosts, in urls',
        ),
        (
            ["--trainer.lora.r", "4", "--inference.vllm.weight-transfer", "nccl"],
            'inference.vllm.weight_transfer = "nccl"',
        ),
        (
            ["--trainer.lora.r", "4", "--inference.vllm.colocate", "true", "--inference.vllm.urls", "[]"],
            "inference.vllm.colocate puts servers to sleep",
        ),
    ],
)
def test_vllm_servers_that_cannot_serve_the_run_are_refused_before_a_warm_start(
    place: Path, capsys, tmp_path_factory, command, options, said
):
    found = ["--inference.backend", "vllm", "--inference.vllm.urls", '["http://127.0.0.1:1"]']
    python = fake_python(tmp_path_factory.mktemp("python"))
    assert main([command, "run.toml", *found, "--inference.vllm.python", str(python), *options]) == 2
    assert said in " ".join(capsys.readouterr().err.split())
    assert not (place / "runs").exists()


def test_a_file_of_conversations_is_read_line_by_line_as_utf_8(tmp_path: Path):
    file = tmp_path / "talk.jsonl"
    said = {"messages": [{"role": "assistant", "content": "a\u2028b"}]}  # a line separator is no end of a line here
    file.write_text(json.dumps(said, ensure_ascii=False) + "\n", encoding="utf-8")
    (read,) = read_conversations(file)
    assert (read.messages, read.tools, read.where) == (said["messages"], [], f"{file}:1")
    file.write_bytes(b"\xff\n")
    with pytest.raises(UsageError, match=r"talk\.jsonl is not UTF-8 text"):
        read_conversations(file)


@pytest.mark.parametrize(
    ("tools", "found"),
    [
        ('"look"', "tools is a str; expected a list of tool schemas"),
        ('["look"]', "tool 0 is a str; expected a tool schema"),
        ('{"name": "look"}', "tools is a dict; expected a list of tool schemas"),
    ],
)
def test_tools_that_are_no_schemas_in_a_file_of_conversations_are_refused(tmp_path: Path, tools: str, found: str):
    file = tmp_path / "talk.jsonl"
    file.write_text('{"messages": [{"role": "assistant", "content": "a"}], "tools": ' + tools + "}\n")
    with pytest.raises(UsageError, match=f"talk.jsonl:1: expected .*; {found}"):
        read_conversations(file)


def test_recorded_routing_of_a_dense_model_is_refused_before_its_warm_start(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(
        "[model.build]\nhidden_size = 32\nnum_layers = 1\n[inference]\nreturn_routed_experts = true\n"
        '[[orchestrator.train.env]]\nid = "guess_number"\n'
    )
    assert main(["config", "run.toml"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "return_routed_experts = true, but the decoder layers of Qwen3ForCausalLM have no routed experts" in said
