"""Whole runs over a pool of replicas that die, freeze and load wrong weights: every token is accounted for."""

import asyncio
import contextlib
import dataclasses
import random

import numpy as np
import pytest

from byte_renderer import VOCAB_SIZE, say
from inference.pool.scripted_replicas import LIMITS, Restarts, ScriptedReplica, logprob_of
from rollouts.players import Doublings, scripted, two_turns
from rollouts.ray_session import local_ray
from run.orchestrator.loop_runs import FakeTrainer, make, nothing_left_behind
from run.orchestrator.test_process_runs import in_processes
from run.orchestrator.test_ray_runs import on_actors
from verbatim.core.errors import EngineDead
from verbatim.inference.pool.pool import ReplicaPool
from verbatim.trainer.transport.canary import Probes
from waiting import HANGS

__all__ = ["local_ray"]

PROBE_IDS = (np.array([5, 9, 4], np.int32), np.arange(1, 9, dtype=np.int32))


def probes(version):
    rows = tuple(np.array([logprob_of(int(i), version) for i in ids[1:]], np.float32) for ids in PROBE_IDS)
    return Probes(token_ids=PROBE_IDS, logprobs=rows)


class Trainer(FakeTrainer):
    """Publishes the logprobs that replicas with the right weights have."""

    def report(self, samples, version, checkpoint):
        return dataclasses.replace(super().report(samples, version, checkpoint), probes=probes(version))


TALKS = {"script": lambda r: say("x" * (1 + r.seed % 25)), "vocab_size": VOCAB_SIZE, "context_length": 100}


@contextlib.asynccontextmanager
async def running(tmp_path, replicas, *, restart=None, steps=6, level=1, limits=LIMITS):
    """A run of `loop_runs` over these replicas."""
    pool = ReplicaPool(replicas, restart=restart, limits=limits)
    orchestrator, notes, _ = make(
        tmp_path, level=level, steps=steps, sampler=pool, trainer=Trainer(tmp_path, delay=0.01), probes=probes(0)
    )
    try:
        yield orchestrator, notes, pool
    finally:
        await pool.close()


def check(orchestrator, notes, pool, *, steps=6):
    """Every step and group once; each token carries the weights that computed it; what was lost is counted."""
    ledger = orchestrator.ledger_for_tests
    ledger.check(pending=0)
    assert [entry[0] for entry in notes.steps] == list(range(1, steps + 1))
    groups = [group.group_id for _, _, groups in notes.steps for group in groups]
    assert len(groups) == len(set(groups))
    turns = [turn for _, _, groups in notes.steps for g in groups for t in g.trajectories for turn in t.turns]
    for turn in turns:
        expected = [logprob_of(int(i), int(v)) for i, v in zip(turn.completion_ids, turn.policy_versions, strict=True)]
        assert turn.logprobs == pytest.approx(expected, abs=1e-6)
    assert ledger.dropped["lost_replica"] == pool.metrics()["replicas/tokens_lost"]
    return ledger


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["stale", "label", "mismatch", "refused", "cache"])
async def test_what_a_wrong_update_sampled_is_lost_and_the_run_goes_on(tmp_path, fault):
    """Version 2 is loaded wrongly by one replica, and version 4 twice: it is out from there on."""
    replicas = [
        ScriptedReplica(i, faults=faults, seconds_per_token=0.001, **TALKS)
        for i, faults in enumerate([["", fault, "", "", fault, fault], []])
    ]
    async with nothing_left_behind(), running(tmp_path, replicas) as (orchestrator, notes, pool):
        assert await orchestrator.run()
        ledger = check(orchestrator, notes, pool)
        metrics = pool.metrics()
    assert ledger.sampled == sum(replica.num_drawn for replica in replicas)
    assert set(ledger.dropped) <= {"lost_replica", "unused_at_end", "cancelled"}
    assert (metrics["replicas/failed_checks"], metrics["replicas/serving"]) == (3, 1)
    assert metrics["replica/0/policy_version"] == 3


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
async def test_kills_and_freezes_at_random_moments_lose_tokens_and_nothing_else(tmp_path, seed):
    """Two kills and a freeze in each run."""
    rng, alive = random.Random(seed), {}
    arguments = {"seconds_per_token": 0.001, "reports": bool(seed % 2), **TALKS}
    restarts = Restarts(**arguments)
    replicas = [ScriptedReplica(i, **arguments) for i in range(3)]

    async def harm():
        for harm in ("die", "freeze", "die"):
            await asyncio.sleep(rng.uniform(0.02, 0.12))
            alive.update({r.index: r for r in [*replicas, *restarts.made]})
            getattr(rng.choice([r for r in alive.values() if not r.is_dead and not r.is_frozen]), harm)()

    async with nothing_left_behind(), running(tmp_path, replicas, restart=restarts, steps=12) as run:
        orchestrator, notes, pool = run
        harming = asyncio.ensure_future(harm())
        assert await orchestrator.run()
        await harming
        ledger = check(orchestrator, notes, pool, steps=12)
        metrics = pool.metrics()
    assert metrics["replicas/lost"] <= 3
    drawn = sum(replica.num_drawn for replica in [*replicas, *restarts.made])
    assert ledger.sampled <= drawn
    if metrics["replicas/requests_lost"] == 0:
        assert ledger.sampled == drawn
    assert set(ledger.dropped) <= {"lost_replica", "unused_at_end", "cancelled"}


