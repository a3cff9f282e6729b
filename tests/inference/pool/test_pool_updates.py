"""Weights reach all replicas at the same time, and tokens of weights that are not proven are never delivered."""

import asyncio
import contextlib
import dataclasses
import logging

import pytest

from inference.pool.scripted_replicas import (
    LIMITS,
    Restarts,
    ScriptedCheck,
    ScriptedReplica,
    after,
    request,
    settled,
)
from inference.pool.test_pool import opened
from verbatim.core.errors import EngineDead, RunStopped
from verbatim.inference.cancelled import num_tokens_drawn, num_tokens_lost
from verbatim.inference.pool import loading
from waiting import HANGS, until

pytestmark = pytest.mark.realtime


async def test_all_replicas_load_at_the_same_time_and_are_checked(tmp_path):
    replicas = [ScriptedReplica(i) for i in range(3)]
    gate = asyncio.Event()
    for replica in replicas:
        replica.gate = gate
    async with opened(*replicas) as pool:
        updating = asyncio.ensure_future(pool.update_replicas(tmp_path, 1, ScriptedCheck(1)))
        await until(lambda: all(replica.events == ["prepare 1", "load 1"] for replica in replicas))
        assert pool.policy_version == 0
        gate.set()
        await updating
        assert pool.policy_version == 1
    assert {tuple(replica.events) for replica in replicas} == {("prepare 1", "load 1", "check 1")}


async def test_tokens_are_withheld_from_the_beginning_of_an_update_until_its_check_has_passed(tmp_path):
    """Those of one replica: another one, whose check has passed, delivers."""
    replicas = [ScriptedReplica(i) for i in range(2)]
    gates = [asyncio.Event(), asyncio.Event()]

    class Gated(ScriptedCheck):
        async def __call__(self, sampler):
            await gates[sampler.index].wait()
            return await super().__call__(sampler)

    async with opened(*replicas) as pool:
        updating = asyncio.ensure_future(pool.update_replicas(tmp_path, 1, Gated(1)))
        await until(lambda: all(replica.policy_version == 1 for replica in replicas))
        asking = [asyncio.ensure_future(pool.generate(request(f"s{i}"))) for i in range(2)]
        await until(lambda: all(replica.num_drawn == 4 for replica in replicas))
        await settled()
        assert [task.done() for task in asking] == [False, False]
        gates[1].set()
        done = await asking[1]
        assert (done.policy_versions.tolist(), done.num_lost_tokens) == ([1] * 4, 0)
        assert not asking[0].done()
        gates[0].set()
        assert (await asking[0]).policy_versions.tolist() == [1] * 4
        await updating


class Counted(ScriptedCheck):
    """Notes how many replicas are prepared and checked at a time; hangs on those of `hang`."""

    def __init__(self, version, hang=()):
        super().__init__(version)
        self.hang, self.now, self.most = set(hang), 0, 0

    @contextlib.contextmanager
    def counting(self):
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            yield
        finally:
            self.now -= 1

    async def prepare(self, sampler):
        with self.counting():
            await asyncio.sleep(0)
            await super().prepare(sampler)

    async def __call__(self, sampler):
        with self.counting():
            await asyncio.sleep(0)
            if sampler.index in self.hang:
                await asyncio.Event().wait()
            return await super().__call__(sampler)


