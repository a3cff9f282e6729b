"""Length penalties: numbers worked out by hand."""

import pytest
from pydantic import ValidationError

from algorithms.credit.groups import rollout, turn
from verbatim import Group, Turn
from verbatim.algorithms.credit.baselines import default_advantage
from verbatim.algorithms.credit.length_penalty import penalised, with_relative_bonus
from verbatim.config.schema import LengthPenaltyConfig
from verbatim.run.orchestrator.assemble import GroupRules, assemble_group


def rewards(penalty, *rollouts):
    return [t.reward for t in penalised(rollouts, LengthPenaltyConfig(**penalty))]


def test_tokens_above_the_target_cost_a_thousandth_each():
    found = rewards(
        {"type": "tokens", "target": 200},
        rollout(1.0, turn(100), turn(600)),
        rollout(1.0, turn(200)),
        rollout(1.0, turn(50)),
    )
    assert found == pytest.approx([0.5, 1.0, 1.0], abs=1e-12)


def test_turns_above_the_target_cost_a_twentieth_each():
    found = rewards({"type": "turns", "target": 5}, rollout(1.0, *[turn()] * 7), rollout(0.0, *[turn()] * 5))
    assert found == pytest.approx([0.9, 0.0], abs=1e-12)


def test_untrained_turns_cost_nothing():
    user = turn(500).replace(trained=False)
    assert rewards({"type": "tokens", "target": 200}, rollout(1.0, turn(300), user)) == pytest.approx([0.9])
    assert rewards({"type": "turns", "target": 1}, rollout(1.0, turn(), user, turn(), user)) == pytest.approx([0.95])


def test_what_is_never_trained_costs_nothing():
    """1 is cut off and in no turn, 2 ends beyond the sample's 401 tokens, 3 has no logprobs: each has 300 trained."""
    blind = Turn(prompt_ids=[1], completion_ids=[2] * 400)
    given = [
        rollout(1.0, turn(300), num_unrecorded_tokens=400),
        rollout(1.0, turn(300), turn(401)),
        rollout(1.0, turn(300), blind),
    ]
    how = {"max_length": 401, "needs_logprobs": True}
    tokens = LengthPenaltyConfig(type="tokens", target=200)
    assert [t.reward for t in penalised(given, tokens, **how)] == pytest.approx([0.9, 0.9, 0.9])
    turns = LengthPenaltyConfig(type="turns", target=0)
    assert [t.reward for t in penalised(given, turns, **how)] == pytest.approx([0.95, 0.95, 0.95])
    assert [t.reward for t in penalised(given, tokens)] == pytest.approx([0.9, 0.499, 0.5])  # the last two are trained


def test_a_rollout_of_which_nothing_is_trained_gets_no_bonus_for_being_short():
    relative = LengthPenaltyConfig(type="tokens", kind="relative")
    given = [rollout(1.0, turn(402)), rollout(1.0, turn(100)), rollout(1.0, turn(300))]
    # 100 and 300 are 200 on average: 1 - 100/200 = 0.5
    assert [t.reward for t in penalised(given, relative, max_length=401)] == pytest.approx([1.0, 1.5, 1.0])


def test_no_bonus_for_rollouts_that_are_worse_than_one_of_which_nothing_is_trained():
    relative = LengthPenaltyConfig(type="tokens", kind="relative")
    given = [rollout(1.0, turn(402)), rollout(0.5, turn(100)), rollout(0.5, turn(300))]
    assert [t.reward for t in penalised(given, relative, max_length=401)] == [1.0, 0.5, 0.5]


def test_the_batch_charges_by_its_own_length():
    group = Group(
        group_id="g",
        example_id="x",
        env="e",
        trajectories=(rollout(1.0, turn(300), turn(401)), rollout(1.0, turn(300), index=1)),
    )
    rules = GroupRules(
        advantage=default_advantage,
        filters={},
        strategy="branching",
        max_length=401,
        max_off_policy_steps=8,
        length_penalty=LengthPenaltyConfig(type="tokens", target=200),
    )
    assembled = assemble_group(group, rules, step=0)
    assert [t.advantage for t in assembled.group.trajectories] == pytest.approx([0.0, 0.0])
    assert assembled.dropped == {"over_length": 401}


def test_the_slope_may_be_any():
    assert rewards({"type": "turns", "target": 0, "slope": 0.5}, rollout(0.0, turn(), turn())) == [-1.0]
    assert rewards({"type": "turns", "target": 0, "slope": 0.0}, rollout(0.25, turn(), turn())) == [0.25]


def test_the_best_rollouts_that_cost_less_than_the_best_usually_do_get_more():
    # The best cost 2 and 6: 4 on average. Bonus 1 - 2/4 = 0.5 and max(0, 1 - 6/4) = 0.
    assert with_relative_bonus([1.0, 1.0, 0.5], [2, 6, 1]) == [1.5, 1.0, 0.5]
    assert with_relative_bonus([2.0, 2.0, 1.0], [1, 7, 4]) == [3.5, 2.0, 1.0]


def test_the_bonus_is_at_most_as_much_again():
    assert with_relative_bonus([1.0, 1.0], [0, 8]) == [2.0, 1.0]


@pytest.mark.parametrize(("given", "costs"), [([0.0, 0.0], [1, 2]), ([-1.0, -1.0], [1, 3]), ([1.0, 1.0], [0, 0])])
def test_nothing_changes_where_nothing_was_right_or_nothing_was_spent(given, costs):
    assert with_relative_bonus(given, costs) == given


def test_the_relative_form_counts_tokens_or_turns():
    long, short = rollout(1.0, turn(2), turn(2), turn(2)), rollout(1.0, turn(18))  # 6 and 18 tokens, 3 turns and 1
    assert rewards({"type": "tokens", "kind": "relative"}, long, short) == [1.5, 1.0]
    assert rewards({"type": "turns", "kind": "relative"}, long, short) == [1.0, 1.5]


@pytest.mark.parametrize(
    ("penalty", "explained"),
    [
        ({"type": "tokens"}, "how many tokens cost nothing"),
        ({"type": "turns", "kind": "relative", "target": 3}, 'found kind = "relative"'),
        ({"type": "words", "target": 3}, "tokens"),
        ({"type": "turns", "target": 3, "slope": -0.1}, "greater than or equal to 0"),
    ],
)
def test_a_penalty_that_makes_no_sense_is_refused(penalty, explained):
    with pytest.raises(ValidationError, match=explained):
        LengthPenaltyConfig(**penalty)
