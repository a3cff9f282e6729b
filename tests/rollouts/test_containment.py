"""Whatever an environment raises, returns or ignores costs its own episode, and nothing else."""

import asyncio
import json
import threading

import pytest

from byte_renderer import VOCAB_SIZE, ByteRenderer, call, say
from run.orchestrator.virtual_runs import virtual_time
from verbatim import Example, Trajectory
from verbatim.environments.environment import Episode, Reply
from verbatim.environments.tools import FunctionTool
from verbatim.inference import SamplingParams
from verbatim.inference.scripted import ScriptedSampler
from verbatim.rollouts import EpisodeLimits, GroupRun, RolloutSetup
from verbatim.rollouts.episode_stats import failure_kind
from verbatim.rollouts.supervised import left_behind
from verbatim.rollouts.traces import TraceFolder

ENDINGS = [
    SystemExit(0),
    SystemExit("bye"),
    KeyboardInterrupt(),
    GeneratorExit(),
    asyncio.CancelledError(),
    RuntimeError("no"),
    type("Own", (BaseException,), {})("mine"),
]


class Task(Episode):
    """Speaks once. `faults` maps a method to what is called in its place."""

    def __init__(self, faults):
        self.messages = [{"role": "user", "content": "go"}]
        self.faults, self.num_closed = faults, 0
        if "run" in faults:
            self.run = lambda agent: faults["run"]()
        self.tools = (FunctionTool(self.poke),)

    async def poke(self) -> str:
        """Touch it."""
        return await self.faults["tool"]() if "tool" in self.faults else "ok"

    async def reply(self, message):
        return await self.faults["reply"]() if "reply" in self.faults else Reply(done=True)

    async def score(self, trajectory):
        return await self.faults["score"]() if "score" in self.faults else 1.0

    def state_key(self):
        return self.faults["state_key"]() if "state_key" in self.faults else None

    async def close(self):
        self.num_closed += 1
        if "close" in self.faults:
            await self.faults["close"]()


class Tasks:
    def __init__(self, **faults):
        self.faults, self.started = faults, []
        for name in ("score_group", "is_success"):
            if name in faults:
                setattr(self, name, lambda given, name=name: faults[name]())

    def examples(self, split):
        return [Example(id="a")]

    async def start(self, example, seed):
        if "start" in self.faults:
            await self.faults["start"]()
        self.started.append(Task(self.faults))
        return self.started[-1]


async def group_of(environment, size=1, completion=None, **limits):
    setup = RolloutSetup(
        env="tasks",
        environment=environment,
        renderer=ByteRenderer(),
        params=SamplingParams(),
        sampler=ScriptedSampler(
            script=lambda request: completion or say("hm"), vocab_size=VOCAB_SIZE, context_length=1000
        ),
        limits=EpisodeLimits(**{"max_turns": 2, **limits}),
        slots=asyncio.Semaphore(8),
    )
    group = await GroupRun(setup, Example(id="a"), index=0, size=size, run_seed=1).run()
    return group.trajectories, setup.episode_stats


def raising(error, *, is_async=True):
    async def later():
        await asyncio.sleep(0)
        raise error

    def now():
        raise error

    return later if is_async else now