async def test_few_replicas_are_checked_at_a_time_and_those_in_line_deliver_nothing(tmp_path, monkeypatch):
    """The first two hang, in a line of two: nothing of the third is delivered, whose turn has not come."""
    monkeypatch.setattr(loading, "MOST_CHECKS", 2)
    monkeypatch.setattr(loading, "LONGEST_TURN", HANGS)
    replicas, check = [ScriptedReplica(i) for i in range(20)], Counted(1)
    async with opened(*replicas) as pool:
        await pool.update_replicas(tmp_path, 1, check)
        assert check.most == 2
    assert {tuple(replica.events) for replica in replicas} == {("prepare 1", "load 1", "check 1")}

    replicas, check = [ScriptedReplica(i) for i in range(3)], Counted(1, hang=[0, 1])
    async with opened(*replicas) as pool:
        updating = asyncio.ensure_future(pool.update_replicas(tmp_path, 1, check))
        await until(lambda: check.now == 2 and replicas[2].policy_version == 1)
        asking = [asyncio.ensure_future(pool.generate(request(f"s{i}"))) for i in range(3)]
        await until(lambda: replicas[2].num_drawn == 4)
        await settled()
        assert not any(task.done() for task in asking)
        assert replicas[2].events == ["prepare 1", "load 1"]
        for task in (updating, *asking):
            task.cancel()
        await asyncio.gather(updating, *asking, return_exceptions=True)


async def test_replicas_that_hang_in_their_check_hold_up_no_others(tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "MOST_CHECKS", 2)
    monkeypatch.setattr(loading, "LONGEST_TURN", 0.01)
    replicas, check = [ScriptedReplica(i) for i in range(8)], Counted(1, hang=[0, 1, 2])
    async with opened(*replicas) as pool:
        updating = asyncio.ensure_future(pool.update_replicas(tmp_path, 1, check))
        await until(lambda: all("check 1" in replica.events for replica in replicas[3:]))
        updating.cancel()
        await asyncio.gather(updating, return_exceptions=True)
    assert not any("check 1" in replica.events for replica in replicas[:3])


async def test_tokens_carry_the_version_that_sampled_them_across_an_update(tmp_path):
    replica = ScriptedReplica(pause=after(5, updated := asyncio.Event()))
    async with opened(replica) as pool:
        asking = asyncio.ensure_future(pool.generate(request(tokens=30)))
        await until(lambda: replica.num_drawn == 5)
        await pool.update_replicas(tmp_path, 1, ScriptedCheck(1))
        updated.set()
        done = await asking
    assert done.policy_versions.tolist() == [0] * 5 + [1] * 25
    assert done.num_lost_tokens == 0


@pytest.mark.parametrize("fault", ["stale", "label", "mismatch", "refused"])
async def test_a_replica_that_fails_its_check_loads_again_and_delivers_nothing_until_then(tmp_path, caplog, fault):
    """What it had in flight is discarded, counted, and asked for again."""
    updated = asyncio.Event()
    replicas = [ScriptedReplica(i, faults=[fault][i:], pause=after(2, updated)) for i in range(2)]
    async with opened(*replicas) as pool:
        asking = [asyncio.ensure_future(pool.generate(request(f"s{i}", tokens=50))) for i in range(2)]
        await until(lambda: all(replica.num_drawn == 2 for replica in replicas))
        await pool.update_replicas(tmp_path, 1, ScriptedCheck(1))
        updated.set()
        assert pool.metrics()["replicas/serving"] == 2
        assert pool.metrics()["replicas/failed_checks"] == 1
        done = await asyncio.gather(*asking)
    done_to_it = [event for event in replicas[0].events if not event.startswith("check")]
    assert done_to_it == ["prepare 1", "load 1", "load 1"]  # it may be paused: nothing is asked of it
    assert done[0].num_lost_tokens == 2
    assert sum(r.num_drawn for r in replicas) == 102
    assert done[1].num_lost_tokens == 0
    assert "replica 0 does not hold policy version 1: " in caplog.text
    assert {
        "stale": "its logprobs are those of version 0",
        "label": "it reports policy version 0, but",
        "mismatch": "1 tensor is not the published one: model.norm.weight",
        "refused": "has no tensor 'lm_head.weight'",
    }[fault] in caplog.text


