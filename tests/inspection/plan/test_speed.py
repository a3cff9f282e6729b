"""Seconds of a step, worked out by hand."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from plan_helpers import groups

from verbatim.config.schema import LoraConfig, TrainerConfig
from verbatim.config.sections import Replicas
from verbatim.inspection.plan.batches import PlannedBatch
from verbatim.inspection.plan.devices import GIB, GPUS, Device
from verbatim.inspection.plan.speed import cache_bytes_per_token, sampler_speed, step_seconds, trainer_speed
from verbatim.trainer.packing import pack_rows
from verbatim.trainer.packing.cost import CostModel, model_cost

DEVICE = Device(name="round", memory=100 * GIB, flops={"bfloat16": 1e12, "float32": 1e11}, bandwidth=1e9, link=1e8)
COST = CostModel(attention=(), per_target=0.0, unit=1e6)
"""A million operations for each token, and no more."""


def trainer(num_ranks, **settings):
    """A micro-batch of 100 tokens for each rank; a million parameters."""
    samples = groups(num_groups=num_ranks, group_size=1, length=100, shared=50, vocab_size=100)
    dealt = [pack_rows([sample], micro_batch_tokens=100, keep_whole=False) for sample in samples]
    return trainer_speed(
        dealt, COST, TrainerConfig(**settings), DEVICE, num_parameters=10**6, num_trained=10**6, utilisation=0.5
    )


def test_the_backward_pass_takes_twice_the_forward_pass():
    found = trainer(1)
    assert found.compute_seconds == pytest.approx(3 * 100 * 1e6 / (1e11 * 0.5))
    assert found.optimizer_seconds == pytest.approx(28e6 / 1e9)
    assert found.seconds == pytest.approx(0.006 + 0.028)
    assert found.tokens == 100 and found.tokens_per_second == pytest.approx(100 / 0.034)


def test_what_is_repeated_and_what_is_left_out_is_counted():
    assert trainer(1, gradient_checkpointing=True).compute_seconds == pytest.approx(4 / 3 * 0.006)
    assert trainer(1, router_aux_loss_coef=0.01).compute_seconds == pytest.approx(4 / 3 * 0.006)
    assert trainer(1, lora=LoraConfig()).compute_seconds == pytest.approx(2 / 3 * 0.006)
    assert trainer(1, dtype="bfloat16").compute_seconds == pytest.approx(0.0006)


def test_two_ranks_take_as_long_for_twice_the_work_and_exchange_beside_it():
    found = trainer(2, dtype="bfloat16")
    assert found.compute_seconds == pytest.approx(0.0006)
    assert found.exchange_seconds == pytest.approx((2 * 2e6 + 4e6) / 2 / 1e8)  # gathered twice, reduced once
    assert found.seconds == pytest.approx(0.04 + 0.014)


def test_the_unit_of_a_cost_is_two_operations_for_each_parameter():
    config = SimpleNamespace(
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=3,
        intermediate_size=192,
        vocab_size=1000,
    )
    assert model_cost(config).unit == 2 * 3 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 192)


BATCH = PlannedBatch(
    samples=(),
    num_rollouts=10,
    sampled_tokens=1000,
    prompt_tokens=2000,
    longest_sampled=100,
    mean_context=50.0,
    said="",
)
CONFIG = SimpleNamespace(num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_hidden_layers=3)
REPLICA = Replicas(count=1, devices_each=1, dtype="bfloat16", most_sequences=64, memory_share=1.0)


def sampler(batch=BATCH, replicas=REPLICA, in_flight=10):
    return sampler_speed(
        batch,
        replicas,
        COST,
        CONFIG,
        DEVICE,
        num_parameters=10**6,
        in_flight=in_flight,
        utilisation=0.5,
        bandwidth_utilisation=0.5,
    )


def test_a_decode_pass_reads_the_weights_once_and_the_cache_of_each_sequence():
    per_token = 2 * 3 * 2 * 16 * 2
    assert cache_bytes_per_token(CONFIG, 2) == per_token
    found = sampler()
    assert found.in_flight == 10 and found.weights == 2_000_000 and found.cache == 10 * 50 * per_token
    assert found.decode_seconds == pytest.approx(100 * (2e6 + found.cache) / 5e8)
    assert found.prefill_seconds == pytest.approx(2000 * 1e6 / 5e11)
    assert found.bound_by == "memory bandwidth"


@pytest.mark.parametrize(
    ("config", "packed"),
    [
        ({}, 10**6 - 64_000),
        ({"tie_word_embeddings": True}, 10**6),
        ({"num_experts": 4}, 0),
    ],
)
def test_the_compiled_kernel_keeps_a_copy_of_the_matrices(config, packed):
    model = SimpleNamespace(**vars(CONFIG), vocab_size=1000, hidden_size=64, **config)
    found, plain = (
        sampler_speed(
            BATCH,
            replace(REPLICA, dtype="float32", packs=packs),
            COST,
            model,
            DEVICE,
            in_flight=10,
            num_parameters=10**6,
            utilisation=0.5,
            bandwidth_utilisation=0.5,
        )
        for packs in (True, False)
    )
    assert (found.packed, plain.packed) == (4 * packed, 0)
    assert found.memory == plain.memory + 4 * packed == found.weights + found.packed + found.cache
    assert found.seconds == plain.seconds  # a pass reads the copy alone


def test_the_compiled_kernel_keeps_keys_and_values_of_a_model_in_bfloat16_in_float32():
    model = SimpleNamespace(**vars(CONFIG), vocab_size=1000, hidden_size=64)
    for packs, width in ((True, 4), (False, 2)):
        found = sampler_speed(
            BATCH,
            replace(REPLICA, dtype="bfloat16", packs=packs),
            COST,
            model,
            DEVICE,
            in_flight=10,
            num_parameters=10**6,
            utilisation=0.5,
            bandwidth_utilisation=0.5,
        )
        assert found.cache == found.in_flight * 50 * 2 * 3 * 2 * 16 * width
        assert found.packed == packs * 2 * (10**6 - 64_000)


def test_what_the_copy_takes_is_no_room_for_sequences():
    model = SimpleNamespace(**vars(CONFIG), vocab_size=1000, hidden_size=64, tie_word_embeddings=True)
    of_one = 50 * 2 * 3 * 2 * 16 * 4
    device = replace(DEVICE, memory=8_000_000 + 5 * of_one)
    asked = replace(REPLICA, dtype="float32")
    for packs, sequences in ((False, 10), (True, 5)):
        found = sampler_speed(
            BATCH,
            replace(asked, packs=packs),
            COST,
            model,
            device,
            in_flight=10,
            num_parameters=10**6,
            utilisation=0.5,
            bandwidth_utilisation=0.5,
        )
        assert found.in_flight == sequences


def test_the_longest_rollout_takes_its_passes_however_many_replicas_there_are():
    many = sampler(replicas=replace(REPLICA, count=10))
    assert many.bound_by == "memory bandwidth" and many.in_flight == 1
    alone = sampler(batch=replace(BATCH, longest_sampled=900))
    assert alone.bound_by == "the longest rollout"
    assert alone.decode_seconds == pytest.approx(900 * (2e6 + 50 * 384) / 5e8)


def test_layers_with_a_window_are_not_counted_in_the_cache():
    config = SimpleNamespace(
        **vars(CONFIG), sliding_window=128, layer_types=["sliding_attention", "sliding_attention", "full_attention"]
    )
    assert cache_bytes_per_token(config, 2) == 2 * 1 * 2 * 16 * 2


@pytest.mark.parametrize(("level", "step", "trainer_waits", "sampler_waits"), [(0, 8, 5, 3), (1, 5, 2, 0)])
def test_which_side_waits(level, step, trainer_waits, sampler_waits):
    found = step_seconds(3.0, 5.0, level=level)
    assert found == {"step": step, "trainer_waits": trainer_waits, "sampler_waits": sampler_waits}


def test_every_device_has_its_figures():
    for device in GPUS.values():
        assert 20 * GIB < device.memory < 200 * GIB and device.is_cuda
        assert device.flops["bfloat16"] > device.flops["float32"] > 1e13
        assert 5e11 < device.bandwidth < 1e13 and device.link < device.bandwidth
