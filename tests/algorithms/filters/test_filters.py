"""Filters flag; any dropping filter that flags drops."""

from dataclasses import dataclass
from typing import Literal

from verbatim import Trajectory, Turn
from verbatim.algorithms.filters import apply_filters
from verbatim.algorithms.filters.zero_advantage import ZeroAdvantage


@dataclass(frozen=True)
class Flag:
    action: Literal["drop", "monitor"]
    flags: bool = True

    def __call__(self, trajectory):
        return self.flags


ANY = Trajectory(example_id="x")


def test_a_monitoring_hit_never_shields_from_a_dropping_filter():
    verdict = apply_filters(ANY, {"first": Flag("monitor"), "second": Flag("drop"), "third": Flag("drop")})
    assert verdict.flagged == ("first", "second", "third")
    assert verdict.dropped_by == "second"


def test_monitoring_alone_drops_nothing():
    assert apply_filters(ANY, {"m": Flag("monitor"), "quiet": Flag("drop", flags=False)}).dropped_by is None


def turn(advantage=None, completion=(2,)):
    return Turn(prompt_ids=[1], completion_ids=completion, logprobs=[-1.0] * len(completion), advantage=advantage)


def test_zero_advantage_looks_at_every_token():
    flagged = ZeroAdvantage()
    assert flagged(Trajectory(example_id="x", advantage=0.0, turns=(turn(),)))
    assert not flagged(Trajectory(example_id="x", advantage=-0.1, turns=(turn(),)))
    assert not flagged(Trajectory(example_id="x", advantage=0.0, turns=(turn(), turn(0.5))))
    assert flagged(Trajectory(example_id="x", advantage=1.0, turns=(turn(0.0), turn(0.0))))


def test_a_turn_without_tokens_has_no_advantage_to_learn_from():
    assert ZeroAdvantage()(Trajectory(example_id="x", advantage=0.0, turns=(turn(1.0, completion=()), turn())))


def test_the_advantage_of_a_turn_that_is_not_trained_counts_for_nothing():
    untrained = turn(1.0).replace(trained=False)
    assert ZeroAdvantage()(Trajectory(example_id="x", turns=(untrained, turn(0.0))))
    assert not ZeroAdvantage()(Trajectory(example_id="x", turns=(untrained, turn(0.5))))
    assert not ZeroAdvantage()(Trajectory(example_id="x", advantage=0.5, turns=(turn().replace(trained=False),)))
