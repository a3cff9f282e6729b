"""Cuts turns at stop strings. The ids are cut after the token that completes the string; the text is cut before the
string.

Example with `stop = ["</answer>"]`: of the tokens `<answer>`, `4`, `</`, `answer>\\n`, `Next` the turn keeps the first
four with their logprobs, and all four are trained. The message's content is `<answer>4`. In the next prompt, the four
tokens are followed by the chat format's close token, which was not sampled and is not trained.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from verbatim.core.types import Int32, StopReason
from verbatim.inference.chat.reply import before_stop
from verbatim.inference.chat.stops import Decode, find_stop
from verbatim.inference.sampler import Completion, SampleRequest
from verbatim.models.renderers.renderer import ParsedResponse


def end_with_stop(completion: Completion, request: SampleRequest, stops: Sequence[str], decode: Decode) -> Completion:
    """Cut a completion after the token that completes the first stop string. Its stop reason becomes "stop".

    A sampler that does not stream its tokens may have sampled tokens after the stop string. Such tokens are cut off
    here; the caller has already counted them.
    """
    found = find_stop(completion.ids, stops, decode)
    if found is None:
        return completion
    size, experts = found[0], completion.routed_experts
    versions, logprobs = completion.policy_versions, completion.logprobs
    if experts is not None:
        # Minus 1, because the model has not processed the last sampled token, so there are no experts for it.
        experts = experts[: len(request.prompt_ids) + size - 1 - request.routed_experts_start]
    return dataclasses.replace(
        completion,
        ids=completion.ids[:size],
        logprobs=None if logprobs is None else logprobs[:size],
        policy_versions=None if versions is None else versions[:size],
        stop_reason=StopReason.STOP,
        routed_experts=experts,
        kept_sets=None if completion.kept_sets is None else completion.kept_sets.first(size),
    )


def said_before_stop(parsed: ParsedResponse, ids: Int32, stops: Sequence[str], decode: Decode) -> ParsedResponse:
    """Cut each string of a parsed completion at the stop string that ends the completion; the stop string itself is cut
    off."""
    found = find_stop(ids, stops, decode)
    return parsed if found is None else before_stop(parsed, found[1], decode(ids))