async def test_a_replica_that_fails_twice_is_out_and_the_run_goes_on_with_the_rest(tmp_path, caplog):
    replicas = [ScriptedReplica(0, faults=["stale", "stale"]), ScriptedReplica(1)]
    restarts = Restarts()
    async with opened(*replicas, restart=restarts) as pool:
        with caplog.at_level(logging.ERROR):
            await pool.update_replicas(tmp_path, 1, ScriptedCheck(1))
        assert "replica 0 is out for the rest of the run, 1 of 2 replicas are left: its logprobs are" in caplog.text
        assert pool.policy_version == 1
        assert (pool.metrics()["replicas/serving"], pool.metrics()["replica/0/serving"]) == (1, 0)
        await asyncio.gather(*(pool.generate(request(f"s{i}")) for i in range(4)))
        await pool.update_replicas(tmp_path, 2, ScriptedCheck(2))
    assert len(replicas[1].requests) == 4
    assert (replicas[0].requests, replicas[0].is_closed, restarts.asked) == ([], True, [])
    assert "load 2" not in replicas[0].events


async def test_the_last_replica_that_fails_its_check_ends_the_run_with_what_is_known(tmp_path):
    replicas = [ScriptedReplica(0, faults=["stale", "stale"]), ScriptedReplica(1, faults=["mismatch"] * 2)]
    async with opened(*replicas) as pool:
        with pytest.raises(EngineDead) as ended:
            await pool.update_replicas(tmp_path, 1, ScriptedCheck(1))
        assert (
            str(ended.value)
            == pool.failure
            == (
                "no replica is left. replica 0: its logprobs are those of version 0; replica 1: 1 tensor is not the "
                "published one: model.norm.weight"
            )
        )
        assert pool.policy_version == 0


async def test_tokens_withheld_for_a_failed_check_are_lost_also_where_the_caller_is_cancelled_meanwhile(tmp_path):
    replicas = [ScriptedReplica(0, faults=["stale"]), ScriptedReplica(1)]
    check = ScriptedCheck(1)
    check.gate = asyncio.Event()
    async with opened(*replicas) as pool:
        updating = asyncio.ensure_future(pool.update_replicas(tmp_path, 1, check))
        await until(lambda: len(check.asked) == 2)
        withheld = [asyncio.ensure_future(pool.generate(request(f"s{i}"))) for i in range(2)]
        await until(lambda: all(replica.num_drawn == 4 for replica in replicas))
        withheld[1].cancel()
        with pytest.raises(asyncio.CancelledError) as ended:
            await withheld[1]
        assert (num_tokens_drawn(ended.value), num_tokens_lost(ended.value)) == (4, 0)
        check.gate.set()
        assert (await withheld[0]).num_lost_tokens == 4
        await updating
        assert pool.metrics()["replicas/tokens_lost"] == 4


# ---- replicas that die or hang in an update


async def test_a_replica_that_dies_in_an_update_is_out_at_once_and_comes_back_with_the_new_weights(tmp_path):
    replicas, restarts = [ScriptedReplica(0, faults=["dies"]), ScriptedReplica(1)], Restarts()
    async with opened(*replicas, restart=restarts) as pool:
        await pool.update_replicas(tmp_path, 1, ScriptedCheck(1))
        assert pool.policy_version == 1
        await until(lambda: pool.metrics()["replicas/serving"] == 2)
        assert restarts.made[0].events == ["load 1", "check 1"]


@pytest.mark.parametrize("fault", ["refused", "mismatch", "gone"])
async def test_a_replica_that_comes_back_while_its_weights_become_outdated_loads_newer_ones(tmp_path, fault):
    """The published folder is removed before it was read to its end."""
    gate = asyncio.Event()

    class Gated(Restarts):
        async def __call__(self, index):
            replica = await super().__call__(index)
            replica.gate = gate
            return replica

    replicas, restarts = [ScriptedReplica(i) for i in range(2)], Gated(faults=[fault])
    async with opened(*replicas, restart=restarts, weights=tmp_path) as pool:
        await pool.update_replicas(tmp_path, 1, ScriptedCheck(1))
        replicas[0].die()
        await until(lambda: restarts.made and restarts.made[0].events == ["load 1"])
        await pool.update_replicas(tmp_path, 2, ScriptedCheck(2))
        gate.set()
        await until(lambda: pool.metrics()["replicas/serving"] == 2)
        metrics = pool.metrics()
    assert restarts.made[0].events == ["load 1", "load 2", "check 2"]
    assert (metrics["replicas/failed_checks"], metrics["replicas/lost"]) == (0, 1)


