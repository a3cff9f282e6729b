"""Turns a sampled completion into a reply: cuts it at stop strings, parses it, and assigns ids to tool calls."""

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
    """Parse a completion into a reply.

    If a stop string occurs, the ids are cut after the token that completes the stop string, and the text is cut before
    the stop string. Without `parallel_tool_calls`, the ids are cut after the first call if other calls follow. With
    `tool_choice = "none"`, attempted calls become text.

    Args:
        completion: The completion from the sampler.
        request: The request.
        renderer: The model's renderer.
        prompt_ids: The prompt: int32 [P].
        seed: The seed of the completion.
        call_id: Returns an id for the k-th call if the model's format has no ids.
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
    """Parse ids. `stop` is the stop string that the last token completes, or None."""
    parsed = renderer.parse_response(ids, prompt_ids, request.tools or None)
    if stop is not None:
        parsed = before_stop(parsed, stop, renderer.decode(ids))
    if request.tool_choice == "none" and parsed.tool_calls:
        texts = [parsed.content, *(call.raw for call in parsed.tool_calls)]
        parsed = dataclasses.replace(parsed, content="\n".join(filter(None, texts)), tool_calls=())
    return parsed


def before_stop(parsed: ParsedResponse, stop: str, text: str) -> ParsedResponse:
    """Cut the parsed completion before the stop string. The stop string is in the part that was sampled last (thinking,
    text or call), because the completion's last token completes it.

    Args:
        parsed: The parsed completion.
        stop: The stop string.
        text: The decoded text of all ids.
    """
    # The start of the string is counted from the end, because parsing may have changed the text before it.
    tail = len(text) - text.find(stop)
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
    """(the ids up to the end of the first call, their parse).

    Some formats write all calls as one list, which cannot be cut. In that case all ids are kept, but only the first of
    the calls.
    """
    first = parsed.tool_calls[0]

    def is_complete(size: int) -> bool:
        calls = parse(ids[:size], None, request, renderer, prompt_ids).tool_calls
        return bool(calls) and calls[0] == first

    # Bisection works because if a prefix has the complete call, every longer prefix has it too.
    size = 1 + bisect_left(range(1, len(ids)), True, key=is_complete)
    cut = parse(ids[:size], None, request, renderer, prompt_ids)
    if cut.tool_calls == (first,):
        return ids[:size], cut
    return ids, dataclasses.replace(parsed, tool_calls=(first,))
