"""Episodes on Ray actors are the episodes of this process, whatever happens to the actors."""

import asyncio
import json
import os
import signal
import sys
import threading
from pathlib import Path

import pytest
import pytest_asyncio

import warm
from byte_renderer import ByteRenderer
from rollouts.chat_server import chat_server
from rollouts.clocks import set_forward
from rollouts.players import Players, SecondTurnsWait, contents, scripted, sharing_players
from rollouts.ray_session import local_ray
from verbatim import Example
from verbatim.core.errors import RunStopped, UsageError
from verbatim.inference import SamplingParams
from verbatim.inference.openai import OpenAI
from verbatim.rollouts import EpisodeLimits, GroupRun, LocalRunner, RolloutSetup
from verbatim.rollouts.backends import RunnerInputs
from verbatim.rollouts.ray.cluster import connect
from verbatim.rollouts.ray.runner import ray_runner
from verbatim.rollouts.workers import pool as worker_pool
from verbatim.rollouts.workers import worker as pool_worker
from verbatim.rollouts.workers.episodes import RemoteSetup
from waiting import HANGS, until

pytestmark = [pytest.mark.extras, pytest.mark.realtime]
__all__ = ["local_ray"]
in_one_loop = pytest.mark.asyncio(loop_scope="module")
"""Of the tests that share actors."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_actors(local_ray, tmp_path_factory):
    players = sharing_players(tmp_path_factory.mktemp("shared"))
    async with players.pool() as pool:
        yield players, pool


@pytest_asyncio.fixture(loop_scope="module")
async def shared(shared_actors):
    """Players and their two actors, of which no loss was counted yet."""
    players, pool = shared_actors
    await until(lambda: len(pool.pids) == 2)
    players.sampler.now = scripted()
    pool.num_lost = pool.num_rerun = 0
    return players, pool


def same(found, expected):
    assert [contents(t) for t in found.trajectories] == [contents(t) for t in expected.trajectories]


@in_one_loop
async def test_groups_on_actors_are_groups_of_this_process(shared):
    players, pool = shared
    counts = []
    run = players.group(pool, size=6, on_sampled=counts.append)
    found = await run.run()
    assert len(set(pool.pids)) == 2 and os.getpid() not in pool.pids
    assert dict(pool.metrics()) == {"rollout/workers": 2, "rollout/workers_lost": 0, "rollout/episodes_rerun": 0}
    same(found, await players.here(size=6))
    assert sum(counts) == run.num_sampled_tokens == sum(t.num_sampled_tokens for t in found.trajectories) > 0
    assert [t.reward_parts["digit"] for t in found.trajectories] == [t.seed % 10 for t in found.trajectories]


@in_one_loop
async def test_episodes_go_to_the_actor_that_plays_the_fewest(shared):
    players, pool = shared
    players.sampler.now = sampler = SecondTurnsWait()
    running = asyncio.create_task(players.group(pool, size=6).run())
    await until(lambda: len(sampler.requests) == 6)
    assert pool.num_running == [3, 3]
    sampler.go_on.set()
    await running
    assert pool.num_running == [0, 0]


@in_one_loop
async def test_what_goes_wrong_in_an_episode_stays_on_its_trajectory_as_here(shared):
    players, pool = shared
    examples = ("score", "over", "2")
    found = [await players.group(pool, example, size=1).run() for example in examples]
    assert pool.num_lost == 0
    for group, example in zip(found, examples, strict=True):
        same(group, await players.here(example, size=1))
    assert [t.error for group in found for t in group.trajectories] == [
        "environment: score raised RuntimeError: no score",
        "timeout: the episode took more than 600 s",
        None,
    ]


def lost_to(counts):
    """A listener that takes nothing but what went down with an actor."""
    return lambda dropped: counts.append(dropped["lost_worker"])


@pytest.mark.parametrize("death", ["SIGKILL", "ray.kill"])
@in_one_loop
async def test_episodes_of_a_lost_worker_are_played_again_and_its_tokens_are_counted(local_ray, shared, death):
    """The first turns of the six are drawn, the second ones held, then one of the two actors dies."""
    players, pool = shared
    players.sampler.now = sampler = SecondTurnsWait()
    sampled, lost = [], []
    run = players.group(pool, size=6, on_sampled=sampled.append, on_dropped=lost_to(lost))
    running = asyncio.create_task(run.run())
    await until(lambda: len(sampled) == 6)
    before = sum(sampled)
    victim = pool._workers[0]
    if death == "ray.kill":
        local_ray.kill(victim.worker.handle)
    else:
        os.kill(victim.pid, signal.SIGKILL)
    await until(lambda: len(lost) == 3)
    assert run.num_sampled_tokens == sum(sampled) - sum(lost)
    sampler.go_on.set()
    found = await running
    await until(lambda: len(pool.pids) == 2)  # another one took its place
    assert victim.pid not in pool.pids
    again = await players.group(pool, index=1, size=6).run()
    assert (pool.num_lost, pool.num_rerun) == (1, 3)
    assert pool.metrics()["rollout/episodes_rerun"] == 3
    same(found, await players.here(size=6))
    same(again, await players.here(index=1, size=6))
    firsts = [len(t.turns[0].completion_ids) for t in found.trajectories]
    assert before == sum(firsts)
    assert sum(lost) in {sum(firsts[i] for i in (0, 2, 4)), sum(firsts[i] for i in (1, 3, 5))}
    assert sum(sampled) - sum(lost) == sum(t.num_sampled_tokens for t in found.trajectories)


@in_one_loop
async def test_an_episode_that_kills_its_actors_fails_and_the_others_do_not(shared):
    players, pool = shared
    sampled, lost = [], []
    deadly = await players.group(pool, "exit", size=1, on_sampled=sampled.append, on_dropped=lost_to(lost)).run()
    good = await players.group(pool, "3", size=4).run()
    assert (pool.num_lost, pool.num_rerun) == (3, 2)
    (failed,) = deadly.trajectories
    assert failed.error.startswith("worker: The actor died ")
    assert failed.error.endswith(" (the last of 3 workers lost with this episode)")
    assert (failed.stop_reason, failed.truncated, failed.turns) == ("api_error", True, ())
    assert (failed.trajectory_id, failed.env, failed.example_id) == ("train-0-0", "doubles", "exit")
    assert sum(sampled) == sum(lost) > 0
    same(good, await players.here("3", size=4))


@in_one_loop
async def test_an_actor_that_is_stuck_is_taken_for_lost(shared, monkeypatch):
    monkeypatch.setattr(worker_pool, "MOST_ATTEMPTS", 1)
    players, pool = shared
    playing = asyncio.create_task(players.group(pool, "block", size=1).run())
    await until(lambda: list(players.folder.glob("blocks-*")))
    set_forward(players.limits.timeout + worker_pool.GRACE + 1)
    (failed,) = (await asyncio.wait_for(playing, HANGS)).trajectories
    assert f"did not end an episode within {worker_pool.GRACE:g} s of its deadline" in failed.error
    good = await players.group(pool, "3").run()
    assert [t.error for t in good.trajectories] == [None] * 4


async def test_with_no_actor_left_and_none_to_start_the_run_stops(local_ray, tmp_path):
    players = Players(trouble={"4": "wait"}, folder=str(tmp_path))
    async with players.pool() as pool:
        running = asyncio.create_task(players.group(pool, "4", size=4).run())
        await until(lambda: len(list(tmp_path.glob("waits-*"))) == 4)
        (tmp_path / "refuse").touch()
        for pid in pool.pids:
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(RunStopped, match=r"no Ray actor is left .*the game server is down"):
            await running
        with pytest.raises(RunStopped, match="no Ray actor is left"):
            await players.group(pool, "3").run()
        assert (pool.pids, pool.num_lost) == ([], 2)


@in_one_loop
async def test_cancelling_reaches_the_engine_and_the_episode(shared):
    """Four episodes are cancelled while they are sampled, then four while their environment waits."""
    players, pool = shared
    players.sampler.now = sampler = SecondTurnsWait()
    sampled, lost = [], []

    def number(what):
        return len(list(players.folder.glob(f"{what}-*")))

    for example, all_wait in (("cancelled", lambda: len(sampled) == 4), ("wait", lambda: number("waits") == 4)):
        run = players.group(pool, example, on_sampled=sampled.append, on_dropped=lost_to(lost))
        running = asyncio.create_task(run.run())
        await until(all_wait)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await until(lambda closed=f"closed-{example}": number(closed) == 4)
        sampler.go_on.set()
    assert (sampler.num_in_flight, lost, pool.num_lost) == (0, [], 0)
    assert len((await players.group(pool, index=2).run()).completed) == 4


@in_one_loop
async def test_what_cannot_travel_fails_its_episode_and_no_actor(shared):
    players, pool = shared
    (kept,) = (await players.group(pool, "lock", size=1).run()).trajectories
    setup = players.setup(pool)
    locked = GroupRun(setup, Example(id="3", payload={"lock": threading.Lock()}), index=1, size=1, run_seed=7)
    (unplayed,) = (await locked.run()).trajectories
    good = await players.group(pool, "3").run()
    assert (pool.num_lost, pool.num_running) == (0, [0, 0])
    assert kept.error.startswith("environment: info is not JSON: ['lock'] is a lock; ")
    assert len(kept.turns) == 2
    assert unplayed.error.startswith("environment: the example cannot be sent to a worker: ")
    assert unplayed.turns == ()
    same(good, await players.here("3"))


@pytest.mark.slow
def test_a_lost_host_is_a_lost_worker_and_a_cluster_that_was_there_stays():
    done = warm.run(
        [sys.executable, "-m", "rollouts.ray_cluster_program"],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=2 * HANGS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == {"same": [True] * 6, "lost": 1, "again": 3, "left": False, "free": 2.0}


async def test_what_hinders_the_actors_is_said_before_anything_is_played(local_ray, monkeypatch):
    players = Players()
    with pytest.raises(UsageError, match=r"on a Ray actor: .*no_such_module"):
        async with players.pool(name="no_such_module.Environment"):
            pass
    monkeypatch.setattr(pool_worker, "START_TIMEOUT", 2.0)
    with pytest.raises(UsageError, match=r"a Ray actor did not start within 2 s; .*rollout\.workers"):
        async with players.pool(workers=5):  # Ray has four CPUs, however many of them other tests hold
            pass
    monkeypatch.undo()
    async with players.pool() as pool:  # nothing of theirs is left in the way
        assert len(pool.pids) == 2


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("127.0.0.1:1", r'at address = "127.0.0.1:1": .*refused.*ray start --head'),
        ("ray://10.0.0.1", r"expected \"auto\", or an address such as"),
    ],
)
def test_a_cluster_that_is_not_there_is_named_at_once(local_ray, address, message):
    with pytest.raises(UsageError, match=message):
        connect(local_ray, address)


async def test_a_teacher_plays_on_actors_too(local_ray):
    from rollouts.test_teacher_loop import Sums

    sampler, params, limits = scripted(), SamplingParams(), EpisodeLimits()
    found, counts = [], []
    with chat_server() as server:
        api = OpenAI(model="teacher", base_url=server.url)
        remote = RemoteSetup(
            env="sums", name="rollouts.test_teacher_loop.Sums", args={}, params=params, limits=limits, teacher=api
        )
        inputs = RunnerInputs(setups={("train", "sums"): remote}, sampler=sampler, renderer=ByteRenderer(), workers=1)
        pool = ray_runner(inputs)
        async with pool as player, api.connect() as teacher:
            for who in (player, LocalRunner()):
                setup = RolloutSetup(
                    env="sums",
                    environment=Sums(),
                    sampler=sampler,
                    renderer=ByteRenderer(),
                    params=params,
                    limits=limits,
                    slots=asyncio.Semaphore(8),
                    teacher=teacher,
                    runner=who,
                )
                listener = []
                run = GroupRun(setup, Example(id="x"), index=0, size=2, run_seed=0, on_sampled=listener.append)
                found.append(await run.run())
                counts.append(sum(listener))
    same(*found)
    assert counts[0] == counts[1] == sum(t.num_sampled_tokens for t in found[0].trajectories)
    assert [t.messages[-1]["content"] for t in found[0].trajectories] == ["12", "12"]
    assert sampler.requests == []
