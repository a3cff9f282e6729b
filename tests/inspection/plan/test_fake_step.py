"""Steps on fake tensors: what grows with what, and what takes no memory."""

import pytest
import torch
from plan_helpers import groups, write_model
from torch._subclasses.fake_tensor import FakeTensorMode

from verbatim.algorithms.losses import LOSSES
from verbatim.config.schema import LoraConfig, ParallelConfig, TrainerConfig
from verbatim.core.errors import ModelError
from verbatim.inspection.plan.fake_step import StepCase, measure
from verbatim.inspection.plan.live_memory import (
    ACTIVATIONS,
    GRADIENTS,
    LOGITS,
    OPTIMIZER,
    REFERENCE,
    WEIGHTS,
    LiveMemory,
)

VOCAB = 1000


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """2 layers of width 64, without weights."""
    return write_model(tmp_path_factory.mktemp("model"), hidden_size=64, layers=2, vocab_size=VOCAB, weights=False)


def planned(model, *, length=128, loss="default", on_cuda=False, reference=None, processes=1, **settings):
    samples = groups(num_groups=2, group_size=4, length=length, shared=length // 2, vocab_size=VOCAB)
    trainer = TrainerConfig(**{"packing": "rows", "micro_batch_tokens": 4 * length, **settings})
    return measure(
        StepCase(
            source=str(model),
            trainer=trainer,
            loss=LOSSES[loss],
            samples=samples,
            processes=processes,
            on_cuda=on_cuda,
            reference=None if reference is None else str(reference),
        )
    )


def test_the_highest_sum_of_tensors_that_are_alive_is_kept():
    memory = LiveMemory(vocab_size=7)
    with FakeTensorMode(), memory.running():
        kept = torch.empty(1000)
        memory.mark([kept], WEIGHTS)
        for _ in range(3):
            a = torch.empty(500)
            b = a * 2
            del a, b
        view = kept[:10]
        del kept
        assert memory.total == 4000 and memory.peak == 8000
        assert memory.at_peak[WEIGHTS] == 4000 and memory.at_peak[ACTIVATIONS] == 4000
        del view
        assert memory.total == 0


@pytest.mark.slow
def test_what_a_process_holds_between_steps_is_its_share(model):
    one, two = planned(model), planned(model, processes=2)
    assert one.parts[OPTIMIZER] >= 8 * one.num_parameters
    assert two.parts[OPTIMIZER] < 0.51 * one.parts[OPTIMIZER]
    assert two.parts[WEIGHTS] < 0.51 * one.parts[WEIGHTS]
    assert one.between_steps < one.peak


@pytest.mark.slow
def test_adapters_alone_have_gradients_and_a_state(model):
    whole, adapted = planned(model), planned(model, lora=LoraConfig(r=4))
    assert adapted.num_trained == 2 * 4 * (2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 192))
    assert adapted.parts[GRADIENTS] == 4 * adapted.num_trained
    assert adapted.parts[WEIGHTS] == whole.parts[WEIGHTS] + 4 * adapted.num_trained


@pytest.mark.slow
def test_experts_take_their_memory_and_their_balance_a_little_more(tmp_path):
    model = write_model(tmp_path, hidden_size=64, layers=2, vocab_size=VOCAB, weights=False, experts=4)
    plain, balanced = planned(model), planned(model, router_aux_loss_coef=0.01)
    expert, attention, norms = 3 * 64 * 48, 64 * (64 + 32 + 32 + 64), 2 * 64 + 2 * 16
    assert plain.num_parameters == VOCAB * 64 + 2 * (4 * expert + 4 * 64 + attention + norms) + 64
    assert plain.parts[GRADIENTS] == balanced.parts[GRADIENTS] == 4 * plain.num_parameters
    probabilities = 2 * 512 * 4 * 4  # layers, tokens, experts, bytes
    assert probabilities <= balanced.parts[ACTIVATIONS] - plain.parts[ACTIVATIONS] < 8 * probabilities


@pytest.mark.slow
def test_a_reference_has_weights_and_no_more_and_none_under_adapters(model):
    found = planned(model, reference=model, loss="gspo")
    assert found.parts[REFERENCE] == 4 * found.num_parameters
    assert planned(model, reference=model, lora=LoraConfig(r=4)).parts[REFERENCE] == 0
    shared = planned(model, reference=model, processes=2)
    assert shared.parts[REFERENCE] == 2 * shared.num_parameters


@pytest.mark.slow
def test_processes_that_share_a_micro_batch_have_half_of_its_activations(tmp_path):
    model = write_model(tmp_path, hidden_size=64, layers=3, vocab_size=VOCAB, weights=False)
    alone = planned(model, length=512, micro_batch_tokens=1024, processes=2)
    shared = planned(
        model, length=512, micro_batch_tokens=512, processes=2, parallel=ParallelConfig(processes=2, sequence=2)
    )
    assert [m.num_tokens for m in shared.dealt[0]] == 4 * [1024]
    # Parts are those at the peak, which is at the logits of the whole micro batch, and in the attention of the half.
    taken = [found.parts[ACTIVATIONS] + found.parts[LOGITS] for found in (alone, shared)]
    assert 0.45 < taken[1] / taken[0] < 0.55


@pytest.mark.slow
def test_float32_on_cuda_makes_all_scores_where_query_heads_share_keys(model):
    float32 = planned(model, length=512, on_cuda=True).parts[ACTIVATIONS]
    assert float32 - planned(model, length=512).parts[ACTIVATIONS] > 2 * 4 * 4 * 512 * 512 * 4  # layers, rows, heads
    assert planned(model, length=512, on_cuda=True, dtype="bfloat16").parts[ACTIVATIONS] < float32 / 2


@pytest.mark.slow
def test_checkpointing_and_offload_keep_less(model):
    plain = planned(model, on_cuda=True, dtype="bfloat16")
    kept = planned(model, on_cuda=True, dtype="bfloat16", gradient_checkpointing=True)
    moved = planned(model, on_cuda=True, dtype="bfloat16", gradient_checkpointing=True, activation_offload=True)
    assert moved.peak < kept.peak < plain.peak


@pytest.mark.slow
def test_checkpointing_needs_no_plan_of_the_same_model_before_it(tmp_path):
    model = write_model(tmp_path, hidden_size=48, layers=2, vocab_size=VOCAB, weights=False)
    assert planned(model, gradient_checkpointing=True).peak > 0


@pytest.mark.slow
def test_more_processes_than_the_model_can_use_are_refused(model):
    with pytest.raises(ModelError, match=r"193 processes .* 192 rows to share out; use at most 192"):
        planned(model, processes=193)
    with pytest.raises(ModelError, match="sequence = 3 does not divide the 4 attention heads"):
        planned(model, processes=3, parallel=ParallelConfig(processes=3, sequence=3))
