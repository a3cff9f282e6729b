"""Every method of an environment x everything that it can do wrong: the run goes on, the failure is counted under its
own reason, and the environment beside it has the trajectories, id for id, that it has alone."""

import asyncio
import contextlib
import itertools
import os
import signal
from collections import Counter
from pathlib import Path

import pytest

from byte_renderer import VOCAB_SIZE, ByteRenderer
from campaigns import sized
from faults.misbehaving import Misbehaving, pokes_then_speaks
from rollouts.players import contents
from run.orchestrator.loop_runs import FakeTrainer, Notes
from run.orchestrator.virtual_runs import virtual_time
from verbatim.algorithms.credit.baselines import default_advantage
from verbatim.algorithms.curriculum import ExampleSchedule
from verbatim.core.errors import ComponentError
from verbatim.core.trajectories import Ledger
from verbatim.environments.resolve import examples_of
from verbatim.inference import SamplingParams
from verbatim.inference.scripted import ScriptedSampler
from verbatim.rollouts import EpisodeLimits, EpisodeStats, GroupRun, LocalRunner, RolloutSetup, supervised
from verbatim.rollouts.backends import RunnerInputs
from verbatim.rollouts.episode import CLOSING
from verbatim.rollouts.processes.runner import process_runner
from verbatim.rollouts.workers import pool as worker_pool
from verbatim.rollouts.workers.episodes import RemoteSetup
from verbatim.run.orchestrator.assemble import GroupRules
from verbatim.run.orchestrator.dispatcher import Dispatcher
from verbatim.run.orchestrator.loop import Orchestrator
from verbatim.run.orchestrator.schedule import RunSchedule
from waiting import HANGS, until

pytestmark = pytest.mark.campaign

STEPS, GROUP, GROUPS = 3, 2, 3
VIRTUAL = EpisodeLimits(timeout=20.0, tool_timeout=10.0, max_turns=4)
"""On a clock that jumps: only what waits for ever takes any time."""
LIMITS = EpisodeLimits(timeout=2 * HANGS, tool_timeout=HANGS, max_turns=4)
FORWARD = {"tool": LIMITS.tool_timeout + 1, "close": CLOSING + 1}
"""Seconds, by method, after which it is too late; `LIMITS.timeout + 1` for all others."""

ASYNC = ("start", "reply", "tool", "run", "score", "close")
METHODS = (*ASYNC, "tools", "state_key")
RAISED = {
    "raise": "RuntimeError",
    "SystemExit": "SystemExit",
    "KeyboardInterrupt": "KeyboardInterrupt",
    "GeneratorExit": "GeneratorExit",
}
NAMES = {"tools": "the episode's tools"}
LEAKS = ("threads", "processes", "files")


def expected(limits):
    """(method, mode) -> how the error of its episodes begins; None where they do not fail."""
    found, late = {}, f"timeout: the episode took more than {limits.timeout:g} s"
    for where, mode in itertools.product(METHODS, RAISED):
        found[where, mode] = f"environment: {NAMES.get(where, where)} raised {RAISED[mode]}"
        if where == "tool":
            found[where, mode] = None  # the model is told; it is counted in `tool_errors`
    for where in ASYNC:
        found[where, "hang"] = late
        found[where, "swallow"] = f"{late}: {where} ignored its cancellation, and was abandoned"
    found["tool", "hang"] = found["tool", "swallow"] = None
    found["close", "hang"] = f"environment: close took more than {CLOSING:g} s"
    found["close", "swallow"] = f"environment: close did not end within {CLOSING:g} s, and was abandoned"
    found["start", "wrong type"] = "environment: the episode's messages: None; expected a list of messages"
    found["reply", "wrong type"] = "environment: reply returned 'done'; expected verbatim.environments.Reply"
    found["tools", "wrong type"] = "environment: the episode's tools: ToolManager(7); expected a list of tools"
    found["tool", "wrong type"] = None
    found["score", "wrong type"] = "environment: score returned '1.0'; expected a number"
    found["state_key", "wrong type"] = "environment: state_key returned ['a', 'list']; expected a string or None"
    for where in ("reply", "tools", "tool"):
        found[where, "huge"] = None  # cut off as too long, or a tool's answer is cut
    found["start", "huge"] = "no_turns: the policy sampled nothing, because its prompt of"
    found["run", "huge"] = "environment: run raised ValueError: xxx"
    found["close", "huge"] = "environment: close raised ValueError: xxx"
    found["score", "huge"] = "environment: score returned 100,000 parts; expected at most 1,000"
    found["state_key", "huge"] = "environment: state_key returned a string of 1,000,000 characters; expected at most"
    found["reply", "no number"] = "environment: reply gave the reward nan; expected a finite number"
    found["tool", "no number"] = "environment: tool poke gave the reward inf; expected a finite number"
    found["score", "no number"] = "environment: score returned 1e+300; expected at most 3.4e+38"
    for where, leak in itertools.product(METHODS, LEAKS):
        found[where, leak] = None
    return found


