"""What `dtype = "auto"` becomes: by the model, the machine and a measurement; once for a run."""

import json
import tomllib
from dataclasses import dataclass, field

import pytest
import torch
from rich.console import Console
from transformers import Qwen3Config

from verbatim.config import dump_config, make_config
from verbatim.core.errors import ConfigError, UsageError
from verbatim.inference.embedded.settings import TorchSettings
from verbatim.logs.checkpoints import RunFolder
from verbatim.run import precision
from verbatim.run.machine import OnCuda, Seconds
from verbatim.run.precision import (
    FASTER,
    TRAINER,
    read_choices,
    read_layers,
    refuse_auto,
    resolve_dtypes,
    resolve_server,
    tell,
    unresolved,
    write_choices,
)
from verbatim.run.rollouts import inference_settings
from verbatim.run.tables import component_tables

LARGE = {"hidden_size": 512, "intermediate_size": 1536, "num_heads": 8, "num_kv_heads": 4, "num_layers": 2}


@dataclass
class Fake:
    """A machine with these answers."""

    cuda: bool | None = None
    instructions: bool = True
    trainer: float = 2.0
    sampler: float = 2.0
    asked: list = field(default_factory=list)

    def place(self, side):
        return "here"

    def cuda_rounds(self, side, device):
        return self.cuda

    def has_instructions(self, side):
        return self.instructions

    def measure(self, side, layers, rows, kernel):
        self.asked.append((side, rows, kernel))
        return Seconds(float32=0.01, bfloat16=0.01 / getattr(self, side), of="ten products")


def config(trainer="auto", sampler="auto", *, build=None, trainer_too=None, **inference):
    return make_config(
        {
            "model": {"build": LARGE if build is None else build},
            "trainer": {"dtype": trainer, **(trainer_too or {})},
            "orchestrator": {"train": {"env": [{"id": "guess_number"}]}},
            "inference": {"torch": {"dtype": sampler, "max_batch_size": 16, **inference}},
        },
        tables=component_tables(),
    )


def dtypes(resolved):
    return resolved.trainer.dtype, inference_settings(resolved).dtype


def test_each_side_takes_what_is_faster_for_it_by_a_margin():
    machine = Fake(trainer=FASTER + 0.01, sampler=FASTER - 0.01)
    resolved, choices = resolve_dtypes(config(), machine=machine)
    assert dtypes(resolved) == ("bfloat16", "float32")
    assert machine.asked == [("trainer", 1024, "auto"), ("sampler", 16, "auto")]
    assert [str(choice) for choice in choices] == [
        "trainer.dtype = bfloat16: bfloat16 is 1.26 times as fast as float32 here, 1.25 required "
        "(7.94 and 10.00 ms, ten products)",
        "inference.torch.dtype = float32: bfloat16 is 1.24 times as fast as float32 here, 1.25 required "
        "(8.06 and 10.00 ms, ten products)",
    ]


def test_what_is_given_is_left_alone_and_nothing_is_measured_for_it():
    machine = Fake()
    given = config("float32", "bfloat16")
    assert resolve_dtypes(given, machine=machine) == (given, []) and not machine.asked
    resolved, choices = resolve_dtypes(config("auto", "float32"), machine=machine)
    assert dtypes(resolved) == ("bfloat16", "float32") and len(choices) == 1


@pytest.mark.parametrize(
    ("machine", "build", "dtype", "reason"),
    [
        (Fake(), {}, "float32", "a tiny model, 28,087 elements per weight matrix"),
        (Fake(cuda=True), {}, "float32", "a tiny model"),
        (Fake(cuda=True), LARGE, "bfloat16", "the CUDA device supports bfloat16"),
        (Fake(cuda=False), LARGE, "float32", "the CUDA device does not support bfloat16"),
        (Fake(instructions=False), LARGE, "float32", "the processor has no instructions for bfloat16"),
        (OnCuda(), LARGE, "bfloat16", "the CUDA device supports bfloat16"),
    ],
)
def test_what_needs_no_measuring_is_not_measured(machine, build, dtype, reason):
    resolved, choices = resolve_dtypes(config(build=build), machine=machine)
    assert dtypes(resolved) == (dtype, dtype)
    assert all(choice.reason.startswith(reason) for choice in choices)
    assert not getattr(machine, "asked", [])


