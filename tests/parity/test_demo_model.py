"""FORMULAS' numerical promises on the demo's own model, before and after reinforcement learning."""

import asyncio
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[1] / "trainer"))
from trainer_helpers import gradients, largest_difference

from verbatim import build_samples
from verbatim.algorithms.credit import assign_advantages
from verbatim.algorithms.credit.baselines import default_advantage
from verbatim.algorithms.losses import LOSSES
from verbatim.config import load_config
from verbatim.config.schema import RunConfig
from verbatim.core.trajectories import build
from verbatim.environments.guess_number import GuessNumber
from verbatim.inference import SamplingParams
from verbatim.inference.embedded.engine import TorchSampler
from verbatim.inference.embedded.settings import TorchSettings
from verbatim.models.build import build_model
from verbatim.models.loading import load_tokenizer
from verbatim.models.renderers import create_renderer
from verbatim.models.trained_tokenizer import chat_text
from verbatim.rollouts import EpisodeLimits, GroupRun, RolloutSetup, trajectory_from_messages
from verbatim.trainer.trainer import Trainer
from verbatim.trainer.warm_start import warm_start

RECIPE = Path(__file__).parents[2] / "recipes" / "guess_number.toml"
ENVIRONMENT = GuessNumber()

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return load_config(RECIPE)


@pytest.fixture(scope="module")
def before_rl(config, tmp_path_factory):
    """The demo's model after part of its warm start."""
    folder = tmp_path_factory.mktemp("demo")
    shown = ENVIRONMENT.demonstrations(200, 0)
    build_model(folder / "model", config.model.build, [chat_text(d.messages, d.tools) for d in shown], seed=0)
    tokenizer = load_tokenizer(folder / "model")
    renderer = create_renderer("auto", tokenizer)
    played = [
        trajectory_from_messages(renderer, d.messages, d.tools, trajectory_id=str(i)) for i, d in enumerate(shown)
    ]
    conversations = [build(trajectory, needs_logprobs=False).samples for trajectory in played]
    settings = config.trainer.model_copy(update={"optim": config.warm_start.optim, "optimizer_steps_per_batch": 1})
    trainer = Trainer(folder / "model", settings, loss=LOSSES["sft"], total_optimizer_steps=40, tokenizer=tokenizer)
    warm_start(trainer, conversations, steps=40, batch_size=8, seed=0)
    trainer.save_weights(folder / "before")
    return folder / "before"


@pytest.fixture(scope="module")
def after_rl(config, before_rl, tmp_path_factory):
    """The same model after a few steps on its own episodes."""
    trainer = Trainer(
        before_rl,
        config.trainer,
        loss=LOSSES["default"],
        tokenizer=load_tokenizer(before_rl),
        total_optimizer_steps=3 * config.trainer.optimizer_steps_per_batch,
    )
    for step in range(3):
        metrics = trainer.train_batch(training_samples(episodes(before_rl, seed=step)))
        assert metrics["grad_norm"] > 0
    folder = tmp_path_factory.mktemp("after")
    trainer.save_weights(folder)
    return folder


def episodes(model, *, seed, deterministic=False):
    """48 episodes in 6 groups."""

    async def run():
        sampler = TorchSampler(
            model, config=TorchSettings(max_batch_size=32, deterministic=deterministic), context_length=512
        )
        setup = RolloutSetup(
            env="guess_number",
            environment=ENVIRONMENT,
            sampler=sampler,
            renderer=create_renderer("auto", load_tokenizer(model)),
            params=SamplingParams(temperature=1.0, max_tokens=48),
            limits=EpisodeLimits(max_context=512),
            slots=asyncio.Semaphore(64),
        )
        try:
            runs = [
                GroupRun(setup, example, index=i, size=8, run_seed=seed)
                for i, example in enumerate(ENVIRONMENT.examples("train")[:6])
            ]
            return await asyncio.gather(*(run.run() for run in runs))
        finally:
            await sampler.close()

    return asyncio.run(run())


def training_samples(groups):
    credited = [assign_advantages(group, default_advantage) for group in groups]
    return [sample for group in credited for t in group.trajectories for sample in build_samples(t)]


@pytest.fixture(params=["before_rl", "after_rl"])
def model(request):
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_sampler_and_the_trainer_agree_on_every_logprob(config, model, deterministic):
    samples = training_samples(episodes(model, seed=9, deterministic=deterministic))
    trainer = Trainer(model, config.trainer, loss=LOSSES["default"], total_optimizer_steps=1)
    theirs = trainer.logprobs(samples)
    difference = np.concatenate(
        [np.abs(ours[s.loss_mask] - s.logprobs[s.loss_mask]) for ours, s in zip(theirs, samples, strict=True)]
    )
    assert len(difference) > 1000
    assert np.median(difference) <= 1e-6
    assert difference.max() <= 5e-5


def test_packed_and_one_by_one_give_the_same_gradient(model):
    samples = training_samples(episodes(model, seed=10))[:12]
    for dtype, limit in (("float64", 1e-12), ("float32", 1e-5)):
        expected, _, _ = gradients(model, samples, dtype=dtype, singly=True)
        for micro_batch_tokens in (10_000, 700):
            found, _, _ = gradients(model, samples, dtype=dtype, micro_batch_tokens=micro_batch_tokens)
            assert largest_difference(found, expected) <= limit


def test_an_episode_re_run_from_its_recorded_ids_gives_the_same_ids_and_logprobs(model):
    first, again = (episodes(model, seed=11, deterministic=True) for _ in range(2))
    for a, b in zip(first, again, strict=True):
        for s, t in zip(a.trajectories, b.trajectories, strict=True):
            assert s["input_ids"] == t["input_ids"]
            assert s["logprobs"] == t["logprobs"]