def expected_in_processes():
    """As above; and what only a process can be kept from."""
    found = expected(LIMITS)
    for where in METHODS:
        found[where, "exit"] = "worker: its process ended with status 0"
        found[where, "block"] = "worker: it did not end an episode within"
    found["score", "killed"] = "worker: its process was ended by SIGKILL"
    return found


HERE, IN_PROCESSES = expected(VIRTUAL), expected_in_processes()
SHORT_HERE = sorted(HERE, key=lambda case: (case[1], METHODS.index(case[0])))[::3]
SHORT_IN_PROCESSES = [("score", "exit"), ("reply", "block"), ("tool", "processes"), ("close", "swallow")]
assert {*SHORT_IN_PROCESSES} <= {*IN_PROCESSES}
assert {where for where, _ in SHORT_HERE} == {*METHODS}
assert {mode for _, mode in SHORT_HERE} == {mode for _, mode in HERE}
assert len(HERE) >= 60


class Run:
    """A few steps on two environments, `good` and `bad`; the bad one's episodes are played by `player`, as many at a
    time as `slots` says."""

    def __init__(self, tmp_path, bad, player, steps=STEPS, limits=LIMITS, slots=64):
        self.steps, self.limits, self.slots = steps, limits, slots
        self.episode_stats, self.notes, self.ledger = EpisodeStats(), Notes(), Ledger()
        self.sampler = ScriptedSampler(script=pokes_then_speaks, vocab_size=VOCAB_SIZE, context_length=400)
        self.environments = {"good": Misbehaving(), "bad": bad}
        setups = {label: self.setup(label, player if label == "bad" else LocalRunner()) for label in self.environments}
        examples = {label: environment.examples("train") for label, environment in self.environments.items()}
        dispatcher = Dispatcher(
            schedule=ExampleSchedule(examples, {"good": 1.0, "bad": 1.0}, seed=5),
            setups=setups,
            ledger=self.ledger,
            group_size=GROUP,
            groups_per_batch=GROUPS,
            max_async_level=0,
            max_off_policy_steps=8,
            oversampling_factor=1.0,
            run_seed=5,
            max_steps=steps,
        )
        rules = GroupRules(
            advantage=default_advantage,
            filters={},
            strategy="interleaved",
            on_break="split",
            max_length=400,
            max_off_policy_steps=8,
        )
        schedule = RunSchedule(
            max_steps=steps,
            eval_setups=[setups["bad"]] if bad.where == "examples" else [],
            eval_interval=1,
            eval_episodes=5,
            eval_examples=None,
            eval_seed=1,
            checkpoint_interval=100,
        )
        self.orchestrator = Orchestrator(
            schedule=schedule,
            sampler=self.sampler,
            trainer=FakeTrainer(tmp_path),
            dispatcher=dispatcher,
            ledger=self.ledger,
            rules={label: rules for label in setups},
            environments=self.environments,
            observer=self.notes,
            checkpointer=self.notes,
            episode_stats=self.episode_stats,
        )

    def setup(self, label, player):
        return RolloutSetup(
            env=label,
            environment=self.environments[label],
            sampler=self.sampler,
            renderer=ByteRenderer(),
            params=SamplingParams(),
            limits=self.limits if label == "bad" else LIMITS,
            runner=player,
            episode_stats=self.episode_stats,
            slots=asyncio.Semaphore(self.slots if label == "bad" else 64),
        )

    async def go(self):
        assert await self.orchestrator.run()
        assert [step for step, _, _ in self.notes.steps] == list(range(1, self.steps + 1))
        self.ledger.check(pending=0)

    def groups(self, label):
        return [group for _, _, groups in self.notes.steps for group in groups if group.env == label]


ALONE = {}


