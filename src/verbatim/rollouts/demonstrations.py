"""Converts conversations to trajectories, so that supervised training uses the same code as training on rollouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from verbatim.core.errors import UsageError
from verbatim.core.types import Int32, Message, ToolCall, Trajectory, Turn
from verbatim.models.renderers.conversation import Conversation
from verbatim.models.renderers.renderer import ParsedResponse, Renderer
from verbatim.models.renderers.tool_support import USE_HERMES


def trajectory_from_messages(
    renderer: Renderer,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None = None,
    *,
    trajectory_id: str = "",
    env: str = "",
) -> Trajectory:
    """Convert a conversation to a trajectory, in which each assistant message is a turn. The completion of a turn
    consists of the ids that follow the prompt's ids when the conversation is rendered with the message.

    Prompts are bridged as in a rollout, so a rollout of the same conversation has the same tokens. The close token
    belongs to the completion. Logprobs are missing, since nothing was sampled. Templates render the last message of a
    conversation specially (Qwen3 puts an empty thinking block before it). Therefore a message is rendered together with
    the tool results that follow it, but without a following user message, which may make the template strip the
    message's thinking. Calls at the end of the conversation get placeholder results.

    Raises:
        UsageError: there is no assistant message; or the rendering of an assistant message does not begin with its
            prompt, has a stop token inside the text, or has calls that cannot be parsed from it again, so that the
            model would learn a different message.
        ModelError: the chat template drops the tools, a call, or a tool's result.
    """
    turns: list[Turn] = []
    conversation: Conversation | None = None
    known = 0
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        plain = renderer.render_ids(messages[:index], tools, add_generation_prompt=True)
        if conversation is None or known == index:
            conversation = Conversation.open(renderer, messages[:index], tools)
        else:
            conversation = conversation.continued(messages[known:index], tools)
        prompt = conversation.prompt_ids
        end = index + 1
        while end < len(messages) and messages[end]["role"] == "tool":
            end += 1
        answered = messages[:end] if end > index + 1 else [*messages[:end], *_stand_ins(message)]
        whole = renderer.render_ids(answered, tools, add_generation_prompt=False)
        if not np.array_equal(whole[: len(plain)], plain):
            raise UsageError(
                f"demonstration {trajectory_id or env!r}: the chat template renders message {index} differently "
                "after a generation prompt, so the message's completion cannot be separated from its prompt"
            )
        completion = _through_close_token(whole[len(plain) :], renderer.stop_token_ids)
        read = renderer.parse_response(completion, prompt, tools)
        _refuse_cut(
            renderer,
            whole[len(plain) + len(completion) :],
            completion,
            read,
            message,
            f"demonstration {trajectory_id or env!r}: message {index}",
        )
        found = [call.name for call in read.tool_calls if call.status == "ok"]
        wanted = [call["function"]["name"] for call in message.get("tool_calls") or ()]
        if found != wanted:
            raise UsageError(
                f"demonstration {trajectory_id or env!r}: message {index} calls {', '.join(wanted) or 'no tool'}, but "
                f"as the renderer writes it, {', '.join(map(str, found)) or 'no call'} is read back; change the "
                f"message, or the renderer: {USE_HERMES}"
            )
        conversation = conversation.answered(completion, read, message, _calls(message))
        turns.append(Turn(prompt_ids=prompt, completion_ids=completion))
        known = index + 1
    if not turns:
        raise UsageError(f"demonstration {trajectory_id or env!r} has no assistant message to learn from")
    return Trajectory(
        example_id=trajectory_id, trajectory_id=trajectory_id, env=env, turns=tuple(turns), messages=tuple(messages)
    )


def _refuse_cut(
    renderer: Renderer, rest: Int32, completion: Int32, read: ParsedResponse, message: Message, which: str
) -> None:
    """Refuse a message whose rendering continues after its first stop token. This happens if generation_config.json
    lists an ordinary text token as a stop token.

    Args:
        rest: The ids that were rendered after the completion.
    """
    if message.get("tool_calls") or not np.isin(rest, renderer.stop_token_ids).any():
        return
    wanted, got = ("".join(str(text or "").split()) for text in (message.get("content"), read.content))
    if got != wanted and wanted.startswith(got):
        token = int(completion[-1])
        raise UsageError(
            f"{which} contains token {token} ({renderer.decode(completion[-1:])!r}) before its end. Turns of this "
            "model end at that token, so what follows could never be sampled; remove the token from eos_token_id in "
            "the model's generation_config.json, or from the message"
        )


def _calls(message: Message) -> list[ToolCall]:
    """Return the calls of a message, with the ids to which tool results refer."""
    return [
        ToolCall(name=call["function"]["name"], arguments={}, id=str(call.get("id") or ""))
        for call in message.get("tool_calls") or ()
    ]


def _stand_ins(message: Message) -> list[Message]:
    """Return a placeholder result for each call of a message."""
    return [
        {"role": "tool", "content": "done", "name": call["function"]["name"], "tool_call_id": call.get("id", "call_0")}
        for call in message.get("tool_calls") or ()
    ]


def _through_close_token(ids: Int32, stop_token_ids: tuple[int, ...]) -> Int32:
    """Return the ids that a model would have sampled: all ids up to and including the first stop token."""
    (closes,) = np.nonzero(np.isin(ids, stop_token_ids))
    return ids[: closes[0] + 1] if len(closes) else ids
