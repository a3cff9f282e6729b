"""The `truncated` filter leaves out of training what was cut off, by its stop reason."""

import pytest

from verbatim import Trajectory, Turn
from verbatim.algorithms.filters.truncated import Truncated
from verbatim.core.errors import ComponentError
from verbatim.core.types import StopReason


def ended(reason, truncated=None):
    turn = Turn(prompt_ids=[1], completion_ids=[2], logprobs=[-1.0], stop_reason=reason or StopReason.STOP)
    cut = reason is not None and reason.truncated
    cut = cut if truncated is None else truncated
    return Trajectory(example_id="x", turns=(turn,), stop_reason=reason, truncated=cut)


@pytest.mark.parametrize(
    ("reason", "flagged"),
    [
        (StopReason.STOP, False),
        (StopReason.LENGTH, True),
        (StopReason.MAX_TURNS, True),
        (StopReason.API_ERROR, True),
        (StopReason.CANCELLED, True),
        (StopReason.MALFORMED, True),
    ],
)
def test_every_end_but_its_own_is_truncated(reason, flagged):
    assert Truncated()(ended(reason)) == flagged


def test_what_the_trajectory_says_counts_and_not_its_last_turn():
    """A sub-agent that was cut off does not cut off the episode."""
    cut_turn = Turn(prompt_ids=[1], completion_ids=[2], stop_reason=StopReason.LENGTH)
    assert not Truncated()(Trajectory(example_id="x", turns=(cut_turn,), stop_reason=StopReason.STOP, truncated=False))
    assert Truncated()(ended(None, truncated=True))


def test_only_the_listed_reasons_count():
    only = Truncated(reasons=("length", "malformed"))
    assert only(ended(StopReason.LENGTH)) and only(ended(StopReason.MALFORMED))
    assert not only(ended(StopReason.MAX_TURNS)) and not only(ended(None, truncated=True))


@pytest.mark.parametrize("reasons", [(), ("stop",), ("long",)])
def test_reasons_that_cut_nothing_off_are_refused(reasons):
    with pytest.raises(ComponentError, match=r"truncated: reasons = .*expected some of length, max_turns"):
        Truncated(reasons=reasons)