async def alone(run, group):
    """The group as it is when nothing else is played."""
    version = int(group.trajectories[0].turns[0].policy_versions[0])
    key = group.group_id, group.example_id, version
    if key not in ALONE:
        sampler = ScriptedSampler(script=pokes_then_speaks, vocab_size=VOCAB_SIZE, context_length=400)
        sampler.policy_version = version
        quiet = RolloutSetup(
            env="good",
            environment=Misbehaving(),
            sampler=sampler,
            renderer=ByteRenderer(),
            params=SamplingParams(),
            limits=LIMITS,
            slots=asyncio.Semaphore(64),
        )
        example = next(e for e in Misbehaving().examples("train") if e.id == group.example_id)
        index = int(group.group_id.partition("-")[2])
        ALONE[key] = await GroupRun(quiet, example, index=index, size=GROUP, run_seed=5).run()
    return ALONE[key]


async def check(run, where, mode, begins):
    """The bad episodes ended as promised, and the good ones as ever."""
    good, bad = run.groups("good"), run.groups("bad")
    assert len(good) >= 2 and len(bad) >= 2
    for group in good:
        expected = await alone(run, group)
        strip = [{k: v for k, v in contents(t).items() if k != "advantage"} for t in group.trajectories]
        assert strip == [{k: v for k, v in contents(t).items() if k != "advantage"} for t in expected.trajectories]
    trajectories = [t for group in bad for t in group.trajectories]
    errors = [t.error for t in trajectories]
    if begins is None:
        assert errors == [None] * len(errors)
        assert not run.episode_stats.failures
    else:
        assert all(error is not None and error.startswith(begins) for error in errors), errors[0]
        assert all(len(error) < 5000 for error in errors)
        assert sum(run.episode_stats.failures.values()) == len(errors)
        counted = Counter()
        for _, metrics, _ in run.notes.steps:
            counted.update({name: n for name, n in metrics.items() if name.startswith("errors/")})
        assert counted == {f"errors/{begins.partition(':')[0]}": len(errors)}
    told = {
        **dict.fromkeys((*RAISED, "wrong type"), "exception"),
        **dict.fromkeys(("hang", "swallow"), "timeout"),
        "huge": "oversize",
    }
    if where == "tool" and mode in told:
        assert all(t.info["tool_errors"] == {told[mode]: 1} for t in trajectories)
    if mode == "huge" and where in ("start", "reply"):
        assert {(t.stop_reason, t.truncated) for t in trajectories} == {("length", True)}


def leftover(folder):
    return [int(path.name.partition("-")[2]) for path in folder.glob("left-*")]


