"""Requests find a replica, survive its death, and what cannot be known is not booked."""

import asyncio
import contextlib
import dataclasses
import itertools

import numpy as np
import pytest

from inference.pool.scripted_replicas import (
    LIMITS,
    Restarts,
    ScriptedCheck,
    ScriptedReplica,
    after,
    pool_of,
    request,
    settled,
)
from verbatim.core.errors import EngineDead, RecordError, SamplerFault
from verbatim.inference.cancelled import num_tokens_drawn, num_tokens_lost
from verbatim.inference.pool.loading import illness
from verbatim.inference.pool.replica import TooSlow
from verbatim.inference.sampler import Sampler, as_replicated, failure_of, watch_engine
from waiting import HANGS, until

pytestmark = pytest.mark.realtime


@contextlib.asynccontextmanager
async def opened(*replicas, **arguments):
    pool = pool_of(*replicas, **arguments)
    try:
        yield pool
    finally:
        await pool.close()
        left = [task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        assert left == []


async def test_it_is_a_replicated_sampler_with_what_all_replicas_can_take():
    short = ScriptedReplica(1)
    short.context_length = 150
    async with opened(ScriptedReplica(0, version=3), short) as pool:
        assert isinstance(pool, Sampler)
        assert as_replicated(pool) is pool
        assert (pool.context_length, pool.vocab_size, pool.policy_version) == (150, 100, 3)
        assert failure_of(pool) is None


async def test_a_session_stays_on_its_replica_and_new_ones_go_to_the_least_busy():
    replicas = [ScriptedReplica(i) for i in range(3)]
    async with opened(*replicas) as pool:
        for _ in range(4):
            await asyncio.gather(*(pool.generate(request(f"episode-{i}/main")) for i in range(6)))
    for replica in replicas:
        sessions = [r.session for r in replica.requests]
        assert len(sessions) == 8
        assert len(set(sessions)) == 2


async def test_a_bad_prompt_is_refused_before_a_replica_is_asked():
    replica = ScriptedReplica()
    async with opened(replica) as pool:
        for prompt in ((), (100,), range(200)):
            with pytest.raises(RecordError):
                await pool.generate(request(prompt=prompt))
        with pytest.raises(RecordError):
            await pool.prompt_logprobs(np.array([1, 100], np.int32))
    assert replica.requests == []


async def test_more_requests_than_places_wait_in_line():
    released, most = asyncio.Event(), [0, 0]

    async def pause(seconds):
        most[:] = [max(m, r.num_in_flight) for m, r in zip(most, replicas, strict=True)]
        await released.wait()
        await asyncio.sleep(0)

    replicas = [ScriptedReplica(i, pause=pause) for i in range(2)]
    async with opened(*replicas, most_running=2) as pool:
        asking = [asyncio.ensure_future(pool.generate(request(f"s{i}", seed=i))) for i in range(12)]
        await until(lambda: [r.num_in_flight for r in replicas] == [2, 2])
        assert pool.metrics()["replicas/requests_waiting"] == 8
        released.set()
        await asyncio.gather(*asking)
        assert most == [2, 2]
        order = [r.seed for replica in replicas for r in replica.requests]
        assert sorted(order) == list(range(12))
        assert sorted(order[:2] + [r.seed for r in replicas[1].requests[:2]]) == [0, 1, 2, 3]


async def test_a_request_that_is_cancelled_in_line_lets_the_others_pass():
    replica = ScriptedReplica(pause=after(2, cancelled := asyncio.Event()))
    async with opened(replica, most_running=1) as pool:
        asking = [asyncio.ensure_future(pool.generate(request(f"s{i}", seed=i))) for i in range(4)]
        await until(lambda: replica.num_in_flight == 1)
        asking[1].cancel()
        cancelled.set()
        ended = await asyncio.gather(*asking, return_exceptions=True)
    assert [isinstance(end, asyncio.CancelledError) for end in ended] == [False, True, False, False]
    assert [r.seed for r in replica.requests] == [0, 2, 3]


async def test_a_cancelled_request_says_how_many_tokens_were_drawn():
    replica = ScriptedReplica(seconds_per_token=0.003)
    async with opened(replica) as pool:
        asking = asyncio.ensure_future(pool.generate(request(tokens=100)))
        await until(lambda: replica.num_drawn >= 3)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError) as ended:
            await asking
    assert num_tokens_drawn(ended.value) == replica.num_drawn >= 3
    assert num_tokens_lost(ended.value) == 0


