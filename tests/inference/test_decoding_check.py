"""A sampler takes a model only if cached decoding has the logprobs of the model's own attention."""

import asyncio

import pytest

from models.architectures import Architecture, tiny_model
from verbatim.core.errors import ModelError
from verbatim.inference.embedded.engine import TorchSampler
from verbatim.inference.embedded.kv_cache import CachePlan
from verbatim.inference.embedded.settings import TorchSettings


@pytest.fixture
def sampler(tmp_path):
    made = []

    def make(name, **config):
        tiny_model(Architecture(name)).save_pretrained(tmp_path)
        made.append(TorchSampler(tmp_path, config=TorchSettings(device="cpu", **config), context_length=64))
        return made[-1]

    yield make
    for engine in made:
        asyncio.run(engine.close())


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("diffllama", "DiffLlamaForCausalLM .*cannot be sampled from by the embedded sampler.*differ by"),
    ],
)
def test_layers_that_one_cache_does_not_hold_are_refused_by_name(name, what, sampler):
    """It attends twice in each layer."""
    with pytest.raises(ModelError, match=what):
        sampler(name)


@pytest.mark.parametrize(
    ("name", "deterministic"),
    [
        ("qwen3", False),
        ("qwen3", True),
        ("deepseek_v3", True),
        ("gemma3_text", False),
        ("jetmoe", True),
        ("gpt2", False),
    ],
)
def test_models_that_decode_as_they_compute_are_taken(name, deterministic, sampler):
    assert sampler(name, deterministic=deterministic, max_batch_size=4).vocab_size == 96


def test_a_cache_that_holds_something_else_is_found_out(sampler, monkeypatch):
    attend = CachePlan.attend
    halved = lambda self, layer, query, key, value, call: attend(self, layer, query, key, value * 0.5, call)  # noqa: E731
    monkeypatch.setattr(CachePlan, "attend", halved)
    with pytest.raises(ModelError, match=r"Qwen3ForCausalLM .*sampled logprobs differ by"):
        sampler("qwen3", kernel="torch")