@pytest.mark.parametrize("error", ENDINGS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("where", ["start", "reply", "score", "run", "state_key", "close", "score_group", "is_success"])
async def test_whatever_an_environment_raises_is_the_fault_of_its_episode(where, error):
    fault = raising(error, is_async=where not in ("state_key", "is_success"))
    (trajectory,), episode_stats = await group_of(Tasks(**{where: fault}))
    said = (
        "awaited something that was cancelled"
        if isinstance(error, asyncio.CancelledError)
        else f"raised {type(error).__name__}"
    )
    assert trajectory.error.startswith(f"environment: {where} {said}")
    assert episode_stats.failures == {f"environment: {where} {said}": 1}


@pytest.mark.parametrize("error", ENDINGS, ids=lambda error: type(error).__name__)
async def test_whatever_a_tool_raises_is_told_to_the_model(error):
    (trajectory,), _ = await group_of(Tasks(tool=raising(error)), completion=call("poke"))
    assert trajectory.error is None
    assert trajectory.info["tool_errors"] == {"exception": 1}


@pytest.mark.parametrize(
    "error", [SystemExit(0), KeyboardInterrupt(), GeneratorExit()], ids=lambda error: type(error).__name__
)
async def test_what_a_tool_raises_on_its_thread_is_told_to_the_model(error):
    class Threaded(Tasks):
        async def start(self, example, seed):
            episode = await super().start(example, seed)
            episode.tools = (FunctionTool(raising(error, is_async=False), name="poke", parameters={"type": "object"}),)
            return episode

    (trajectory,), _ = await group_of(Threaded(), completion=call("poke"))
    assert trajectory.info["tool_errors"] == {"exception": 1}


def swallowing(freed):
    """Sleeps, whatever it is told, until the test is over."""

    async def stubborn():
        while not freed.is_set():
            try:
                await asyncio.wait_for(freed.wait(), 5.0)
            except (asyncio.CancelledError, TimeoutError):
                continue
        return 1.0

    return stubborn


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr("verbatim.rollouts.supervised.GRACE", 0.05)
    monkeypatch.setattr("verbatim.rollouts.episode.CLOSING", 0.05)


@pytest.mark.parametrize("where", ["start", "reply", "run", "score"])
@virtual_time
async def test_what_ignores_its_deadline_is_left_behind_and_its_episode_is_closed(where, short):
    freed, environment, before = asyncio.Event(), Tasks(), len(left_behind)
    environment.faults[where] = swallowing(freed)
    started = asyncio.get_running_loop().time()
    (trajectory,), episode_stats = await group_of(environment, timeout=0.05)
    assert asyncio.get_running_loop().time() - started == pytest.approx(0.1)  # the deadline and the grace
    assert trajectory.error == (
        f"timeout: the episode took more than 0.05 s: {where} ignored its cancellation, and was abandoned"
    )
    assert episode_stats.failures == {failure_kind(trajectory.error): 1}
    assert [episode.num_closed for episode in environment.started] == ([] if where == "start" else [1])
    assert len(left_behind) == before + 1
    freed.set()
    await asyncio.sleep(0.1)
    assert len(left_behind) == before
    assert [episode.num_closed for episode in environment.started] == [1]  # not closed again


@virtual_time
async def test_a_close_that_ignores_its_deadline_is_left_behind(short):
    freed = asyncio.Event()
    (trajectory,), _ = await group_of(Tasks(close=swallowing(freed)))
    assert trajectory.error == "environment: close did not end within 0.05 s, and was abandoned"
    assert trajectory.num_sampled_tokens > 0
    freed.set()


@virtual_time
async def test_a_score_group_that_ignores_its_deadline_is_left_behind(short):
    freed = asyncio.Event()
    trajectories, episode_stats = await group_of(Tasks(score_group=swallowing(freed)), size=2, timeout=0.1)
    assert {t.error for t in trajectories} == {
        "environment: score_group took more than 0.1 s, ignored its cancellation, and was abandoned"
    }
    assert episode_stats.num_failed == 2
    freed.set()


@virtual_time
async def test_a_score_that_comes_after_its_deadline_does_not_count():
    async def late():
        try:
            await asyncio.sleep(5.0)
        except asyncio.CancelledError:
            return 1.0

    (trajectory,), _ = await group_of(Tasks(score=late), timeout=0.05)
    assert (trajectory.error, trajectory.reward) == ("timeout: the episode took more than 0.05 s", None)


@virtual_time
async def test_a_run_that_is_cancelled_does_not_wait_for_what_ignores_it(short):
    freed = asyncio.Event()
    running = asyncio.create_task(group_of(Tasks(score=swallowing(freed)), timeout=60.0))
    await asyncio.sleep(0.05)
    started = asyncio.get_running_loop().time()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert asyncio.get_running_loop().time() - started == pytest.approx(0.05)  # the grace
    freed.set()


async def test_an_environment_that_cancels_its_own_task_fails_alone():
    async def cancel():
        asyncio.current_task().cancel()
        return 1.0

    (trajectory,), _ = await group_of(Tasks(reply=cancel))
    assert trajectory.error is not None
    assert trajectory.error.startswith("environment: ")


class Unprintable(Exception):
    def __str__(self):
        raise SystemExit(1)


class Unshowable:
    def __repr__(self):
        raise SystemExit(1)


@pytest.mark.parametrize("where", ["score", "reply"])
async def test_what_cannot_be_printed_is_reported_all_the_same(where):
    async def unshowable():
        return Unshowable()

    (raised,), _ = await group_of(Tasks(**{where: raising(Unprintable())}))
    assert raised.error == f"environment: {where} raised Unprintable: (its text cannot be read: SystemExit)"
    (returned,), _ = await group_of(Tasks(**{where: unshowable}))
    assert "a Unshowable (its repr raised SystemExit)" in returned.error


async def test_an_exception_of_50_mb_is_kept_as_its_beginning():
    (trajectory,), _ = await group_of(Tasks(score=raising(ValueError("x" * 50_000_000))))
    assert trajectory.error.startswith("environment: score raised ValueError: xxx")
    # 12 characters of "ValueError: " and 50,000,000 make the text, of which 2,000 are kept.
    assert trajectory.error.endswith("x [cut: 49,998,012 of 50,000,012 characters]")
    assert len(json.dumps(dict(trajectory.info))) < 5_000


@pytest.mark.parametrize("reward", [1e300, -1e300, 10**400, 3.5e38])
async def test_a_reward_that_float32_cannot_hold_is_refused_where_it_enters(reward):
    async def score():
        return reward

    async def reply():
        return Reply(done=True, reward=reward)

    for where, fault in (("score", score), ("reply", reply)):
        (trajectory,), _ = await group_of(Tasks(**{where: fault}))
        assert trajectory.error.startswith(f"environment: {where} ")
        assert trajectory.reward is None


async def test_the_largest_reward_that_float32_holds_is_taken():
    async def score():
        return 3.4028234663852886e38

    (trajectory,), _ = await group_of(Tasks(score=score))
    assert (trajectory.error, trajectory.reward) == (None, 3.4028234663852886e38)


async def test_turn_rewards_whose_sum_float32_cannot_hold_fail_the_rollout():
    async def nothing():
        return None

    async def reply():
        return Reply(messages=[{"role": "user", "content": "more"}], reward=3e38)

    (trajectory,), _ = await group_of(Tasks(score=nothing, reply=reply))
    assert trajectory.error == (
        "environment: the turns together returned 6e+38; expected at most 3.4e+38, all that float32 holds"
    )


async def test_messages_that_cannot_be_copied_fail_their_episode():
    async def reply():
        return Reply(messages=[{"role": "user", "content": "more", "lock": threading.Lock()}])

    (trajectory,), _ = await group_of(Tasks(reply=reply))
    assert trajectory.error.startswith("environment: the reply's messages, at 0: ['lock'] is a lock; expected texts")


def test_a_callback_of_traces_that_exits_costs_nothing(tmp_path):
    def leave(trajectory):
        raise SystemExit(0)

    traces = TraceFolder(tmp_path, trace_callback=leave, success_callback=leave)
    stored = json.loads(traces.store(Trajectory(example_id="a")).read_text())
    assert stored["callback_errors"] == ["trace_callback raised SystemExit: 0", "success_callback raised SystemExit: 0"]
