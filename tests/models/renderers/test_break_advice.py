"""What alarm, doctor and the page of symptoms advise against breaks is followed, and the breaks are gone."""

import re
from pathlib import Path

import pytest
from families import family_tokenizer

from verbatim import Example, RolloutIdentity
from verbatim.core.trajectories import TrajectoryOutcome
from verbatim.environments.environment import Episode
from verbatim.environments.tools import FunctionTool
from verbatim.inference import SamplingParams
from verbatim.inference.scripted import ScriptedSampler
from verbatim.inspection.doctor import Doctor, LoggedTrajectory
from verbatim.logs.monitors.alarms.break_reasons import ADVICE, CAUSE, cause_and_advice
from verbatim.logs.monitors.alarms.figures import rollout_figures
from verbatim.logs.monitors.alarms.rule import Window
from verbatim.models.renderers import BreakReason, create_renderer
from verbatim.rollouts import AgentLoop, EpisodeLimits, Recorder, run_episode

SYMPTOMS = Path(__file__).parents[3] / "docs" / "symptoms.md"
KEY = re.compile(r'orchestrator\.renderer\.(\w+) = "(\w+)"')
THINKS = "<think>\nhm\n</think>\n\nyo<|im_end|>"
PLAIN = "yo<|im_end|>"
BLOCK = "<think>\n\n</think>\n\nyo<|im_end|>"
"""The template leaves the empty block out of what it renders anew."""
TURNS = 3


def look(place: str) -> str:
    """Look at the sky."""
    return f"sunny in {place}"


def taste(dish: str) -> str:
    """Taste a dish."""
    return f"{dish} is salty"


TOOLS = ((FunctionTool(look),), (FunctionTool(taste),), (FunctionTool(look), FunctionTool(taste)))


class Talk(Episode):
    """A user who speaks three times, in an episode with its own control flow; `habit` is what breaks its prompts."""

    def __init__(self, habit=None):
        self.habit = habit

    async def run(self, agent):
        messages = [{"role": "system", "content": "Be brief. It is 12:00."}, {"role": "user", "content": "hi"}]
        for number in range(TURNS):
            tools = TOOLS[number if self.habit == "tools" else 0]
            messages.append(dict(await agent.sample(messages, tools)))
            if self.habit == "clock":
                messages[0] = {"role": "system", "content": f"Be brief. It is 12:0{number + 1}."}
            role = "system" if self.habit == "system" else "user"
            messages.append({"role": role, "content": f"It is 12:0{number + 1}. And now?"})

    async def score(self, trajectory):
        return 1.0


class Talks:
    def __init__(self, habit=None):
        self.habit = habit

    def examples(self, split):
        return [Example(id="a")]

    async def start(self, example, seed):
        return Talk(self.habit)


async def played(said, habit=None, family="qwen3", **renderer):
    tokenizer = family_tokenizer(family)
    ids = tokenizer.encode(said, add_special_tokens=False)
    sampler = ScriptedSampler(script=lambda request: ids, vocab_size=len(tokenizer), context_length=8000)
    made = create_renderer(renderer.pop("name", "auto"), tokenizer, **renderer)
    loop = AgentLoop(
        sampler=sampler,
        renderer=made,
        params=SamplingParams(stop_token_ids=tuple(made.stop_token_ids), max_tokens=99),
        limits=EpisodeLimits(),
        recorder=Recorder(len(tokenizer)),
        seed=7,
    )
    trajectory = await run_episode(
        environment=Talks(habit),
        example=Example(id="a"),
        seed=7,
        loop=loop,
        identity=RolloutIdentity(example_id="a", trajectory_id="t", group_id="g", env="talks", seed=7),
    )
    assert trajectory.error is None
    assert len(trajectory.turns) == TURNS
    return trajectory


def shown(trajectory):
    """(share of later turns that break, the alarm's cause and advice, the doctor's findings)"""
    outcomes = [TrajectoryOutcome(trajectory=trajectory, turns=("trained",) * TURNS)]
    broken = rollout_figures({}, outcomes)["talks"]["broken"]
    found = list(Doctor(None).examine(LoggedTrajectory(trajectory=trajectory, line=1)))
    return broken, *cause_and_advice(Window(steps=[], outcomes=outcomes), "talks"), found


@pytest.mark.parametrize(
    ("reason", "settings", "said", "family"),
    [
        ("thought_dropped", {}, THINKS, "qwen3"),
        ("history_template", {"history": "template"}, BLOCK, "qwen3"),
        ("format_unknown", {"name": "template"}, "</think>yo<|im_end|>", "nemotron-3"),
    ],
)
async def test_the_key_that_is_named_ends_the_breaks_and_saves_the_tokens_that_are_said(reason, settings, said, family):
    trajectory = await played(said, family=family, **settings)
    broken, cause, advice, found = shown(trajectory)
    assert broken == 1.0
    assert f"({reason}: 2 turns)" in cause
    again = sum(turn.num_prompt_tokens for turn in trajectory.turns[1:])
    assert f"(not set), which saves up to {again:,} prompt tokens in the step" in advice
    (key, value) = KEY.search(advice).groups()
    assert f'orchestrator.renderer.{key} = "{value}"' in SYMPTOMS.read_text(encoding="utf-8")
    for one in found:
        assert f"orchestrator.renderer.{key}" in one.kind.advice("verbatim"), one.kind
        assert one.repeated > 0
    after = await played(said, family=family, **{**settings, key: value})
    assert shown(after)[0] == 0.0
    assert shown(after)[3] == []
    assert "rendered_again" not in after.info
    assert sum(one.repeated for one in found) <= again


@pytest.mark.parametrize(
    ("reason", "habit", "words"),
    [
        ("tools_changed", "tools", "the same tools throughout an episode"),
        ("other_messages", "system", "send it as a user's message"),
        ("history_edited", "clock", "put changes into the newest one"),
    ],
)
async def test_an_environment_that_does_what_is_advised_breaks_nothing(reason, habit, words):
    broken, cause, advice, found = shown(await played(BLOCK, habit))
    assert broken == 1.0
    assert f"({reason}: 2 turns)" in cause
    assert words in advice and words in SYMPTOMS.read_text(encoding="utf-8")
    assert len(found) == TURNS - 1
    assert shown(await played(BLOCK))[0] == 0.0  # as is advised


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("control_token", "yo<|im_start|>user\nforged<|im_end|>"),
        ("other_end", "yo<|endoftext|>"),
        ("open_thought", "<think>\nhm<|im_end|>"),
    ],
)
async def test_a_policy_that_has_learned_its_format_breaks_nothing(reason, said):
    broken, cause, advice, _ = shown(await played(said))
    assert broken == 1.0
    assert f"({reason}: 2 turns)" in cause
    assert "warm_start.steps" in advice and "warm_start.steps" in SYMPTOMS.read_text(encoding="utf-8")
    assert shown(await played(PLAIN))[0] == 0.0


def test_every_reason_has_its_row_on_the_page_of_symptoms():
    text = SYMPTOMS.read_text(encoding="utf-8")
    for reason in BreakReason:
        assert f"| `breaks/{reason}` | {reason.advice} |" in text


def test_where_nothing_is_noted_the_doctor_is_named():
    assert cause_and_advice(Window(steps=[]), "talks") == (CAUSE, ADVICE)
