"""Episodes in child processes are the episodes of this process, whatever happens to the children."""

import asyncio
import contextlib
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import pytest_asyncio

from byte_renderer import ByteRenderer
from rollouts.chat_server import chat_server
from rollouts.clocks import set_forward
from rollouts.players import Players, SecondTurnsWait, contents, scripted, sharing_players
from run.orchestrator.loop_runs import nothing_left_behind
from verbatim import Example
from verbatim.core.errors import ComponentError, RunStopped, UsageError
from verbatim.inference import SamplingParams
from verbatim.inference.openai import OpenAI
from verbatim.rollouts import EpisodeLimits, GroupRun, LocalRunner, RolloutSetup
from verbatim.rollouts.backends import RunnerInputs
from verbatim.rollouts.processes import worker as process_worker
from verbatim.rollouts.processes.runner import ProcessSettings, process_runner
from verbatim.rollouts.workers import pool as worker_pool
from verbatim.rollouts.workers import worker as pool_worker
from verbatim.rollouts.workers.episodes import RemoteSetup, packed_plan
from waiting import HANGS, until, wait_until

pytestmark = pytest.mark.realtime
in_one_loop = pytest.mark.asyncio(loop_scope="module")
"""Of the tests that share workers."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_workers(tmp_path_factory):
    players = sharing_players(tmp_path_factory.mktemp("shared"))
    settings, logs = ProcessSettings(worker_memory_mb=300), players.folder / "logs"
    async with players.processes(settings=settings, logs=logs) as pool:
        yield players, pool


@pytest_asyncio.fixture(loop_scope="module")
async def shared(shared_workers):
    """Players and their two workers, of which no loss was counted yet."""
    players, pool = shared_workers
    await until(lambda: len(pool.pids) == 2)
    players.sampler.now = scripted()
    pool.num_lost = pool.num_rerun = 0
    return players, pool


def same(found, expected):
    assert [contents(t) for t in found.trajectories] == [contents(t) for t in expected.trajectories]


def lost_to(counts):
    """A listener that takes nothing but what went down with a worker."""
    return lambda dropped: counts.append(dropped["lost_worker"])


def runs(pid):
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.mark.slow
@in_one_loop
async def test_groups_in_processes_are_groups_of_this_process(shared):
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
async def test_episodes_go_to_the_worker_that_plays_the_fewest(shared):
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
    examples, troubles = ("3", "score", "over", "2", "2", "2"), {0: "fail", 5: "outside_vocabulary", 9: "nan"}
    players.sampler.now = scripted(trouble=troubles)
    found = [await players.group(pool, example, size=1).run() for example in examples]
    assert pool.num_lost == 0
    players.sampler.now = scripted(trouble=troubles)
    for group, example in zip(found, examples, strict=True):
        same(group, await players.here(example, size=1))
    assert [(t.error or "none").partition(":")[0] for group in found for t in group.trajectories] == [
        "sampler",
        "environment",
        "timeout",
        "record",
        "none",
        "record",
    ]


@in_one_loop
async def test_episodes_of_a_lost_worker_are_played_again_and_its_tokens_are_counted(shared):
    """The first turns of the six are drawn, the second ones held, then one of the two processes is killed."""
    players, pool = shared
    players.sampler.now = sampler = SecondTurnsWait()
    sampled, lost = [], []
    run = players.group(pool, size=6, on_sampled=sampled.append, on_dropped=lost_to(lost))
    running = asyncio.create_task(run.run())
    await until(lambda: len(sampled) == 6)
    before = sum(sampled)
    victim = pool.pids[0]
    os.kill(victim, signal.SIGKILL)
    await until(lambda: len(lost) == 3)
    assert run.num_sampled_tokens == sum(sampled) - sum(lost)
    sampler.go_on.set()
    found = await running
    await until(lambda: len(pool.pids) == 2)  # another one took its place
    assert victim not in pool.pids
    again = await players.group(pool, index=1, size=6).run()
    assert (pool.num_lost, pool.num_rerun) == (1, 3)
    same(found, await players.here(size=6))
    same(again, await players.here(index=1, size=6))
    firsts = [len(t.turns[0].completion_ids) for t in found.trajectories]
    assert before == sum(firsts)
    assert sum(lost) in {sum(firsts[i] for i in (0, 2, 4)), sum(firsts[i] for i in (1, 3, 5))}
    assert sum(sampled) - sum(lost) == sum(t.num_sampled_tokens for t in found.trajectories)


@pytest.mark.slow
async def test_an_episode_that_ends_its_workers_fails_and_those_beside_it_do_not(caplog, monkeypatch):
    """All share one worker; each loss costs all of them a try, and the third one they play alone."""
    monkeypatch.setattr(worker_pool, "LONGEST_PAUSE", 0.0)
    players = Players(trouble={"4": "exit"})
    sampled, lost = [], []
    async with players.processes(workers=1) as pool:
        deadly, good = await asyncio.gather(
            players.group(pool, "4", size=1, on_sampled=sampled.append, on_dropped=lost_to(lost)).run(),
            players.group(pool, "3", size=4).run(),
        )
        assert pool.num_lost == 3  # two with all of them, and one with the guilty one alone
        assert pool._spare == []
    (failed,) = deadly.trajectories
    assert failed.error == "worker: its process ended with status 1 (the last of 3 workers lost with this episode)"
    assert (failed.stop_reason, failed.truncated, failed.turns) == ("api_error", True, ())
    assert sum(sampled) == sum(lost) > 0
    same(good, await players.here("3", size=4))
    assert "a worker process of environment 'doubles' was lost; its " in caplog.text


@in_one_loop
async def test_an_environment_that_damages_its_interpreter_costs_its_own_episode(shared, monkeypatch):
    monkeypatch.setattr(worker_pool, "MOST_ATTEMPTS", 1)
    players, pool = shared
    (failed,) = (await players.group(pool, "interpreter", size=1).run()).trajectories
    good = await players.group(pool, "3").run()
    assert pool.num_lost == 1
    assert failed.error.startswith("worker: its code failed outside the environment: "), failed.error
    same(good, await players.here("3"))


@in_one_loop
async def test_a_worker_that_is_stuck_is_taken_for_lost(shared, monkeypatch):
    monkeypatch.setattr(worker_pool, "MOST_ATTEMPTS", 1)
    monkeypatch.setattr(worker_pool, "GRACE", 2 * HANGS)
    players, pool = shared
    playing = asyncio.create_task(players.group(pool, "block", size=1).run())
    await until(lambda: list(players.folder.glob("blocks-*")))
    set_forward(players.limits.timeout + HANGS)  # past the deadline, and not yet past the grace
    for _ in range(100):
        await asyncio.sleep(0)
    assert not playing.done()
    set_forward(HANGS)
    (failed,) = (await asyncio.wait_for(playing, HANGS)).trajectories
    assert failed.error.startswith(f"worker: it did not end an episode within {worker_pool.GRACE:g} s of its deadline")
    good = await players.group(pool, "3").run()
    assert [t.error for t in good.trajectories] == [None] * 4


@pytest.mark.slow
async def test_with_no_worker_left_and_none_to_start_the_run_stops(tmp_path):
    players = Players(trouble={"4": "wait"}, folder=str(tmp_path))
    async with players.processes() as pool:
        running = asyncio.create_task(players.group(pool, "4", size=4).run())
        await until(lambda: len(list(tmp_path.glob("waits-*"))) == 4)
        (tmp_path / "refuse").touch()
        for pid in pool.pids:
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(RunStopped, match=r"no worker process of environment 'doubles' is left .*server is down"):
            await running
        with pytest.raises(RunStopped, match="no worker process of environment 'doubles' is left"):
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


class MadeOnlyHere:
    """Can be pickled, and is something else where `made` has not been called."""

    def __reduce__(self):
        return _made_in, (os.getpid(),)


def _made_in(pid):
    if pid != os.getpid():
        raise SystemExit(3)
    return MadeOnlyHere()


@in_one_loop
async def test_what_cannot_travel_fails_its_episode_and_no_worker(shared):
    players, pool = shared
    (kept,) = (await players.group(pool, "lock", size=1).run()).trajectories
    setup = players.setup(pool)
    unplayed = []
    for payload in (threading.Lock(), MadeOnlyHere()):
        run = GroupRun(setup, Example(id="3", payload={"it": payload}), index=1, size=1, run_seed=7)
        unplayed += (await run.run()).trajectories
    good = await players.group(pool, "3").run()
    assert (pool.num_lost, pool.num_running) == (0, [0, 0])
    assert kept.error.startswith("environment: info is not JSON: ['lock'] is a lock; ")
    assert len(kept.turns) == 2
    assert [t.error for t in unplayed] == [
        "environment: the example cannot be sent to a worker: TypeError: cannot pickle '_thread.lock' object",
        "environment: the example cannot be sent to a worker: SystemExit: 3",
    ]
    assert [t.turns for t in unplayed] == [(), ()]
    same(good, await players.here("3"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trouble", "limit", "why"),
    [
        ("memory", None, r"it used \d+ MB of memory; orchestrator.rollout.processes.worker_memory_mb = 300"),
        ("threads", "MOST_THREADS", r"it had \d+ threads; at most 50"),
        ("files", "MOST_FILES", r"it had \d+ open files; at most 50"),
    ],
)
@in_one_loop
async def test_a_worker_that_takes_too_much_is_replaced(shared, monkeypatch, trouble, limit, why):
    monkeypatch.setattr(process_worker, "WATCH_EVERY", 0.05)
    monkeypatch.setattr(worker_pool, "MOST_ATTEMPTS", 1)
    if limit is not None:
        monkeypatch.setattr(process_worker, limit, 50)
    players, pool = shared
    (failed,) = (await players.group(pool, trouble, size=1).run()).trajectories
    good = await players.group(pool, "3").run()
    assert pool.num_lost == 1
    assert re.match(f"worker: {why}", failed.error), failed.error
    same(good, await players.here("3"))


@in_one_loop
async def test_what_environments_print_is_in_their_log_and_nowhere_else(capfd, shared):
    players, pool = shared
    log = players.folder / "logs" / "doubles.log"
    before = log.stat().st_size
    (played,) = (await players.group(pool, "print", size=1).run()).trajectories
    assert played.error is None
    assert capfd.readouterr() == ("", "")
    assert log.read_bytes()[before:] == b"\x1b[31mred\x1b[0m\n\x1b]0;title\x07\n"


@pytest.mark.slow
@in_one_loop
async def test_a_log_that_grows_too_long_starts_anew(monkeypatch, shared):
    monkeypatch.setattr(process_worker, "WATCH_EVERY", 0.05)
    monkeypatch.setattr(process_worker, "MOST_LOGGED", 1000)
    players, pool = shared
    log = players.folder / "logs" / "doubles.log"
    log.write_bytes(b"x" * 2000)
    await until(lambda: log.stat().st_size == 0)
    await players.group(pool, "print", size=1).run()
    assert b"red" in log.read_bytes()[:20]


@in_one_loop
async def test_signals_of_the_terminal_do_not_reach_workers_and_do_not_end_them(shared):
    players, pool = shared
    pids = pool.pids
    for pid in pids:
        assert os.getpgid(pid) == os.getsid(pid) == pid != os.getpgid(0)
        os.kill(pid, signal.SIGINT)
        os.kill(pid, signal.SIGTERM)
    found = await players.group(pool).run()
    assert (pool.pids, pool.num_lost) == (pids, 0)
    same(found, await players.here())


@pytest.mark.slow
async def test_a_worker_ends_with_its_pool_and_programs_that_its_environment_leaves_behind_end_with_it(tmp_path):
    players = Players(trouble={"4": "programs"}, folder=str(tmp_path))
    async with players.processes(workers=1) as pool:
        await players.group(pool, "4", size=2).run()
        programs = [int(path.name.partition("-")[2]) for path in tmp_path.glob("program-*")]
        pids = pool.pids
        assert len(programs) == 2 and all(map(runs, [*programs, *pids]))
    await until(lambda: not any(map(runs, [*pids, *programs])))


@in_one_loop
async def test_a_copy_of_a_worker_says_nothing_to_the_run(shared):
    players, pool = shared
    found = await players.group(pool, "fork", size=2).run()
    good = await players.group(pool, "3").run()
    assert pool.num_lost == 0
    assert [t.error for t in found.trajectories] == [None] * 2
    assert [t.info["ended with"] for t in found.trajectories] == [-signal.SIGTERM] * 2
    assert [t.info["copy"] for t in found.trajectories] == [True] * 2  # it could not go on
    same(good, await players.here("3"))


class StartsOnceTold:
    """A worker that starts once the pool has said that it waits for it."""

    def __init__(self, is_told):
        self.is_told = is_told

    async def start(self):
        await until(self.is_told)
        return 1

    async def close(self):
        pass


async def test_it_is_said_that_workers_take_long_to_start(monkeypatch, caplog):
    monkeypatch.setattr(worker_pool, "SAY_EVERY", 0.0)
    said = "waiting for a Ray actor to start: 1 of 2 have started after "
    facts = iter([lambda: True, lambda: said in caplog.text])
    pool = worker_pool.WorkerPool(lambda alone: StartsOnceTold(next(facts)), None, workers=2, what="Ray actor")
    await pool.start()
    assert pool.pids == [1, 1]
    await pool.close()
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.slow
async def test_what_hinders_the_workers_is_said_before_anything_is_played(monkeypatch, tmp_path):
    players = Players(folder=str(tmp_path))
    with pytest.raises(UsageError, match=r"in a worker process of environment 'doubles': .*no_such_module"):
        async with players.processes(1, name="no_such_module.Environment"):
            pass
    (tmp_path / "leave").touch()
    with pytest.raises(UsageError, match=r"in a worker process of environment 'doubles': .*SystemExit"):
        async with players.processes(workers=1):
            pass
    (tmp_path / "leave").unlink()
    monkeypatch.setattr(process_worker.sys, "executable", str(tmp_path / "no-python"))
    with pytest.raises(UsageError, match=r"a worker process of environment 'doubles' cannot be started: .*no-python"):
        async with players.processes(workers=1):
            pass
    monkeypatch.undo()
    monkeypatch.setattr(pool_worker, "START_TIMEOUT", 0.0)
    with pytest.raises(UsageError, match=r"did not start within 0 s; its output is in .*doubles\.log"):
        async with players.processes(workers=1):
            pass


@pytest.mark.slow
@pytest.mark.parametrize("alone", [True, False], ids=["for one episode", "in the place of a lost one"])
async def test_a_worker_that_refuses_is_ended_also_where_the_run_ends_meanwhile(tmp_path, monkeypatch, alone):
    """Whoever wanted it is cancelled while its process takes its time to end."""
    monkeypatch.setattr(process_worker, "PATIENCE", HANGS)
    players = Players(folder=str(tmp_path))
    async with nothing_left_behind(), players.processes(workers=1) as pool:
        made, make = [], pool._make
        pool._make = lambda alone: made.append(make(alone)) or made[-1]
        monkeypatch.setattr(process_worker, "kill_group", lambda leader: None)
        (tmp_path / "refuse_and_linger").touch()
        starting = asyncio.create_task(pool._start(alone=True) if alone else pool._replace())
        await until(lambda: made and made[0]._peer._transport and made[0]._peer._transport.is_closing())
        pid = made[0]._process.pid
        assert runs(pid)
        starting.cancel()
        for _ in range(100):  # turns of the loop, after which it has been told
            await asyncio.sleep(0)
        (tmp_path / "refuse_and_linger").unlink()
        await asyncio.wait({starting})
    assert not runs(pid)


@pytest.mark.slow
async def test_a_worker_that_cannot_be_reached_is_ended(monkeypatch):
    """Its process is there, and then the connection cannot be made."""

    async def fails(*args, **kwargs):
        raise OSError("no connection")

    players, began = Players(), []
    monkeypatch.setattr(asyncio.get_running_loop(), "create_unix_connection", fails)
    spawn = asyncio.get_running_loop().subprocess_exec

    async def spawned(*args, **kwargs):
        began.append(await spawn(*args, **kwargs))
        return began[-1]

    monkeypatch.setattr(asyncio.get_running_loop(), "subprocess_exec", spawned)
    async with nothing_left_behind():
        with pytest.raises(UsageError, match="cannot be started: no connection"):
            async with players.processes(workers=2):
                pass
    assert [transport.get_returncode() for transport, _ in began] == [-signal.SIGKILL] * len(began) != []


def test_environments_that_cannot_be_made_again_elsewhere_are_refused_by_name():
    def plan(name, **args):
        setup = RemoteSetup(env="mine", name=name, args=args, params=SamplingParams(), limits=EpisodeLimits())
        return packed_plan({("train", "mine"): setup}, ByteRenderer(), pickle.dumps)

    assert plan("my_module.Mine", size=3)
    with pytest.raises(ComponentError, match=r"environment 'mine': __main__\.Mine is defined in the main program"):
        plan("__main__.Mine")
    with pytest.raises(ComponentError, match=r"environment 'mine': its argument client is a lock, which cannot be"):
        plan("my_module.Mine", client=threading.Lock())


PROGRAM = """
import asyncio, sys
from pathlib import Path
from rollouts.players import Players
from waiting import until

