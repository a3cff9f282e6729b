"""Hostile chat templates end in a refusal that names them: in bounded time and memory, wherever they are rendered.

The program that renders them ends what takes a minute of the processor; most take a tenth of a second, all entry points
together. How long the slowest one takes is reported.
"""

import asyncio
import json
import sys
from pathlib import Path

import pytest

import warm
from campaigns import sized
from faults.hostile_templates import BOMBS, PLAIN, SOURCES, byte_tokenizer, run
from verbatim import Example
from verbatim.environments.environment import Episode, Reply
from verbatim.inference import SamplingParams
from verbatim.inference.scripted import ScriptedSampler
from verbatim.models.renderers import create_renderer
from verbatim.rollouts import EpisodeLimits, GroupRun, RolloutSetup

MEGABYTES = 300.0
"""Of memory, for all entry points together."""
SHORT = (
    "nested ranges", "endless macro", "doubling by tilde", "doubling lists", "times", "format inner width", "replace",
    "shared lists written", "shared tuples as a key", "deep list written", "income", "class by format", "precision",
    "huge output", "wordwrap", "lipsum", "deep generators", "sums of lists", "frame of a generator", "deep brackets",
)  # fmt: skip
PROGRAM = Path(__file__).with_name("hostile_templates.py")


def tried(names):
    done = warm.run([sys.executable, str(PROGRAM), *names], capture_output=True, text=True, check=False)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["name"] for row in rows] == list(names), done.stderr[-2000:]
    return rows


def wrong(row):
    """What is not as promised."""
    answers = row["answers"]
    entries = {"auto", "doctor"} if row["name"] in SOURCES else {"auto", "doctor", "late", "server", "short"}
    # The doctor's report is on a template that refuses whatever it is given, too: it says what it lacks.
    said = [
        f"{entry}: {answer[:300]}"
        for entry, answer in answers.items()
        if not answer.startswith(("refused: ", "status 1: ") if entry == "doctor" else "refused: ")
    ]
    said += [f"{entry} was not tried" for entry in entries - answers.keys()]
    said += [
        f"{entry} does not name it: {answer[:300]}"
        for entry, answer in answers.items()
        if entry != "short" and "the-hostile-one" not in answer
    ]
    if row["megabytes"] > MEGABYTES:
        said.append(f"{row['megabytes']:.0f} MB")
    return said


@pytest.mark.slow
@pytest.mark.realtime
@pytest.mark.campaign
def test_hostile_templates_are_refused_wherever_they_are_rendered(campaign):
    found = campaign("hostile templates")
    rows = tried(sized(SHORT, tuple(BOMBS)))
    faults = {}
    for row in rows:
        if said := wrong(row):
            faults[row["name"]] = said
        for answer in row["answers"]:
            if answer != "short":
                found.add(wrong=any(part.startswith(answer) for part in faults.get(row["name"], ())))
    found.note = (
        f"{len(rows)} templates; at most {max(row['seconds'] for row in rows):.1f} s of processor time and "
        f"{max(row['megabytes'] for row in rows):.0f} MB for one"
    )
    assert faults == {}


def test_the_short_part_names_templates_of_the_campaign():
    assert set(SHORT) <= BOMBS.keys() and len(SHORT) >= 20


def test_a_harmless_template_is_found(monkeypatch):
    """The campaign can fail: it is accepted by every entry point."""
    monkeypatch.setitem(BOMBS, "harmless", "")
    said = wrong({"name": "harmless", "answers": run("harmless"), "megabytes": MEGABYTES + 1})
    assert {each.split(":")[0] for each in said} >= {"auto", "late", "server", f"{MEGABYTES + 1:.0f} MB"}


class Talk(Episode):
    """A user who speaks a given number of times."""

    def __init__(self, rounds):
        self.messages, self._left = [{"role": "user", "content": "go"}], rounds

    async def reply(self, message):
        self._left -= 1
        return Reply(messages=[{"role": "user", "content": "go on"}] if self._left else [], done=not self._left)

    async def score(self, trajectory):
        return 1.0


class Talks:
    def examples(self, split):
        return [Example(id="short", payload={"rounds": 2}), Example(id="long", payload={"rounds": 9})]

    async def start(self, example, seed):
        return Talk(example.payload["rounds"])


async def test_a_template_that_explodes_at_a_late_turn_fails_that_episode_alone():
    tokenizer = byte_tokenizer("{% if messages | length > 8 %}" + BOMBS["nested ranges"] + "{% endif %}" + PLAIN)
    renderer = create_renderer("auto", tokenizer)
    answer = tokenizer.encode("yes<|im_end|>", add_special_tokens=False)
    setup = RolloutSetup(
        env="talks",
        environment=Talks(),
        renderer=renderer,
        params=SamplingParams(),
        sampler=ScriptedSampler(script=lambda request: answer, vocab_size=len(tokenizer), context_length=4000),
        limits=EpisodeLimits(max_turns=12),
        slots=asyncio.Semaphore(8),
    )
    short, long = [
        (await GroupRun(setup, example, index=0, size=1, run_seed=1).run()).trajectories[0]
        for example in Talks().examples("train")
    ]
    assert (short.error, short.reward, len(short.turns)) == (None, 1.0, 2)
    assert long.error.startswith("template: the model's chat template does not finish rendering 9 messages")
    assert (long.reward, len(long.turns)) == (None, 4)
