"""What a schedule of examples makes of keys that changed before a resume."""

import json

import pytest

from verbatim.algorithms.curriculum import ExampleSchedule, PoolRules
from verbatim.core.errors import RunStopped
from verbatim.core.types import Example


def schedule(envs, rules=None):
    examples = {env: [Example(id=f"{env}-{n}") for n in range(4)] for env in envs}
    return ExampleSchedule(examples, envs, seed=0, pool_rules=rules)


def resumed(before, envs, rules=None):
    after = schedule(envs, rules)
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    return after


def test_a_changed_ratio_holds_for_the_next_draws_and_passes_go_on():
    before = schedule({"a": 1.0, "b": 1.0})
    drawn = [before.draw() for _ in range(3)]
    after = resumed(before, {"a": 1.0, "b": 1e-12})
    of_a = [one.example.id for one in drawn if one.env == "a"]
    rest = [after.draw() for _ in range(4 - len(of_a))]
    assert {one.env for one in rest} == {"a"} and rest[0].index == 3
    assert len({*of_a, *(one.example.id for one in rest)}) == 4  # each once, before any comes again


def test_an_environment_that_is_added_begins_its_first_pass():
    before = schedule({"a": 1.0})
    before.draw()
    after = resumed(before, {"a": 1e-12, "b": 1.0})
    assert {after.draw().example.id for _ in range(4)} == {f"b-{n}" for n in range(4)}


def test_an_environment_that_is_left_out_is_refused_while_an_example_of_it_is_in_flight():
    before = schedule({"a": 1.0, "b": 1.0})
    after = resumed(before, {"a": 1.0})
    assert after.lookup("a", "a-1", 0).example.id == "a-1"
    with pytest.raises(RunStopped, match="'b' no longer has the example 'b-1'"):
        after.lookup("b", "b-1", 0)


def test_a_pooled_example_stays_under_other_thresholds_and_comes_back_by_its_share():
    before = schedule({"a": 1.0}, PoolRules(easy_threshold=0.5))
    before.pools.observe("a", "a-0", 0.75)
    stays = resumed(before, {"a": 1.0}, PoolRules(easy_threshold=1.0))
    assert stays.pools.members("a", "easy") == ["a-0"]
    stays.pools.observe("a", "a-1", 0.75)  # the new rule judges the next groups
    assert stays.pools.members("a", "easy") == ["a-0"]
    back = resumed(before, {"a": 1.0}, PoolRules(easy_threshold=1.0, easy_fraction=1.0))
    assert back.pools.members("a", "easy") == []


def test_a_shorter_window_keeps_the_latest_groups():
    before = schedule({"a": 1.0}, PoolRules(hard_threshold=0.0, window=3))
    for mean in (1.0, 0.0):
        before.pools.observe("a", "a-2", mean)
    after = resumed(before, {"a": 1.0}, PoolRules(hard_threshold=0.0, window=1))
    after.pools.observe("a", "a-2", 0.0)
    assert after.pools.members("a", "hard") == ["a-2"]
