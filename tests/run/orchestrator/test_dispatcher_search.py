"""Random settings of the dispatcher, on virtual time, with failures, flat groups, difficulty pools and a resume.

Every run ends, every sampled token is booked once, no group is handed out that is too old as a whole, and a synchronous
run takes what was launched first.
"""

import asyncio
import json
import random
from types import SimpleNamespace

import pytest
from virtual_runs import on_virtual_time

from campaigns import sized
from verbatim import Example, Trajectory
from verbatim.algorithms.curriculum import ExampleSchedule, PoolRules
from verbatim.core.errors import RunStopped
from verbatim.core.trajectories import Ledger, age
from verbatim.rollouts import EpisodeStats
from verbatim.rollouts.group import MOST_IN_LINE
from verbatim.run.orchestrator import dispatcher
from verbatim.run.orchestrator.dispatcher import Dispatcher

LENGTHS = {
    "even": lambda rng: 1.0,
    "at once": lambda rng: 0.0,
    "uneven": lambda rng: rng.uniform(0.1, 4.0),
    "heavy tail": lambda rng: min(200.0, rng.paretovariate(0.8)),
    "stragglers": lambda rng: 40.0 if rng.random() < 0.05 else 1.0,
}
POOLS = [
    None,
    None,
    PoolRules(easy_threshold=0.99),
    PoolRules(hard_threshold=0.5),
    PoolRules(easy_threshold=0.6, hard_threshold=0.3, easy_fraction=0.3),
]


class RandomRun:
    """One run, with settings that its seed decides."""

    def __init__(self, seed):
        self.seed, self.rng = seed, random.Random(seed)
        choice = self.rng.choice
        self.level, self.bound = choice(range(4)), choice(range(4))
        self.factor, self.groups = choice([1, 1.3, 1.5, 2, 2.5, 3, 4]), choice(range(1, 9))
        self.size, self.batches, self.filtering = choice([1, 2, 3]), choice(range(1, 13)), choice([True, False])
        self.slots, self.flat, self.fails = choice([1, 2, 5, 999]), choice([0, 0.2, 0.5, 0.8]), choice([0, 0, 0.1, 0.4])
        self.seconds, self.train_seconds = LENGTHS[choice(list(LENGTHS))], choice([0, 0.1, 1, 5, 30])
        self.pools, self.examples = choice(POOLS), [Example(id=f"e{i}") for i in range(choice([1, 3, 7, 50]))]

    def make(self, state):
        self.ledger, self.version, self.saved = Ledger(), 0, []
        setup = SimpleNamespace(
            env="e",
            environment=object(),
            sampler=SimpleNamespace(vocab_size=9),
            slots=asyncio.Semaphore(self.slots),
            runner=SimpleNamespace(run=self.run_episode, metrics=dict),
            episode_stats=EpisodeStats(),
            run_id="",
            routing=None,
        )
        self.dispatcher = Dispatcher(
            schedule=ExampleSchedule({"e": self.examples}, {"e": 1.0}, seed=self.seed, pool_rules=self.pools),
            setups={"e": setup},
            ledger=self.ledger,
            group_size=self.size,
            groups_per_batch=self.groups,
            max_async_level=self.level,
            max_off_policy_steps=self.bound,
            oversampling_factor=self.factor,
            run_seed=0,
            max_steps=self.batches,
            online_difficulty_filtering=self.filtering,
        )
        if state is not None:
            self.version = state["step"]
            self.dispatcher.load_state_dict(state["dispatcher"])
            self.ledger.load_state_dict(state["ledger"])
            self.ledger.drop({"cancelled": state["pending"]})
            self.ledger.check(pending=0)

    async def run_episode(self, setup, task, recorder):
        group, sample = task.identity.group_id, task.identity.sample_index
        rng = random.Random(f"{self.seed} {group} {sample}")
        num_turns, error = rng.randint(1, 3), None
        for turn in range(num_turns):
            begun = self.version
            await asyncio.sleep(self.seconds(rng) / num_turns)
            count = rng.randint(1, 4)
            recorder.count(count)
            recorder.record(
                prompt_ids=[1, turn],
                completion_ids=[2] * count,
                logprobs=[-1.0] * count,
                policy_versions=[begun] + [self.version] * (count - 1),
            )
            if rng.random() < self.fails / num_turns:
                error = "environment: broke"
                break
        recorder.close()
        flat = random.Random(f"{self.seed} {group}").random() < self.flat
        reward = None if rng.random() < 0.05 else 0.5 if flat else float(rng.random() < 0.5)
        return Trajectory.of(task.identity, turns=recorder.turns, reward=reward, error=error)

    async def go(self, *, until, state=None):
        """Batches up to `until`; the last of an interrupted run is not trained."""
        self.make(state)
        start = self.version
        self.dispatcher.start(version=start, batch=start)
        handed = asyncio.Queue()
        trainer = asyncio.create_task(self.train(handed))
        try:
            for number in range(start, until):
                groups = await self.dispatcher.next_batch()
                if groups is None:
                    break
                self.check_batch(number, [group.index for group in groups])
                handed.put_nowait((number, groups))
            if until == self.batches:
                handed.put_nowait(None)
                await trainer
            else:
                await asyncio.sleep(self.rng.uniform(0.0, 5.0))
        except RunStopped:
            pass  # every group failed, or was flat
        finally:
            trainer.cancel()
            await asyncio.gather(trainer, return_exceptions=True)
            await self.dispatcher.stop()
        if trainer.done() and not trainer.cancelled():
            trainer.result()
        self.ledger.check(self.dispatcher.num_pending_tokens)

    def check_batch(self, number, indices):
        assert len(indices) == self.groups
        assert indices == sorted(set(indices))
        if min(self.level, self.bound) == 0:
            waiting = [*self.dispatcher._drawn, *self.dispatcher._running.values(), *self.dispatcher._ready]
            passed_over = [group for group in waiting if group.drawn.index < indices[-1]]
            assert all(number - group.version > self.bound for group in passed_over)

    async def train(self, handed):
        while (batch := await handed.get()) is not None:
            number, groups = batch
            await asyncio.sleep(self.train_seconds)
            for group in groups:
                ends = {"trained": 0, "error": 0, "stale": 0}
                for t in group.trajectories:
                    end = "error" if t.error else "stale" if age(t, number) > self.bound else "trained"
                    ends[end] += t.num_sampled_tokens
                completed = group.completed
                assert not completed or min(age(t, number) for t in completed) <= self.bound  # a place is not wasted
                self.ledger.settle_group(group.index, trained=ends.pop("trained"), dropped=ends)
            self.dispatcher.settled()
            self.version = number + 1
            state = {
                "step": self.version,
                "dispatcher": self.dispatcher.state_dict(),
                "ledger": self.ledger.state_dict(),
                "pending": self.dispatcher.num_pending_tokens,
            }
            self.saved.append(json.loads(json.dumps(state)))
            held = [row["index"] for row in state["dispatcher"]["held"]]
            launched = range(state["dispatcher"]["schedule"]["drawn"])
            ended = [index for index in launched if self.ledger.is_settled(index)]
            assert sorted(held + ended) == list(launched)
            self.dispatcher.advance(self.version)
            self.ledger.check(self.dispatcher.num_pending_tokens)
            assert self.dispatcher.num_running <= max(1, round(self.factor * self.groups))

    async def straight(self):
        await self.go(until=self.batches)
        return self.version

    async def interrupted(self):
        await self.go(until=self.rng.randrange(self.batches))
        await self.go(until=self.batches, state=self.rng.choice(self.saved) if self.saved else None)
        return self.version


