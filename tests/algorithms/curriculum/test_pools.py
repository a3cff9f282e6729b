"""Difficulty pools: a partition of the data set, kept over a resume; what is drained is lifted or ends."""

import json
import logging

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verbatim import Example, Group, Trajectory
from verbatim.algorithms.curriculum import DifficultyPools, ExampleSchedule, PoolRules, flatness
from verbatim.core.errors import NothingToSample


def rows(n, prefix="e"):
    return [Example(id=f"{prefix}{i}") for i in range(n)]


def pools(n=4, **rules):
    return DifficultyPools({"a": [f"e{i}" for i in range(n)]}, PoolRules(**rules))


def schedule(n=4, seed=0, **rules):
    return ExampleSchedule({"a": rows(n)}, {"a": 1.0}, seed=seed, pool_rules=PoolRules(**rules))


@pytest.mark.parametrize(
    ("mean", "pool"),
    [(0.95, "easy"), (1.0, "easy"), (0.949, "normal"), (0.051, "normal"), (0.05, "hard"), (-1, "hard")],
)
def test_thresholds_are_inclusive(mean, pool):
    p = pools(easy_threshold=0.95, hard_threshold=0.05)
    p.observe("a", "e1", mean)
    assert "e1" in p.members("a", pool)


def test_without_thresholds_nothing_is_set_aside():
    p = pools()
    for mean in (0.0, 1.0):
        p.observe("a", "e1", mean)
    assert p.members("a", "normal") == ["e0", "e1", "e2", "e3"]


def test_the_mean_is_over_the_last_groups_of_the_example():
    p = pools(easy_threshold=0.9, window=3)
    p.observe("a", "e0", 0.4)  # mean 0.4
    p.observe("a", "e0", 1.0)  # mean 0.7
    p.observe("a", "e1", 1.0)
    assert p.members("a", "easy") == ["e1"]
    p.observe("a", "e0", 1.0)  # mean 0.8
    assert p.members("a", "easy") == ["e1"]
    p.observe("a", "e0", 1.0)  # 0.4 is out of the window: mean 1.0
    assert p.members("a", "easy") == ["e0", "e1"]


def test_the_mean_is_over_the_last_groups_after_a_resume_too():
    p, again = (pools(easy_threshold=0.9, window=2) for _ in range(2))
    for mean in (0.0, 0.5):
        p.observe("a", "e0", mean)
    again.load_state_dict(json.loads(json.dumps(p.state_dict())))
    again.observe("a", "e0", 1.0)  # mean 0.75
    assert again.members("a", "easy") == []
    again.observe("a", "e0", 1.0)  # mean 1.0
    assert again.members("a", "easy") == ["e0"]


def test_metrics_are_shares_of_the_data_set_and_of_the_groups_since_last_asked():
    p = pools(easy_threshold=0.9, hard_threshold=0.1)
    for example, mean in (("e0", 1.0), ("e1", 0.0), ("e2", 0.5), ("e3", 0.5), ("e2", 0.0)):
        p.observe("a", example, mean)
    assert p.metrics() == {
        "pool/a/easy": 0.25,
        "pool/a/hard": 0.5,
        "pool/a/normal": 0.25,
        "evicted_examples/a/easy": 0.2,
        "evicted_examples/a/hard": 0.4,
    }
    assert p.metrics()["evicted_examples/a/hard"] == 0.0


def test_a_share_of_each_pool_is_lifted_at_least_one():
    p = pools(n=12, easy_threshold=0.9, hard_threshold=0.1, easy_fraction=0.5, hard_fraction=0.01)
    for i in range(12):
        p.observe("a", f"e{i}", 1.0 if i < 8 else 0.0)
    lifted = p.lift("a", np.random.default_rng(0))
    assert len([i for i in lifted if int(i[1:]) < 8]) == 4
    assert len([i for i in lifted if int(i[1:]) >= 8]) == 1
    assert sorted(lifted) == sorted(p.members("a", "normal"))


def test_pooled_examples_are_not_drawn():
    s = schedule(n=4, easy_threshold=1.0)
    s.pools.observe("a", "e2", 1.0)
    assert {s.draw().example.id for _ in range(12)} == {"e0", "e1", "e3"}


