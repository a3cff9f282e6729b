"""Compiled layers have the gradient of those that are not, and are compiled once."""

import parallel_jobs as jobs
import pytest
import torch
from parallel_ranks import crew
from test_trainer_steps import make_trainer
from trainer_helpers import make_batch, routed_samples, shared_prefixes, write_qwen_moe
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from verbatim.errors import ModelError
from verbatim.models.attention import ATTENTION
from verbatim.models.tiny import decoder_layers
from verbatim.trainer.compile import compile_layers

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def uncompiled_attention(monkeypatch):
    """What a trainer registers, later tests do not see."""
    before = ALL_ATTENTION_FUNCTIONS[ATTENTION]
    yield
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, before)
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "settings",
    [
        {"packing": "tree", "micro_batch_tokens": 40},
        {"packing": "rows", "micro_batch_tokens": 30, "gradient_checkpointing": True},
        {"packing": "tree", "lora": {"r": 4, "alpha": 8}, "gradient_checkpointing": True},
    ],
)
def test_the_gradient_is_that_of_layers_that_are_not_compiled(sliding_qwen, settings):
    gradients = []
    for compiled in (True, False):
        trainer = make_trainer(sliding_qwen, dtype="float64", compile=compiled, **settings)
        found = jobs.noted_gradients(trainer)
        for batch in (shared_prefixes(), make_batch(1)):
            trainer.train_batch(batch)
        gradients.append(found)
    compiled, plain = gradients
    assert max(map(jobs.apart, compiled, plain)) < 1e-10


@pytest.mark.parametrize("settings", [{}, {"router_aux_loss_coef": 0.5}])
def test_a_mixture_of_experts_is_watched_and_told_what_to_choose_in_compiled_layers(tmp_path, settings):
    experts = write_qwen_moe(tmp_path, norm_topk_prob=True)
    gradients, metrics = [], []
    for compiled in (True, False):
        trainer = make_trainer(experts, dtype="float64", packing="rows", compile=compiled, **settings)
        found = jobs.noted_gradients(trainer)
        metrics.append([trainer.train_batch(batch) for batch in (routed_samples(), make_batch(1))])
        gradients.append(found)
    compiled, plain = gradients
    assert max(map(jobs.apart, compiled, plain)) < 1e-10
    assert metrics[0][0]["router/replayed"] == 1
    for one, other in zip(*metrics, strict=True):
        expected = {name: value for name, value in other.items() if name.startswith("router/")}
        assert {name: one[name] for name in expected} == pytest.approx(expected, rel=1e-10)


def test_experts_whose_layers_are_recomputed_too_are_refused(tmp_path):
    experts = write_qwen_moe(tmp_path)
    with pytest.raises(ModelError, match=r"cannot be compiled here .*context_fn.*; set trainer\.compile = false"):
        make_trainer(experts, compile=True, gradient_checkpointing=True)


def test_layers_are_compiled_once_whatever_the_number_of_tokens(sliding_qwen):
    trainer = make_trainer(sliding_qwen, compile=True)
    for seed in range(2):
        trainer.train_batch(make_batch(seed))
    torch._dynamo.utils.counters.clear()
    for seed in range(2, 6):
        trainer.train_batch(make_batch(seed))
    assert torch._dynamo.utils.counters["stats"].get("unique_graphs", 0) == 0


@pytest.mark.realtime
def test_two_processes_compile_their_layers(qwen):
    with crew(2) as two:
        (found,) = two.run(jobs.compare, [{
            "model": str(qwen), "batches": [["usual", 0]], "micro_batch_tokens": 40, "compile": True,
            "gradient_checkpointing": True,
        }])  # fmt: skip
    assert max(found["gradient"]) < 1e-10


def test_a_layer_that_cannot_be_compiled_is_refused_with_the_model(qwen, monkeypatch):
    def fails(*_, **__):
        raise RuntimeError("no C++ compiler")

    def compiled(function, **_):
        return fails

    monkeypatch.setattr(torch, "compile", compiled)
    with pytest.raises(ModelError, match=r"Qwen3ForCausalLM cannot be compiled here \(RuntimeError: no C.* compiler\)"):
        make_trainer(qwen, compile=True)


def test_attention_is_called_between_compiled_pieces_once_however_many_models_are_compiled(qwen):
    compile_layers(make_trainer(qwen).model)
    first = ALL_ATTENTION_FUNCTIONS[ATTENTION]
    compile_layers(make_trainer(qwen).model)
    assert ALL_ATTENTION_FUNCTIONS[ATTENTION] is first


def test_layers_are_not_compiled_unless_it_is_asked_for(qwen, monkeypatch):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda forward, **_: compiled.append(forward) or forward)
    model = make_trainer(qwen).model
    assert compiled == []
    make_trainer(qwen, compile=True)
    assert len(compiled) == len(decoder_layers(model))
