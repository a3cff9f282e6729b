"""Whole runs in which sampler and trainer take turns on one device: never both at once, and every token is accounted
for."""

import asyncio
import contextlib
import random
from types import SimpleNamespace

import pytest

from byte_renderer import VOCAB_SIZE, say
from inference.pool.scripted_replicas import LIMITS, Restarts, ScriptedReplica
from run.orchestrator.loop_runs import Coins, go_on_and_check, make, nothing_left_behind
from run.orchestrator.test_pool_runs import TALKS, Trainer, check, probes
from verbatim.core.errors import EngineDead, RunStopped
from verbatim.inference.pool.pool import ReplicaPool
from verbatim.inference.scripted import ScriptedSampler
from verbatim.run.orchestrator import device_handoff


class Device:
    """Who is on it. The trainer looks when it begins and when it ends a batch."""

    def __init__(self, replicas, restarts=None):
        self.replicas, self.restarts = replicas, restarts
        self.batches = self.num_asked = 0

    def servers(self):
        made = self.restarts.made if self.restarts is not None else []
        return [replica for replica in [*self.replicas, *made] if not replica.is_dead]

    def asked(self):
        return self.restarts.asked if self.restarts is not None else []

    def trainer_comes(self):
        assert all(replica.is_asleep for replica in self.servers())
        self.batches += 1
        self.num_asked = len(self.asked())

    def trainer_leaves(self):
        assert all(replica.is_asleep for replica in self.servers())
        assert len(self.asked()) == self.num_asked, "a server was started while the trainer had the device"


class Visitor(Trainer):
    """Trains on the device; `during(version)` is what happens meanwhile."""

    def __init__(self, tmp_path, device, during=lambda version: None, delay=0.01):
        super().__init__(tmp_path, delay=delay)
        self.device, self.during, self.turn = device, during, asyncio.Lock()

    async def train(self, samples, version, *, checkpoint=False):
        async with self.turn:
            self.device.trainer_comes()
            self.during(version)
            report = await super().train(samples, version, checkpoint=checkpoint)
            self.device.trainer_leaves()
            return report


@contextlib.asynccontextmanager
async def sharing(tmp_path, replicas, *, restart=None, during=lambda version: None, delay=0.01, **settings):
    pool = ReplicaPool(replicas, restart=restart, limits=LIMITS)
    device = Device(replicas, restart)
    orchestrator, notes, _ = make(
        tmp_path,
        sampler=pool,
        trainer=Visitor(tmp_path, device, during, delay),
        probes=probes(0),
        shares_device=True,
        **{"steps": 6, **settings},
    )
    try:
        yield orchestrator, notes, pool, device
    finally:
        await pool.close()


@pytest.mark.slow
async def test_the_sampler_sleeps_while_the_trainer_trains_and_is_awake_for_each_evaluation(tmp_path, monkeypatch):
    monkeypatch.setattr(device_handoff, "time", SimpleNamespace(perf_counter=asyncio.get_running_loop().time))
    replicas = [ScriptedReplica(i, seconds_per_token=0.001, **TALKS) for i in range(2)]
    async with nothing_left_behind(), sharing(tmp_path, replicas, evaluate=True) as (orchestrator, notes, pool, device):
        assert await orchestrator.run()
        ledger = check(orchestrator, notes, pool)
    assert device.batches == 6
    assert [step for step, _ in notes.evals] == [0, 2, 4, 6]
    assert all(evaluation.num_failed == 0 for _, evaluation in notes.evals)
    assert ledger.dropped["lost_replica"] == ledger.dropped["cancelled"] == 0
    for _, metrics, groups in notes.steps:
        assert metrics["time/sampler_asleep"] == pytest.approx(0.01)  # the trainer's
        assert metrics["time/sampler_falling_asleep"] == 0
        assert metrics["replica/1/waking_seconds"] == 0.25
        assert metrics["staleness/max"] == 0
        assert len(groups) == 3


@pytest.mark.slow
async def test_what_is_still_sampled_when_a_batch_is_handed_over_goes_on_after_it(tmp_path):
    """Online difficulty filtering with a surplus: groups are in flight when the batch is full, and may fill the next
    one while the policy is evaluated."""
    replicas = [ScriptedReplica(i, seconds_per_token=0.001, **TALKS) for i in range(2)]
    settings = {"online_filtering": True, "oversampling": 3.0, "evaluate": True, "environment": Coins()}
    async with nothing_left_behind(), sharing(tmp_path, replicas, **settings) as (orchestrator, _, _, device):
        assert await orchestrator.run()
        ledger = orchestrator.ledger_for_tests
        ledger.check(pending=0)
    assert device.batches == 6
    assert set(reason for reason, count in ledger.dropped.items() if count) <= {"difficulty", "unused_at_end"}


