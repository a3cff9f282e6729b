"""The loop: every batch from whole groups, versions as the staleness rule says, nothing lost over a stop."""

import asyncio
import json
import random
from collections import Counter

import pytest

from byte_renderer import VOCAB_SIZE, ByteRenderer, say
from verbatim import Example
from verbatim.credit.default import default_advantage
from verbatim.curriculum import ExampleSchedule
from verbatim.environments.base import Episode
from verbatim.errors import RunStopped
from verbatim.filters.zero_advantage import ZeroAdvantage
from verbatim.inference import SamplingParams
from verbatim.inference.scripted import ScriptedSampler
from verbatim.orchestrator.assemble import Rules, assemble_group
from verbatim.orchestrator.dispatcher import Dispatcher
from verbatim.orchestrator.loop import Orchestrator, Plan
from verbatim.rollouts import EpisodeLimits, RolloutSetup
from verbatim.trajectories import Ledger
from verbatim.transport import StepReport

GROUP, GROUPS = 2, 3


class Coin(Episode):
    """Says one thing; earns 0 or 1 by its seed."""

    messages = ({"role": "user", "content": "flip"},)

    def __init__(self, seed, fails):
        self.reward, self.fails = float(random.Random(seed).random() < 0.5), fails

    async def score(self, trajectory):
        if self.fails:
            raise RuntimeError("no score")
        return self.reward


class Coins:
    def __init__(self, fails=lambda example, seed: False):
        self.fails = fails

    def examples(self, split):
        return [Example(id=f"e{i}") for i in range(7)]

    async def start(self, example, seed):
        return Coin(seed, self.fails(example, seed))


class FakeTrainer:
    """Counts what it is given; can be slow, and can lose tokens."""

    def __init__(self, tmp_path, delay=0.0, loses=0):
        self.tmp_path, self.delay, self.loses, self.batches = tmp_path, delay, loses, []

    async def train(self, samples, version, *, checkpoint=False):
        await asyncio.sleep(self.delay)
        self.batches.append(samples)
        trained = sum(s.num_trained_tokens for s in samples) - self.loses
        state = self.tmp_path if checkpoint else None
        return StepReport(
            version=version, weights=self.tmp_path, num_trained_tokens=trained, metrics={"loss": 0.0}, state=state
        )

    async def save(self, folder, version):
        pass

    async def watch(self):
        await asyncio.Event().wait()

    async def close(self):
        pass


class Notes:
    def __init__(self):
        self.steps, self.evals, self.saved = [], [], {}

    def on_step(self, step, metrics, groups):
        self.steps.append((step, dict(metrics), list(groups)))

    def on_eval(self, step, evaluation):
        self.evals.append((step, evaluation))

    async def save(self, step, trainer, state, trainer_state=None):
        self.saved[step] = json.loads(json.dumps(state))


def make(tmp_path, *, level=0, steps=4, environment=None, trainer=None, notes=None, filters=None, evaluate=False,
         token_seconds=0.0, interval=100, max_off_policy_steps=8):  # fmt: skip
    environment = environment or Coins()
    sampler = ScriptedSampler(
        script=lambda r: say("x" * (1 + r.seed % 5)), vocab_size=VOCAB_SIZE, context_length=100,
        seconds_per_token=token_seconds,
    )
    ledger = Ledger()
    setup = RolloutSetup(
        env="coins", environment=environment, sampler=sampler, renderer=ByteRenderer(), params=SamplingParams(),
        limits=EpisodeLimits(), slots=asyncio.Semaphore(64),
    )  # fmt: skip
    dispatcher = Dispatcher(
        schedule=ExampleSchedule({"coins": environment.examples("train")}, {"coins": 1.0}, seed=0),
        setups={"coins": setup}, ledger=ledger, group_size=GROUP, groups_per_batch=GROUPS, max_async_level=level,
        oversampling_factor=1.0, run_seed=5, num_batches=steps,
    )  # fmt: skip
    rules = Rules(
        advantage=default_advantage, filters=filters or {}, strategy="interleaved", max_length=100,
        max_off_policy_steps=max_off_policy_steps,
    )  # fmt: skip
    notes = notes or Notes()
    plan = Plan(
        max_steps=steps, eval_setups=[setup] if evaluate else [], eval_interval=2, eval_episodes=10, eval_seed=1,
        checkpoint_interval=interval,
    )  # fmt: skip
    orchestrator = Orchestrator(
        plan=plan, sampler=sampler, trainer=trainer or FakeTrainer(tmp_path), dispatcher=dispatcher, ledger=ledger,
        rules={"coins": rules}, environments={"coins": environment}, observer=notes, checkpointer=notes,
    )  # fmt: skip
    orchestrator.ledger_for_tests = ledger
    return orchestrator, notes, sampler


