"""The watch over every test's episodes sees what it is there to see."""

import asyncio
import dataclasses

import numpy as np
import pytest

from byte_renderer import VOCAB_SIZE, ByteRenderer, call, say
from token_identity import watched
from verbatim.environments.guess_number import GuessNumber
from verbatim.inference import SamplingParams
from verbatim.inference.scripted import ScriptedSampler
from verbatim.rollouts import EpisodeLimits, GroupRun, RolloutSetup
from verbatim.rollouts.recorder import Recorder


@pytest.fixture(autouse=True)
def every_episode_is_token_exact():
    """These episodes are wrong on purpose."""


def play(renderer=None):
    """Two guesses and a word."""
    answers = [call("guess", number=3), call("guess", number=5), say("bye")]
    left = list(answers)
    environment = GuessNumber()
    setup = RolloutSetup(
        env="g",
        environment=environment,
        renderer=renderer or ByteRenderer(),
        sampler=ScriptedSampler(script=lambda request: left.pop(0), vocab_size=VOCAB_SIZE, context_length=4000),
        params=SamplingParams(),
        limits=EpisodeLimits(),
        slots=asyncio.Semaphore(1),
    )
    example = next(e for e in environment.examples("train") if e.payload["secret"] not in (3, 5))
    with watched() as watch:
        asyncio.run(GroupRun(setup, example, index=0, size=1, run_seed=0).run())
    return watch


def test_an_episode_as_it_was_sampled_is_seen_and_right():
    watch = play()
    assert (watch.num_episodes, watch.wrong) == (1, [])
    assert watch.num_turns >= 2


@pytest.mark.parametrize(
    ("field", "change", "complaint"),
    [
        ("completion_ids", lambda ids: np.asarray(ids)[::-1], "other ids"),
        ("logprobs", lambda logprobs: np.zeros_like(logprobs), "other logprobs"),
        ("policy_versions", lambda versions: np.asarray(versions) + 1, "not trained as it was sampled"),
        ("prompt_ids", lambda ids: np.asarray(ids)[:-1], "other ids"),
    ],
)
def test_a_recorder_that_changes_what_was_sampled_is_seen(monkeypatch, field, change, complaint):
    record = Recorder.record
    monkeypatch.setattr(
        Recorder,
        "record",
        lambda self, **fields: record(self, **{**fields, field: change(fields[field]), "extends": None}),
    )
    watch = play()
    assert any(complaint in wrong for wrong in watch.wrong)


def test_a_recorder_that_forgets_a_turn_is_seen(monkeypatch):
    close = Recorder.close

    def forget(self):
        close(self)
        del self.turns[-1:]

    monkeypatch.setattr(Recorder, "close", forget)
    assert any("turns recorded" in wrong for wrong in play().wrong)


def test_a_renderer_that_reads_ids_otherwise_the_second_time_is_seen():
    class Moody(ByteRenderer):
        reads = 0

        def parse_response(self, *arguments, **named):
            self.reads += 1
            parsed = super().parse_response(*arguments, **named)
            return parsed if self.reads % 2 else dataclasses.replace(parsed, content=parsed.content + "!")

    assert any("read again" in wrong for wrong in play(Moody()).wrong)
