"""Another way to compute a model is told from rounding: by how far the model's own numbers are from float64."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from verbatim.models.agreement import Precision, beyond_rounding, disagreement
from verbatim.models.attention import WholeSequencePlan, follow_plans
from verbatim.models.float64 import keep_float64
from verbatim.models.head import CausalLM

SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.15,
}
CONFIGS = [
    LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    MistralConfig(**SIZES, sliding_window=24),
    Qwen2Config(**SIZES),
    Qwen3Config(**SIZES),
]


def model_of(config, dtype=torch.float32):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)
    follow_plans(model)
    return CausalLM(model)


@pytest.mark.parametrize(("times", "is_rounding"), [(0, True), (4, True), (16, False), (-16, False)])
def test_a_few_times_as_far_as_the_own_numbers_is_rounding(times, is_rounding):
    exact = torch.tensor([[3.0, 4.0], [0.375, 0.5]], dtype=torch.float64)
    own = (exact * (1 + 2.0**-20)).float()  # each row is 2^-20 of itself away
    said = beyond_rounding((exact * (1 + times * 2.0**-20)).float(), own, exact)
    assert (said == "") == is_rounding
    assert is_rounding or said.startswith("1.5e-05 away from its numbers in float64 (relative), and")  # 2^-16
    assert is_rounding or said.endswith("the model's own form is 9.5e-07 away")


def test_numbers_as_near_as_float32_has_them_are_rounding_where_the_own_ones_are_exact():
    exact = torch.tensor([[1.0, 2.0, 4.0]], dtype=torch.float64)
    assert beyond_rounding(exact.float() * (1 + 2**-24), exact.float(), exact) == ""
    assert beyond_rounding(exact.float() * (1 + 2**-21), exact.float(), exact)


@pytest.mark.parametrize("odd", [torch.nan, torch.inf])
def test_what_is_no_number_is_no_rounding(odd):
    exact = torch.ones(2, 2, dtype=torch.float64)
    ours = exact.float()
    ours[1, 1] = odd
    assert beyond_rounding(ours, exact.float(), exact)
    assert beyond_rounding(exact.float(), exact.float(), exact) == ""


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_in_float64_is_that_of_its_weights_in_float64_and_stays_as_it_is(config, dtype):
    model = model_of(config, dtype)
    reference = copy.deepcopy(model.model).double()
    keep_float64(reference)
    before = {name: (p.data_ptr(), p.clone()) for name, p in model.model.named_parameters()}
    given = torch.arange(40) * 7 % 97, torch.arange(40), WholeSequencePlan()
    with Precision(torch.float64):
        found = model.hidden(*given)
    torch.testing.assert_close(found, CausalLM(reference).hidden(*given), rtol=1e-12, atol=1e-12)
    assert all((p.data_ptr(), p.dtype) == (before[n][0], dtype) for n, p in model.model.named_parameters())
    assert all(torch.equal(p, before[n][1]) for n, p in model.model.named_parameters())
    assert model.hidden(*given).dtype == dtype


def test_a_model_in_bfloat16_is_computed_in_float32_with_rounded_inputs_where_asked():
    model = model_of(CONFIGS[3], torch.bfloat16)
    reference = copy.deepcopy(model.model).float()
    given = torch.arange(40) * 7 % 97, torch.arange(40), WholeSequencePlan()
    for rounds in (False, True):
        if rounds:
            for module in reference.model.modules():
                if isinstance(module, torch.nn.Linear):
                    module.register_forward_pre_hook(lambda _, inputs: (inputs[0].bfloat16().float(),))
        with Precision(torch.float32, rounds=rounds):
            found = model.hidden(*given)
        torch.testing.assert_close(found, CausalLM(reference).hidden(*given), rtol=0, atol=5e-2 if rounds else 5e-5)


def own_form(model):
    """The layers of a copy of the model, and all of it, as another way to compute it would be given."""
    model, positions, plan = CausalLM(copy.deepcopy(model.model)), torch.arange(48), WholeSequencePlan()
    tables = model.backbone.rotary_emb(torch.zeros(1, 48, 64), positions[None])

    def layer(index, hidden):
        module = model.backbone.layers[index]
        return module(hidden[None], position_embeddings=tables, attention_plan=plan)[0]

    return layer, lambda ids: model.hidden(ids, positions, plan)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
def test_the_layer_that_computes_something_else_is_named(config):
    model = model_of(config)
    layer, hidden = own_form(model)
    assert disagreement(model, layer, hidden, length=48) == ""

    def wrong(index, given):
        return layer(index, given) * (1 + 1e-4 * (index == 1))

    given = torch.arange(9), torch.arange(9), WholeSequencePlan()
    before = model.hidden(*given)
    said = disagreement(model, wrong, hidden, length=48)
    assert said.startswith(
        "layer 1 (of 0 to 2) is 1.0e-04 away from its numbers in float64 (relative), and the model's"
    )
    assert torch.equal(model.hidden(*given), before), "the model is as it was"


def test_a_large_number_in_a_row_hides_no_other_row_and_its_rounding_refuses_nothing():
    exact = torch.linspace(1, 2, 8 * 16, dtype=torch.float64).view(8, 16)
    own = exact.float()
    ours = own.clone()
    ours[0, 3] *= 1 + 1e-5
    assert beyond_rounding(ours, own, exact) == ""
    ours[4:, 5] *= 1 + 1e-4
    assert beyond_rounding(ours, own, exact)


def test_a_single_row_that_is_wrong_is_found():
    exact = torch.linspace(1, 2, 28 * 16, dtype=torch.float64).view(28, 16)
    ours = exact.float()
    ours[27, 3] *= 1 + 1e-3
    assert beyond_rounding(ours, exact.float(), exact)


def test_what_is_around_the_layers_is_compared_too():
    model = model_of(CONFIGS[0])
    layer, hidden = own_form(model)
    said = disagreement(model, layer, lambda ids: hidden(ids) * 1.01, length=48)
    assert said.startswith("each layer agrees, but all of them together are 1.0e-02 away")