def versions(groups):
    return {int(v) for g in groups for t in g.trajectories for turn in t.turns for v in turn.policy_versions}


async def test_a_synchronous_run_samples_every_batch_with_the_newest_weights(tmp_path):
    orchestrator, notes, sampler = make(tmp_path, level=0, steps=4)
    assert await orchestrator.run()
    assert [versions(groups) for _, _, groups in notes.steps] == [{0}, {1}, {2}, {3}]
    assert sampler.policy_version == 4
    ledger = orchestrator.ledger_for_tests
    assert ledger.sampled == ledger.trained == sum(
        t.num_sampled_tokens for _, _, groups in notes.steps for g in groups for t in g.trajectories
    )


@pytest.mark.parametrize("level", [1, 3])
async def test_an_asynchronous_run_starts_no_rollout_with_weights_that_are_too_old(tmp_path, level):
    trainer = FakeTrainer(tmp_path, delay=0.01)
    orchestrator, notes, _ = make(tmp_path, level=level, steps=6, trainer=trainer, token_seconds=0.001)
    await orchestrator.run()
    for batch, (_, metrics, groups) in enumerate(notes.steps):
        assert min(versions(groups)) >= max(0, batch - level)
        assert metrics["staleness/max"] <= level
    assert any(min(versions(groups)) < batch for batch, (_, _, groups) in enumerate(notes.steps))


@pytest.mark.parametrize("level", [0, 1, 5])
async def test_a_run_ends_with_nothing_pending_and_launches_nothing_that_no_batch_will_use(tmp_path, level):
    orchestrator, _, sampler = make(tmp_path, level=level, steps=3, token_seconds=0.001)
    await orchestrator.run()
    ledger = orchestrator.ledger_for_tests
    ledger.check(pending=0)
    assert ledger.sampled == ledger.trained
    assert len(sampler.requests) == 3 * GROUPS * GROUP


async def test_tokens_that_the_trainer_loses_stop_the_run(tmp_path):
    orchestrator, _, _ = make(tmp_path, trainer=FakeTrainer(tmp_path, loses=1))
    with pytest.raises(AssertionError, match="was given"):
        await orchestrator.run()


async def test_failing_rollouts_are_counted_and_their_groups_trained_without_them(tmp_path):
    environment = Coins(fails=lambda example, seed: seed % 2 == 0)
    orchestrator, notes, _ = make(tmp_path, environment=environment)
    await orchestrator.run()
    everything = [t for _, _, groups in notes.steps for g in groups for t in g.trajectories]
    failed = [t for t in everything if t.error]
    assert 0 < len(failed) < len(everything)
    ledger = orchestrator.ledger_for_tests
    assert ledger.dropped["error"] == sum(t.num_sampled_tokens for t in failed)
    assert sum(m["errors/environment"] for _, m, _ in notes.steps if "errors/environment" in m) == len(failed)


async def test_a_run_in_which_everything_fails_stops_and_says_why(tmp_path):
    orchestrator, _, _ = make(tmp_path, steps=50, environment=Coins(fails=lambda example, seed: True))
    with pytest.raises(RunStopped, match="score raised RuntimeError: no score"):
        await orchestrator.run()


