"""The hostile requests that are sent to `verbatim serve`, sent to a gateway: each is refused by name or answered, none
is a fault of ours, and another session gets the tokens that it gets alone."""

import asyncio
import dataclasses
import itertools
import json
import logging

import aiohttp
import numpy as np
import pytest
from scripted_gateway import Client, gateway_over, last_text, scripted

from byte_renderer import ROLES, say
from campaigns import sized
from faults.hostile_exchange import exchange, verdict
from faults.hostile_requests import CHAT, MESSAGES, MESSAGES_BODY, RESPONSES, Case, all_cases, changed, paths_of
from faults.hostile_requests import VALUES as WRONG
from verbatim.inference.http import protocol
from verbatim.rollouts import EpisodeLimits

pytestmark = pytest.mark.realtime

COUNT, REWARD = "/v1/messages/count_tokens", "/v1/reward"
ROUTES = (CHAT, MESSAGES, RESPONSES, protocol.GENERATE)
OTHERWISE = {(415,): (200,), (403,): (200,), (405,): (404,)}
"""What `serve` refuses and a gateway does not: its key keeps web pages away, and it has one answer for all methods."""
ANY_MODEL = "/v1/models/../x"
"""A name that a model may have: a gateway has one card for all of them."""
NO_JSON = ("not UTF-8", "UTF-16", "repeated")
"""Values that the gateway's parser takes for no JSON: the message is about the body."""


def of_a_gateway() -> list[Case]:
    """The cases of its routes, and those of the routes that `serve` has not."""
    cases = [case for case in all_cases() if case.path in ROUTES or case.path not in (COUNT, REWARD, *served())]
    count = {name: MESSAGES_BODY[name] for name in ("model", "system", "messages", "tools")}
    for path, body in ((COUNT, count), (REWARD, {"reward": {"a": 1.0, "b": 0.5}})):
        for at, (kind, text) in itertools.product(paths_of(body), WRONG.items()):
            name = ".".join(map(str, at))
            cases.append(Case(name=f"{path} {name}: {kind}", path=path, data=changed(body, at, text)))

    def statuses(case: Case) -> tuple[int, ...]:
        return (200,) if case.path == ANY_MODEL else OTHERWISE.get(case.statuses, case.statuses)

    return [
        dataclasses.replace(
            case, statuses=statuses(case), names=(*case.names, "body") if case.name.endswith(NO_JSON) else case.names
        )
        for case in cases
    ]


def served() -> tuple[str, ...]:
    """The routes that only `serve` has."""
    return (protocol.PROMPT_LOGPROBS, protocol.WEIGHTS, protocol.SAMPLER, protocol.LOAD)


def spoken(request):
    """Says the last message back; whatever to ids that are no conversation."""
    is_spoken = not set(ROLES.values()).isdisjoint(request.prompt_ids.tolist())
    return np.array(say(f":{last_text(request)[:40]}" if is_spoken else "ids"), np.int32)


def a_gateway(sampler=None):
    """One whose healthy client may take a turn beside every fourth of the requests."""
    return gateway_over(sampler or scripted(spoken), limits=EpisodeLimits(max_turns=10_000, max_context=100_000))


async def faults_of(cases, row=None):
    """What is wrong with the answers of a gateway to these."""
    async with a_gateway() as gateway:
        return await faults_in(gateway, cases, row)


async def faults_in(gateway, cases, row=None):
    """The same, of a gateway that is up: eight at a time, each to a session of its own, beside a healthy client."""
    wrong: list[str] = []
    async with aiohttp.ClientSession() as http:
        other, places, asked = Client(http, gateway.episode()), asyncio.Semaphore(8), itertools.count()

        async def play(number: int, case: Case) -> None:
            async with places:
                episode = gateway.episode()
                key = {"authorization": f"Bearer {episode.api_key}", **case.headers}
                try:
                    found = verdict(case, *await exchange(gateway.url, dataclasses.replace(case, headers=key)))
                except TimeoutError:
                    found = f"{case.name}: no answer"
                await episode.cancel()
                if row is not None:
                    row.add(wrong=found is not None)
                wrong.extend([] if found is None else [found])
                if number % 4 == 0:
                    text = f"hello {next(asked)}"
                    said = await other.say([{"role": "user", "content": text}])
                    wrong.extend([] if said["content"].endswith(f":{text}") else [f"{text} was answered {said}"])

        await asyncio.gather(*itertools.starmap(play, enumerate(cases)))
        trajectory = await other.episode.finish()
        assert len(trajectory.turns) == next(asked)
    assert gateway.service.held_bytes == 0
    return wrong


@pytest.mark.slow
@pytest.mark.campaign
async def test_hostile_requests_to_a_gateway_are_refused_by_name_and_change_nothing_for_others(campaign, caplog):
    caplog.set_level(logging.WARNING)
    cases = of_a_gateway()
    assert len(cases) > 2500
    wrong = await faults_of(cases[:: sized(40, 1)], campaign("hostile requests to a gateway"))
    assert wrong == []
    ours = [record for record in caplog.records if record.name.startswith(("verbatim", "uvicorn"))]
    assert [record for record in ours if record.exc_info] == [], "no traceback is logged"


@pytest.mark.parametrize("fault", ["a reader that raises", "a refusal without a name"])
async def test_the_campaign_finds_a_fault(fault, monkeypatch):
    """So it can fail: with a fault in the reader of chats, the field's cases are wrong."""
    from verbatim.inference.chat import fields

    def raises(given, name, **about):
        if name not in given:
            return None
        raise KeyError(name) if fault == "a reader that raises" else fields.BadField(name, "this is wrong")

    monkeypatch.setattr("verbatim.inference.chat.fields.read_integer", raises)
    data = json.dumps({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}).encode()
    assert len(await faults_of([Case(name="a", path=CHAT, data=data, names=("max_tokens",))])) == 1
