"""Makes a run folder of any size. The episodes are played with the scripted sampler, and written by the same code as in
a run.

128 episodes with tools are played once, through the rollout engine. Every step then reuses these episodes, with
logprobs, rewards, outcomes and ids of its own. By default, the folder has 100,000 trajectories of about 1,650 sampled
tokens, which take 2 GB. `benchmarks/viewer.py` uses this module. Run as a script, it prints one JSON line:

    python benchmarks/big_run.py FOLDER [--trajectories 100000]
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from verbatim.core.trajectories import TrajectoryOutcome
from verbatim.core.types import Trajectory
from verbatim.environments.tools import FunctionTool, ToolManager
from verbatim.inference import SampleRequest, SamplingParams
from verbatim.inference.scripted import ScriptedSampler
from verbatim.logs.monitors.jsonl import JsonlWriter
from verbatim.logs.monitors.metrics_log import MetricsLog
from verbatim.logs.outcomes.files import OutcomeFolder
from verbatim.models.renderers import create_renderer
from verbatim.models.trained_tokenizer import END_OF_TURN, build_tokenizer
from verbatim.rollouts import MultiTurnRollout

PER_STEP, GROUP = 128, 16
ENVIRONMENTS = ("library", "archive", "atlas")
ROOT = Path(__file__).parents[1]
_EVAL_EVERY, _EVAL_EPISODES = 50, 24
_METRICS = 90
"""Number of metrics per step in addition to those computed from the trajectories, as in a run with several replicas."""


def look_up(subject: str) -> str:
    """Look a subject up.

    Args:
        subject: What to look up.
    """
    return " ".join(random.Random(subject).choices(words(), k=40))


def words() -> list[str]:
    """The words of a page of the documentation."""
    if not _WORDS:
        _WORDS.extend((ROOT / "docs" / "trajectories.md").read_text(encoding="utf-8").split())
    return _WORDS


_WORDS: list[str] = []


@dataclass(frozen=True, kw_only=True)
class Written:
    """The folder that was written, with its counts."""

    folder: Path
    trajectories: int
    steps: int
    sampled_tokens: int
    size: int
    """Size of the outcome files in bytes."""


def play(folder: Path, *, count: int, turns: int, length: int) -> list[Trajectory]:
    """Play episodes of a scripted model that calls the tool `look_up` in each turn and then answers.

    Args:
        folder: The folder into which the tokenizer is written.
        count: Number of episodes, in groups of `GROUP`.
        turns: Maximum number of turns per episode.
        length: Number of words in each turn.
    """
    tokenizer = build_tokenizer([" ".join(words())] * 2, vocab_size=2048, context_length=65536)
    tokenizer.save_pretrained(folder / "model")
    ends = tokenizer.convert_tokens_to_ids(END_OF_TURN)

    def script(request: SampleRequest) -> list[int]:
        draw = random.Random(request.seed)
        said = " ".join(draw.choices(words(), k=length))
        call = json.dumps({"name": "look_up", "arguments": {"subject": draw.choice(words())}})
        again = request.prompt_ids.tolist().count(ends) < 2 * turns
        text = f"<think>\n{said}\n</think>\n\n" + (f"<tool_call>\n{call}\n</tool_call>" if again else said)
        ids: list[int] = tokenizer.encode(text)
        return [*ids, ends]

    sampler = ScriptedSampler(
        script=script, vocab_size=len(tokenizer), context_length=65536, logprob=lambda token: -0.5
    )
    renderer = create_renderer("auto", tokenizer)
    rollout = MultiTurnRollout(
        sampler=sampler,
        template=renderer,
        tool_manager=ToolManager([FunctionTool(look_up)]),
        max_turns=turns,
        sampling_params=SamplingParams(max_tokens=8192, stop_token_ids=(ends,)),
    )
    conversations = [
        {"messages": [{"role": "user", "content": " ".join(["About", *words()[i : i + 12]])}], "id": f"subject {i}"}
        for i in range(count // GROUP)
        for _ in range(GROUP)
    ]
    return rollout(conversations)


def outcomes_of(step: int, played: Sequence[Trajectory], draw: np.random.Generator) -> list[TrajectoryOutcome]:
    """Make the outcomes of a step: the played episodes, with logprobs, rewards and ids of this step."""
    skill = 1 - math.exp(-step / 300)
    return [_outcome(step, place, each, skill, draw) for place, each in enumerate(played)]


def _outcome(step: int, place: int, played: Trajectory, skill: float, draw: np.random.Generator) -> TrajectoryOutcome:
    group, sample = divmod(place, GROUP)
    turns, trainer, gradients = [], [], []
    advantage = float(draw.normal())
    for turn in played.turns:
        count = len(turn.completion_ids)
        logprobs = -draw.exponential(0.5, count).astype(np.float32)
        version = max(0, step - 1 - place % 3)
        turns.append(turn.replace(logprobs=logprobs, policy_versions=np.full(count, version, np.int32)))
        trainer.append(np.minimum(logprobs + draw.normal(0, 0.01, count).astype(np.float32), 0))
        gradients.append((-advantage * np.exp(draw.normal(0, 0.01, count))).astype(np.float32))
    kind = draw.random()
    error = f"environment: TimeoutError after {int(kind * 1000)} s" if kind < 0.02 else None
    name = f"train-{step * (PER_STEP // GROUP) + group}"
    trajectory = played.replace(
        turns=turns,
        trajectory_id=f"{name}-{sample}",
        group_id=name,
        sample_index=sample,
        run_id="big",
        error=error,
        env=ENVIRONMENTS[group % len(ENVIRONMENTS)],
        example_id=f"subject {(step + group) % 500}",
        reward=None if error else float(draw.random() < 0.2 + 0.7 * skill),
        advantage=None if error else advantage,
        reward_parts={} if error else {"right": float(draw.random()), "short": float(draw.random())},
        stop_reason="length" if kind > 0.95 else played.stop_reason,
        truncated=bool(kind > 0.95),
    )
    if error:
        return TrajectoryOutcome.of_dropped(trajectory, "error")
    if kind < 0.07:
        return TrajectoryOutcome.of_dropped(trajectory, "filter:repetition", ["repetition"])
    if kind < 0.10:
        return TrajectoryOutcome.of_dropped(trajectory, "stale")
    return TrajectoryOutcome(
        trajectory=trajectory,
        turns=("trained",) * len(turns),
        trainer_logprobs=tuple(trainer),
        gradients=tuple(gradients),
    )


def metrics_of(step: int, outcomes: Sequence[TrajectoryOutcome], draw: np.random.Generator) -> dict[str, Any]:
    """Make the metrics of a step: those computed from the trajectories, and as many further metrics as a run has."""
    rewards = [outcome.trajectory.reward for outcome in outcomes if outcome.trajectory.reward is not None]
    sampled = sum(outcome.trajectory.num_sampled_tokens for outcome in outcomes)
    trained = sum(outcome.num_trained_tokens for outcome in outcomes)
    mean = float(np.mean(rewards))
    return {
        "reward/mean": mean,
        "reward/std": float(np.std(rewards)),
        "success": mean,
        "rollouts": len(outcomes),
        "turns": float(np.mean([len(outcome.turns) for outcome in outcomes])),
        "completion_tokens": sampled / len(outcomes),
        "entropy": 2 * math.exp(-step / 500),
        "grad_norm": float(draw.gamma(2)),
        "staleness/mean": 1.0,
        "mismatch_kl": float(draw.exponential(1e-3)),
        "ledger/sampled": sampled * step,
        "ledger/trained": trained * step,
        "ledger/dropped/error": (sampled - trained) * step,
        "seconds": 12.0,
        **{f"replica/{i % 8}/figure_{i // 8}": float(value) for i, value in enumerate(draw.random(_METRICS))},
    }


def write_run(folder: Path, *, trajectories: int, turns: int = 4, length: int = 182, seed: int = 0) -> Written:
    """Write the run folder. By default, each trajectory has about 1,650 sampled tokens."""
    draw = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    steps = max(1, trajectories // PER_STEP)
    (folder / "config.toml").write_text(f'name = "big"\nmax_steps = {steps}\nseed = {seed}\n[model]\nname = "model"\n')
    played = play(folder, count=PER_STEP, turns=turns, length=length)
    files = OutcomeFolder(folder / "trajectories")
    metrics = MetricsLog(folder / "metrics.jsonl")
    evaluated = OutcomeFolder(folder / "evaluations")
    tokens = 0
    for step in range(1, steps + 1):
        outcomes = outcomes_of(step, played, draw)
        files.write(step, outcomes)
        found = metrics_of(step, outcomes, draw)
        metrics.on_step(step, found)
        tokens += sum(outcome.trajectory.num_sampled_tokens for outcome in outcomes)
        if step % _EVAL_EVERY == 0:
            evaluated.write(
                step,
                [
                    TrajectoryOutcome.of_evaluated(
                        outcome.trajectory.replace(trajectory_id=f"eval-{place}-0", group_id=f"eval-{place}")
                    )
                    for place, outcome in enumerate(outcomes[:_EVAL_EPISODES])
                ],
            )
            share = {name: found[name] for name in ("success", "reward/mean", "reward/std")}
            metrics.on_eval(step, ENVIRONMENTS[0], {**share, "episodes": _EVAL_EPISODES, "failed": 0})
    metrics.close()
    alarms = JsonlWriter(folder / "alarms.jsonl")
    alarms.write(
        {
            "name": "entropy_collapse",
            "step": steps // 2,
            "state": "raised",
            "message": "entropy fell to 0.02 from 1.1",
            "cause": "the learning rate is too high",
            "advice": "lower trainer.optim.lr (now 3e-4)",
            "evidence": {"entropy": 0.02},
            "env": None,
            "trajectory_ids": [f"train-{steps * PER_STEP // GROUP}-0"],
        }
    )
    alarms.close()
    (folder / "summary.json").write_text(json.dumps({"steps": steps}))
    size = sum(mark.size for mark in files.files.values())
    return Written(folder=folder, trajectories=steps * PER_STEP, steps=steps, sampled_tokens=tokens, size=size)


def main() -> None:
    """Write one run, and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--trajectories", type=int, default=100_000)
    args = parser.parse_args()
    began = time.perf_counter()
    found = write_run(args.folder, trajectories=args.trajectories)
    print(
        json.dumps(
            {
                "benchmark": "big_run",
                "trajectories": found.trajectories,
                "steps": found.steps,
                "sampled_tokens": found.sampled_tokens,
                "gigabytes": round(found.size / 1e9, 3),
                "bytes_per_sampled_token": round(found.size / found.sampled_tokens, 2),
                "seconds": round(time.perf_counter() - began, 1),
            }
        )
    )


if __name__ == "__main__":
    main()