async def test_a_server_that_is_found_again_in_the_middle_of_an_update_is_asked_for_nothing_before_it_loads(tmp_path):
    """It answers to health checks, and is paused."""

    class Paused(Restarts):
        async def __call__(self, index):
            replica = await super().__call__(index)
            replica.is_paused = True
            return replica

    replicas, restarts = [ScriptedReplica(i) for i in range(2)], Paused()
    async with opened(*replicas, restart=restarts, weights=tmp_path) as pool:
        await pool.update_replicas(tmp_path, 1, ScriptedCheck(1))
        replicas[0].die()
        await until(lambda: restarts.made and pool.metrics()["replicas/serving"] == 2)
        assert (len(restarts.made), pool.metrics()["replicas/lost"]) == (1, 1)


async def test_an_update_waits_for_the_only_replica_to_come_back(tmp_path):
    replica, restarts = ScriptedReplica(0, faults=["dies"]), Restarts()
    async with opened(replica, restart=restarts) as pool:
        await pool.update_replicas(tmp_path, 1, ScriptedCheck(1))
        assert (await pool.generate(request())).policy_versions.tolist() == [1] * 4
    assert restarts.made[0].held == 1


@pytest.mark.parametrize(
    ("fault", "hangs", "said"),
    [
        ("slow", None, r"replica 1: loading policy version 1 took more than 0\.3 s"),
        ("too slow", None, r"replica 1: pausing it took more than 120 s"),
        (None, "prepare", r"replica 1: filling the prefix cache before an update took more than 0\.3 s"),
        (None, "check", r"replica 1: the check of policy version 1 took more than 0\.3 s"),
    ],
)
async def test_each_phase_has_a_deadline_that_names_replica_phase_and_seconds(tmp_path, caplog, fault, hangs, said):
    replicas = [ScriptedReplica(0), ScriptedReplica(1, faults=[fault] if fault else [])]

    class Hanging(ScriptedCheck):
        async def prepare(self, sampler):
            if hangs == "prepare" and sampler.index == 1:
                await asyncio.Event().wait()

        async def __call__(self, sampler):
            if hangs == "check" and sampler.index == 1:
                await asyncio.Event().wait()

    async with opened(*replicas, limits=dataclasses.replace(LIMITS, update=0.3, check=0.3)) as pool:
        await pool.update_replicas(tmp_path, 1, Hanging(1))
        assert pool.metrics()["replicas/serving"] == 1
        replicas[0].die()
        with pytest.raises(EngineDead, match=said):
            await pool.update_replicas(tmp_path, 2, ScriptedCheck(2))


async def test_a_replica_that_freezes_in_an_update_does_not_hold_up_the_others_for_long(tmp_path):
    """Its health check finds it: the update's own limit is longer than this test may take."""
    replicas = [ScriptedReplica(0), ScriptedReplica(1, faults=["slow"])]
    async with opened(*replicas, limits=dataclasses.replace(LIMITS, update=2 * HANGS)) as pool:
        updating = asyncio.ensure_future(pool.update_replicas(tmp_path, 1, ScriptedCheck(1)))
        await until(lambda: "load 1" in replicas[1].events)
        replicas[1].freeze()
        await asyncio.wait_for(updating, HANGS)
        assert pool.metrics()["replicas/serving"] == 1


async def test_an_update_that_is_cancelled_leaves_nothing_behind(tmp_path):
    replicas = [ScriptedReplica(i, faults=["slow"]) for i in range(2)]
    async with opened(*replicas) as pool:
        updating = asyncio.ensure_future(pool.update_replicas(tmp_path, 1, ScriptedCheck(1)))
        await until(lambda: all("load 1" in replica.events for replica in replicas))
        updating.cancel()
        with pytest.raises(asyncio.CancelledError):
            await updating


