"""Ends turns with stop strings: the ids with the token that completes one, the text before it.

Example, `stop = ["</answer>"]`: of the tokens `<answer>`, `4`, `</`, `answer>\\n`, `Next` the turn has the first four,
each with its logprob, and all four are trained. The message says `<answer>4`. The next prompt continues the four tokens
and adds the format's close, which was not sampled and is not trained.
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
    """The completion up to the token that completes the first stop string, as one that has ended by itself.

    What a sampler that does not show its tokens has drawn behind it is left out; its caller has counted it.
    """
    found = find_stop(completion.ids, stops, decode)
    if found is None:
        return completion
    size, experts = found[0], completion.routed_experts
    versions, logprobs = completion.policy_versions, completion.logprobs
    if experts is not None:
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
    """What was read of a completion, with its texts up to the stop string that ends it."""
    found = find_stop(ids, stops, decode)
    return parsed if found is None else before_stop(parsed, found[1], decode(ids))
