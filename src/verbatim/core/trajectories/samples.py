"""Builds training samples, and counts the tokens that are left out, by reason."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise
from typing import Any, Literal

import numpy as np

from verbatim.core.errors import ComponentError, RunStopped
from verbatim.core.imports import import_object, is_import_path
from verbatim.core.records.experts import RoutedExperts
from verbatim.core.records.kept import KeptSets
from verbatim.core.records.samples import TrainingSample
from verbatim.core.records.spans import Span
from verbatim.core.records.turn import Turn
from verbatim.core.texts import shown
from verbatim.core.token_tree import Int32, PathReader, TokenPath
from verbatim.core.trajectories.openings import spoken_before
from verbatim.core.trajectories.outcome import TRAINED, TrajectoryOutcome
from verbatim.core.trajectories.record import TrajectoryRecord
from verbatim.core.trajectories.strategies import branching, interleaved

Strategy = Callable[[Sequence[Turn]], list[list[int]]]

STRATEGIES: dict[str, Strategy] = {"interleaved": interleaved, "branching": branching}
"""`strategy(turns) -> samples`: for each sample, the indices of its turns in order. In a sample, the prompt of each
turn after the first must extend the turn before it exactly; a strategy only chooses which turns to join into one
sample."""

OnBreak = Literal["split", "error"]

_SHOWN = 8
"""Number of ids that a message shows, starting at the first difference."""


@dataclass(frozen=True, kw_only=True)
class BuiltSamples:
    """The samples of one trajectory, and the outcome of each of the trajectory's sampled tokens."""

    samples: list[TrainingSample]
    """The samples, each with at least one trained token."""
    outcome: TrajectoryOutcome
    """Which tokens are trained, and which are dropped as `error`, `cancelled`, `untrained`, `over_length` or
    `missing_logprobs`."""

    @property
    def dropped(self) -> dict[str, int]:
        """Number of sampled tokens that are not trained, by reason."""
        return self.outcome.dropped


def build_samples(
    trajectory: TrajectoryRecord, strategy: str = "interleaved", *, include_failed: bool = False
) -> list[TrainingSample]:
    """The training samples of a trajectory; a failed trajectory has none.

    A turn that is marked untrained, or that has no logprobs, is only context. A token's advantage is its turn's
    advantage if the turn has one, else its trajectory's advantage if the trajectory has one, else 0.

    Args:
        trajectory: The trajectory, with its advantages.
        strategy: A name from `STRATEGIES`, or an import path.
        include_failed: Also build samples from a trajectory with an `error`, using the turns before the error.

    Raises:
        ValueError: an unknown strategy.

    Example:
        >>> from verbatim import Trajectory
        >>> first = Turn(prompt_ids=[1, 2], completion_ids=[3], logprobs=[-0.5])
        >>> second = Turn(prompt_ids=[1, 2, 3, 4], completion_ids=[5], logprobs=[-0.25])
        >>> (sample,) = build_samples(Trajectory(example_id="x", turns=(first, second), advantage=2.0))
        >>> sample.token_ids.tolist(), sample.loss_mask.tolist()
        ([1, 2, 3, 4, 5], [False, False, True, False, True])
        >>> sample.advantages.tolist(), sample.chunk_ids.tolist()
        ([0.0, 0.0, 2.0, 0.0, 2.0], [-1, -1, 0, -1, 1])
    """
    return build(trajectory, strategy=strategy, include_failed=include_failed).samples