# ---- versions


@pytest.mark.parametrize("labels", [[0, 0, 0, 0], [2, 2, 2, 2], [1, 1, 1, 3]])
async def test_tokens_labelled_with_versions_that_the_replica_did_not_hold_are_discarded(tmp_path, labels, caplog):
    """The replica then loads everything again before it serves."""

    class Mislabels(ScriptedReplica):
        labels = None

        async def generate(self, request):
            completion = await super().generate(request)
            if self.labels is None:
                return completion
            versions, self.labels = completion.policy_versions.copy(), None
            versions[:] = labels
            return dataclasses.replace(completion, policy_versions=versions)

    replicas = [Mislabels(i) for i in range(2)]
    async with opened(*replicas) as pool:
        await pool.update_replicas(tmp_path, 1, ScriptedCheck(1))
        replicas[0].labels = labels
        done = await pool.generate(request("a"))
        assert (done.policy_versions.tolist(), done.num_lost_tokens) == ([1] * 4, 4)
        await until(lambda: pool.metrics()["replicas/serving"] == 2)
    assert f"replica 0 reports that policy versions {min(labels)} to {max(labels)} sampled" in caplog.text
    assert replicas[0].events == ["prepare 1", "load 1", "check 1"] * 2


# ---- the start


async def test_weights_that_are_not_the_trainers_at_the_start_end_the_run_by_name():
    replicas = [ScriptedReplica(i) for i in range(3)]
    replicas[1].held = 5
    async with opened(*replicas, restart=Restarts()) as pool:
        with pytest.raises(
            RunStopped,
            match=(
                r"^replicas do not hold policy version 0, with which the run begins\. replica 1: its logprobs are "
                r"those of version 5$"
            ),
        ):
            await pool.check_replicas(ScriptedCheck(0))


async def test_replicas_that_hold_the_weights_pass_at_the_start_and_one_that_died_comes_back():
    replicas, restarts = [ScriptedReplica(i) for i in range(2)], Restarts()
    replicas[1].die()
    async with opened(*replicas, restart=restarts) as pool:
        await pool.check_replicas(ScriptedCheck(0))
        await until(lambda: pool.metrics()["replicas/serving"] == 2)
    assert set(restarts.made[0].events) == {"check 0"}


async def test_a_replica_that_comes_back_loads_what_the_run_began_with_where_that_is_known(tmp_path):
    """As a server that others started: what it holds is unknown. At the start nothing is loaded."""
    replicas, restarts = [ScriptedReplica(i) for i in range(2)], Restarts()
    async with opened(*replicas, restart=restarts, weights=tmp_path) as pool:
        await pool.check_replicas(ScriptedCheck(0))
        assert [replica.events for replica in replicas] == [["check 0"]] * 2
        replicas[1].die()
        await until(lambda: restarts.made and pool.metrics()["replicas/serving"] == 2)
    assert restarts.made[0].events == ["load 0", "check 0"]


async def test_200_healthy_updates_pass_without_a_false_alarm_while_requests_go_on(tmp_path, caplog):
    replicas = [ScriptedReplica(i) for i in range(2)]
    async with opened(*replicas, restart=Restarts()) as pool:
        going_on, completions = True, []

        async def sample(number):
            while going_on:
                completions.append(await pool.generate(request(f"s{number}", tokens=6)))

        sampling = [asyncio.ensure_future(sample(number)) for number in range(4)]
        for version in range(1, 201):
            await pool.update_replicas(tmp_path, version, ScriptedCheck(version))
        going_on = False
        await asyncio.gather(*sampling)
        metrics = pool.metrics()
    assert metrics["replicas/failed_checks"] == metrics["replicas/lost"] == metrics["replicas/requests_resent"] == 0
    assert sum(len(c.ids) for c in completions) == sum(r.num_drawn for r in replicas)
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
