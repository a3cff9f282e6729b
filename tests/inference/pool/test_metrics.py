"""What a pool reports of its replicas."""

import math

import pytest

from inference.pool.scripted_replicas import ScriptedReplica, request
from inference.pool.test_pool import opened
from verbatim.inference.pool.admission_queue import AdmissionQueue
from verbatim.inference.pool.member import Member
from verbatim.inference.pool.metrics import MOST_NAMED, PoolMetrics
from verbatim.inference.pool.replica import ReplicaLoad
from verbatim.inference.pool.replica_supervisor import ReplicaFaultCounts
from verbatim.inference.pool.routing import Router
from verbatim.run.orchestrator.step_metrics import ReportsMetrics
from waiting import until


async def test_rates_are_since_the_reading_before_and_begin_anew_with_a_new_server():
    """2 s, 100 tokens, 30 of 40 found; 4 s later 60 more, 10 of 10 found; then a new server: its own 8 in 1 s."""
    times = iter([0.0, 2.0, 6.0, 7.0, 8.0])
    metrics, member = PoolMetrics(lambda: next(times)), Member(3, ScriptedReplica(3, version=5))
    places = AdmissionQueue(Router(most_running=4))

    def read():
        found = metrics.read([member], places, ReplicaFaultCounts())
        return [found.get(f"replica/3/{name}") for name in ("tokens_per_second", "prefix_cache_hit_rate")]

    member.load = ReplicaLoad(generated_tokens=100, cache_queries=40, cache_hits=30)
    assert read() == [50.0, 0.75]
    member.load = ReplicaLoad(generated_tokens=160, cache_queries=50, cache_hits=40)
    assert read() == [15.0, 1.0]
    member.load, member.num_restarts = ReplicaLoad(generated_tokens=8, cache_queries=2, cache_hits=0), 1
    assert read() == [8.0, 0.0]
    rate, share = read()
    assert rate == 0.0
    assert math.isnan(share)


async def test_a_replica_that_never_said_anything_has_only_what_the_pool_knows():
    member = Member(0, ScriptedReplica(version=5))
    found = PoolMetrics(lambda: 0.0).read([member], AdmissionQueue(Router(most_running=4)), ReplicaFaultCounts())
    assert {name: value for name, value in found.items() if name.startswith("replica/")} == {
        "replica/0/serving": 1.0,
        "replica/0/in_flight": 0,
        "replica/0/policy_version": 5,
        "replica/0/restarts": 0,
        "replica/0/unverified_tensors": 0,
    }


async def test_tensors_that_no_digest_tells_of_are_counted_for_each_replica():
    replicas = [ScriptedReplica(i) for i in range(2)]
    replicas[1].num_unverified = 6
    found = PoolMetrics(lambda: 0.0).read(
        [Member(i, replica) for i, replica in enumerate(replicas)],
        AdmissionQueue(Router(most_running=4)),
        ReplicaFaultCounts(),
    )
    assert [found[f"replica/{i}/unverified_tensors"] for i in range(2)] == [0, 6]


async def test_more_than_a_few_replicas_have_a_distribution_instead_of_metrics_each():
    """33 replicas: the first has said nothing, the others have drawn 10, 20, ... 320 tokens in 2 s, and each was asked
    for prompts but the last."""
    times = iter([0.0, 2.0])
    metrics = PoolMetrics(lambda: next(times))
    members = [Member(i, ScriptedReplica(i, version=5 + (i == 7))) for i in range(MOST_NAMED + 1)]
    members[3].state = "out"
    for i, member in enumerate(members[1:], 1):
        member.load = ReplicaLoad(generated_tokens=10 * i, cache_queries=10 * (i < 32), cache_hits=i % 2)
    found = metrics.read(members, AdmissionQueue(Router(most_running=4)), ReplicaFaultCounts())
    assert not any(name.startswith("replica/") for name in found)
    assert found["replicas/serving"] == 32
    assert [found[f"replicas/tokens_per_second/{of}"] for of in ("min", "mean", "max")] == [5.0, 82.5, 160.0]
    assert [found[f"replicas/policy_version/{of}"] for of in ("min", "max")] == [5, 6]
    assert found["replicas/serving/min"] == 0.0
    assert found["replicas/prefix_cache_hit_rate/mean"] == pytest.approx(16 / 31 / 10)  # 1, 3, ... 31 of 1 to 31
    assert "replicas/waking_seconds/mean" not in found
    assert len(found) == 10 + 3 * 10


@pytest.mark.realtime
async def test_the_pool_asks_its_replicas_and_the_steps_metrics_take_what_it_says():
    replicas = [ScriptedReplica(i) for i in range(2)]
    async with opened(*replicas) as pool:
        assert isinstance(pool, ReportsMetrics)
        await pool.generate(request("a"))
        await until(lambda: all(pool.metrics().get(f"replica/{i}/kv_usage") == 0.25 for i in range(2)))
        found = pool.metrics()
        assert found["replica/0/running"] == found["replica/0/waiting"] == found["replica/0/in_flight"] == 0
        assert {name.split("/")[2] for name in found if name.startswith("replica/1/")} == {
            "serving",
            "in_flight",
            "policy_version",
            "restarts",
            "unverified_tensors",
            "running",
            "waiting",
            "kv_usage",
            "prefix_cache_hit_rate",
            "tokens_per_second",
        }