def build(
    trajectory: TrajectoryRecord,
    *,
    strategy: str = "interleaved",
    on_break: OnBreak = "split",
    max_length: int | None = None,
    needs_logprobs: bool = True,
    include_failed: bool = False,
) -> BuiltSamples:
    """The training samples of a trajectory, and the outcome of all its tokens.

    A trajectory with an `error` gives no samples. Sampled tokens that are in no turn are dropped as `cancelled`,
    because their completion was cut off.

    Args:
        trajectory: The trajectory, with its advantages.
        strategy: A name from `STRATEGIES`, or an import path.
        on_break: What happens at a prompt that extends no sample: "split" opens a new sample, "error" stops the run.
        max_length: Maximum number of tokens in a sample. A turn that ends beyond this maximum is dropped whole, as
            `over_length`, so that samples are cut at turn boundaries only.
        needs_logprobs: False for supervised training, where recorded text has no logprobs.
        include_failed: Also build samples from the completed turns of a trajectory with an `error`; its sampled tokens
            that are in no turn are dropped as `error`.

    Raises:
        ValueError: an unknown strategy.
        ComponentError: a user's own strategy cannot be imported, or joins turns that do not extend each other.
        RunStopped: there is a break, and `on_break` is "error"; the message names the position of the break.
    """
    group = find_strategy(strategy)
    failed = trajectory.error is not None
    if failed and not include_failed:
        return BuiltSamples(samples=[], outcome=TrajectoryOutcome.of_dropped(trajectory, "error"))
    longest = sys.maxsize if max_length is None else max_length
    outcomes = [turn_outcome(turn, longest, needs_logprobs) for turn in trajectory.turns]
    kept = [
        (index, turn)
        for index, turn in enumerate(trajectory.turns)
        if len(turn.completion_ids) and turn.path.length <= longest
    ]
    runs = group([turn for _, turn in kept])
    _check_runs(strategy, runs, kept)
    if on_break == "error" and strategy != "branching":
        _refuse_breaks(trajectory, kept, runs)
    samples: list[TrainingSample] = []
    # A single sample needs no reader; with several samples, the reader copies shared prefixes instead of joining them
    # every time.
    ids_of = TokenPath.ids if len(runs) == 1 else PathReader().ids
    has_experts = any([turn.routed_experts is not None for turn in trajectory.turns])
    for run in runs:
        trained = [kept[place] for place in run if outcomes[kept[place][0]] == TRAINED]
        if trained:
            routed = _routed(trained, trajectory.turns) if has_experts else None
            samples.append(_sample(trajectory, trained, ids_of(trained[-1][1].path), routed, part=len(samples)))
    unrecorded = "error" if failed else "cancelled"
    outcome = TrajectoryOutcome(
        trajectory=trajectory,
        turns=tuple(outcomes),
        unrecorded=unrecorded if trajectory.num_unrecorded_tokens else None,
    )
    num_trained = sum(sample.num_trained_tokens for sample in samples)
    assert num_trained == outcome.num_trained_tokens, (
        f"trajectory {trajectory.trajectory_id}: {num_trained} tokens in samples, {outcome.num_tokens}"
    )
    return BuiltSamples(samples=samples, outcome=outcome)


def find_strategy(name: str) -> Strategy:
    """The strategy with this name, or at this import path.

    Raises:
        ValueError: the name is unknown.
        ComponentError: the strategy cannot be imported.
    """
    if name in STRATEGIES:
        return STRATEGIES[name]
    if not is_import_path(name):
        raise ValueError(f"trajectory strategy {name!r}; expected one of {', '.join(STRATEGIES)}")
    strategy: Strategy = import_object(name)
    return strategy


def _check_runs(strategy: str, runs: list[list[int]], kept: Sequence[tuple[int, Turn]]) -> None:
    """Check that every turn occurs once, and that joined turns extend each other. A failure raises a ComponentError for
    a user's own strategy, and an AssertionError for a built-in strategy."""
    fault = None
    if strategy not in STRATEGIES and not _is_lists(runs):
        fault = f"gave {shown(runs, 80)}"
    elif sorted(chain.from_iterable(runs)) != [*range(len(kept))]:
        fault = "lost or repeated turns"
    elif not all([kept[place][1].extends(kept[before][1]) for run in runs for before, place in pairwise(run)]):
        fault = "joined turns across a break"
    assert fault is None or strategy not in STRATEGIES, f"{strategy} {fault}"
    if fault is not None:
        raise ComponentError(
            f"trajectory strategy {strategy} {fault}; expected lists of turn indices: each index from 0 to "
            f"{len(kept) - 1} in exactly one list, and the prompt of each turn extends the turn before it in its list"
        )


def _is_lists(runs: object) -> bool:
    return isinstance(runs, list | tuple) and all(
        isinstance(run, list | tuple) and all(isinstance(place, int) for place in run) for run in runs
    )


def turn_outcome(turn: Turn, longest: int, needs_logprobs: bool) -> str:
    """`TRAINED`, or why a turn is not trained: `untrained`, `over_length` or `missing_logprobs`."""
    if not turn.trained:
        return "untrained"
    if turn.path.length > longest:
        return "over_length"
    return TRAINED if turn.logprobs is not None or not needs_logprobs else "missing_logprobs"


def _sample(
    trajectory: TrajectoryRecord,
    trained: Sequence[tuple[int, Turn]],
    token_ids: Int32,
    routed: RoutedExperts | None,
    *,
    part: int,
) -> TrainingSample:
    """One sample: the tokens up to the end of its last trained turn, with all trained turns marked.

    Untrained turns after the last trained turn are left out, because they are not context for any trained token.
    """
    spans: list[Span] = []
    for index, turn in trained:
        _add_spans(spans, index, turn, turn.advantage if turn.advantage is not None else trajectory.advantage)
    return TrainingSample.of_spans(
        token_ids,
        spans,
        routed_experts=routed,
        kept_sets=_kept_sets(trained, len(token_ids)),
        trajectory_id=trajectory.trajectory_id,
        group_id=trajectory.group_id,
        env=trajectory.env,
        part=part,
    )