def test_a_drained_pool_is_lifted_with_a_warning(caplog):
    s = schedule(n=4, easy_threshold=1.0, easy_fraction=0.5)
    for i in range(4):
        s.pools.observe("a", f"e{i}", 1.0)
    with caplog.at_level(logging.WARNING):
        drawn = {s.draw().example.id for _ in range(8)}
    assert len(drawn) == 2
    assert caplog.messages == ["environment 'a': all examples were in difficulty pools; 2 of them are sampled again"]


def test_a_drained_set_is_an_end_that_says_how_to_go_on():
    s = schedule(n=3, easy_threshold=1.0, hard_threshold=0.0)
    for i, mean in enumerate((1.0, 0.0, 0.0)):
        s.pools.observe("a", f"e{i}", mean)
    with pytest.raises(NothingToSample, match=r"\(a: 1 easy, 2 hard\): nothing is left .*easy_fraction"):
        s.draw()


def test_a_drained_environment_leaves_the_others_their_ratios():
    s = ExampleSchedule(
        {"a": rows(2), "b": rows(3), "c": rows(3)},
        {"a": 5.0, "b": 3.0, "c": 1.0},
        seed=0,
        pool_rules=PoolRules(hard_threshold=0.0),
    )
    for i in range(2):
        s.pools.observe("a", f"e{i}", 0.0)
    drawn = [s.draw().env for _ in range(4000)]
    assert "a" not in drawn
    assert 0.72 < drawn.count("b") / 4000 < 0.78  # 3 of 4


@pytest.mark.parametrize(
    ("rewards", "kind"),
    [
        ([0.0, 0.0], "hard"),
        ([-1.0, -1.0], "hard"),
        ([1.0, 1.0, 1.0], "easy"),
        ([0.5, 0.5], "flat"),
        ([0.0, 1.0], None),
        ([], None),
        ([None, None], None),
        ([1.0, None], "easy"),
        ([0.0, None], "hard"),
        ([0.0, 1.0, None], None),
        ([float("nan"), 0.5], "flat"),
    ],
)
def test_a_group_of_equal_rewards_is_flat_and_a_missing_one_is_not_0(rewards, kind):
    failed = Trajectory(example_id="x", reward=0.7, error="environment: broke")
    group = Group(
        group_id="g",
        example_id="x",
        env="a",
        trajectories=(failed, *(Trajectory(example_id="x", reward=r) for r in rewards)),
    )
    assert flatness(group) == kind


steps = st.lists(
    st.one_of(
        st.just(("draw",)),
        st.tuples(st.just("observe"), st.integers(0, 5), st.sampled_from([0.0, 0.3, 0.5, 1.0])),
        st.just(("reload",)),
    ),
    max_size=60,
)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(steps, st.integers(0, 3), st.sampled_from([0.0, 0.3]), st.integers(1, 3))
def test_the_three_pools_always_partition_the_data_set_and_a_resume_draws_the_same(script, seed, fraction, window):
    def make():
        return ExampleSchedule(
            {"a": rows(4), "b": rows(2)},
            {"a": 1.0, "b": 2.0},
            seed=seed,
            pool_rules=PoolRules(easy_threshold=1.0, hard_threshold=0.0, easy_fraction=fraction, window=window),
        )

    def draw(from_schedule):
        try:
            return from_schedule.draw()
        except NothingToSample:
            return None

    s = make()
    for what, *arguments in script:
        if what == "draw":
            normal = {env: set(s.pools.members(env, "normal")) for env in "ab"}
            drawn = draw(s)
            if drawn is None:
                assert fraction == 0 or not any(s.pools.members(env, "easy") for env in "ab")
            elif normal[drawn.env]:
                assert drawn.example.id in normal[drawn.env]
        elif what == "observe":
            number, mean = arguments
            s.pools.observe("a" if number < 4 else "b", f"e{number % 4}", mean)
        else:
            state = json.loads(json.dumps(s.state_dict()))
            again = make()
            again.load_state_dict(state)
            if fraction == 0:
                twin = make()
                twin.load_state_dict(state)
                assert [draw(twin) for _ in range(10)] == [draw(s) for _ in range(10)]
                s = make()
                s.load_state_dict(state)
            else:
                s = again
        for env, count in (("a", 4), ("b", 2)):
            parts = [s.pools.members(env, pool) for pool in ("easy", "normal", "hard")]
            assert sorted(i for part in parts for i in part) == [f"e{i}" for i in range(count)]