def test_the_sampler_is_measured_with_what_computes_its_passes():
    machine = Fake()
    resolve_dtypes(config("float32", kernel="torch"), machine=machine)
    assert machine.asked == [("sampler", 16, "torch")]


@pytest.mark.parametrize("trainer", [{"compile": True}, {"parallel": {"processes": 2}}])
def test_a_trainer_on_a_cpu_that_would_have_autocast_stays_in_float32(trainer):
    """What is measured are products in bfloat16 alone."""
    machine, given = Fake(), config(sampler="float32", trainer_too=trainer)
    (choice,) = resolve_dtypes(given, machine=machine)[1]
    assert choice.dtype == "float32" and "autocast" in choice.reason and not machine.asked
    assert resolve_dtypes(given, machine=Fake(cuda=True))[0].trainer.dtype == "bfloat16"


def test_the_layers_of_an_adapter_are_those_of_its_base(tmp_path):
    base = tmp_path / "base"
    Qwen3Config(
        hidden_size=64,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_hidden_layers=2,
        vocab_size=50,
    ).save_pretrained(base)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(base)}))
    assert read_layers(config(), adapter).sizes == {(64, 64): 4, (64, 32): 4, (64, 96): 4, (96, 64): 2}


def test_the_layers_of_a_model_are_counted_without_its_head():
    layers = read_layers(config(build={"hidden_size": 128, "num_layers": 3}))
    assert layers.sizes == {(128, 128): 6, (128, 64): 6, (128, 384): 6, (384, 128): 3}
    assert layers.linear_alone
    assert layers.mean_size == (6 * 128 * 128 + 6 * 128 * 64 + 9 * 128 * 384) / 21


def test_a_run_that_goes_on_has_what_it_had():
    machine = Fake()
    stored = tomllib.loads(dump_config(config("float32", "bfloat16")))
    resolved, choices = resolve_dtypes(config(), stored=stored, machine=machine)
    assert dtypes(resolved) == ("float32", "bfloat16") and not machine.asked
    assert {choice.reason for choice in choices} == {"as stored with the run"}


@pytest.mark.parametrize("as_tables", [lambda run: run.model_dump(), lambda run: tomllib.loads(dump_config(run))])
def test_a_fork_with_another_sampler_than_the_run_had_chooses_for_it(as_tables):
    before = make_config(
        {
            "model": {"build": LARGE},
            "orchestrator": {"train": {"env": [{"id": "guess_number"}]}},
            "inference": {"backend": "vllm"},
        },
        tables=component_tables(),
    )
    machine = Fake()
    resolved, choices = resolve_dtypes(config(), stored=as_tables(before), machine=machine)
    assert dtypes(resolved) == ("float32", "bfloat16") and machine.asked == [("sampler", 16, "auto")]
    assert choices[0].reason == "as stored with the run" and choices[1].reason.startswith("bfloat16 is 2.00 times")


def test_the_folder_of_a_run_has_the_choice_and_gives_it_to_a_resumed_one(tmp_path):
    asked = config().model_copy(update={"run_dir": tmp_path / "run"})
    assert RunFolder.stored_tables(asked, True) is None
    resolved, choices = resolve_dtypes(asked, machine=Fake(sampler=1.0))
    with RunFolder.join(resolved, role="orchestrator") as folder:
        tell(choices, Console(quiet=True), folder.path)
    kept = json.loads((tmp_path / "run" / "precision.json").read_text())
    assert [(one["key"], one["dtype"]) for one in kept["choices"]] == [
        ("trainer.dtype", "bfloat16"),
        ("inference.torch.dtype", "float32"),
    ]
    assert "2.00 times" in kept["choices"][0]["reason"]
    again, as_stored = resolve_dtypes(asked, stored=RunFolder.stored_tables(asked, True), machine=Fake(trainer=1.0))
    assert dtypes(again) == ("bfloat16", "float32")
    tell(as_stored, Console(quiet=True), tmp_path / "run")
    assert json.loads((tmp_path / "run" / "precision.json").read_text()) == kept, "why it is so stays written"


