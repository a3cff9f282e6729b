"""The last layer, computed for the tokens that targets are predicted from, has the gradient of the whole layer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from trainer_helpers import VOCAB, shared_prefixes
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from verbatim.algorithms.losses import LOSSES
from verbatim.models.head import CausalLM
from verbatim.models.loading import load_model
from verbatim.trainer.last_layer import Wanted, narrow_last_layer
from verbatim.trainer.logprobs import TargetLogprobs
from verbatim.trainer.metrics import MetricSums
from verbatim.trainer.packing import PACKERS
from verbatim.trainer.recompute import checkpoint_layers
from verbatim.trainer.step import GradientPass

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": None,
}
FAMILIES = {
    "llama": LlamaConfig(**SIZES),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES),
    "mistral": MistralConfig(**SIZES, sliding_window=5),
    "qwen3 with a window": Qwen3Config(
        **SIZES, layer_types=["full_attention", "sliding_attention"], sliding_window=5, use_sliding_window=True
    ),
}


def samples():
    """A third of their tokens is trained at most; trajectories predict different tokens from one place."""
    found = []
    for sample in (sample for seed in range(8) for sample in shared_prefixes(seed)):
        mask = sample.loss_mask & (np.arange(len(sample)) % 3 == 0)
        mask[-1] = True
        found.append(replace(sample, loss_mask=mask))
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}
    for name, config in FAMILIES.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(0.1 * torch.randn_like(parameter))
        made[name] = tmp_path_factory.mktemp("model")
        model.save_pretrained(made[name])
    return made


def gradients(folder, *, narrow, packing, dtype, checkpointing=False):
    """The gradient by parameter name, the loss, and what the last layer gave out."""
    model = load_model(folder, dtype=dtype, only_attention=False)
    if checkpointing:
        checkpoint_layers(model)
    lm, sizes = CausalLM(model), []
    if narrow:
        narrow_last_layer(model)
    model.model.layers[-1].register_forward_hook(lambda *at: sizes.append((at[1][0].shape[1], at[2].shape[1])))
    batch = samples()
    step = GradientPass(lm=TargetLogprobs(lm, 1000), loss=LOSSES["default"], denominator=100, metrics=MetricSums())
    step.run(PACKERS[packing](batch, micro_batch_tokens=10_000, keep_whole=False))
    return {name: p.grad for name, p in model.named_parameters()}, step.loss_sum(), sizes


def assert_same(found, expected, tolerance):
    largest = max(float(x.norm()) for x in expected.values())
    for name, wanted in expected.items():
        assert float((found[name] - wanted).norm()) < tolerance * max(float(wanted.norm()), 1e-2 * largest), name


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["rows", "tree"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_gradient_is_that_of_the_whole_layer(folders, family, packing):
    for dtype, tolerance in (("float64", 1e-12), ("float32", 1e-5)):
        expected, loss, whole = gradients(folders[family], narrow=False, packing=packing, dtype=dtype)
        found, narrow_loss, sizes = gradients(folders[family], narrow=True, packing=packing, dtype=dtype)
        assert whole[0][0] == whole[0][1]
        assert sizes[0][1] < 0.7 * sizes[0][0]
        assert narrow_loss == pytest.approx(loss, rel=tolerance)
        assert_same(found, expected, tolerance)


def test_recomputed_layers_are_narrow_too(folders):
    expected, *_ = gradients(folders["qwen3"], narrow=False, packing="tree", dtype="float32")
    found, _, sizes = gradients(folders["qwen3"], narrow=True, packing="tree", dtype="float32", checkpointing=True)
    assert sizes[0][1] < sizes[0][0]
    assert_same(found, expected, 1e-5)


def test_the_example_of_wanted_tokens():
    wanted = Wanted.among(1000, np.array([7, 9, 9, 300], np.int32), torch.device("cpu"))
    assert wanted.tokens.tolist() == wanted.tokens_Q.tolist() == [7, 9, *[300] * 62]
    assert wanted.places_M.tolist() == [0, 1, 1, 2]


def test_where_most_tokens_or_none_are_wanted_all_are_computed():
    cpu = torch.device("cpu")
    assert Wanted.among(71, np.arange(64, dtype=np.int32), cpu) is None
    assert Wanted.among(72, np.arange(64, dtype=np.int32), cpu) is not None
    assert Wanted.among(72, np.zeros(0, np.int32), cpu) is None


def test_other_families_and_other_classes_are_left_alone():
    class Other(AutoModelForCausalLM.from_config(FAMILIES["qwen3"]).__class__):
        pass

    gemma = AutoModelForCausalLM.from_config(Gemma2Config(**SIZES))
    narrow_last_layer(gemma)
    assert "forward" not in vars(gemma.model.layers[-1])
    model = Other(FAMILIES["qwen3"])
    model.model.__class__ = type("OtherModel", (type(model.model),), {})
    narrow_last_layer(model)
    assert "forward" not in vars(model.model.layers[-1])
