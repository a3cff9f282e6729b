"""Reads logged vLLM responses as trajectories. The log must contain the ids of each prompt and completion.

If a request has `"return_token_ids": true`, the server adds these ids to the response. For a chat completion,
`prompt_token_ids` is in the response and `token_ids` in each choice; for a plain completion, both are in the choice. In
a stream, the first chunk has the ids of the prompt, and each chunk has the ids sampled since the chunk before it. A
line is one of the following: a response or a chunk of a response; `{"request": ..., "response": ...}`; or a
conversation, that is, an object with a list of such responses or of such pairs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verbatim.core.token_tree import as_ids
from verbatim.core.types import StopReason, Trajectory, Turn
from verbatim.inspection.doctor.logs.log_file import DAMAGED, LogFile, LoggedTrajectory

CONVERSATION_KEYS = (
    "trajectory_id",
    "rollout_id",
    "conversation_id",
    "session_id",
    "episode_id",
    "thread_id",
    "request_id",
)
"""Keys whose value identifies the conversation of a response; the first key in use counts. The keys are searched in the
line, its request, its response, and the `metadata` of each of these. `request_id` counts only if its values repeat,
because it is usually different for every request."""

_LISTS = ("responses", "turns", "steps", "calls", "generations", "conversation")
_STOPS = {"length": StopReason.LENGTH, "abort": StopReason.CANCELLED}


@dataclass
class _LoggedChoice:
    """One choice of one response, assembled from its chunks."""

    prompt: Sequence[int]
    agent: str
    tools: str
    line: int
    completion: list[int] = field(default_factory=list)
    stop_reason: StopReason = StopReason.STOP


class VllmFormat:
    """The format of logged vLLM responses, described in the module docstring."""

    name = "vllm"
    expected = '{"prompt_token_ids": [...], "choices": [{"token_ids": [...], "finish_reason": "stop"}]}'

    def __init__(self) -> None:
        self._key: str | None = None
        self._conversations = False

    def matches(self, record: Mapping[str, Any]) -> bool:
        return any(True for _ in _responses(record))

    def read(self, file: LogFile) -> Iterator[LoggedTrajectory]:
        for name, places in self._group(file).items():
            answers: dict[int, list[_LoggedChoice]] = {}
            open_answers: dict[tuple[str, int], _LoggedChoice] = {}
            for line in file.at(places):
                try:
                    for request, response in _responses(line.record):
                        _take(response, request, line.record, line.number, answers, open_answers)
                except DAMAGED as error:
                    file.damaged(line.number, error)
            # Several choices answer the same prompt, so they are trajectories of a group, not turns of one trajectory.
            for choice, of_choice in sorted(answers.items()):
                try:
                    yield _trajectory(f"{name}#{choice}" if len(answers) > 1 else name, of_choice)
                except DAMAGED as error:
                    file.damaged(of_choice[0].line, error)

    @property
    def about(self) -> str:
        """A note on how the responses were grouped into trajectories."""
        if self._key is not None:
            return f'answers of vLLM, grouped by "{self._key}"'
        if self._conversations:
            return "answers of vLLM, one conversation per line"
        names = ", ".join(CONVERSATION_KEYS[:3])
        return f"answers of vLLM; none names its conversation ({names}, ...), so the file is read as one trajectory"

    def _group(self, file: LogFile) -> dict[str, list[tuple[int, int]]]:
        """For each trajectory, the pairs (line number, offset) of its lines. Only names and offsets are kept in
        memory."""
        found: list[tuple[int, int, dict[str, str]]] = []
        for line in file.lines_of(self):
            self._conversations |= _listed(line.record) is not None
            found.append((line.number, line.offset, _names(line.record)))
        self._key = next((key for key in CONVERSATION_KEYS if _tells(key, [names for *_, names in found])), None)
        groups: dict[str, list[tuple[int, int]]] = {}
        for number, offset, names in found:
            own = f"line {number}" if self._conversations else ""
            groups.setdefault(names.get(self._key or "", own), []).append((number, offset))
        return groups


def _tells(key: str, lines: Sequence[Mapping[str, str]]) -> bool:
    values = [names[key] for names in lines if key in names]
    return bool(values) and (key != "request_id" or len(set(values)) < len(values))


def _names(record: Mapping[str, Any]) -> dict[str, str]:
    parts = [part for part in (record, record.get("request"), record.get("response")) if isinstance(part, dict)]
    parts += [part["metadata"] for part in parts if isinstance(part.get("metadata"), dict)]
    names: dict[str, str] = {}
    for part in parts:
        for key in CONVERSATION_KEYS:
            if isinstance(part.get(key), str | int):
                names.setdefault(key, str(part[key]))
    return names


def _listed(record: Mapping[str, Any]) -> list[Any] | None:
    return next((record[key] for key in _LISTS if isinstance(record.get(key), list)), None)


def _responses(record: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """The pairs (request, response) of all responses in a line."""
    listed = _listed(record)
    for item in [record] if listed is None else listed:
        if not isinstance(item, dict):
            continue
        response = item["response"] if isinstance(item.get("response"), dict) else item
        request = item["request"] if isinstance(item.get("request"), dict) else item
        choices = response.get("choices", response.get("outputs"))
        if isinstance(choices, list) or {"prompt_token_ids", "token_ids"} <= response.keys():
            yield request, response


def _take(
    response: Mapping[str, Any],
    request: Mapping[str, Any],
    line: Mapping[str, Any],
    number: int,
    answers: dict[int, list[_LoggedChoice]],
    open_answers: dict[tuple[str, int], _LoggedChoice],
) -> None:
    """Add a response to `answers`, or add a chunk to the response to which the chunk belongs."""
    choices = response.get("choices", response.get("outputs", [response]))
    for place, choice in enumerate(choices):
        index = choice.get("index", place)
        ids = choice.get("token_ids")
        prompt = choice.get("prompt_token_ids") or response.get("prompt_token_ids")
        key = (str(response.get("id", "")), index)
        if prompt is not None:
            agent = next((p["agent"] for p in (line, request, response) if isinstance(p.get("agent"), str)), "main")
            tools = json.dumps(request["tools"], sort_keys=True) if request.get("tools") else ""
            open_answers[key] = _LoggedChoice(prompt=prompt, agent=agent, tools=tools, line=number)
            answers.setdefault(index, []).append(open_answers[key])
        elif key not in open_answers:
            raise ValueError("a response without prompt_token_ids; send the request with return_token_ids = true")
        if ids is None and not str(response.get("object")).endswith("chunk"):
            raise ValueError("a response without token_ids; send the request with return_token_ids = true")
        open_answers[key].completion += ids or ()
        if choice.get("finish_reason") is not None:
            open_answers[key].stop_reason = _STOPS.get(choice["finish_reason"], StopReason.STOP)


def _trajectory(name: str, answers: Sequence[_LoggedChoice]) -> LoggedTrajectory:
    turns = [
        Turn(
            prompt_ids=as_ids(answer.prompt, "prompt_token_ids"),
            completion_ids=as_ids(answer.completion, "token_ids"),
            stop_reason=answer.stop_reason,
            agent=answer.agent,
        )
        for answer in answers
    ]
    tools = tuple(answer.tools for answer in answers)
    return LoggedTrajectory(
        trajectory=Trajectory(example_id="", trajectory_id=name, turns=tuple(turns)),
        line=answers[0].line,
        tools=tools if any(tools) else (),
    )
