"""One run with five planted faults, each in an environment of its own, and what its alarms say.

The real loop, rollouts, ledger and alarms; the sampler follows a script and the trainer counts.

    python tests/faults/five_faults.py
"""

from __future__ import annotations

import asyncio
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from byte_renderer import VOCAB_SIZE, ByteRenderer, say
from run.orchestrator.loop_runs import FakeTrainer, Notes
from verbatim import Example
from verbatim.algorithms.credit.baselines import default_advantage
from verbatim.algorithms.curriculum import ExampleSchedule
from verbatim.algorithms.filters.zero_advantage import ZeroAdvantage
from verbatim.core.trajectories import Ledger
from verbatim.environments.environment import Episode, Reply
from verbatim.environments.tools import FunctionTool
from verbatim.inference import SamplingParams
from verbatim.inference.scripted import ScriptedSampler
from verbatim.logs.monitors.alarm import Alarm
from verbatim.logs.monitors.alarms import ALARMS, AlarmWatch
from verbatim.rollouts import EpisodeLimits, RolloutSetup
from verbatim.run.orchestrator.assemble import GroupRules
from verbatim.run.orchestrator.dispatcher import Dispatcher
from verbatim.run.orchestrator.loop import Orchestrator
from verbatim.run.orchestrator.schedule import RunSchedule

GROUP, GROUPS, CONTEXT = 8, 10, 400
NAMED_BY = {
    "dead_parser": "tool_format",
    "stripped_thinking": "prompt_breaks",
    "stale_sampler": "staleness",
    "hackable_reward": "reward_hacking",
    "always_fails": "repeated_error",
}
"""The alarm that names each fault; that of the stale sampler is of the run, the others are of their environments."""


HEALTHY = tuple(f"healthy_{n}" for n in range(5))
"""Environments in which nothing is wrong."""


ASKED = {
    "dead_parser": "where is it?",
    "stripped_thinking": "a riddle",
    "stale_sampler": "say yes",
    "hackable_reward": "tell a joke",
    "always_fails": "an order",
}
"""What the user asks."""


def look(place: str) -> str:
    """Look at a place.

    Args:
        place: Where.
    """
    return place


class Played(Episode):
    """Two turns; earns by its seed, unless its environment says otherwise."""

    def __init__(self, kind: str, seed: int) -> None:
        self.kind, self.seed, self.replies = kind, seed, 0
        self.messages = ({"role": "user", "content": ASKED.get(kind, "go")},)
        self.tools = [FunctionTool(look)] if kind == "dead_parser" else []

    async def reply(self, message):
        self.replies += 1
        return Reply(messages=[{"role": "user", "content": "and?"}], done=self.replies == 2)

    async def score(self, trajectory):
        if self.kind == "always_fails":
            raise KeyError(f"question {self.seed}")
        if self.kind == "hackable_reward":
            return trajectory.num_sampled_tokens / 100  # the longer, the better
        return float(self.seed % 3 == 0)


@dataclass
class Place:
    """One environment."""

    kind: str
    label: str

    def examples(self, split):
        return [Example(id=f"{self.label}-{n}") for n in range(50)]

    async def start(self, example, seed):
        return Played(self.kind, seed)


class StripsThinking(ByteRenderer):
    """Its template leaves the thinking of earlier turns out, so that no prompt extends what was sampled."""

    def __init__(self) -> None:
        super().__init__(bridges=False)

    def _one(self, message):
        said = re.sub(r"<think>.*?</think>", "", message["content"]) if message["role"] == "assistant" else None
        return super()._one(message if said is None else {**message, "content": said})


class Stale(ScriptedSampler):
    """Says that it took the new weights, and goes on with the old ones."""

    async def update_weights(self, path, version):
        self.updates.append((path, version))


def sampler_of(kind: str, version: list[int]) -> ScriptedSampler:
    """What the policy says in one environment; `version` holds the version that the run has published."""

    def script(request):
        jitter = request.seed % 7
        if kind == "dead_parser":  # the renderer reads calls between two special tokens, and the model writes Hermes'
            return say('<tool_call>{"name": "look", "arguments": {"place": "here"}}</tool_call>')
        if kind == "stripped_thinking":
            return say("<think>" + "hm" * jitter + "</think>yes")
        if kind == "hackable_reward":  # from step 12 on it has found out
            return say("ha" * (5 + jitter + 10 * (version[0] >= 12)))
        return say("yes" * (1 + jitter))

    made = Stale if kind == "stale_sampler" else ScriptedSampler
    return made(script=script, vocab_size=VOCAB_SIZE, context_length=CONTEXT)


