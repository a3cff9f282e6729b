"""A run without a model: a coin for an environment, a script for a sampler, a trainer that counts."""

import asyncio
import contextlib
import gc
import json
import random
from collections import Counter

import numpy as np

from byte_renderer import VOCAB_SIZE, ByteRenderer, say
from verbatim import Example
from verbatim.algorithms.credit.baselines import default_advantage
from verbatim.algorithms.curriculum import ExampleSchedule
from verbatim.core.errors import RunStopped
from verbatim.core.trajectories import Ledger
from verbatim.core.types import Group, StopReason
from verbatim.environments.environment import Episode
from verbatim.inference import Completion, SamplingParams
from verbatim.inference.scripted import ScriptedSampler, default_logprob
from verbatim.rollouts import EpisodeLimits, RolloutSetup
from verbatim.run.orchestrator.assemble import GroupRules
from verbatim.run.orchestrator.dispatcher import Dispatcher
from verbatim.run.orchestrator.eval_progress import EvalProgress
from verbatim.run.orchestrator.loop import Orchestrator
from verbatim.run.orchestrator.schedule import RunSchedule
from verbatim.trainer.transport import StepReport

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
        return self.report(samples, version, checkpoint)

    def report(self, samples, version, checkpoint):
        self.batches.append(samples)
        trained = sum(s.num_trained_tokens for s in samples) - self.loses
        state = self.tmp_path / "states" / f"v{version}" if checkpoint else None
        if state is not None:
            state.mkdir(parents=True, exist_ok=True)
        return StepReport(
            version=version, weights=self.tmp_path, num_trained_tokens=trained, metrics={"loss": 0.0}, state=state
        )

    async def save(self, folder, version):
        pass

    async def watch(self):
        await asyncio.Event().wait()

    async def close(self):
        pass


class GatedTrainer(FakeTrainer):
    """Trains one batch, in order, for each `let(1)`; `events` is what happened to which version."""

    def __init__(self, tmp_path, gates=0):
        super().__init__(tmp_path)
        self.gates, self.turn, self.events = asyncio.Semaphore(gates), asyncio.Lock(), []

    @property
    def held(self):
        """Versions handed over and not reported."""
        reported = {version for what, version in self.events if what == "reported"}
        return [version for what, version in self.events if what == "handed" and version not in reported]

    def let(self, count):
        for _ in range(count):
            self.gates.release()

    async def train(self, samples, version, *, checkpoint=False):
        self.events.append(("handed", version))
        async with self.turn:  # first come, first served
            await self.gates.acquire()
            report = self.report(samples, version, checkpoint)
            self.events.append(("reported", version))
            return report


class FailingTrainer(FakeTrainer):
    """As the real one: after a batch that fails, those that were handed over after it fail too.

    It fails when `ahead` more batches have been handed over."""

    def __init__(self, tmp_path, *, at, delay=0.0, can_save=True, ahead=0):
        super().__init__(tmp_path, delay)
        self.at, self.can_save, self.turn, self.handed = at, can_save, asyncio.Lock(), []
        self.ahead = ahead

    async def train(self, samples, version, *, checkpoint=False):
        self.handed.append(version)
        async with self.turn:
            await asyncio.sleep(self.delay)
            if version >= self.at:
                await until(lambda: len(self.handed) >= self.at + self.ahead)
                raise RunStopped(f"the trainer: no finite loss for version {version}")
            return self.report(samples, version, checkpoint)

    async def save(self, folder, version):
        if not self.can_save:
            raise RunStopped("the state is gone")


class HeldInTheMiddle(ScriptedSampler):
    """From request `first` on, every completion ("x", "y", "z", end) waits after its second token for `go_on`."""

    def __init__(self, first):
        super().__init__(script=lambda request: say("xyz"), vocab_size=VOCAB_SIZE, context_length=100)
        self.first, self.go_on = first, asyncio.Event()

    async def generate(self, request):
        if len(self.requests) < self.first:
            return await super().generate(request)
        self.requests.append(request)
        self.num_in_flight += 1
        try:
            versions = [self.policy_version] * 2
            await self.go_on.wait()
            versions += [self.policy_version] * 2
        finally:
            self.num_in_flight -= 1
        ids = np.array(say("xyz"), dtype=np.int32)
        logprobs = np.array([default_logprob(i) for i in say("xyz")], dtype=np.float32)
        return Completion(
            ids=ids, logprobs=logprobs, policy_versions=np.array(versions, dtype=np.int32), stop_reason=StopReason.STOP
        )


class Groups(list):
    """The groups whose trajectories have these outcomes, in their order."""

    def __init__(self, outcomes):
        self.outcomes, members = outcomes, {}
        for outcome in outcomes:
            members.setdefault(outcome.trajectory.group_id, []).append(outcome.trajectory)
        super().__init__(
            Group(group_id=name, example_id=found[0].example_id, env=found[0].env, trajectories=found)
            for name, found in members.items()
        )


def tokens_by_outcome(notes):
    """What the observer was told, summed over the steps: to be compared with the ledger."""
    found = Counter()
    for _, _, groups in notes.steps:
        for outcome in groups.outcomes:
            found.update(outcome.num_tokens)
    return found


class Notes:
    def __init__(self):
        self.steps, self.evals, self.saved, self.marked = [], [], {}, []

    def on_step(self, step, metrics, outcomes):
        self.steps.append((step, dict(metrics), Groups(list(outcomes))))

    def on_eval(self, step, evaluation):
        self.evals.append((step, evaluation))

    def stage(self, what, total=None, *, count=None):
        return contextlib.nullcontext()

    async def save(self, step, trainer, state, trainer_state=None):
        if trainer_state is None:
            await trainer.save(None, step)
        elif trainer_state != "there":
            trainer_state.rmdir()  # moved away
        self.saved[step] = json.loads(json.dumps(state))

    def mark_best(self, step, best):
        self.marked.append((step, best["step"]))


