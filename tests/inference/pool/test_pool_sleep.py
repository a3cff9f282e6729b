"""A pool that leaves its devices to the trainer: requests wait, and nothing is started while the trainer has them."""

import asyncio
import dataclasses

import pytest

from inference.pool.scripted_replicas import LIMITS, Restarts, ScriptedCheck, ScriptedReplica, request, settled
from inference.pool.test_pool import opened
from verbatim.core.errors import EngineDead
from waiting import until

pytestmark = pytest.mark.realtime

SHORT = dataclasses.replace(LIMITS, update=0.3)
"""Where a replica never falls asleep, or never loads."""


async def test_it_sleeps_once_its_requests_have_ended_and_others_wait_for_the_next_update(tmp_path):
    replicas = [ScriptedReplica(i, seconds_per_token=0.003) for i in range(2)]
    async with opened(*replicas) as pool:
        before = [asyncio.ensure_future(pool.generate(request(f"s{i}", tokens=20))) for i in range(2)]
        await until(lambda: all(replica.num_drawn for replica in replicas))
        sleeping = asyncio.ensure_future(pool.sleep())
        await asyncio.sleep(0)
        later = asyncio.ensure_future(pool.generate(request("later")))
        await sleeping
        assert all(replica.is_asleep for replica in replicas)
        assert [len(task.result().ids) for task in before] == [20, 20]
        assert pool.metrics()["replicas/serving"] == 0
        assert not later.done() and pool.metrics()["replicas/requests_waiting"] == 1
        await pool.update_replicas(tmp_path, 1, ScriptedCheck(1))
        assert (await later).policy_versions.tolist() == [1] * 4
        metrics = pool.metrics()
    assert (metrics["replicas/serving"], metrics["replica/0/waking_seconds"]) == (2, 0.25)


async def test_its_check_is_prepared_before_it_sleeps_because_it_cannot_be_while_it_does(tmp_path):
    replica = ScriptedReplica()
    async with opened(replica) as pool:
        assert "replica/0/waking_seconds" not in pool.metrics()
        for version in (1, 2):
            await pool.update_replicas(tmp_path, version, ScriptedCheck(version))
            await pool.sleep()
    assert replica.events == [
        "prepare 1",
        "load 1",
        "check 1",
        "prepare 1",
        "sleep",
        "load 2",
        "check 2",
        "prepare 2",
        "sleep",
    ]


async def test_one_that_dies_while_it_sleeps_is_started_when_the_trainer_has_left(tmp_path):
    replica, restarts = ScriptedReplica(), Restarts()
    async with opened(replica, restart=restarts) as pool:
        await pool.sleep()
        replica.die()
        await until(lambda: pool.metrics()["replicas/lost"] == 1)
        await settled()
        assert restarts.asked == []
        await pool.update_replicas(tmp_path, 1, ScriptedCheck(1))
        assert restarts.asked == [0]
        assert (await pool.generate(request())).policy_versions.tolist() == [1] * 4


@pytest.mark.parametrize("fault", ["hangs", "fails"])
async def test_one_that_does_not_fall_asleep_is_started_again_and_put_to_sleep(fault, caplog):
    replicas, restarts = [ScriptedReplica(0), ScriptedReplica(1)], Restarts()
    replicas[0].at_sleep = [fault]
    async with opened(*replicas, restart=restarts, limits=SHORT) as pool:
        await pool.sleep()
        assert restarts.made[0].is_asleep and replicas[1].is_asleep
    said = "falling asleep took more than 0.3 s" if fault == "hangs" else "sleep: 500"
    assert f"replica 0 is lost and will be restarted; its 0 requests are sent again: replica 0: {said}" in caplog.text


async def test_the_last_one_that_never_falls_asleep_ends_the_run(monkeypatch):
    monkeypatch.setattr("verbatim.inference.pool.replica_supervisor.LONGEST_PAUSE", 0.01)

    class Restless(ScriptedReplica):
        async def sleep(self):
            self.at_sleep = ["fails"]
            await super().sleep()

    async def restart(index):
        return Restless(index)

    async with opened(Restless(0), restart=restart) as pool:
        with pytest.raises(EngineDead, match=r"no replica is left\. replica 0: sleep: 500"):
            await pool.sleep()


async def test_one_that_is_being_started_is_waited_for(tmp_path):
    """A server that starts takes the device too."""
    replicas, restarts = [ScriptedReplica(0), ScriptedReplica(1)], Restarts()
    async with opened(*replicas, restart=restarts) as pool:
        await pool.generate(request())
        replicas[0].die()
        await until(lambda: pool.metrics()["replicas/lost"] == 1)
        await pool.sleep()
        assert restarts.made[0].is_asleep and replicas[1].is_asleep


@pytest.mark.parametrize("faults", [["stale"], ["stale", "stale"]])
async def test_one_that_wakes_up_with_wrong_weights_loads_again_once(tmp_path, faults):
    """What it cannot compute is not asked of it: it is still half asleep."""
    replicas = [ScriptedReplica(0, faults=faults), ScriptedReplica(1)]
    async with opened(*replicas) as pool:
        await pool.sleep()
        await pool.update_replicas(tmp_path, 1, ScriptedCheck(1))
        assert pool.metrics()["replicas/serving"] == 3 - len(faults)
    assert replicas[0].events == ["sleep", "load 1", "check 1", "load 1", "check 1"]


async def test_one_that_dies_as_it_wakes_up_is_started_again_with_the_new_weights(tmp_path):
    replica, restarts = ScriptedReplica(faults=["dies"]), Restarts()
    async with opened(replica, restart=restarts) as pool:
        await pool.sleep()
        await pool.update_replicas(tmp_path, 1, ScriptedCheck(1))
        assert (restarts.made[0].held, pool.metrics()["replicas/serving"]) == (1, 1)


async def test_one_that_hangs_as_it_wakes_up_is_named_with_its_limit(tmp_path, caplog):
    replica, restarts = ScriptedReplica(faults=["slow"]), Restarts()
    async with opened(replica, restart=restarts, limits=SHORT) as pool:
        await pool.sleep()
        await pool.update_replicas(tmp_path, 1, ScriptedCheck(1))
    assert "replica 0: loading policy version 1 took more than 0.3 s" in caplog.text
    assert restarts.asked == [0]


async def test_it_can_be_closed_while_it_sleeps_and_requests_wait():
    async with opened(ScriptedReplica()) as pool:
        await pool.sleep()
        waiting = asyncio.ensure_future(pool.generate(request()))
        await settled()
        assert not waiting.done()
        await pool.close()
        assert (await waiting).stop_reason == "cancelled"