async def test_a_request_that_is_cancelled_again_still_says_how_many_tokens_were_drawn():
    """As where a run is stopped while an episode that is over its time is cut off."""

    class Slow(ScriptedReplica):
        async def generate(self, request):
            try:
                return await super().generate(request)
            except asyncio.CancelledError:
                asked.set()
                await answers.wait()
                raise

    asked, answers = asyncio.Event(), asyncio.Event()
    replica = Slow(seconds_per_token=0.003)
    async with opened(replica) as pool:
        asking = asyncio.ensure_future(pool.generate(request(tokens=100)))
        await until(lambda: replica.num_drawn >= 3)
        asking.cancel()
        await asked.wait()
        asking.cancel()
        await settled()
        answers.set()
        with pytest.raises(asyncio.CancelledError) as ended:
            await asking
    assert num_tokens_drawn(ended.value) == replica.num_drawn >= 3


# ---- deaths


@pytest.mark.parametrize("end", ["die", "freeze"])
@pytest.mark.parametrize("reports", [True, False])
async def test_the_requests_of_a_lost_replica_are_sent_again_elsewhere(end, reports):
    """What it is known to have drawn is counted once; where nothing is known, the request is."""
    replicas = [ScriptedReplica(i, seconds_per_token=0.004, reports=reports) for i in range(2)]
    # Of one that dies the requests know first; the watch, were it quicker, would have them report what they drew.
    limits = dataclasses.replace(LIMITS, health_interval=HANGS) if end == "die" else LIMITS
    async with opened(*replicas, restart=None, limits=limits) as pool:
        asking = [asyncio.ensure_future(pool.generate(request(f"s{i}", tokens=20))) for i in range(4)]
        await until(lambda: replicas[0].num_drawn >= 6)
        getattr(replicas[0], end)()
        done = await asyncio.gather(*asking)
        metrics = pool.metrics()
    assert all(len(c.ids) == 20 for c in done)
    assert [r.session for r in replicas[1].requests][2:] == ["s0", "s2"]
    known = sum(c.num_lost_tokens for c in done)
    assert metrics["replicas/requests_resent"] == 2
    assert metrics["replicas/tokens_lost"] == known
    assert metrics["replicas/serving"] == 1
    if end == "die" or not reports:  # a broken connection says nothing
        assert (known, metrics["replicas/requests_lost"]) == (0, 2)
    else:
        assert known == replicas[0].num_drawn
        assert metrics["replicas/requests_lost"] == 0


async def test_a_replica_that_died_is_started_again_and_the_others_go_on():
    replicas, restarts = [ScriptedReplica(i) for i in range(2)], Restarts()
    async with opened(*replicas, restart=restarts) as pool:
        await pool.generate(request("a"))
        replicas[0].die()
        await asyncio.gather(*(pool.generate(request(f"s{i}")) for i in range(4)))
        assert len(replicas[1].requests) >= 4
        await until(lambda: pool.metrics()["replicas/serving"] == 2)
        await asyncio.gather(*(pool.generate(request(f"t{i}")) for i in range(4)))
        assert len(restarts.made[0].requests) == 2
        assert pool.metrics()["replica/0/restarts"] == 1
    assert restarts.asked == [0]
    assert replicas[0].is_closed
    assert restarts.made[0].is_closed


async def test_a_replica_that_comes_back_loads_the_current_weights_and_is_checked_before_it_serves(tmp_path):
    replicas, restarts = [ScriptedReplica(i) for i in range(2)], Restarts()
    async with opened(*replicas, restart=restarts) as pool:
        await pool.update_replicas(tmp_path, 4, ScriptedCheck(4))
        check = ScriptedCheck(5)
        await pool.update_replicas(tmp_path, 5, check)
        replicas[1].die()
        await until(lambda: restarts.made)
        await until(lambda: pool.metrics()["replicas/serving"] == 2)
        assert restarts.made[0].events == ["load 5", "check 5"]
        assert restarts.made[0].held == 5
        assert pool.metrics()["replica/1/policy_version"] == 5
        assert check.asked == ["replica 0", "replica 1", "replica 1"]