@pytest.mark.slow
async def test_a_run_without_a_replica_left_ends_with_a_checkpoint_and_says_what_is_known(tmp_path):
    replicas = [ScriptedReplica(i, faults=["", "", "stale", "stale"], **TALKS) for i in range(2)]
    async with nothing_left_behind(), running(tmp_path, replicas) as (orchestrator, notes, pool):
        with pytest.raises(EngineDead, match=r"no replica is left\. replica 0: its logprobs differ by 0\.01"):
            await orchestrator.run()
    assert max(notes.saved) == orchestrator.step >= 3
    assert pool.policy_version == 2


# ---- episodes elsewhere


class FrozenOnFirst(ScriptedReplica):
    """Replica 0 answers its first requests. It freezes in the middle of a later one, of which a token was drawn."""

    def __init__(self, index=0, *, answers=6, **arguments):
        super().__init__(index, script=two_turns, vocab_size=VOCAB_SIZE, context_length=500, **arguments)
        self.answers, self.later = answers, []
        if index == 0:
            self.pause = self.freeze_in_the_middle

    async def _answer(self, index, request, versions, watch):
        if index >= self.answers:
            self.later.append(versions)
        return await super()._answer(index, request, versions, watch)

    async def freeze_in_the_middle(self, seconds):
        await asyncio.sleep(seconds)
        if any(self.later):
            self.freeze()  # its requests end with the number of tokens drawn


def trajectories(notes):
    return sorted(
        (t.trajectory_id, t.reward, [turn.completion_ids.tolist() for turn in t.turns])
        for _, _, groups in notes.steps
        for g in groups
        for t in g.trajectories
    )


async def same_trajectories_although_a_replica_dies(tmp_path, elsewhere):
    """No limit but that of the frozen one's silence can end anything: the other answers at once."""
    local, expected, _ = make(tmp_path, sampler=scripted(), environment=Doublings(), max_length=500)
    assert await local.run()
    replicas, restarts = (
        [FrozenOnFirst(i) for i in range(2)],
        Restarts(
            **{
                "script": two_turns,
                "vocab_size": VOCAB_SIZE,
                "context_length": 500,
            }
        ),
    )
    limits = dataclasses.replace(LIMITS, health=0.5, stall=HANGS, update=HANGS, check=HANGS, start=HANGS)
    pool = ReplicaPool(replicas, restart=restarts, limits=limits)
    orchestrator, notes, _ = make(tmp_path, sampler=pool, environment=Doublings(), max_length=500)
    async with nothing_left_behind(), elsewhere(orchestrator, pool):
        assert await orchestrator.run()
        ledger, lost = orchestrator.ledger_for_tests, pool.metrics()["replicas/tokens_lost"]
        await pool.close()
    assert trajectories(notes) == trajectories(expected)
    ledger.check(pending=0)
    assert dict(ledger.dropped) == {"lost_replica": lost}
    assert lost > 0
    assert ledger.sampled == sum(replica.num_drawn for replica in [*replicas, *restarts.made])


@pytest.mark.slow
@pytest.mark.realtime
async def test_episodes_in_processes_go_on_when_a_replica_is_lost(tmp_path):
    await same_trajectories_although_a_replica_dies(
        tmp_path, lambda orchestrator, pool: in_processes(orchestrator, pool, "rollouts.players.Doublings")
    )


@pytest.mark.extras
@pytest.mark.slow
@pytest.mark.realtime
async def test_episodes_on_ray_actors_go_on_when_a_replica_is_lost(local_ray, tmp_path):
    await same_trajectories_although_a_replica_dies(
        tmp_path, lambda orchestrator, pool: on_actors(orchestrator, pool, "rollouts.players.Doublings")
    )


@pytest.mark.slow
async def test_episodes_here_go_on_when_a_replica_is_lost(tmp_path):
    @contextlib.asynccontextmanager
    async def here(orchestrator, pool):
        yield

    await same_trajectories_although_a_replica_dies(tmp_path, here)
