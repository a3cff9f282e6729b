"""A trajectory as training samples, and what of it is not trained and why."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from verbatim.trajectories.extension import OpenSample
from verbatim.trajectories.interleaved import interleaved
from verbatim.types import TrainingSample, Trajectory, Turn

Strategy = Callable[[Iterable[tuple[int, Turn]], int | None], tuple[list[OpenSample], list[int]]]

STRATEGIES: dict[str, Strategy] = {"interleaved": interleaved}


@dataclass(frozen=True, kw_only=True)
class BuiltSamples:
    """The samples of one trajectory; every sampled token of it is in exactly one of the two."""

    samples: list[TrainingSample]
    """Each with at least one trained token."""
    dropped: dict[str, int] = field(default_factory=dict)
    """Sampled tokens that are not trained, by reason: `missing_logprobs`, `over_length`."""


def build_samples(trajectory: Trajectory, strategy: str = "interleaved") -> list[TrainingSample]:
    """The training samples of a trajectory.

    A turn whose logprobs are missing is context only. The advantage of a token is its turn's, or else its
    trajectory's, or else 0.

    Raises:
        ValueError: an unknown strategy.

    Example:
        >>> first = Turn(prompt_ids=[1, 2], completion_ids=[3], logprobs=[-0.5])
        >>> second = Turn(prompt_ids=[1, 2, 3, 4], completion_ids=[5], logprobs=[-0.25])
        >>> (sample,) = build_samples(Trajectory(example_id="x", turns=(first, second), advantage=2.0))
        >>> sample.token_ids.tolist(), sample.loss_mask.tolist()
        ([1, 2, 3, 4, 5], [False, False, True, False, True])
        >>> sample.advantages.tolist(), sample.chunk_ids.tolist()
        ([0.0, 0.0, 2.0, 0.0, 2.0], [-1, -1, 0, -1, 1])
    """
    return build(trajectory, strategy=strategy).samples


def build(
    trajectory: Trajectory,
    *,
    strategy: str = "interleaved",
    max_length: int | None = None,
    needs_logprobs: bool = True,
) -> BuiltSamples:
    """The training samples of a trajectory, and a count of what is left out.

    Args:
        trajectory: Its advantages are already assigned.
        strategy: A name from `STRATEGIES`.
        max_length: Most tokens of a sample; turns beyond it are dropped whole, as `over_length`.
        needs_logprobs: False for supervised training, where recorded text has none.

    Raises:
        ValueError: an unknown strategy.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"trajectory strategy {strategy!r}; expected one of {', '.join(STRATEGIES)}")
    turns = trajectory.turns
    opened, too_long = STRATEGIES[strategy](
        ((i, turn) for i, turn in enumerate(turns) if len(turn.completion_ids)), max_length
    )
    dropped: dict[str, int] = {}
    if too_long:
        dropped["over_length"] = sum(len(turns[i].completion_ids) for i in too_long)
    samples = []
    for sample in opened:
        built = _finish(sample, trajectory, needs_logprobs)
        if built.loss_mask.any():
            samples.append(built)
    if needs_logprobs:
        missing = sum(len(turns[i].completion_ids) for s in opened for *_, i in s.spans if turns[i].logprobs is None)
        if missing:
            dropped["missing_logprobs"] = missing
    trained = sum(sample.num_trained_tokens for sample in samples)
    recorded = sum(len(turn.completion_ids) for turn in turns)
    assert trained + sum(dropped.values()) == recorded, (
        f"trajectory {trajectory.trajectory_id}: {recorded} recorded, {trained} trained, dropped {dropped}"
    )
    return BuiltSamples(samples=samples, dropped=dropped)


def _finish(sample: OpenSample, trajectory: Trajectory, needs_logprobs: bool) -> TrainingSample:
    length = len(sample)
    loss_mask = np.zeros(length, dtype=np.bool_)
    logprobs = np.full(length, np.nan, dtype=np.float32)
    advantages = np.zeros(length, dtype=np.float32)
    chunk_ids = np.full(length, -1, dtype=np.int32)
    versions = np.full(length, -1, dtype=np.int32)
    temperatures = np.ones(length, dtype=np.float32)
    for start, end, index in sample.spans:
        turn = trajectory.turns[index]
        if turn.logprobs is None and needs_logprobs:
            continue  # context only
        span = slice(start, end)
        loss_mask[span] = True
        chunk_ids[span] = index
        temperatures[span] = turn.temperature
        if turn.logprobs is not None:
            logprobs[span] = turn.logprobs
        if turn.policy_versions is not None:
            versions[span] = turn.policy_versions
        advantage = turn.advantage if turn.advantage is not None else trajectory.advantage
        advantages[span] = 0.0 if advantage is None else advantage
    return TrainingSample(
        token_ids=sample.ids.copy(), loss_mask=loss_mask, logprobs=logprobs, advantages=advantages,
        chunk_ids=chunk_ids, policy_versions=versions, temperatures=temperatures,
        trajectory_id=trajectory.trajectory_id, group_id=trajectory.group_id, env=trajectory.env,
    )  # fmt: skip