async def test_a_replica_that_comes_back_during_an_update_joins_with_the_new_version_only(tmp_path):
    replicas, restarts = [ScriptedReplica(i) for i in range(2)], Restarts()
    async with opened(*replicas, restart=restarts) as pool:
        first, second = ScriptedCheck(1), ScriptedCheck(2)
        await pool.update_replicas(tmp_path, 1, first)
        first.gate = asyncio.Event()
        replicas[1].die()
        await until(lambda: restarts.made and "check 1" in restarts.made[0].events)
        await pool.update_replicas(tmp_path, 2, second)
        first.gate.set()
        await until(lambda: pool.metrics()["replicas/serving"] == 2)
        assert restarts.made[0].events == ["load 1", "check 1", "load 2", "check 2"]
        done = await asyncio.gather(*(pool.generate(request(f"s{i}")) for i in range(6)))
        assert {int(v) for c in done for v in c.policy_versions} == {2}


async def test_a_server_that_cannot_be_started_is_tried_again(monkeypatch):
    monkeypatch.setattr("verbatim.inference.pool.replica_supervisor.LONGEST_PAUSE", 0.01)
    replicas, restarts = [ScriptedReplica(i) for i in range(2)], Restarts(failing=2)
    async with opened(*replicas, restart=restarts) as pool:
        await pool.generate(request())
        replicas[0].die()
        await until(lambda: restarts.made and pool.metrics()["replicas/serving"] == 2)
    assert restarts.asked == [0, 0, 0]


@pytest.mark.parametrize("hangs", [False, True])
async def test_the_last_replica_that_cannot_be_started_again_ends_the_run_with_what_is_known(monkeypatch, hangs):
    monkeypatch.setattr("verbatim.inference.pool.replica_supervisor.LONGEST_PAUSE", 0.01)
    monkeypatch.setattr("verbatim.inference.pool.replica_supervisor.MOST_LOST_IN_A_ROW", 2)
    replica, restarts = ScriptedReplica(), Restarts(failing=99, hangs=hangs)
    limits = dataclasses.replace(LIMITS, start=0.05) if hangs else LIMITS
    async with opened(replica, restart=restarts, limits=limits) as pool:
        asking = asyncio.ensure_future(pool.generate(request()))
        replica.die()
        said = "no replica is left. " + (
            "replica 0: the restart took more than 0.05 s" if hangs else "replica 0: the server ended with status 1"
        )
        with pytest.raises(EngineDead) as ended:
            await watch_engine(pool)
        assert str(ended.value) == failure_of(pool) == said
        for waiting in (asking, pool.generate(request())):
            with pytest.raises(SamplerFault, match="no replica is left"):
                await waiting
    assert len(restarts.asked) == 2


async def test_without_restarts_a_dead_replica_stays_out_and_the_last_one_names_all(tmp_path):
    replicas = [ScriptedReplica(i) for i in range(2)]
    async with opened(*replicas) as pool:
        await pool.generate(request())
        replicas[1].die()
        await until(lambda: pool.metrics()["replicas/serving"] == 1)
        await pool.update_replicas(tmp_path, 1, ScriptedCheck(1))
        replicas[0].freeze()
        with pytest.raises(
            EngineDead,
            match=(
                r"^no replica is left\. replica 0 has answered no health check for \d+ s; "
                r"replica 1: connection refused$"
            ),
        ):
            await pool.update_replicas(tmp_path, 2, ScriptedCheck(2))


async def test_a_replica_that_is_silent_for_less_than_its_limit_is_not_lost():
    """A busy machine: two health checks take too long, the third one is answered."""
    replica, asked = ScriptedReplica(), []

    async def health():
        asked.append(len(asked))
        if len(asked) <= 2:
            raise TooSlow("replica 0: health: no answer within 10 s")

    replica.health = health
    assert await illness(replica, dataclasses.replace(LIMITS, silence=HANGS)) is None
    assert asked == [0, 1, 2]


async def test_a_replica_that_refuses_connections_is_lost_at_the_second_check():
    replica = ScriptedReplica()
    replica.die()
    assert await illness(replica, dataclasses.replace(LIMITS, silence=HANGS)) == "replica 0: connection refused"