def play(seed, monkeypatch):
    """Whether the run came to its last batch. In two of three runs the line for places is so short that most groups in
    flight are only drawn."""
    monkeypatch.setattr(dispatcher, "MOST_IN_LINE", (MOST_IN_LINE, 1, 4)[seed % 3])
    run = RandomRun(seed)
    whole = on_virtual_time(run.interrupted() if seed % 2 else run.straight()) == run.batches
    if whole:
        run.ledger.drop({"unused_at_end": run.dispatcher.discard()})
        run.ledger.check(pending=0)
    return whole


@pytest.mark.campaign
def test_every_run_ends_and_every_token_is_booked_once(campaign, monkeypatch):
    row, whole, wrong = campaign("random settings of the dispatcher"), 0, []
    for seed in range(sized(40, 4000)):
        try:
            whole += play(seed, monkeypatch)
        except AssertionError as error:
            wrong.append((seed, str(error)))
        row.add(wrong=bool(wrong) and wrong[-1][0] == seed)
    assert wrong == []
    assert whole >= 0.3 * row.cases  # the others are used up, or all flat


def _drops_nothing(dispatcher, waiting):
    """Groups that are too old stay where they are."""


def _forgets_what_is_held(dispatcher):
    return {**state_dict(dispatcher), "held": []}


state_dict = Dispatcher.state_dict


@pytest.mark.parametrize(("name", "broken"), [("_drop_stale", _drops_nothing), ("state_dict", _forgets_what_is_held)])
def test_a_dispatcher_that_does_not_do_its_part_is_found_by_the_first_runs(monkeypatch, name, broken):
    monkeypatch.setattr(Dispatcher, name, broken)
    with pytest.raises(AssertionError):
        for seed in range(20):
            play(seed, monkeypatch)
