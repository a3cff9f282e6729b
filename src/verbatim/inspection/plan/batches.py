"""Makes the batch for a plan: from an earlier run's trajectories, or with the maximum lengths that the configuration
allows."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from verbatim.config.schema import RunConfig
from verbatim.core.errors import UsageError
from verbatim.core.trajectories import build
from verbatim.core.types import TrainingSample, Trajectory, Turn
from verbatim.logs.monitors.trajectory_log import TRAJECTORIES, read_trajectories

KEPT_IDS = 100
"""Assumed number of ids in a kept set if the number is unknown: with `top_p` or `min_p`, without `top_k`, and without
an earlier run."""
PROMPT_SHARE = 0.25
"""If the turns alone could fill a trajectory, the prompt is assumed to take this share of the trajectory's tokens."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PlannedBatch:
    """A batch, and the work of the sampler to produce it."""

    samples: Sequence[TrainingSample]
    """The training samples."""
    num_rollouts: int
    """Number of trajectories."""
    sampled_tokens: int
    """Number of sampled tokens."""
    prompt_tokens: int
    """Number of context tokens that were not sampled. The sampler reads each of them once."""
    longest_sampled: int
    """Number of sampled tokens in the trajectory with the most sampled tokens. These are sampled one after the
    other."""
    mean_context: float
    """Mean number of tokens that precede a sampled token in its sequence."""
    said: str
    """A sentence that says where the lengths come from."""
    is_assumed: bool = True
    """True if the lengths are the maximum that the configuration allows; False if they come from a run."""

    @property
    def longest(self) -> int:
        """Number of tokens in the longest sample."""
        return max(map(len, self.samples))


def assumed_batch(config: RunConfig) -> PlannedBatch:
    """A batch in which every rollout has the maximum length, `orchestrator.seq_len`.

    Each rollout is a prompt, which all rollouts of a group share, followed directly by turns of `max_tokens` sampled
    tokens. At most three quarters of a rollout's tokens are sampled.

    Example: `seq_len = 2048` and 16 turns of up to 512 tokens give a prompt of 512 tokens and three turns of 512.
    """
    orchestrator = config.orchestrator
    length = orchestrator.seq_len
    most = max(
        min(
            (env.sampling or orchestrator.sampling).max_tokens * env.max_turns,
            env.max_total_completion_tokens or length,
        )
        for env in orchestrator.train.env
    )
    turn = max((env.sampling or orchestrator.sampling).max_tokens for env in orchestrator.train.env)
    sampled = max(1, min(most, int(length * (1 - PROMPT_SHARE))))
    turns = [min(turn, sampled - start) for start in range(0, sampled, turn)]
    prompt = length - sampled
    rng = np.random.default_rng(0)
    # Every vocabulary has at least 256 ids.
    vocabulary = config.model.build.vocab_size if config.model.build is not None else 256
    trajectories = []
    for group in range(orchestrator.batch_size // orchestrator.group_size):
        opening = rng.integers(0, vocabulary, prompt, dtype=np.int32)
        for number in range(orchestrator.group_size):
            rest = rng.integers(0, vocabulary, sampled, dtype=np.int32)
            trajectories.append(_trajectory(opening, rest, turns, f"{group}-{number}"))
    shape = f"{len(turns)} turns of {turns[0]:,}" if len(turns) > 1 else f"one turn of {sampled:,}"
    return _batch(
        config,
        trajectories,
        f"assumed: each of {len(trajectories):,} rollouts has orchestrator.seq_len = {length:,} tokens, a prompt of "
        f"{prompt:,} that its group shares, and {shape} sampled; --from-run FOLDER uses the lengths of a run",
    )


def batch_of_run(config: RunConfig, run: Path) -> PlannedBatch:
    """Make a batch from the last trajectories of a run.

    Raises:
        UsageError: the folder does not exist, is not a run folder, or has no trajectories that can be trained.
    """
    path = run / TRAJECTORIES if run.is_dir() else run
    if not path.exists():
        raise UsageError(
            f"--from-run {run}: there is no folder {TRAJECTORIES}; expected a run folder with "
            "monitor.save_trajectories = true, for example runs/NAME/latest"
        )
    kept: deque[Trajectory] = deque(maxlen=config.orchestrator.batch_size)
    kept.extend(trajectory for _, trajectory in read_trajectories(run) if trajectory.error is None)
    if not any(trajectory.num_sampled_tokens for trajectory in kept):
        raise UsageError(f"--from-run {run}: {path} has no trajectory that could be trained")
    few = (
        f", fewer than the batch_size of {config.orchestrator.batch_size:,}"
        if (len(kept) < config.orchestrator.batch_size)
        else ""
    )
    found = _batch(config, kept, f"the last {len(kept):,} trajectories of {path}{few}")
    return replace(found, is_assumed=False)


def kept_set_bytes(config: RunConfig, batch: PlannedBatch) -> int:
    """The size of a batch's kept sets in bytes, at 4 bytes per id; 0 if sampling keeps all ids.

    The number of ids is taken from the kept sets of the earlier run. If there are no such kept sets, each sampled token
    is assumed to have `top_k` ids, or `KEPT_IDS` ids without `top_k`.
    """
    if not config.needs_kept_sets:
        return 0
    found = sum(len(sample.kept_sets.ids) for sample in batch.samples if sample.kept_sets is not None)
    samplings = [env.sampling or config.orchestrator.sampling for env in config.orchestrator.train.env]
    return 4 * (found or batch.sampled_tokens * max(sampling.top_k or KEPT_IDS for sampling in samplings))


def _trajectory(opening: np.ndarray, rest: np.ndarray, lengths: Sequence[int], name: str) -> Trajectory:
    turns, start, context = [], 0, opening
    for length in lengths:
        completion = rest[start : start + length]
        turns.append(Turn(prompt_ids=context, completion_ids=completion, logprobs=np.full(length, -1.0, np.float32)))
        context = np.concatenate([context, completion])
        start += length
    return Trajectory(example_id=name, turns=tuple(turns), reward=1.0, advantage=1.0, trajectory_id=name)


def _batch(config: RunConfig, trajectories: Iterable[Trajectory], said: str) -> PlannedBatch:
    orchestrator = config.orchestrator
    strategies = {env.trajectory_strategy or orchestrator.trajectory_strategy for env in orchestrator.train.env}
    samples: list[TrainingSample] = []
    sampled = prompt = longest = 0
    contexts = 0.0
    count = 0
    for trajectory in trajectories:
        count += 1
        built = build(
            trajectory,
            strategy=max(strategies, key=lambda name: name == "branching"),
            max_length=orchestrator.seq_len,
            needs_logprobs=orchestrator.training_mode != "sft",
        )
        samples.extend(built.samples)
        own = trajectory.num_sampled_tokens
        sampled += own
        longest = max(longest, own)
        for turn in trajectory.turns:
            contexts += len(turn.completion_ids) * (len(turn.prompt_ids) + len(turn.completion_ids) / 2)
        prompt += max((len(turn.prompt_ids) + len(turn.completion_ids) for turn in trajectory.turns), default=own) - own
    if not samples:
        raise UsageError(
            f"no token of these {count} trajectories can be trained: they have no logprobs, or are "
            f"longer than orchestrator.seq_len = {orchestrator.seq_len}"
        )
    return PlannedBatch(
        samples=samples,
        num_rollouts=count,
        sampled_tokens=sampled,
        prompt_tokens=max(0, prompt),
        longest_sampled=longest,
        mean_context=contexts / max(1, sampled),
        said=said,
    )