class Samplers(ScriptedSampler):
    """The sampler of the run: new weights reach those of all environments."""

    def __init__(self) -> None:
        super().__init__(script=lambda request: say("x"), vocab_size=VOCAB_SIZE, context_length=CONTEXT)
        self.version = [0]
        self.of = {kind: sampler_of(kind, self.version) for kind in (*NAMED_BY, *HEALTHY)}

    async def update_weights(self, path, version):
        self.version[0] = version
        await super().update_weights(path, version)
        for sampler in self.of.values():
            await sampler.update_weights(path, version)


@dataclass
class Watched(Notes):
    """An observer that shows every step to the alarms."""

    watch: AlarmWatch
    alarms: list[tuple[Alarm, float]] = field(default_factory=list)
    seconds: float = 0.0
    """What the alarms took."""

    def __post_init__(self) -> None:
        super().__init__()
        self.began = time.monotonic()

    def on_step(self, step, metrics, outcomes):
        began = time.process_time()
        found = self.watch.on_step(step, metrics, outcomes)
        self.seconds += time.process_time() - began
        self.alarms += [(alarm, time.monotonic() - self.began) for alarm in found]
        self.last = step
        super().on_step(step, metrics, outcomes)
        self.keep(step, metrics, outcomes, found)

    def keep(self, step, metrics, outcomes, alarms):
        """For those that write them down."""


def play(
    folder: Path,
    kinds: Sequence[str] = tuple(NAMED_BY),
    steps: int = 24,
    *,
    labels: Mapping[str, str] | None = None,
    observer: Callable[[AlarmWatch], Watched] = Watched,
) -> Watched:
    """The run, of one environment of each kind.

    Args:
        folder: Of the trainer.
        kinds: Of `NAMED_BY` and `HEALTHY`.
        steps: In all.
        labels: What the environments are called; by their kinds if it is None.
        observer: Makes what is told of every step.
    """
    label_of = labels or {kind: kind for kind in kinds}
    orchestrator_config = {
        "group_size": GROUP,
        "max_async_level": 0,
        "max_off_policy_steps": 8,
        "renderer": {"name": "auto"},
        "train": {"env": [{"id": label_of[kind]} for kind in kinds]},
    }
    samplers, ledger = Samplers(), Ledger()
    environments = {label_of[kind]: Place(kind, label_of[kind]) for kind in kinds}
    setups = {
        label_of[kind]: RolloutSetup(
            env=label_of[kind],
            environment=environments[label_of[kind]],
            sampler=samplers.of[kind],
            renderer=StripsThinking() if kind == "stripped_thinking" else ByteRenderer(),
            params=SamplingParams(),
            limits=EpisodeLimits(),
            slots=asyncio.Semaphore(64),
        )
        for kind in kinds
    }
    dispatcher = Dispatcher(
        schedule=ExampleSchedule(
            {label: place.examples("train") for label, place in environments.items()},
            dict.fromkeys(environments, 1.0),
            seed=0,
            pool_rules=None,
        ),
        setups=setups,
        ledger=ledger,
        group_size=GROUP,
        groups_per_batch=GROUPS,
        max_async_level=0,
        max_off_policy_steps=1000,
        oversampling_factor=1.0,
        run_seed=5,
        max_steps=steps,
    )
    rules = GroupRules(
        advantage=default_advantage,
        filters={"zero_advantage": ZeroAdvantage()},
        strategy="interleaved",
        max_length=CONTEXT,
        max_off_policy_steps=8,
    )
    notes = observer(AlarmWatch(ALARMS, config={"orchestrator": orchestrator_config}))
    orchestrator = Orchestrator(
        schedule=RunSchedule(
            max_steps=steps,
            eval_setups=[],
            eval_interval=1000,
            eval_episodes=0,
            eval_examples=None,
            eval_seed=0,
            checkpoint_interval=1000,
        ),
        sampler=samplers,
        trainer=FakeTrainer(folder),
        dispatcher=dispatcher,
        ledger=ledger,
        rules=dict.fromkeys(environments, rules),
        environments=environments,
        observer=notes,
        checkpointer=notes,
    )
    assert asyncio.run(orchestrator.run())
    return notes


def main() -> None:
    """Print which alarm names which fault, when, and what it says."""
    with TemporaryDirectory() as folder:
        notes = play(Path(folder))
    for fault, name in NAMED_BY.items():
        found = [(alarm, seconds) for alarm, seconds in notes.alarms if alarm.name == name]
        alarm, seconds = next((a, s) for a, s in found if a.env in (fault, None))
        print(f"{fault}: {name} at step {alarm.step}, after {seconds:.1f} s\n    {alarm.message}\n    {alarm.advice}")
        print(f"    {', '.join(alarm.trajectory_ids)}")
    others = [f"{a.name} ({a.env}) at step {a.step}" for a, _ in notes.alarms if NAMED_BY.get(str(a.env)) != a.name]
    print(f"others: {'; '.join(others)}")
    print(f"the alarms took {1e3 * notes.seconds / notes.last:.1f} ms of processor time a step")


if __name__ == "__main__":
    main()
