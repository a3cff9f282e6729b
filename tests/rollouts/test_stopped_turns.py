"""Stop strings while rollouts are sampled: whole tokens are trained, the text ends before, and the format closes."""

import random

import numpy as np
import pytest

from byte_renderer import END, VOCAB_SIZE, ByteRenderer, call, say, text
from verbatim import build_samples
from verbatim.config.orchestrator import SamplingConfig
from verbatim.core.errors import RecordError
from verbatim.core.types import StopReason, Trajectory
from verbatim.inference import SampleRequest, SamplingParams
from verbatim.inference.chat.request import chat_body
from verbatim.inference.http.sampler import HttpSampler
from verbatim.inference.proxy import SamplerProxy
from verbatim.inference.scripted import ScriptedSampler
from verbatim.models.renderers import create_renderer
from verbatim.models.trained_tokenizer import build_tokenizer
from verbatim.rollouts import EpisodeLimits
from verbatim.rollouts.agent_loop import AgentLoop
from verbatim.rollouts.recorder import Recorder

ASK = {"role": "user", "content": "go"}


class Whole(SamplerProxy):
    """Hands completions over whole, as servers do."""

    async def generate(self, request):
        return await self._sampler.generate(request)


def loop_over(*script, stop, shows=True, renderer=None, vocab_size=VOCAB_SIZE, limits=None, **params):
    sampler = ScriptedSampler(script=script, vocab_size=vocab_size, context_length=500)
    loop = AgentLoop(
        sampler=sampler if shows else Whole(sampler),
        renderer=renderer or ByteRenderer(),
        seed=3,
        params=SamplingParams(stop=stop, **params),
        limits=limits or EpisodeLimits(max_context=500),
        recorder=Recorder(vocab_size),
    )
    return loop, sampler


@pytest.mark.parametrize(("shows", "num_behind"), [(True, 0), (False, len(say(" made up")))])
async def test_a_turn_ends_with_the_token_that_completes_a_stop_string(shows, num_behind):
    loop, sampler = loop_over(say("Look\nObs: made up"), stop=("\nObs:",), shows=shows)
    message = await loop.sample([ASK])
    (turn,) = loop.turns
    assert message == {"role": "assistant", "content": "Look"}
    assert turn.completion_ids.tolist() == text("Look\nObs:")
    assert turn.logprobs.tolist() == [float(np.float32(-1.0 / (1 + i))) for i in text("Look\nObs:")]
    assert (turn.stop_reason, len(turn.policy_versions)) == (StopReason.STOP, len(turn.completion_ids))
    assert loop.recorder.num_unrecorded_tokens == num_behind
    assert sampler.num_drawn == len(turn.completion_ids) + num_behind
    assert sampler.requests[0].params.stop == ()


async def test_every_token_of_the_stop_string_is_trained():
    loop, _ = loop_over(say("a</x>b"), stop=("</x>",))
    await loop.sample([ASK])
    (sample,) = build_samples(Trajectory(example_id="e", turns=loop.turns, reward=1.0))
    assert sample.token_ids[sample.loss_mask].tolist() == text("a</x>")


@pytest.mark.parametrize("shows", [True, False])
async def test_a_character_of_several_tokens_is_found_where_its_last_one_is_drawn(shows):
    loop, _ = loop_over(say("ä→→x"), stop=("→→",), shows=shows)
    message = await loop.sample([ASK])
    assert (message["content"], loop.turns[0].completion_ids.tolist()) == ("ä", text("ä→→"))


async def test_a_token_that_goes_on_behind_the_stop_string_is_kept_whole():
    tokenizer = build_tokenizer(["How are you? So?"] * 50, vocab_size=400, context_length=500)
    said = tokenizer.encode("Yes</think>no")
    kept = tokenizer.encode("Yes</think>")
    assert tokenizer.convert_ids_to_tokens(kept[-1]) == "</think>"
    loop, _ = loop_over(said, stop=("</th",), renderer=create_renderer("qwen3", tokenizer), vocab_size=len(tokenizer))
    await loop.sample([ASK])
    assert loop.turns[0].completion_ids.tolist() == kept


