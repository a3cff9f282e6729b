"""Compares verifiers' traces with the turns that our sampler served: both must have the same sampled tokens, and each
token must have the same context in both.

verifiers stores a rollout as a graph of messages. Each message has the ids that it adds, and a mask that marks the
sampled ids. The prompt of a sampled message consists of all ids on the path to it and of its own ids outside the mask;
its ids inside the mask are the completion.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from verbatim.core.errors import EnvironmentFault
from verbatim.core.types import Message, StopReason, Turn

_STOPS = {
    "max_turns": StopReason.MAX_TURNS,
    "context_length": StopReason.LENGTH,
    "max_input_tokens": StopReason.LENGTH,
    "max_output_tokens": StopReason.LENGTH,
    "max_total_tokens": StopReason.LENGTH,
}

Served = tuple[bytes, bytes, bytes]
"""(prompt ids as int32, completion ids as int32, logprobs as float32), each as bytes."""


def check_served(traces: Sequence[Any], turns: Sequence[Turn]) -> None:
    """Check that the traces have exactly the completions that were served, and that each completion follows the same
    context.

    Raises:
        EnvironmentFault: the traces differ from the turns.
    """
    recorded = Counter(message for trace in traces for message in _sampled(trace))
    served = Counter(
        (
            turn.prompt_ids.tobytes(),
            turn.completion_ids.tobytes(),
            b"" if turn.logprobs is None else turn.logprobs.tobytes(),
        )
        for turn in turns
    )
    # An engine may return no logprobs. For such turns, verifiers' logprobs are not compared.
    context = {key[:2] for key in served if not key[2]}
    recorded = Counter({(*key[:2], b"") if key[:2] in context else key: n for key, n in recorded.items()})
    if recorded == served:
        return
    strange, missing = recorded - served, served - recorded
    raise EnvironmentFault(
        f"verifiers' trace and the sampled turns differ: {strange.total()} sampled messages of the trace were not "
        f"served like this, {missing.total()} of {served.total()} served completions are in no trace; "
        + _told(next(iter([*strange, *missing])))
    )


def _told(key: Served) -> str:
    prompt, completion = (np.frombuffer(part, np.int32) for part in key[:2])
    return f"one has {len(prompt)} prompt ids, the completion {completion[:8].tolist()}{'...' * (len(completion) > 8)}"


def _sampled(trace: Any) -> Iterator[Served]:
    """Yield each sampled message of a trace, with its context."""
    for node in trace.nodes:
        if not node.sampled:
            continue
        count = sum(node.mask)
        if node.mask != [False] * (len(node.mask) - count) + [True] * count or len(node.logprobs) != count:
            raise EnvironmentFault(
                f"verifiers' trace has a message whose {count} sampled ids are not all at its end, "
                f"or do not have one logprob each (found {len(node.logprobs)} logprobs)"
            )
        split = len(node.token_ids) - count
        before, parent = [node.token_ids[:split]], node.parent
        while parent is not None:
            before.append(trace.nodes[parent].token_ids)
            parent = trace.nodes[parent].parent
        prompt = [token for ids in reversed(before) for token in ids]
        yield (
            np.array(prompt, np.int32).tobytes(),
            np.array(node.token_ids[split:], np.int32).tobytes(),
            np.array(node.logprobs, np.float32).tobytes(),
        )


def errors_of(episode: Any) -> str | None:
    """Return verifiers' first three error messages, joined, or None if there were no errors."""
    found = [*episode.errors, *(error for trace in episode.traces for error in trace.errors if not trace.ok)]
    return "; ".join(f"{error.type}: {error.message}" for error in found[:3]) or None


def rewards_of(episode: Any) -> dict[str, float]:
    """Return the weighted rewards of the trained agents by name. Rewards with the same name are summed."""
    parts: dict[str, float] = {}
    for trace in episode.traces:
        if trace.agent is not None and not trace.agent.trainable:
            continue
        for name, reward in trace.rewards.items():
            if reward is not None:
                parts[name] = parts.get(name, 0.0) + float(reward.value)
    return parts


def metrics_of(episode: Any) -> dict[str, float]:
    """Return verifiers' metrics by name. If there are several agents, each name is prefixed with the agent's name."""
    return {
        f"{trace.agent.name}/{name}" if len(episode.traces) > 1 and trace.agent is not None else name: float(value)
        for trace in episode.traces
        for name, value in trace.metrics.items()
        if value is not None
    }


def stop_reason_of(episode: Any) -> StopReason:
    """Return why the episode ended, according to the stop conditions of the traces."""
    for trace in episode.traces:
        if trace.stop_condition in _STOPS:
            return _STOPS[trace.stop_condition]
        if trace.is_truncated:
            return StopReason.LENGTH
    return StopReason.STOP


def messages_of(episode: Any) -> list[Message]:
    """Return the messages of the last branch of the first trace, in OpenAI's format."""
    from verifiers.v1.dialects.chat import message_to_wire

    found: list[Message] = []
    for message in episode.traces[0].messages if episode.traces else ():
        wire = message_to_wire(message)
        wire["content"] = wire.get("content") or ""
        found.append(wire)
    return found