async def test_filtered_rollouts_stay_in_the_metrics_and_their_tokens_under_the_filters_name(tmp_path):
    orchestrator, notes, _ = make(tmp_path, filters={"zero_advantage": ZeroAdvantage()}, steps=6)
    await orchestrator.run()
    flat = [
        t for _, _, groups in notes.steps for g in groups for t in g.trajectories
        if len({u.reward for u in g.trajectories}) == 1
    ]  # fmt: skip
    assert orchestrator.ledger_for_tests.dropped["filter:zero_advantage"] == sum(t.num_sampled_tokens for t in flat)
    assert sum(m.get("filters/zero_advantage/dropped", 0) for _, m, _ in notes.steps) == len(flat) > 0
    assert all(m["rollouts"] == GROUP * GROUPS for _, m, _ in notes.steps)


async def test_evaluation_runs_before_during_and_after_the_same_number_for_each_example(tmp_path):
    orchestrator, notes, _ = make(tmp_path, steps=4, evaluate=True)
    await orchestrator.run()
    assert [step for step, _ in notes.evals] == [0, 2, 4]
    for _, evaluation in notes.evals:
        assert evaluation.num_episodes == 14  # 10 asked for, 7 examples
        assert set(Counter(t.example_id for t in evaluation.trajectories).values()) == {2}
    assert notes.evals[0][1].success == notes.evals[2][1].success  # the same seeds: a coin does not learn


def drawn(notes):
    groups = [group for _, _, groups in notes.steps for group in groups]
    return [(group.group_id, group.example_id, [t.seed for t in group.trajectories]) for group in groups]


async def stop_at(orchestrator, notes, step):
    running = asyncio.ensure_future(orchestrator.run())
    while len(notes.steps) < step and not running.done():  # noqa: ASYNC110  (the loop itself is under test)
        await asyncio.sleep(0)
    orchestrator.request_stop()
    return await running


@pytest.mark.parametrize("level", [0, 1])
async def test_after_a_stop_no_example_is_skipped_or_trained_twice(tmp_path, level):
    straight, expected, _ = make(tmp_path, level=level, steps=6)
    await straight.run()
    first, notes, _ = make(tmp_path, level=level, steps=6, token_seconds=0.0005)
    assert not await stop_at(first, notes, 3)
    (state,) = [notes.saved[max(notes.saved)]]
    second, notes, sampler = make(tmp_path, level=level, steps=6, notes=notes)
    second.load_state_dict(state)
    await sampler.update_weights(tmp_path, second.step)
    assert await second.run()
    assert [step for step, _, _ in notes.steps] == [1, 2, 3, 4, 5, 6]
    trained = Counter(g.group_id for _, _, groups in notes.steps for g in groups)
    assert set(trained.values()) == {1}
    if level == 0:
        assert drawn(notes) == drawn(expected)
    ledger = second.ledger_for_tests
    ledger.check(pending=0)


async def test_checkpoints_come_at_the_start_at_the_interval_and_at_the_end(tmp_path):
    orchestrator, notes, _ = make(tmp_path, steps=5, interval=2)
    await orchestrator.run()
    assert sorted(notes.saved) == [0, 2, 4, 5]


async def test_what_is_too_old_at_the_trainers_door_is_dropped_and_counted(tmp_path):
    orchestrator, notes, _ = make(tmp_path, level=0, steps=1)
    await orchestrator.run()
    group = notes.steps[0][2][0]
    rules = Rules(
        advantage=default_advantage, filters={}, strategy="interleaved", max_length=100, max_off_policy_steps=8
    )
    on_time, late = assemble_group(0, group, rules, step=8), assemble_group(0, group, rules, step=9)
    tokens = sum(t.num_sampled_tokens for t in group.trajectories)
    assert (on_time.num_trained_tokens, on_time.dropped) == (tokens, {})
    assert (late.num_trained_tokens, late.dropped) == (0, {"stale": tokens})