async def test_the_next_prompt_continues_the_turn_and_closes_it_in_the_formats_way():
    tokenizer = build_tokenizer(["How are you? So?"] * 50, vocab_size=400, context_length=500)
    renderer = create_renderer("qwen3", tokenizer)
    loop, _ = loop_over(
        tokenizer.encode("yo</x>z"),
        tokenizer.encode("ok<|im_end|>"),
        stop=("</x>",),
        renderer=renderer,
        vocab_size=len(tokenizer),
    )
    message = await loop.sample([ASK])
    await loop.sample([ASK, message, {"role": "user", "content": "So?"}])
    first, second = loop.turns
    known = [*first.prompt_ids.tolist(), *first.completion_ids.tolist()]
    assert second.prompt_ids[: len(known)].tolist() == known
    assert tokenizer.decode(known).endswith("yo</x>")
    close = "<|im_end|>\n<|im_start|>user\nSo?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(second.prompt_ids[len(known) :]) == close
    (sample,) = build_samples(Trajectory(example_id="e", turns=loop.turns, reward=1.0))
    assert tokenizer.decode(sample.token_ids[sample.loss_mask]) == "yo</x>ok<|im_end|>"


async def test_a_stop_string_inside_of_a_call_leaves_a_call_that_cannot_be_read():
    loop, _ = loop_over(call("add", a=1), stop=('"a"',))
    message = await loop.sample([ASK])
    assert message["content"] == "" and "tool_calls" not in message
    assert [c.status for c in loop.turns[0].tool_calls] == ["unclosed_block"]


async def test_an_end_of_the_model_before_any_stop_string_is_as_ever():
    loop, _ = loop_over(say("yo"), stop=("</x>",))
    assert (await loop.sample([ASK]))["content"] == "yo"
    assert loop.turns[0].completion_ids.tolist() == say("yo")


async def test_exact_ids_of_an_environment_end_with_its_stop_strings_too():
    loop, _ = loop_over(say("ab;cd"), stop=(), shows=False)
    completion = await loop.complete(np.array([1], np.int32), SamplingParams(stop=(";",), stop_token_ids=(END,)))
    assert (completion.ids.tolist(), completion.stop_reason) == (text("ab;"), StopReason.STOP)
    assert loop.recorder.num_unrecorded_tokens == len(say("cd"))


@pytest.mark.parametrize("seed", range(40))
async def test_wherever_tokens_are_cut_the_first_text_with_a_stop_string_ends_the_turn(seed):
    rng = random.Random(seed)
    said = "".join(rng.choice("ab→ä;\n") for _ in range(rng.randrange(1, 40)))
    stops = ["".join(rng.choice("ab→ä;\n") for _ in range(rng.randrange(1, 4))) for _ in range(rng.randrange(1, 4))]
    shows = rng.random() < 0.5
    loop, _ = loop_over(say(said), stop=tuple(stops), shows=shows)
    message = await loop.sample([ASK])
    ids = say(said)
    prefixes = (ByteRenderer().decode(ids[:n]) for n in range(1, len(ids) + 1))
    wanted = next((n for n, prefix in enumerate(prefixes, 1) if any(stop in prefix for stop in stops)), len(ids))
    assert loop.turns[0].completion_ids.tolist() == ids[:wanted]
    shown = ByteRenderer().decode(ids[:wanted])
    places = [shown.index(stop) for stop in stops if stop in shown]
    assert message["content"] == shown[: min(places, default=len(shown))]


async def test_samplers_know_no_texts_and_say_so():
    request = SampleRequest(prompt_ids=np.array([1], np.int32), params=SamplingParams(stop=("x",)), seed=0)
    for sampler in (
        ScriptedSampler(script=[[1]], vocab_size=9, context_length=9),
        HttpSampler("http://127.0.0.1:9", context_length=9, vocab_size=9, ours=True),
    ):
        with pytest.raises(RecordError, match=r"stop: a sampler takes token ids only, found \['x'\]"):
            await sampler.generate(request)
        await sampler.close()


def test_a_chat_server_is_sent_the_stop_strings():
    body = chat_body("m", [ASK], [], SamplingParams(stop=("a", "b")), extra_body={})
    assert body["stop"] == ["a", "b"]
    assert "stop" not in chat_body("m", [ASK], [], SamplingParams(), extra_body={})


@pytest.mark.parametrize(("given", "stop"), [("\n\n", ("\n\n",)), (["a", "b", "a"], ("a", "b")), ([], ())])
def test_the_configuration_takes_one_text_or_several(given, stop):
    assert SamplingConfig.model_validate({"stop": given}).params.stop == stop


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("", "which is empty"),
        (["x" * 257], "257 characters"),
        ([f"{n}" for n in range(17)], "expected at most 16"),
        ([1], "which is not a text"),
        (["\ufffd"], "stands for invalid bytes"),
        (7, "expected a text or a list of texts"),
    ],
)
def test_what_can_be_no_stop_string_is_refused(given, problem):
    with pytest.raises(ValueError, match=problem):
        SamplingConfig.model_validate({"stop": given})
    with pytest.raises(ValueError, match=problem):
        SamplingParams(stop=given if isinstance(given, list) else (given,) if given != 7 else 7)
