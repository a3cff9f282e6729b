"""Before a run starts, it says how long it will take here, from passes that really ran."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from verbatim.config import dump_config, load_config
from verbatim.config.cluster import ClusterConfig
from verbatim.config.recipe_files import recipes
from verbatim.core.types import TrainingSample
from verbatim.run import expected_time
from verbatim.run.environments import Environments
from verbatim.run.expected_time import Trial, TrialOrder, announce, duration, expected, is_measured, lines

RECIPE = recipes()["smollm2_calculator"]
IN_FLOAT32 = {"inference": {"torch": {"dtype": "float32"}}, "trainer": {"dtype": "float32", "lora": None}}

TRIAL = Trial(
    threads=1,
    sequences=64,
    sampled_per_second=640.0,
    prompts_per_second=1000.0,
    trained_per_second=500.0,
    warm_start_per_second=200.0,
    sampler_bytes=2_000_000_000,
    trainer_bytes=3_500_000_000,
    sampled_per_episode=70.0,
    fewest_trained=1500,
    most_trained=7480,
    warm_start_tokens=1600,
)


@pytest.fixture
def config():
    return load_config(RECIPE)


def test_a_side_that_is_left_alone_has_all_cores(config):
    """64 episodes of 70 tokens at 640/s are 7 s, and 3,000 tokens of prompts 3 s. Training takes 3 s to 14.96 s. The
    shorter of both takes its time, and what is left of the longer half of it. The warm start has both cores: 10 steps
    of 8 s at half the time. An evaluation is 200 / 64 batches at half the time, before and after steps 15 and 30."""
    found = expected(config, TRIAL, cores=2, shares=True)
    assert found.sampling == pytest.approx(10.0)
    assert found.training == pytest.approx((3.0, 14.96))
    assert found.step == pytest.approx((3.0 + 3.5, 10.0 + 2.48))
    assert found.warm_start == pytest.approx(40.0)
    assert (found.num_evaluations, found.evaluations) == (3, pytest.approx(3 * 200 / 64 * 5.0))
    rest = 40.0 + 46.875
    assert found.run == pytest.approx((30 * 6.5 + rest, 30 * 12.48 + rest))


def test_sides_that_share_no_cores_wait_for_the_slower_one(config):
    assert expected(config, TRIAL, cores=2, shares=False).step == pytest.approx((10.0, 14.96))


def test_sides_in_turns_take_the_sum(config):
    orchestrator = config.orchestrator.model_copy(update={"max_async_level": 0})
    found = expected(config.model_copy(update={"orchestrator": orchestrator}), TRIAL, cores=2, shares=False)
    assert found.step == pytest.approx((13.0, 24.96))


def test_what_is_printed(config):
    speed, told, memory = lines(config, TRIAL, expected(config, TRIAL, cores=2, shares=True))
    assert speed.split(None, 1)[1] == (
        "sampler 640 tokens/s (64 sequences), trainer 500 tokens/s, on one thread each, measured here and now"
    )
    assert "a step takes 6 to 12 s (sampling 64 episodes of 70 tokens 10 s" in told
    assert "training 1,500 to 7,480 tokens 3 to 15 s" in told
    assert "the run 5 to 8 min: 30 steps, a warm start of 40 s, 3 evaluations of 16 s" in told
    assert "sampler 2.0 GB, trainer at most 3.5 GB" in memory
    assert [duration(x) for x in (7.4, 119.4, 120, 5000)] == ["7 s", "119 s", "2 min", "83 min"]


def test_memory_that_the_machine_lacks_is_said(config):
    huge = replace(TRIAL, trainer_bytes=10**15)
    assert "too little" in lines(config, huge, expected(config, huge, cores=2, shares=True))[2]


def test_small_models_and_models_elsewhere_are_not_measured(tmp_path):
    model = {"model": {"name": str(tmp_path)}}
    small = load_config(RECIPE, settings=model)
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    assert not is_measured(small)
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.truncate(200_000_000)  # sparse
    assert is_measured(small)
    assert not is_measured(small.model_copy(update={"cluster": ClusterConfig()}))
    assert is_measured(small.model_copy(update={"cluster": ClusterConfig(roles=())}))
    elsewhere = {"inference": {"torch": {"urls": ["http://127.0.0.1:1"]}}}
    assert not is_measured(load_config(RECIPE, settings={**model, **elsewhere}))


def sample(*ids: int, trained: int) -> TrainingSample:
    length = len(ids)
    mask = np.arange(length) >= length - trained
    return TrainingSample(
        token_ids=np.array(ids, np.int32),
        loss_mask=mask,
        logprobs=np.full(length, np.nan, np.float32),
        advantages=np.zeros(length, np.float32),
        chunk_ids=np.where(mask, 0, -1).astype(np.int32),
        policy_versions=np.where(mask, 0, -1).astype(np.int32),
        temperatures=np.ones(length, np.float32),
    )


@pytest.mark.slow
@pytest.mark.realtime
def test_a_measurement_that_fails_does_not_stop_the_run(monkeypatch, caplog):
    """Started as a program, as a run does it, whose model is not there."""
    monkeypatch.setattr(expected_time, "is_measured", lambda config: True)
    monkeypatch.setattr(expected_time, "like_episodes", lambda *args: [[sample(1, 2, 3, trained=1)]])
    made = load_config(RECIPE, settings={**IN_FLOAT32, "model": {"name": "/no/such/model"}})
    console = Console(record=True)
    announce(made, Environments(train={}, eval={}), console)
    assert console.export_text() == ""
    (record,) = caplog.records
    assert "could not be measured" in record.message and "/no/such/model" in record.message


@pytest.mark.slow
def test_real_passes_are_measured_and_batches_counted(qwen_folder, monkeypatch):
    """Eight groups of eight. Both conversations begin with 10 tokens; each then has 5 of its own and 4 trained ones.
    The eight groups are two different conversations: 10 + 2 x 9 tokens if a group's members are alike. If not, each of
    64 members has its 4: 10 + 2 x 5 + 64 x 4."""
    from verbatim.run import speed_trial

    monkeypatch.setattr(speed_trial, "SECONDS", 0.05)
    one, other = (sample(*range(10), *range(20 + k, 29 + k), trained=4) for k in (0, 1))
    found = speed_trial.measure(
        TrialOrder(
            config=dump_config(load_config(RECIPE, settings=IN_FLOAT32)),
            model=str(qwen_folder),
            conversations=[[one], [other]],
        )
    )
    assert found.sequences == 64
    assert (found.fewest_trained, found.most_trained, found.sampled_per_episode) == (28, 276, 4.0)
    assert found.warm_start_tokens == 28
    assert min(found.sampled_per_second, found.prompts_per_second, found.trained_per_second) > 0
    assert found.warm_start_per_second == found.trained_per_second
    assert min(found.sampler_bytes, found.trainer_bytes) > 0


@pytest.fixture
def qwen_folder(tmp_path) -> Path:
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=1024,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "qwen")
    return tmp_path / "qwen"