async def test_an_engine_that_hangs_behind_a_server_that_answers_is_lost():
    """It has drawn all three tokens, and does not answer; that its counts stand still is what tells."""

    class Counting(ScriptedReplica):
        """Its counts go on as with others' requests, until it hangs: however late a look at them is, it is well."""

        async def load_metrics(self):
            others = 0 if self.is_stalled and self.num_drawn == 3 else next(looks)
            load = await super().load_metrics()
            return dataclasses.replace(load, generated_tokens=load.generated_tokens + others)

    looks = itertools.count(1000)
    replicas = [Counting(i) for i in range(2)]
    replicas[0].is_stalled = True
    async with opened(*replicas, limits=dataclasses.replace(LIMITS, stall=0.1)) as pool:
        done = await pool.generate(request(tokens=3))
        assert len(done.ids) == 3
        assert replicas[0].num_drawn == done.num_lost_tokens == 3
        assert pool.metrics()["replicas/lost"] == 1


# ---- requests that fail


async def test_a_request_that_fails_on_a_living_replica_is_tried_on_another_one_and_the_log_says_so_once(caplog):
    replicas = [ScriptedReplica(i) for i in range(2)]
    async with opened(*replicas) as pool:
        replicas[0].fails = 1
        assert len((await pool.generate(request("a"))).ids) == 4
        assert pool.metrics()["replicas/serving"] == 2
        replicas[1].fails = 1  # where the session is now
        await pool.generate(request("a"))
        replicas[0].fails = 1
        await pool.generate(request("a"))
        assert pool.metrics()["replicas/requests_failed"] == 3
    assert caplog.text.count("replica 0 is alive, but failed on a request: replica 0: 500") == 1
    assert [len(r.requests) for r in replicas] == [1, 2]


async def test_a_request_that_fails_everywhere_fails_and_no_replica_is_lost():
    replicas = [ScriptedReplica(i) for i in range(3)]
    for replica in replicas:
        replica.fails = 9
    async with opened(*replicas) as pool:
        with pytest.raises(SamplerFault, match=r"replica 1: 500 \(the last of 2 replicas that failed on it\)"):
            await pool.generate(request())
        assert pool.metrics()["replicas/serving"] == 3


async def test_a_request_that_kills_every_replica_fails_before_all_are_gone():
    class Fragile(ScriptedReplica):
        async def generate(self, request):
            if request.seed == 666:
                self.die()
            return await super().generate(request)

    replicas = [Fragile(i) for i in range(6)]
    async with opened(*replicas) as pool:
        with pytest.raises(SamplerFault, match="the last of 4 replicas that were lost with it"):
            await pool.generate(request(seed=666))
        await until(lambda: pool.metrics()["replicas/serving"] == 2)
        assert len((await pool.generate(request())).ids) == 4


async def test_a_completion_that_a_replica_cut_off_by_itself_is_asked_for_again(caplog):
    """As a server that is shut down: it answers what it has."""
    replicas = [ScriptedReplica(i, seconds_per_token=0.004) for i in range(2)]
    async with opened(*replicas) as pool:
        asking = asyncio.ensure_future(pool.generate(request(tokens=30)))
        await until(lambda: replicas[0].num_drawn >= 2)
        await replicas[0].close()
        done = await asking
    assert (len(done.ids), done.num_lost_tokens) == (30, replicas[0].num_drawn)
    assert f"replica 0: it cut a completion off after {replicas[0].num_drawn} tokens" in caplog.text


# ---- the end


async def test_closing_ends_what_is_in_flight_and_in_line_as_cancelled():
    closed = []

    async def on_close():
        closed.append(True)

    replica = ScriptedReplica(seconds_per_token=0.004)
    pool = pool_of(replica, most_running=1, on_close=on_close)
    asking = [asyncio.ensure_future(pool.generate(request(tokens=100))) for _ in range(2)]
    await until(lambda: replica.num_drawn >= 2)
    await pool.close()
    await pool.close()
    drawn, waiting = await asyncio.gather(*asking)
    assert (drawn.stop_reason, len(drawn.ids)) == ("cancelled", replica.num_drawn)
    assert (waiting.stop_reason, len(waiting.ids)) == ("cancelled", 0)
    assert closed == [True]
    with pytest.raises(SamplerFault, match="closed"):
        await pool.generate(request())


async def test_logprobs_of_a_prompt_come_from_any_replica_that_lives():
    replicas = [ScriptedReplica(i) for i in range(2)]
    ids = np.array([1, 2, 3], np.int32)
    async with opened(*replicas) as pool:
        replicas[0].die()
        found = await pool.prompt_logprobs(ids)
    assert np.isnan(found[0])
    assert found[1:].tolist() == pytest.approx([-1 / 3, -1 / 4])