def runs(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.mark.slow
@pytest.mark.parametrize("here", sized(SHORT_HERE, [*HERE]), ids=" ".join)
@pytest.mark.realtime
@virtual_time
async def test_played_here_it_costs_its_own_episodes(tmp_path, campaign, here):
    row = campaign("environments, played here")
    row.add(wrong=True)
    await play_here(tmp_path, *here)
    row.wrong -= 1


async def play_here(tmp_path, where, mode):
    bad = Misbehaving(where, mode, str(tmp_path))
    run = Run(tmp_path, bad, LocalRunner(), limits=VIRTUAL)
    try:
        await run.go()
        await check(run, where, mode, HERE[where, mode])
    finally:
        for pid in leftover(tmp_path):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for kept in bad.kept:
            if isinstance(kept, int):
                os.close(kept)


def swallows_what_is_raised(monkeypatch):
    ends = supervised.UserCallGuard.__exit__
    monkeypatch.setattr(supervised.UserCallGuard, "__exit__", lambda *given: ends(*given[:1], None, None, None) or True)


def counts_no_failure(monkeypatch):
    monkeypatch.setattr(EpisodeStats, "failed", lambda self, trajectory: None)


def lets_one_environment_change_another(monkeypatch):
    monkeypatch.setattr(Misbehaving, "num_started", 0, raising=False)
    start = Misbehaving.start

    async def counted(self, example, seed):
        Misbehaving.num_started += 1
        return await start(self, example, seed + Misbehaving.num_started // 10)

    monkeypatch.setattr(Misbehaving, "start", counted)


@pytest.mark.parametrize(
    "fault",
    [swallows_what_is_raised, counts_no_failure, lets_one_environment_change_another],
    ids=lambda fault: fault.__name__,
)
def test_a_fault_of_the_run_is_found(tmp_path, monkeypatch, fault):
    with monkeypatch.context() as planted, pytest.raises(AssertionError):
        fault(planted)
        virtual_time(play_here)(tmp_path, "close", "SystemExit")


@pytest.mark.parametrize("there", sized(SHORT_IN_PROCESSES, [*IN_PROCESSES]), ids=" ".join)
@pytest.mark.realtime
@pytest.mark.slow
async def test_played_in_processes_it_costs_its_own_episodes(tmp_path, campaign, monkeypatch, there):
    where, mode = there
    monkeypatch.setattr(worker_pool, "LONGEST_PAUSE", 0.0)
    monkeypatch.setattr(worker_pool, "MOST_ATTEMPTS", 1)  # another worker would be lost in the same way
    limits, slots = LIMITS, 64
    if mode == "block":  # an episode that is cut off before it blocks ends with the same error
        monkeypatch.setattr(worker_pool, "GRACE", 0.1)
        limits = EpisodeLimits(timeout=1.0, max_turns=4)
    if mode in ("block", "hang", "swallow"):  # one at a time: all on a worker share its clock and its loss
        slots = 1
    row = campaign("environments, in processes")
    row.add(wrong=True)
    args = {"where": where, "mode": mode, "folder": str(tmp_path)}
    forward = FORWARD.get(where, LIMITS.timeout + 1)
    setup = RemoteSetup(
        env="bad",
        name="faults.misbehaving.Misbehaving",
        args={**args, "forward": forward},
        params=SamplingParams(),
        limits=LIMITS,
    )
    relay = Relay()
    run = Run(tmp_path, Misbehaving(**args), relay, steps=2, limits=limits, slots=slots)
    inputs = RunnerInputs(setups={("train", "bad"): setup}, sampler=run.sampler, renderer=ByteRenderer(), workers=2)
    async with process_runner(inputs) as player:
        relay.runner = player
        await run.go()
        pids = player.pools["train", "bad"].pids
    await check(run, where, mode, IN_PROCESSES[where, mode])
    await until(lambda: not any(map(runs, [*pids, *leftover(tmp_path)])))
    assert (len(leftover(tmp_path)) > 0) == (mode == "processes")
    row.wrong -= 1


class Relay:
    """A runner that is known only when the run is made."""

    runner = None

    async def run(self, setup, task, recorder):
        return await self.runner.run(setup, task, recorder)

    def metrics(self):
        return self.runner.metrics()


AT_THE_START = {
    "raise": "raised RuntimeError: no",
    "SystemExit": "raised SystemExit: 0",
    "GeneratorExit": "raised GeneratorExit",
}


@pytest.mark.parametrize("mode", AT_THE_START)
def test_examples_that_fail_at_the_start_are_refused_by_name(campaign, mode):
    row = campaign("environments, examples at the start")
    row.add(wrong=True)
    with pytest.raises(ComponentError, match=f"environment 'mine': examples.*{AT_THE_START[mode]}"):
        examples_of(Misbehaving("examples", mode), "mine", "eval")
    row.wrong -= 1


class Rows(list):
    def __iter__(self):
        raise SystemExit(0)


@pytest.mark.parametrize(
    ("given", "said"),
    [(7, "gave"), ([], "is empty"), ([1, 2], "at index 0"), (Rows([1]), "cannot be read: SystemExit: 0")],
)
def test_examples_that_are_no_examples_are_refused_by_name(campaign, given, said):
    row = campaign("environments, examples at the start")
    row.add(wrong=True)
    environment = Misbehaving()
    environment.examples = lambda split: given
    with pytest.raises(ComponentError, match=f"environment 'mine': examples.*{said}"):
        examples_of(environment, "mine", "eval")
    row.wrong -= 1


@pytest.mark.parametrize("mode", ["raise", "SystemExit", "GeneratorExit"])
async def test_examples_that_fail_in_an_evaluation_cost_that_evaluation(tmp_path, campaign, mode):
    row = campaign("environments, examples in an evaluation")
    row.add(wrong=True)
    run = Run(tmp_path, Misbehaving("examples", mode), LocalRunner())
    await run.go()
    await check(run, "examples", mode, None)
    assert len(run.notes.evals) == STEPS + 1  # before the first step, and after each
    for _, evaluation in run.notes.evals:
        assert (evaluation.num_episodes, evaluation.metrics["errors/environment"]) == (0, 1.0)
    assert sum(run.episode_stats.unmeasured.values()) == STEPS + 1
    assert "evaluations were skipped" in run.episode_stats.summary()[-1]
    row.wrong -= 1
