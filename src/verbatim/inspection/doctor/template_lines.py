"""Finds the line of a chat template that causes a break, by tracing which lines the template executes.

For stripped thinking, this module renders a dialogue with and without the user's next message. The reported line is the
condition above the first line that is executed only without this next message. For other classes, the reported line is
an executed line that writes arguments or tools with `tojson`, or that trims content.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from functools import cache
from types import FrameType
from typing import Any

from verbatim.core.errors import EnvironmentFault, ModelError, TemplateFault
from verbatim.inspection.doctor.classes import BreakClass
from verbatim.inspection.doctor.diagnosis import TemplateLine

# "zq" marks text that comes from a message, because templates do not write "zq" themselves.
_THOUGHT, _ANSWER = "zq thought", "zq answer"
_ASK = {"role": "user", "content": "zq ask"}
_TOOL = {
    "type": "function",
    "function": {
        "name": "zq",
        "description": "zq",
        "parameters": {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]},
    },
}
# The id has nine letters, because Mistral's templates refuse others.
_CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "zqzqzqzqz", "type": "function", "function": {"name": "zq", "arguments": {"a": "b"}}}],
}
_SEES = {"role": "tool", "content": "zq", "tool_call_id": "zqzqzqzqz", "name": "zq"}
_LATER = {"assistant": [_ASK], "tool": [{"role": "assistant", "content": _ANSWER}, _ASK]}
"""The messages that follow, up to and including the next user message, by the role of the last message so far."""
_THOUGHTFUL: Sequence[dict[str, Any]] = (
    {"role": "assistant", "content": _ANSWER, "reasoning_content": _THOUGHT},
    {"role": "assistant", "content": _ANSWER, "thinking": _THOUGHT},
    {"role": "assistant", "content": f"<think>\n{_THOUGHT}\n</think>\n\n{_ANSWER}"},
)
"""An answer with thinking, in each of the forms in which templates accept thinking."""

_ASKS = re.compile(r"\bif\b")
_TRIMS = re.compile(r"\|\s*trim|\.l?r?strip\(")
_WRITES_TOOLS = re.compile(r"\btools?\b.*tojson|tojson.*\btools?\b|in tools\b")


def template_lines(template: str) -> Callable[[BreakClass], TemplateLine | None]:
    """Return a function that takes a class of breaks and returns the line that causes such breaks, or None if no line
    is found.

    Raises:
        ModelError: the template is not valid Jinja, or exceeds its time limit.
    """
    return cache(_WatchedTemplate(template).line)


class _WatchedTemplate:
    """Renders a template and records which of its lines are executed."""

    def __init__(self, template: str) -> None:
        from verbatim.models.renderers.chat_template import ChatTemplate

        self.lines = template.split("\n")
        self._template = ChatTemplate(template, {})
        # Keep only the Python lines at which a template line begins. Other lines of the compiled code belong to no
        # branch.
        self._line_of = {python: line for line, python in self._template.program.debug_info}

    def line(self, kind: BreakClass) -> TemplateLine | None:
        number = self._responsible(kind)
        return None if number is None else TemplateLine(number, self.lines[number - 1].strip())

    def _responsible(self, kind: BreakClass) -> int | None:
        match kind:
            case BreakClass.THINKING_STRIPPED:
                return self._where_thinking_goes()
            case BreakClass.TOOL_ARGUMENTS:
                return self._line_that(lambda text: "tojson" in text and "arguments" in text, [_ASK, _CALL])
            case BreakClass.WHITESPACE:
                answer = {"role": "assistant", "content": _ANSWER}
                return self._line_that(lambda text: bool(_TRIMS.search(text)), [_ASK, answer, _ASK])
            case BreakClass.TOOLS_CHANGED:
                return self._line_that(lambda text: bool(_WRITES_TOOLS.search(text)), [_ASK])
        return None

    def _where_thinking_goes(self) -> int | None:
        answers = [[_ASK, thoughtful] for thoughtful in _THOUGHTFUL]
        # The last form is left out: its thinking is in the content, and the content is empty here.
        calls = [[_ASK, {**_CALL, **thoughtful, "content": ""}, _SEES] for thoughtful in _THOUGHTFUL[:-1]]
        for messages in (*answers, *calls):
            last, earlier = self._run(messages), self._run([*messages, *_LATER[messages[-1]["role"]]])
            if last is None or earlier is None or _THOUGHT not in last[0] or _THOUGHT in earlier[0]:
                continue
            emits = min(last[1] - earlier[1], default=None)
            if emits is None:
                continue
            above = [n for n in last[1] & earlier[1] if n < emits and _ASKS.search(self.lines[n - 1])]
            return max(above, default=emits)
        earlier = self._run([_ASK, _THOUGHTFUL[-1], _ASK])
        if earlier is None or _THOUGHT in earlier[0]:
            return None
        # Thinking is stripped even from the last answer, so no condition differs. Report the line that splits the
        # thinking off.
        return self._line_that(lambda text: "</think>" in text, [_ASK, _THOUGHTFUL[-1], _ASK])

    def _line_that(self, says: Callable[[str], bool], messages: list[dict[str, Any]]) -> int | None:
        ran = self._run(messages)
        return None if ran is None else next((n for n in sorted(ran[1]) if says(self.lines[n - 1])), None)

    def _run(self, messages: Sequence[dict[str, Any]]) -> tuple[str, set[int]] | None:
        """The rendered text and the numbers of the executed lines; None if the template rejects the messages."""
        ran: set[int] = set()
        of_template = self._template.program.root_render_func.__code__.co_filename

        def watch(frame: FrameType, event: str, arg: object) -> Any:
            if frame.f_code.co_filename != of_template:
                return None
            if event == "line" and frame.f_lineno in self._line_of:
                ran.add(self._line_of[frame.f_lineno])
            return watch

        before = sys.gettrace()  # set by a debugger or a coverage measurement
        sys.settrace(watch)
        try:
            text = self._template.text(messages, [_TOOL], False)
        except EnvironmentFault:
            return None
        except TemplateFault as error:
            raise ModelError(str(error)) from error
        finally:
            sys.settrace(before)
        return text, ran