_span: Callable[[tuple[Any, ...]], Span] = partial(tuple.__new__, Span)
"""Creates a span from a tuple of its fields, in half the time of `Span(...)`."""


def _add_spans(spans: list[Span], index: int, turn: Turn, advantage: float | None) -> None:
    """Add the trained tokens of a turn, as one span for each policy version that sampled some of these tokens."""
    end, versions, logprobs = turn.path.length, turn.policy_versions, turn.logprobs
    start, advantage = end - len(turn.completion_ids), advantage or 0.0
    if versions is None or versions.strides == (0,):
        # Stride 0: `Turn` stores a single repeated version, so no comparison is needed.
        version = -1 if versions is None else versions.item(0)
        spans.append(_span((start, end, index, version, advantage, turn.temperature, logprobs)))
        return
    cuts = [0, *(np.flatnonzero(versions[1:] != versions[:-1]) + 1).tolist(), end - start]
    for first, last in pairwise(cuts):
        own = None if logprobs is None else logprobs[first:last]
        version = versions.item(first)
        spans.append(_span((start + first, start + last, index, version, advantage, turn.temperature, own)))


def _kept_sets(trained: Sequence[tuple[int, Turn]], length: int) -> KeptSets | None:
    """The kept sets of a sample's trained tokens, or None if nothing was cut."""
    if all(turn.kept_sets is None for _, turn in trained):
        return None
    turns = [turn for _, turn in trained]
    joined = KeptSets.joined([turn.kept_sets for turn in turns], [len(turn.completion_ids) for turn in turns])
    assert joined is not None
    places = np.concatenate([np.arange(turn.num_prompt_tokens, turn.path.length) for turn in turns])
    return joined.spread(places, length)


def _routed(trained: Sequence[tuple[int, Turn]], turns: Sequence[Turn]) -> RoutedExperts:
    """The experts that processed the tokens of a sample. They are read from the records of the sample's own turns, and
    from the records of other turns up to the position where the other turn's context differs from the sample's. If
    several turns recorded the experts of one token, the first of the sample's own turns has priority, and a turn
    outside the sample comes last.

    Args:
        trained: The trained turns of the sample, each with its index.
        turns: All turns of the trajectory; at least one has recorded experts.
    """
    first = next(turn.routed_experts for turn in turns if turn.routed_experts is not None)
    recorded = [(turn, turn.routed_experts) for turn in dict.fromkeys([*(turn for _, turn in trained), *turns])]
    path = trained[-1][1].path
    found = RoutedExperts.of_none(path.length, first)
    for turn, experts in recorded:
        if experts is not None:
            start = turn.path.length - 1 - len(experts)
            at = np.arange(start, min(turn.path.length - 1, path.shared_with(turn.path)))
            found.add(at, experts[: len(at)])
    return found


def _refuse_breaks(
    trajectory: TrajectoryRecord, kept: Sequence[tuple[int, Turn]], runs: Sequence[Sequence[int]]
) -> None:
    """Stop at the first break.

    Args:
        trajectory: The trajectory of the turns.
        kept: Index and turn of each turn that is in a sample.
        runs: For each sample, the indices of its turns in `kept`.

    Raises:
        RunStopped: there is a break; the message names trajectory, turn and position, and shows the ids that both turns
            have from there.
    """
    for first in spoken_before((run[0] for run in runs), [turn for _, turn in kept]):
        raise RunStopped(
            f"trajectory {trajectory.trajectory_id!r}: {_explain_break(*kept[first], kept[:first])}. The run has "
            'on_break = "error"; with "split" the turn would start a training sample of its own'
        )


def _explain_break(index: int, turn: Turn, earlier: Sequence[tuple[int, Turn]]) -> str:
    """Explain where a turn's prompt first differs from the closest earlier turn, and show the ids that both turns have
    from there.

    Example: `turn 1 (main) does not extend turn 0: of its 3 prompt ids the first 1 are the same; at position 1 it has
    [9, 7], turn 0 has [2]`.
    """
    length = turn.num_prompt_tokens
    closest, before = max(earlier, key=lambda pair: (min(length, turn.path.shared_with(pair[1].path)), pair[0]))
    shared = min(length, turn.path.shared_with(before.path))
    ours, theirs = turn.prompt_ids, before.path.ids()
    return (
        f"turn {index} ({turn.agent}) does not extend turn {closest}: of its {length} prompt ids the first {shared} "
        f"are the same; at position {shared} it has {_window(ours, shared)}, turn {closest} has "
        f"{_window(theirs, shared)}"
    )


def _window(ids: Int32, start: int) -> str:
    shown = ids[start : start + _SHOWN].tolist()
    if not shown:
        return "ended"
    return f"[{', '.join(map(str, shown))}{', ...' if start + _SHOWN < len(ids) else ''}]"