async def test_a_run_on_two_devices_never_sleeps(tmp_path):
    replica = ScriptedReplica(**TALKS)
    pool = ReplicaPool([replica], limits=LIMITS)
    orchestrator, notes, _ = make(tmp_path, sampler=pool, trainer=Trainer(tmp_path), probes=probes(0))
    assert await orchestrator.run()
    await pool.close()
    assert "sleep" not in replica.events
    assert "time/sampler_asleep" not in notes.steps[0][1]


@pytest.mark.slow
async def test_a_server_that_dies_while_it_sleeps_is_started_when_the_trainer_has_left(tmp_path):
    replica, restarts = ScriptedReplica(**TALKS), Restarts(**TALKS)

    def during(version):
        if version == 3:
            replica.die()

    async with (
        nothing_left_behind(),
        sharing(
            tmp_path,
            [replica],
            restart=restarts,
            during=during,
            delay=0.1,  # several looks at its health
        ) as (orchestrator, notes, pool, _),
    ):
        assert await orchestrator.run()
        ledger = check(orchestrator, notes, pool)
    assert restarts.asked == [0]
    assert ledger.dropped["lost_replica"] == 0
    assert ledger.sampled == replica.num_drawn + restarts.made[0].num_drawn


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
async def test_kills_at_any_moment_never_put_both_on_the_device(tmp_path, seed):
    rng, arguments = random.Random(seed), {"seconds_per_token": 0.001, "reports": True, **TALKS}
    replicas, restarts = [ScriptedReplica(i, **arguments) for i in range(2)], Restarts(**arguments)

    async def harm():
        for _ in range(4):
            await asyncio.sleep(rng.uniform(0.01, 0.08))
            alive = [replica for replica in [*replicas, *restarts.made] if not replica.is_dead]
            if alive:
                rng.choice(alive).die()

    async with (
        nothing_left_behind(),
        sharing(tmp_path, replicas, restart=restarts, steps=10, delay=0.05) as (orchestrator, notes, pool, _),
    ):
        harming = asyncio.ensure_future(harm())
        assert await orchestrator.run()
        harming.cancel()
        await asyncio.gather(harming, return_exceptions=True)
        check(orchestrator, notes, pool, steps=10)


@pytest.mark.slow
async def test_a_sampler_that_does_not_wake_up_ends_the_run_with_a_checkpoint_that_goes_on(tmp_path):
    replica = ScriptedReplica(faults=["", "", "stale", "stale"], **TALKS)
    async with nothing_left_behind(), sharing(tmp_path, [replica]) as (orchestrator, notes, _, _):
        with pytest.raises(EngineDead, match=r"no replica is left\. replica 0: its logprobs differ"):
            await orchestrator.run()
    assert max(notes.saved) == 3
    await go_on_and_check(notes, tmp_path)


@pytest.mark.slow
async def test_a_trainer_that_fails_while_the_sampler_sleeps_ends_the_run_with_a_checkpoint(tmp_path):
    def during(version):
        if version == 3:
            raise RunStopped("the trainer: no finite loss")

    replica = ScriptedReplica(**TALKS)
    async with nothing_left_behind(), sharing(tmp_path, [replica], during=during) as (orchestrator, notes, _, _):
        with pytest.raises(RunStopped, match="no finite loss"):
            await orchestrator.run()
    assert replica.is_closed and max(notes.saved) == 2
    await go_on_and_check(notes, tmp_path)


@pytest.mark.slow
async def test_a_stop_while_the_trainer_trains_ends_after_that_step(tmp_path):
    stop = []

    def during(version):
        if version == 2:
            stop[0].request_stop()

    async with nothing_left_behind(), sharing(tmp_path, [ScriptedReplica(**TALKS)], during=during) as run:
        orchestrator, notes, _, _ = run
        stop.append(orchestrator)
        assert not await orchestrator.run()
    assert max(notes.saved) == orchestrator.step == 2
    await go_on_and_check(notes, tmp_path)


async def test_a_sampler_that_fails_to_sleep_ends_the_run(tmp_path):
    class Restless(ScriptedSampler):
        async def sleep(self):
            raise EngineDead("it cannot sleep")

    sampler = Restless(script=lambda r: say("x"), vocab_size=VOCAB_SIZE, context_length=100)
    orchestrator, notes, _ = make(tmp_path, sampler=sampler, shares_device=True)
    with pytest.raises(EngineDead, match="it cannot sleep"):
        await orchestrator.run()
    assert max(notes.saved) == 0