def test_servers_elsewhere_have_a_dtype_already():
    with pytest.raises(
        UsageError,
        match=r'inference.torch.dtype cannot be "auto" if urls is set, because the servers have chosen a dtype already',
    ):
        resolve_dtypes(config(urls=["http://127.0.0.1:8000"]), machine=Fake())


def test_the_trainer_alone_is_measured_where_nothing_is_sampled():
    """As `verbatim sft` does, also where the sampler's servers are elsewhere."""
    machine = Fake()
    resolved, choices = resolve_dtypes(config(urls=["http://127.0.0.1:8000"]), machine=machine, keys=(TRAINER,))
    assert dtypes(resolved) == ("bfloat16", "auto")
    assert [side for side, *_ in machine.asked] == ["trainer"] == [choice.key[:7] for choice in choices]


@pytest.mark.parametrize(("faster", "dtype"), [(2.0, "bfloat16"), (1.0, "float32")])
def test_a_server_by_itself_is_measured_for_its_model_and_settings(tmp_path, monkeypatch, faster, dtype):
    machine = Fake(sampler=faster)
    monkeypatch.setattr(precision, "_this_machine", lambda: machine)
    Qwen3Config(
        hidden_size=512,
        intermediate_size=1536,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        num_hidden_layers=2,
        vocab_size=50,
    ).save_pretrained(tmp_path)
    asked = TorchSettings(dtype="auto", max_batch_size=8, kernel="torch")
    settings, choice = resolve_server(asked, tmp_path)
    assert settings == asked.model_copy(update={"dtype": dtype}) and choice.dtype == dtype
    assert machine.asked == [("sampler", 8, "torch")]


def test_a_fork_has_the_reasons_of_what_it_did_not_change(tmp_path, caplog):
    before, fork = tmp_path / "before", tmp_path / "fork"
    for folder in (before, fork):
        folder.mkdir()
    assert read_choices(before) == []
    resolved, choices = resolve_dtypes(config(), machine=Fake())
    tell(choices, Console(quiet=True), before)
    assert read_choices(before, resolved) == choices
    changed = config("bfloat16", "float32")
    kept = read_choices(before, changed)
    assert kept == choices[:1]
    write_choices(fork, kept)
    anew = resolve_dtypes(config("bfloat16", "auto"), machine=Fake(sampler=1.0))[1]
    tell(anew, Console(quiet=True), fork)
    assert read_choices(fork) == [*anew, *choices[:1]]
    (before / "precision.json").write_text('{"format": 1, "choices": [{}]}')
    assert read_choices(before) == [] and "cannot be read" in caplog.text


def test_processes_that_are_started_one_by_one_do_not_choose_each_for_itself():
    with pytest.raises(UsageError, match=r'"float32" or "bfloat16": .* --trainer.dtype bfloat16 --inference.torch'):
        refuse_auto(config(), "two processes")
    refuse_auto(config("float32", "bfloat16"), "two processes")
    assert unresolved(config("auto", "float32")) == ["trainer.dtype"]


def test_other_words_are_refused():
    with pytest.raises(ConfigError, match=r"trainer.dtype.*float16.*'float32', 'bfloat16' or 'auto'"):
        config("float16")


def test_a_sampler_that_no_run_starts_says_that_it_needs_a_dtype():
    with pytest.raises(UsageError, match='here use "float32" or "bfloat16"'):
        _ = TorchSettings(dtype="auto").precision


def test_this_machine_measures_both_sides():
    """Figures are not judged, which a busy machine would change; they are there, and both passes ran. The caller's
    random numbers go on as if nothing had been measured."""
    from verbatim.run.measured_precision import ThisMachine

    build = {"hidden_size": 64, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 96, "num_layers": 3}
    layers = read_layers(config(build=build))
    machine, before = ThisMachine(), torch.get_rng_state()
    for side, kernel in (("trainer", "auto"), ("sampler", "auto"), ("sampler", "torch")):
        found = machine.measure(side, layers, 4, kernel)
        assert 0 < found.bfloat16 < 5 and 0 < found.float32 < 5
    assert torch.equal(torch.get_rng_state(), before)
    assert machine.cuda_rounds("trainer", "cpu") is None and isinstance(machine.has_instructions("trainer"), bool)
