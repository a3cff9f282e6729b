"""The whole synchronous training loop in one file: every stage by its name, nothing hidden.

An agent with a tool learns to guess a number. `python recipes/minimal_rl.py --steps 60` trains it. Without `--steps`
the run is short, and only shows how the parts work together. `verbatim rl recipes/guess_number.toml` has the same
stages, and also processes, checkpoints and metrics.

    Example -> Environment -> [Renderer -> Sampler -> parse -> Tools -> bridge] x turns -> Trajectory
            -> Group -> credit -> filters -> strategy -> TrainingSample -> packing -> MicroBatch
            -> loss -> optimizer -> weights -> Sampler
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from verbatim import Group, TrainingSample
from verbatim.algorithms import LOSSES
from verbatim.algorithms.credit import assign_advantages
from verbatim.algorithms.credit.baselines import default_advantage
from verbatim.algorithms.curriculum import ExampleSchedule
from verbatim.algorithms.filters import apply_filters
from verbatim.algorithms.filters.zero_advantage import ZeroAdvantage
from verbatim.config.schema import BuildConfig, OptimConfig, TrainerConfig
from verbatim.core.trajectories import Ledger, build
from verbatim.environments.guess_number import GuessNumber
from verbatim.environments.resolve import corpus
from verbatim.inference import SamplingParams
from verbatim.inference.embedded.engine import TorchSampler
from verbatim.inference.embedded.settings import TorchSettings
from verbatim.models.build import build_model
from verbatim.models.loading import load_tokenizer
from verbatim.models.renderers import create_renderer
from verbatim.models.renderers.renderer import Renderer
from verbatim.rollouts import EpisodeLimits, GroupRun, RolloutSetup, trajectory_from_messages
from verbatim.trainer.trainer import Trainer
from verbatim.trainer.transport import WeightFolders
from verbatim.trainer.warm_start import warm_start

SEED = 0
GROUP_SIZE = 16
SEQ_LEN = 512


def make_model(folder: Path, environment: GuessNumber) -> Path:
    """Build a small model with random weights, and a tokenizer that is trained on text of the task itself."""
    texts = corpus(environment.demonstrations(500, SEED))
    build_model(folder, BuildConfig(hidden_size=128, num_layers=3, vocab_size=1024), texts, seed=SEED)
    return folder


def teach_the_format(model: Path, folder: Path, environment: GuessNumber, renderer: Renderer, steps: int) -> Path:
    """Take supervised optimizer steps on clumsy play, which shows how to call a tool but not how to win."""
    conversations = []
    for number, demonstration in enumerate(environment.demonstrations(1000, SEED)):
        trajectory = trajectory_from_messages(
            renderer, demonstration.messages, demonstration.tools, trajectory_id=f"demonstration-{number}"
        )
        conversations.append(build(trajectory, needs_logprobs=False).samples)
    trainer = Trainer(
        model,
        TrainerConfig(optim=OptimConfig(lr=3e-3, schedule="cosine", warmup_steps=10)),
        loss=LOSSES["sft"],
        total_optimizer_steps=steps,
        tokenizer=load_tokenizer(model),
    )
    warm_start(trainer, conversations, steps=steps, batch_size=8, seed=SEED)
    trainer.save_weights(folder)
    return folder


def to_samples(groups: Sequence[Group], ledger: Ledger, first_index: int) -> list[TrainingSample]:
    """Apply credit, filters and the strategy to the groups. Tokens that are not trained are counted by reason."""
    samples: list[TrainingSample] = []
    filters = {"zero_advantage": ZeroAdvantage()}
    for index, group in enumerate(groups, start=first_index):
        trained, dropped = 0, Counter[str]()
        for trajectory in assign_advantages(group, default_advantage).trajectories:
            if trajectory.error is not None:
                dropped["error"] += trajectory.num_sampled_tokens
                continue
            verdict = apply_filters(trajectory, filters)
            if verdict.dropped_by is not None:
                dropped[f"filter:{verdict.dropped_by}"] += trajectory.num_sampled_tokens
                continue
            built = build(trajectory, strategy="interleaved", max_length=SEQ_LEN)
            dropped.update(built.dropped)
            trained += sum(sample.num_trained_tokens for sample in built.samples)
            samples.extend(built.samples)
        ledger.settle_group(index, trained=trained, dropped=dropped)
    return samples


async def reinforce(model: Path, folder: Path, environment: GuessNumber, steps: int, groups_per_step: int) -> float:
    """Run the training loop, and return the mean reward of the last step."""
    tokenizer = load_tokenizer(model)
    renderer = create_renderer("auto", tokenizer)
    sampler = TorchSampler(model, config=TorchSettings(max_batch_size=128), context_length=SEQ_LEN)
    trainer = Trainer(
        model,
        TrainerConfig(optim=OptimConfig(lr=7e-4, beta2=0.95, warmup_steps=10, max_grad_norm=0.1)),
        loss=LOSSES["default"],
        total_optimizer_steps=steps,
        tokenizer=tokenizer,
    )
    weights = WeightFolders(folder)
    ledger = Ledger()
    schedule = ExampleSchedule({"guess_number": environment.examples("train")}, {"guess_number": 1.0}, seed=SEED)
    setup = RolloutSetup(
        env="guess_number",
        environment=environment,
        sampler=sampler,
        renderer=renderer,
        params=SamplingParams(temperature=1.0, max_tokens=48),
        limits=EpisodeLimits(max_turns=6, max_context=SEQ_LEN),
        slots=asyncio.Semaphore(256),
    )
    reward = 0.0
    try:
        for step in range(steps):
            draws = [schedule.draw() for _ in range(groups_per_step)]
            runs = [
                GroupRun(
                    setup,
                    draw.example,
                    index=draw.index,
                    size=GROUP_SIZE,
                    run_seed=SEED,
                    on_sampled=ledger.sampled_tokens,
                    on_dropped=ledger.drop,
                )
                for draw in draws
            ]
            groups = await asyncio.gather(*(run.run() for run in runs))
            samples = to_samples(groups, ledger, first_index=draws[0].index)
            metrics = await asyncio.to_thread(trainer.train_batch, samples)
            await sampler.update_weights(weights.publish(step + 1, trainer.save_weights), step + 1)
            ledger.check(pending=0)
            rewards = [t.reward or 0.0 for group in groups for t in group.completed]
            reward = sum(rewards) / max(1, len(rewards))
            print(
                f"step {step + 1:3d}  reward {reward:.3f}  trained tokens {metrics['trained_tokens']:6.0f}  "
                f"grad norm {metrics['grad_norm']:.2f}",
                flush=True,
            )
    finally:
        await sampler.close()
    return reward


def main(argv: Sequence[str] | None = None) -> float:
    """Build a model, warm-start it and train it by reinforcement learning. Return the mean reward of the last step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=10, help="steps: batches trained and published")
    parser.add_argument("--warm-start-steps", type=int, default=150, help="supervised optimizer steps before that")
    parser.add_argument("--groups", type=int, default=16, help="groups of 16 episodes per step")
    args = parser.parse_args(argv)
    environment = GuessNumber(low=1, high=15, max_guesses=4)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = make_model(folder / "model", environment)
        renderer = create_renderer("auto", load_tokenizer(model))
        if args.warm_start_steps:
            model = teach_the_format(model, folder / "warm_start", environment, renderer, args.warm_start_steps)
        return asyncio.run(reinforce(model, folder / "weights", environment, args.steps, args.groups))


if __name__ == "__main__":
    main()
