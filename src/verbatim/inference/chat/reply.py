"""Reads a sampled completion as the reply to a request: cut at stop strings, parsed, its calls named."""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Callable

import numpy as np

from verbatim.core.types import Int32, StopReason, ToolCall
from verbatim.inference.chat.protocol import ChatReply, ChatRequest
from verbatim.inference.chat.stops import find_stop
from verbatim.inference.sampler import Completion
from verbatim.models.renderers.renderer import ParsedResponse, Renderer


def read_reply(
    completion: Completion,
    request: ChatRequest,
    renderer: Renderer,
    prompt_ids: Int32,
    *,
    seed: int | None = None,
    call_id: Callable[[int], str],
) -> ChatReply:
    """The reply that a completion is.

    A stop string cuts the ids behind the token that completes it, and the texts before it. Without
    `parallel_tool_calls`, the ids end with the first call where others follow it. Under `tool_choice = "none"`
    attempted calls are text.

    Args:
        completion: As the sampler returned it.
        request: What was asked for.
        renderer: The model's.
        prompt_ids: The prompt: int32 [P].
        seed: The seed of the completion.
        call_id: An id for the k-th call, where the model's format has none.
    """
    ids, stop = completion.ids, None
    found = find_stop(ids, request.stop, renderer.decode)
    if found is not None:
        ids, stop = ids[: found[0]], found[1]
    parsed = parse(ids, stop, request, renderer, prompt_ids)
    if not request.parallel_tool_calls and len(parsed.tool_calls) > 1:
        ids, parsed = _first_call(ids, parsed, request, renderer, prompt_ids)
        stop = None
    num_cut = len(completion.ids) - len(ids)
    calls = tuple(
        call if call.id else dataclasses.replace(call, id=call_id(k)) for k, call in enumerate(parsed.tool_calls)
    )
    texts = (
        tuple(renderer.decode(np.array([token], dtype=np.int32)) for token in ids.tolist())
        if (request.include_logprobs)
        else ()
    )
    logprobs, versions = completion.logprobs, completion.policy_versions
    return ChatReply(
        content=parsed.content,
        reasoning_content=parsed.reasoning_content,
        tool_calls=calls,
        stop_reason=StopReason.STOP if stop is not None or num_cut else completion.stop_reason,
        stop_string=stop,
        ids=ids,
        logprobs=None if logprobs is None else logprobs[: len(ids)],
        policy_versions=None if versions is None else versions[: len(ids)],
        token_texts=texts,
        prompt_ids=prompt_ids if request.include_token_ids else None,
        num_prompt_tokens=len(prompt_ids),
        num_cached_tokens=completion.num_cached_tokens,
        num_cut_tokens=num_cut,
        seed=seed,
    )


def parse(ids: Int32, stop: str | None, request: ChatRequest, renderer: Renderer, prompt_ids: Int32) -> ParsedResponse:
    """Read ids that end with the token that completes `stop`; None: no stop string ends them."""
    parsed = renderer.parse_response(ids, prompt_ids, request.tools or None)
    if stop is not None:
        parsed = before_stop(parsed, stop, renderer.decode(ids))
    if request.tool_choice == "none" and parsed.tool_calls:
        texts = [parsed.content, *(call.raw for call in parsed.tool_calls)]
        parsed = dataclasses.replace(parsed, content="\n".join(filter(None, texts)), tool_calls=())
    return parsed


def before_stop(parsed: ParsedResponse, stop: str, text: str) -> ParsedResponse:
    """What was read of a completion whose last token completes a stop string, with its texts up to that string: it is
    in the last of them.

    Args:
        parsed: What was read of all ids.
        stop: The stop string.
        text: That of all ids.
    """
    tail = len(text) - text.find(stop)  # characters before the end, if nothing was left out behind it
    reasoning = parsed.reasoning_content
    if reasoning is not None and stop in reasoning:
        return ParsedResponse(content="", reasoning_content=_cut(reasoning, stop, tail))
    calls = list(parsed.tool_calls)
    if calls and stop in calls[-1].raw:
        calls[-1] = _cut_call(calls[-1], stop)
    return dataclasses.replace(parsed, content=_cut(parsed.content, stop, tail), tool_calls=tuple(calls))


def _cut(text: str, stop: str, tail: int) -> str:
    place = len(text) - tail
    return text[:place] if place >= 0 and text.startswith(stop, place) else text.partition(stop)[0]


def _cut_call(call: ToolCall, stop: str) -> ToolCall:
    raw = call.raw.partition(stop)[0]
    return dataclasses.replace(call, arguments=None, status="unclosed_block", raw=raw)


def _first_call(
    ids: Int32, parsed: ParsedResponse, request: ChatRequest, renderer: Renderer, prompt_ids: Int32
) -> tuple[Int32, ParsedResponse]:
    """The ids up to the end of the first call, and what they say.

    Some formats write all calls as one list, which cannot be cut: then the ids stay, and the first call is answered.
    """
    first = parsed.tool_calls[0]

    def is_complete(size: int) -> bool:
        calls = parse(ids[:size], None, request, renderer, prompt_ids).tool_calls
        return bool(calls) and calls[0] == first

    size = 1 + bisect_left(range(1, len(ids)), True, key=is_complete)
    cut = parse(ids[:size], None, request, renderer, prompt_ids)
    if cut.tool_calls == (first,):
        return ids[:size], cut
    return ids, dataclasses.replace(parsed, tool_calls=(first,))
