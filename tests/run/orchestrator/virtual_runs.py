"""A dispatcher on a clock that jumps from event to event: episodes of given lengths, a trainer of a given speed."""

import asyncio
import functools
import selectors
from types import SimpleNamespace

from verbatim import Example, Trajectory, Turn
from verbatim.algorithms.curriculum import ExampleSchedule
from verbatim.core.trajectories import Ledger, age
from verbatim.rollouts import EpisodeStats
from verbatim.run.orchestrator.dispatcher import Dispatcher


class JumpingLoop(asyncio.SelectorEventLoop):
    """Time stands still while anything can run, then jumps to the next timer.

    Calls on threads (`asyncio.to_thread`) are made at once on the loop's thread. Their results come at once, or where a
    test sets `thread_seconds`, so much later: until then everything else goes on.
    """

    LONGEST = 10_000.0
    """Virtual seconds after which a test hangs: a run always has a timer left, that of its `LoopLag`."""

    class Selector(selectors.DefaultSelector):
        loop = None

        def select(self, timeout=None):
            assert timeout is not None, "everybody waits, and no timer is left"
            self.loop.now += timeout
            assert self.loop.now < self.loop.LONGEST, "what is waited for does not happen"
            return super().select(0)

    def __init__(self):
        self.now = self.thread_seconds = 0.0
        selector = self.Selector()
        selector.loop = self
        super().__init__(selector)

    def time(self):
        return self.now

    def run_in_executor(self, executor, func, *args):
        done = self.create_future()
        try:
            tell, what = done.set_result, func(*args)
        except Exception as error:  # noqa: BLE001  (carried to the caller)
            tell, what = done.set_exception, error
        if self.thread_seconds:
            self.call_later(self.thread_seconds, lambda: done.done() or tell(what))
        else:
            tell(what)
        return done


def on_virtual_time(coroutine):
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        return runner.run(coroutine)


def virtual_time(test):
    """Decorates a test that waits for no thread and no file descriptor: its deadlines pass when everybody waits for
    them, however slow the machine."""

    @functools.wraps(test)
    def run(*args, **kwargs):
        return on_virtual_time(test(*args, **kwargs))

    return run


class Play:
    """Plays groups of one rollout, or of two where they are filtered: group i takes `seconds(i)`, samples one token by
    the version in use when it begins and one at its end, and is flat where `flat(i)`."""

    def __init__(
        self,
        *,
        seconds,
        flat=lambda index: False,
        groups_per_batch=16,
        level=1,
        bound=8,
        factor=1.0,
        batches=20,
        filtering=False,
        places=10_000,
    ):
        self.seconds, self.flat, self.batches = seconds, flat, batches
        self.version, self.ledger = 0, Ledger()
        self.launched, self.finished, self.taken, self.in_flight = {}, {}, [], []
        setup = SimpleNamespace(
            env="e",
            environment=object(),
            sampler=SimpleNamespace(vocab_size=9),
            slots=asyncio.Semaphore(places),
            runner=SimpleNamespace(run=self.run_episode, metrics=dict),
            episode_stats=EpisodeStats(),
            run_id="",
            routing=None,
        )
        examples = {"e": [Example(id=f"e{i}") for i in range(7)]}
        self.dispatcher = Dispatcher(
            schedule=ExampleSchedule(examples, {"e": 1.0}, seed=0),
            setups={"e": setup},
            ledger=self.ledger,
            group_size=2 if filtering else 1,
            groups_per_batch=groups_per_batch,
            max_async_level=level,
            max_off_policy_steps=bound,
            oversampling_factor=factor,
            run_seed=0,
            max_steps=batches,
            online_difficulty_filtering=filtering,
        )

    async def run_episode(self, setup, task, recorder):
        index = int(task.identity.group_id.removeprefix("train-"))
        now = asyncio.get_running_loop().time
        self.launched.setdefault(index, (now(), self.version))
        begun = self.version
        await asyncio.sleep(self.seconds(index))
        recorder.count(2)
        turn = Turn(prompt_ids=[1], completion_ids=[2, 3], logprobs=[-1.0, -1.0], policy_versions=[begun, self.version])
        self.finished[index] = now()
        reward = 0.0 if self.flat(index) else float(task.identity.sample_index)
        return Trajectory.of(task.identity, turns=[turn], reward=reward)

    async def run(self, train_seconds=0.1):
        """All batches, each trained after the one before: a list of (time handed out, numbers, ages)."""
        self.dispatcher.start(version=0, batch=0)
        batches, trainer = asyncio.Queue(), asyncio.create_task(self.train(train_seconds))
        self.handed = batches
        for number in range(self.batches):
            groups = await self.dispatcher.next_batch()
            ages = [max(age(t, number) for t in group.trajectories) for group in groups]
            self.taken.append((asyncio.get_running_loop().time(), [group.index for group in groups], ages))
            batches.put_nowait(groups)
        await trainer
        await self.dispatcher.stop()
        self.stale = [group for kind, group in self.dispatcher.take_dropped() if kind is None]
        self.ledger.drop({"unused_at_end": self.dispatcher.discard()})
        self.ledger.check(pending=0)
        return self.taken

    async def train(self, seconds):
        for _ in range(self.batches):
            groups = await self.handed.get()
            await asyncio.sleep(seconds)
            for group in groups:
                tokens = sum(t.num_sampled_tokens for t in group.trajectories)
                self.ledger.settle_group(group.index, trained=tokens, dropped={})
            self.dispatcher.settled()
            self.version += 1
            self.dispatcher.advance(self.version)
            self.in_flight.append(self.dispatcher.num_running)