def make(
    tmp_path,
    *,
    level=0,
    steps=4,
    environment=None,
    trainer=None,
    notes=None,
    filters=None,
    evaluate=False,
    token_seconds=0.0,
    interval=100,
    max_off_policy_steps=8,
    launch_bound=8,
    oversampling=1.0,
    sampler=None,
    probes=None,
    max_length=100,
    strategy="interleaved",
    on_break="split",
    online_filtering=False,
    pool_rules=None,
    logprob_models=None,
    limits=None,
    params=None,
    shares_device=False,
    routing=None,
    eval_interval=2,
    progress=None,
    reads_turn_rewards=True,
):
    environment = environment or Coins()
    sampler = sampler or ScriptedSampler(
        script=lambda r: say("x" * (1 + r.seed % 5)),
        vocab_size=VOCAB_SIZE,
        context_length=100,
        seconds_per_token=token_seconds,
    )
    ledger = Ledger()
    setup = RolloutSetup(
        env="coins",
        environment=environment,
        sampler=sampler,
        renderer=ByteRenderer(),
        params=params or SamplingParams(),
        limits=limits or EpisodeLimits(),
        slots=asyncio.Semaphore(64),
        routing=routing,
    )
    dispatcher = Dispatcher(
        schedule=ExampleSchedule(
            {"coins": environment.examples("train")}, {"coins": 1.0}, seed=0, pool_rules=pool_rules
        ),
        setups={"coins": setup},
        ledger=ledger,
        group_size=GROUP,
        groups_per_batch=GROUPS,
        max_async_level=level,
        max_off_policy_steps=launch_bound,
        oversampling_factor=oversampling,
        run_seed=5,
        max_steps=steps,
        online_difficulty_filtering=online_filtering,
    )
    rules = GroupRules(
        advantage=default_advantage,
        filters=filters or {},
        strategy=strategy,
        on_break=on_break,
        max_length=max_length,
        max_off_policy_steps=max_off_policy_steps,
        reads_turn_rewards=reads_turn_rewards,
    )
    notes, trainer = notes or Notes(), trainer or FakeTrainer(tmp_path)
    schedule = RunSchedule(
        max_steps=steps,
        eval_setups=[setup] if evaluate else [],
        eval_interval=eval_interval,
        eval_episodes=10,
        eval_examples=None,
        eval_seed=1,
        checkpoint_interval=interval,
        shares_device=shares_device,
        keeps_best=progress is not None and progress.best is not None,
    )
    orchestrator = Orchestrator(
        schedule=schedule,
        sampler=sampler,
        trainer=trainer,
        dispatcher=dispatcher,
        ledger=ledger,
        rules={"coins": rules},
        environments={"coins": environment},
        observer=notes,
        checkpointer=notes,
        probes=probes,
        logprob_models=logprob_models or {},
        progress=progress or EvalProgress(),
    )
    orchestrator.ledger_for_tests, orchestrator.trainer_for_tests = ledger, trainer
    orchestrator.pools_for_tests = dispatcher.schedule.pools
    return orchestrator, notes, sampler


def versions(groups):
    return {int(v) for g in groups for t in g.trajectories for turn in t.turns for v in turn.policy_versions}


async def until(condition, looks=120_000):
    """Let everybody else work until this holds: so many looks, and not seconds, for a machine may stand still."""
    for _ in range(looks):  # a minute and more
        if condition():
            return
        await asyncio.sleep(0.0005)
    raise TimeoutError("it does not come to hold")


@contextlib.asynccontextmanager
async def nothing_left_behind():
    """No task outlives the block, and no exception of one goes unread."""
    loop, complaints = asyncio.get_running_loop(), []
    loop.set_exception_handler(lambda loop, context: complaints.append(context["message"]))
    yield
    for _ in range(3):  # what was cancelled ends
        await asyncio.sleep(0)
    gc.collect()
    left = [task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    assert (left, complaints) == ([], []), (left, complaints)


async def go_on_and_check(notes, tmp_path, *, step=None, level=0, steps=6):
    """Resume from a checkpoint, the newest by default: every step comes once, no group is trained twice, and every
    sampled token is trained or dropped."""
    step = max(notes.saved) if step is None else step
    notes.steps = [entry for entry in notes.steps if entry[0] <= step]  # as the metrics of a resumed run
    assert [entry[0] for entry in notes.steps] == list(range(1, step + 1))
    second, notes, sampler = make(tmp_path, level=level, steps=steps, notes=notes)
    second.load_state_dict(notes.saved[step])
    await sampler.update_weights(tmp_path, second.step)
    assert await second.run()
    assert [entry[0] for entry in notes.steps] == list(range(1, steps + 1))
    trained = Counter(group.group_id for _, _, groups in notes.steps for group in groups)
    assert trained == {f"train-{index}": 1 for index in range(steps * GROUPS)}  # nothing twice, nothing skipped
    ledger = second.ledger_for_tests
    ledger.check(pending=0)
    in_steps = sum(t.num_sampled_tokens for _, _, groups in notes.steps for g in groups for t in g.trajectories)
    assert ledger.trained == in_steps
    assert tokens_by_outcome(notes) == {"trained": in_steps}
    gone = {"cancelled", "lost_worker"}  # the latter of actors that were killed in the middle
    assert {reason for reason, count in ledger.dropped.items() if count} <= gone, ledger.dropped
    assert ledger.sampled == in_steps + sum(ledger.dropped.values())