async def main():
    players = Players(trouble={"4": "block"}, folder=sys.argv[1])
    async with players.processes(logs=Path(sys.argv[1])) as pool:
        playing = asyncio.create_task(players.group(pool, "4", size=2).run())
        # Both are to be stuck, and see no socket.
        await until(lambda: len(list(Path(sys.argv[1]).glob("blocks-*"))) == 2)
        print(*pool.pids, flush=True)
        await playing

asyncio.run(main())
"""


@pytest.mark.slow
def test_workers_end_with_the_run_however_that_ends(tmp_path):
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], cwd=Path(__file__).parents[1], stdout=subprocess.PIPE, text=True
    )
    try:
        pids = list(map(int, program.stdout.readline().split()))
        assert len(pids) == 2 and all(map(runs, pids))
    finally:
        program.kill()
        program.wait()
        program.stdout.close()
    wait_until(lambda: not any(map(runs, pids)))


def test_losses_in_a_row_are_followed_by_longer_and_longer_pauses():
    pauses = [worker_pool.pause_before_replacement(num_lost, num_workers=2) for num_lost in range(12)]
    assert pauses == pytest.approx([0, 0, 0, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10, 10, 10])


@pytest.mark.slow
async def test_a_teacher_plays_in_processes_too():
    sampler, params, limits = scripted(), SamplingParams(), EpisodeLimits()
    from rollouts.test_teacher_loop import Sums

    found, counts = [], []
    with chat_server() as server:
        api = OpenAI(model="teacher", base_url=server.url)
        remote = RemoteSetup(
            env="sums", name="rollouts.test_teacher_loop.Sums", args={}, params=params, limits=limits, teacher=api
        )
        inputs = RunnerInputs(setups={("train", "sums"): remote}, sampler=sampler, renderer=ByteRenderer(), workers=1)
        pool = process_runner(inputs)
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
    assert sampler.requests == []
