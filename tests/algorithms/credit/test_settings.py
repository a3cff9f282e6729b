"""What a file says about credit and filters, how environments inherit it, and what of it a batch shows."""

import dataclasses
import math

import pytest

from algorithms.credit.groups import group_of, rollout, turn
from verbatim.algorithms.credit import ADVANTAGES
from verbatim.algorithms.filters.zero_advantage import ZeroAdvantage
from verbatim.config import load_config
from verbatim.config.schema import LengthPenaltyConfig
from verbatim.core.errors import ConfigError
from verbatim.run.build import make_rules
from verbatim.run.environments import make_environments
from verbatim.run.orchestrator.assemble import GroupRules, assemble_group, rollout_metrics
from verbatim.run.tables import component_tables

TWO = """\
[model]
name = "some/model"
[orchestrator]
batch_size = 8
group_size = {size}
{top}
[[orchestrator.train.env]]
id = "guess_number"
[[orchestrator.train.env]]
id = "guess_number"
name = "other"
{other}
{end}
"""


@pytest.fixture
def rules(tmp_path):
    """The rules of the two environments of a file."""

    def load(top="", other="", end="", size=4):
        file = tmp_path / "run.toml"
        file.write_text(TWO.format(top=top, other=other, end=end, size=size))
        config = load_config(file, tables=component_tables())
        made = make_rules(config, make_environments(config))
        return made["guess_number"], made["other"]

    return load


def test_environments_inherit_the_advantage_and_may_have_their_own(rules):
    top = 'advantage = { type = "chunk_returns", gamma = 0.5 }'
    inherits, own = rules(top=top, other='advantage = { type = "rloo" }')
    assert inherits.advantage == dataclasses.replace(ADVANTAGES["chunk_returns"], parameters={"gamma": 0.5})
    assert own.advantage == ADVANTAGES["rloo"]


def test_environments_inherit_the_length_penalty_and_may_have_their_own(rules):
    top, other = 'length_penalty = { type = "tokens", target = 9 }', 'length_penalty = { type = "turns", target = 2 }'
    inherits, own = rules(top=top, other=other)
    assert inherits.length_penalty == LengthPenaltyConfig(type="tokens", target=9)
    assert own.length_penalty == LengthPenaltyConfig(type="turns", target=2)
    assert [made.length_penalty for made in rules()] == [None, None]


def test_all_filters_are_on_by_default(rules):
    for made in rules():
        assert list(made.filters) == ["gibberish", "repetition", "zero_advantage"]
        assert [rule.action for rule in made.filters.values()] == ["drop"] * 3


def test_a_list_of_filters_replaces_the_defaults(rules):
    (made, _) = rules(top='filters = [{ type = "repetition", threshold = 0.4, action = "monitor" }]')
    (rule,) = made.filters.values()
    assert (rule.threshold, rule.ngram, rule.action) == (0.4, 8, "monitor")
    assert rules(top="filters = []")[0].filters == {}


@pytest.mark.parametrize(
    ("settings", "explained"),
    [
        (
            {"top": 'filters = [{ type = "gibberish", threshold = 1 }]'},
            r"run.toml:\d+: orchestrator.filters.0.threshold: found 1, expected less than or equal to 0",
        ),
        (
            {"top": 'advantage = { type = "gigpo", gamma = 1.5 }'},
            r"run.toml:\d+: orchestrator.advantage.gamma: found 1.5, expected less than or equal to 1",
        ),
        ({"top": 'length_penalty = { type = "turns" }'}, "how many turns cost nothing"),
        (
            {"end": '[trainer.loss]\ntype = "ppo"\ndual_clip = 0.5'},
            r"run.toml:\d+: trainer.loss.dual_clip: found 0.5, expected greater than 1",
        ),
        ({"size": 1}, 'orchestrator.group_size: found 1, which gives every rollout the advantage 0 under "default"'),
        (
            {"size": 1, "top": 'advantage = { type = "chunk_returns" }', "other": 'advantage = { type = "rloo" }'},
            'the advantage 0 under "rloo"',
        ),
    ],
)
def test_what_cannot_work_is_refused_when_the_file_is_loaded(rules, settings, explained):
    with pytest.raises(ConfigError, match=explained):
        rules(**settings)


def test_groups_of_one_may_have_chunk_returns(rules):
    assert len(rules(size=1, top='advantage = { type = "chunk_returns" }')) == 2


# ---- in a batch


def assembled(*rollouts, **fields):
    rules = GroupRules(
        advantage=ADVANTAGES["default"],
        filters={"zero_advantage": ZeroAdvantage()},
        strategy="interleaved",
        max_length=100,
        max_off_policy_steps=8,
        **fields,
    )
    return assemble_group(group_of(*rollouts), rules, step=0)


def test_a_length_penalty_is_in_the_samples_and_not_in_the_metrics():
    penalty = LengthPenaltyConfig(type="turns", target=1, slope=0.5)
    rollouts = [rollout(1.0, turn(), trajectory_id="a"), rollout(1.0, turn(), turn(), trajectory_id="b", index=1)]
    group = assembled(*rollouts, length_penalty=penalty)
    assert {float(a) for s in group.samples for a in s.advantages[s.loss_mask]} == {0.25, -0.25}
    metrics = rollout_metrics([group], 0, {"a": True, "b": True})
    assert metrics["reward/mean"] == 1.0
    assert assembled(*rollouts).samples == ()  # without it they are equal


def test_a_reward_that_is_no_number_is_dropped_and_counted():
    good = [rollout(float(i), turn(3), trajectory_id=f"{i}", index=i) for i in range(2)]
    group = assembled(*good, rollout(math.nan, turn(5), trajectory_id="bad", index=2))
    assert group.dropped == {"error": 5} and group.num_trained_tokens == 6
    assert [outcome.reason for outcome in group.outcomes] == [None, None, "error"]
    assert rollout_metrics([group], 0, {"0": False, "1": True, "bad": False})["errors/reward"] == 1


def test_where_a_teacher_is_followed_rollouts_without_a_reward_are_trained_and_in_no_baseline():
    rollouts = [
        rollout(1.0, turn(2), trajectory_id="a"),
        rollout(None, turn(3), trajectory_id="b", index=1),
        rollout(0.0, turn(4), trajectory_id="c", index=2),
    ]
    rules = GroupRules(
        advantage=ADVANTAGES["default"],
        filters={},
        strategy="interleaved",
        max_length=100,
        max_off_policy_steps=8,
        needs_rewards=False,
    )
    group = assemble_group(group_of(*rollouts), rules, step=0)
    found = {s.trajectory_id: set(s.advantages[s.loss_mask].tolist()) for s in group.samples}
    assert found == {"a": {0.5}, "b": {0.0}, "c": {-0.5}}
    assert (group.dropped, [outcome.reason for outcome in group.outcomes]) == ({}, [None, None, None])
