"""A request's texts are in the prompt once and in order, or its field is refused: by each protocol of the gateway."""

from collections import Counter

import pytest
from scripted_gateway import Client

from campaigns import sized
from lost_messages import renderer_of, requests, sampler_for, wrong_with
from verbatim import Example
from verbatim.rollouts.gateway import Gateway

pytestmark = pytest.mark.realtime


@pytest.mark.slow
@pytest.mark.campaign
@pytest.mark.parametrize("template", ["qwen3_5_think", "gptoss", "llama3_1"])
async def test_each_text_is_written_once_or_refused_by_its_field(template, http, campaign):
    row, found = campaign("requests to the gateway: written once, or refused by field"), {}
    renderer = renderer_of(template)
    sampler, statuses = sampler_for(renderer), Counter()
    async with Gateway(sampler, renderer) as gateway:
        for name, given, body in requests(sized(7, 300)):
            client = Client(http, gateway.episode(Example(id=str(name))))
            answer = await client.post(name[1], body)
            statuses[client.status] += 1
            prompt = renderer.decode(sampler.requests[-1].prompt_ids) if client.status == 200 else ""
            wrong = wrong_with(given, client.status, answer, prompt, template)
            row.add(wrong=bool(wrong))
            if wrong:
                found[name] = wrong
    assert found == {}
    assert set(statuses) <= {200, 400}
    assert statuses[200] >= row.cases // 4


async def test_an_agent_with_two_system_messages_is_answered_and_its_later_ones_continue_what_was_sampled(http):
    renderer = renderer_of("qwen3_vl")
    sampler = sampler_for(renderer)
    system, late = {"role": "system", "content": "Be brief."}, {"role": "system", "content": "It is late."}
    opening = [system, {"role": "developer", "content": "In German."}, {"role": "user", "content": "Hi"}]
    async with Gateway(sampler, renderer) as gateway:
        episode = gateway.episode(Example(id="e"))
        client = Client(http, episode)
        answer = await client.say(opening)
        await client.say([*opening, answer, late, {"role": "user", "content": "And now?"}])
        trajectory = await episode.finish(reward=1.0)
    first, second = (request.prompt_ids.tolist() for request in sampler.requests)
    assert renderer.decode(sampler.requests[0].prompt_ids).startswith(
        "<|im_start|>system\nBe brief.\n\nIn German.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    )
    sampled = [*first, *trajectory.turns[0].completion_ids.tolist()]
    assert second[: len(sampled)] == sampled
    assert renderer.decode(sampler.requests[1].prompt_ids[len(sampled) :]).startswith(
        "\n<|im_start|>user\nIt is late.<|im_end|>\n<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_a_call_of_the_history_that_cannot_be_read_is_text_behind_the_content(http):
    renderer = renderer_of("qwen3_5_think")
    sampler = sampler_for(renderer)
    given = [("look", '{"at": "Bonn"}'), ("read", '{"file": "a'), ("edit", '{"old": 1, "old": 2}')]
    calls = [{"id": name, "type": "function", "function": {"name": name, "arguments": text}} for name, text in given]
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "So.", "tool_calls": calls},
        *({"role": "tool", "tool_call_id": name, "content": f"of {name}"} for name, _ in given),
    ]
    async with Gateway(sampler, renderer) as gateway:
        client = Client(http, gateway.episode(Example(id="e")))
        await client.chat(messages)
    assert client.status == 200
    assert (
        'So.\nread {"file": "a\nedit {"old": 1, "old": 2}\n\n<tool_call>\n<function=look>\n<parameter=at>\nBonn\n'
    ) in renderer.decode(sampler.requests[0].prompt_ids)


async def test_where_nothing_is_to_be_folded_the_field_is_refused(http):
    renderer = renderer_of("qwen3_5_think", later_system="refuse")
    async with Gateway(sampler_for(renderer), renderer) as gateway:
        client = Client(http, gateway.episode(Example(id="e")))
        answer = await client.chat([{"role": "user", "content": "Hi"}, {"role": "system", "content": "Be brief."}])
    assert client.status == 400
    assert answer["error"]["message"].startswith("messages[1].content: the model's chat template writes no message of")
