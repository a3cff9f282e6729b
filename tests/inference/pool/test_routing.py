"""Where requests go: to the replica that holds their prefix, unless that one is overloaded, full or gone."""

import importlib.util
import sys
from pathlib import Path

import pytest

from verbatim.inference.pool.routing import OVERLOAD, SLACK, Router

ROOT = Path(__file__).parents[3]


def router_of(*replicas, **arguments):
    router = Router(**{"most_running": 100, **arguments})
    for replica in replicas:
        router.add(replica)
    return router


def taken(router, *sessions, tokens=10):
    return [router.take(session, tokens).replica for session in sessions]


def test_sessions_are_spread_and_stay():
    router = router_of(0, 1, 2)
    assert taken(router, "a", "b", "c", "a", "b", "c") == [0, 1, 2, 0, 1, 2]


def test_equally_busy_replicas_are_chosen_by_their_sessions():
    """Nothing is in flight, as between turns: the sessions that will come back count."""
    router = router_of(0, 1)
    for session in ("a", "b", "c", "d"):
        router.leave(router.take(session, 10))
    assert taken(router, "a", "b", "c", "d") == [0, 1, 0, 1]


def test_a_long_prompt_weighs_more_than_a_short_one():
    """Costs 1 + length / mean length: the first is 2; 10 after 1000 adds 1.02."""
    router = router_of(0, 1)
    assert taken(router, "long", tokens=1000) == [0]
    assert taken(router, "short", tokens=10) == [1]
    assert taken(router, "next", tokens=10) == [1]


def test_a_session_moves_only_off_a_replica_that_is_overloaded():
    """All prompts are equal, so a request costs 2. The mean of the two replicas is half of what is in flight."""
    router = router_of(0, 1)
    assert taken(router, "a") == [0]
    mine = 1
    while True:
        overloaded = 2 * mine > OVERLOAD * mine + SLACK  # the other one has nothing
        (chosen,) = taken(router, "a")
        assert chosen == (1 if overloaded else 0)
        if overloaded:
            break
        mine += 1
    assert mine == 3
    assert router.num_moved == 1
    assert taken(router, "a") == [1]  # it stays where it is now


def test_the_sessions_of_a_lost_replica_are_spread_over_the_others_and_it_comes_back_empty():
    router = router_of(0, 1, 2)
    for session in "abcdef":
        router.leave(router.take(session, 10))
    router.remove(0)
    assert sorted(taken(router, "a", "d")) == [1, 2]
    assert router.num_moved == 0
    router.add(0)
    assert taken(router, "new") == [0]


def test_a_full_replica_takes_nothing_and_where_all_are_full_nothing_is_taken():
    router = router_of(0, 1, most_running=2)
    first = router.take("a", 10)
    assert taken(router, "a", "a", "b") == [0, 1, 1]
    assert router.take("c", 10) is None
    assert (router.num_running(0), router.num_running(1)) == (2, 2)
    router.leave(first)
    assert taken(router, "c") == [0]


def test_a_replica_to_avoid_is_taken_where_there_is_no_other():
    router = router_of(0, 1)
    assert router.take("a", 10).replica == 0
    assert router.take("a", 10, avoid=[0]).replica == 1
    assert router.take("a", 10, avoid=[0, 1]).replica == 1
    router.remove(1)
    assert router.take("a", 10, avoid=[0]).replica == 0


def test_a_request_that_ends_after_its_replica_is_gone_changes_nothing():
    router = router_of(0, 1)
    place = router.take("a", 10)
    router.remove(0)
    router.add(0)
    router.leave(place)
    assert (router.num_running(0), router.num_running(7)) == (0, 0)


def test_requests_without_a_session_are_not_remembered():
    router = router_of(0, 1)
    assert taken(router, "", "", "") == [0, 1, 0]
    assert router.num_sessions == 0


def test_the_sessions_that_asked_longest_ago_are_forgotten():
    router = router_of(0, 1, most_sessions=3)
    for session in ("a", "b", "a", "c", "d"):
        router.leave(router.take(session, 10))
    assert router.num_sessions == 3  # b is forgotten
    for number in range(10_000):
        router.leave(router.take(f"s{number}", 10))
    assert router.num_sessions == 3


def test_the_load_of_an_idle_replica_is_exactly_0():
    router = router_of(0)
    places = [router.take("a", tokens) for tokens in (3, 7, 11, 1)]
    for place in places:
        router.leave(place)
    assert places[0].seat.load == 0


# ---- simulated, smaller than by benchmarks/routing.py


@pytest.fixture(scope="module")
def simulate():
    """`simulate` and `Perfect` of the benchmark, which is no package."""
    spec = importlib.util.spec_from_file_location("routing_benchmark", ROOT / "benchmarks" / "routing.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its records look their annotations up there
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 4])
def test_nearly_all_of_the_cache_is_found_and_the_work_is_spread(simulate, lost):
    """32 replicas, 2,048 episodes of 10 turns; a third of the way 4 replicas are lost."""
    settings = {"replicas": 32, "episodes": 2048, "turns": 10, "lost": lost, "concurrent": 2048, "seed": 3}
    perfect, ours = (simulate.simulate(kind, **settings) for kind in (simulate.Perfect, simulate.Routing))
    assert perfect.hits / perfect.prompts > 0.85
    assert ours.hits / ours.prompts >= 0.95 * perfect.hits / perfect.prompts
    assert ours.imbalance <= 1.15
    assert len(ours.busy) == 32 - lost


def test_the_simulation_tells_good_routing_from_bad(simulate):
    settings = {"replicas": 16, "episodes": 512, "turns": 6, "lost": 0, "concurrent": 512, "seed": 3}
    by_hash, in_turn = (simulate.simulate(kind, **settings) for kind in (simulate.Hash, simulate.InTurn))
    assert by_hash.imbalance > 1.2
    assert in_turn.hits / in_turn.prompts < 0.1
