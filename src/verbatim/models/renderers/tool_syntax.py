"""Defines the syntaxes of tool calls and parses calls.

A model's syntax is never guessed from its output: `derived_syntax` derives it from what the chat format writes. Five
forms are known. They cover the JSON of Hermes, Mistral and Llama, the calls of DeepSeek and Kimi, the XML of Qwen, GLM
and other models, the calls of LFM, and the calls of Gemma 4:

- `whole`: one JSON object with the name in it: `<tool_call>{"name": "look", "arguments": {"at": "Bonn"}}</tool_call>`
- `named`: the name, then the arguments as a JSON object: `<|begin|>look<|sep|>{"at": "Bonn"}<|end|>`; the call's id may
  stand between name and arguments: `[TOOL_CALLS]look[CALL_ID]a1b2c3d4e[ARGS]{"at": "Bonn"}`
- `tagged`: the name, then each argument separately: `<function=look><parameter=at>Bonn</parameter></function>`
- `python`: a list of calls with keywords: `<|begin|>[look(at="Bonn")]<|end|>`
- `marked`: the name, then keys without quotes and strings between marks: `<|begin|>look{at:<|"|>Bonn<|"|>}<|end|>`

A call is well-formed only if nothing but its parts stands between its marks, so that no sampled text is silently
dropped. Any other attempt is recorded as raw text, with a status that says what is wrong.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, islice
from typing import Any, Literal

from verbatim.core.types import ToolCall
from verbatim.models.renderers.marked_calls import marked_call
from verbatim.models.renderers.python_calls import python_calls
from verbatim.models.renderers.responses import NOT_JSON, check_call, is_json, parameters_of, read_json, unreadable
from verbatim.models.renderers.sampled_text import shown
from verbatim.models.renderers.tagged_calls import ArgumentTags, spaced

Form = Literal["whole", "named", "tagged", "python", "marked"]

ANY_NAME = "\ufdd6"
"""Placeholder for the tool's name in `ToolSyntax.before`: a noncharacter, which templates do not write."""
_MOST_ENDS = 32
"""Number of positions that are tried as the end of a call, because text inside a call may look like its end."""
_NAME = re.compile(r"""[^\s<>"'=]+""")
_ID = re.compile(r"(?:functions\.)?(.+):\d+")
"""A call id that contains the tool's name, such as Kimi's `functions.look:0`."""


@dataclass(frozen=True, kw_only=True)
class ToolSyntax:
    """The text around the parts of a call, without leading and trailing white space."""

    form: Form
    """The form of the calls; see the module's docstring."""
    before: str
    """The text before the first of several calls; may be empty, or contain `ANY_NAME` in place of the tool's name."""
    opens: str
    """The text before each call. In `whole`, "" if a call has no marks and is the whole completion."""
    closes: str
    """The text after each call."""
    after: str = ""
    """The text after the last of several calls; may be empty."""
    listed: bool = False
    """In `whole`: True if several calls are written as one JSON list."""
    after_name: str = ""
    """The text between name and arguments."""
    named_by_id: bool = False
    """In `named`: True if the call's id, which contains the tool's name, is written in place of the name."""
    after_id: str = ""
    """In `named`: the text between a call's id (which follows `after_name`) and the arguments; "" if calls have no
    id."""
    arguments: str = "arguments"
    """In `whole`: the key of the arguments."""
    others: frozenset[str] = frozenset()
    """In `whole`: the other keys that a call may have."""
    tags: ArgumentTags | None = None
    """In `tagged`: the text around each argument."""
    quote: str = ""
    """In `python`: the quote around strings if the format writes them unescaped; "" if it escapes them."""
    mark: str = ""
    """In `marked`: the mark before and after each string."""

    def read(self, text: str, tools: Sequence[Mapping[str, Any]] = ()) -> tuple[str, tuple[ToolCall, ...]]:
        """Return (1) the text outside the calls, with one line per piece, and (2) every attempted call, in order.

        Args:
            text: Sampled text as `sampled_text.hide` returns it.
            tools: The tool schemas. The schemas decide which arguments without quotes are strings.
        """
        if not self.opens:
            # Without marks, only a completion that is nothing but a call counts as a call, because answers may also
            # contain JSON.
            call = self._bare(text)
            return ("", (call,)) if call is not None else (text, ())
        begun = self._begins.search(text)
        if begun is None:
            return text, ()
        beside, calls = [self._before.sub("", text[: begun.start()].rstrip()).rstrip()], list[ToolCall]()
        while begun is not None:
            found, end = self._attempt(text, begun, tools)
            calls += found
            begun = self._begins.search(text, end)
            if all(call.status == "ok" for call in found):  # after a malformed call, the text may be part of that call
                rest = self._after.sub("", text[end : len(text) if begun is None else begun.start()])
                beside.append(self._before.sub("", rest.rstrip()).strip())
        return "\n".join(filter(None, beside)), tuple(calls)

    @property
    def marks(self) -> list[str]:
        """The strings with which calls, or the text before them, begin; empty if calls have no marks."""
        first = self.opens.split()[:1]
        start, name, _ = self.before.partition(ANY_NAME)
        return [*first, *([start if name else start + first[0]] if first else [])]

    @cached_property
    def _before(self) -> re.Pattern[str]:
        return re.compile(re.escape(self.before).replace(ANY_NAME, _NAME.pattern) + r"\Z")

    @cached_property
    def _after(self) -> re.Pattern[str]:
        return re.compile(rf"\A\s*{spaced(self.after)}")

    @cached_property
    def _begins(self) -> re.Pattern[str]:
        """Matches the beginning of an attempt: the first word of `opens`, or all of it if that word may be prose."""
        first = self.opens.split()[0]
        return re.compile(re.escape(first) if _is_tag(first) else rf"(?<!\w){spaced(self.opens)}")

    @cached_property
    def _opens(self) -> re.Pattern[str]:
        return re.compile(spaced(self.opens))

    @cached_property
    def _closes(self) -> re.Pattern[str]:
        return re.compile(spaced(self.closes))

    def _attempt(
        self, text: str, begun: re.Match[str], tools: Sequence[Mapping[str, Any]]
    ) -> tuple[Sequence[ToolCall], int]:
        """(the calls of one attempt, the index after the attempt).

        The attempt ends at the first close that makes the text before it a well-formed call. If no close does, the
        attempt ends at the first close or at the next attempt.
        """
        opened = self._opens.match(text, begun.start())
        following = self._begins.search(text, begun.end())
        limit = len(text) if following is None else following.start()
        if opened is not None:
            for end, behind in islice(self._ends(text, opened.end(), limit), _MOST_ENDS):
                if self.tags is not None and end > limit:
                    break  # a value without quotes cannot contain another call
                calls = self._calls(text[opened.end() : end], tools)
                if all(call.status == "ok" for call in calls) and not self._goes_on(text, behind):
                    return calls, behind
        closed = self._closes.search(text, begun.end(), limit) if self.closes else None
        body = text[begun.end() if opened is None else opened.end() : limit if closed is None else closed.start()]
        end = limit if closed is None else closed.end()
        if closed is None and self.closes:
            return [unreadable(shown(body.strip()), "unclosed_block")], end
        calls = self._calls(body, tools) if opened is not None else ()
        if not calls or all(call.status == "ok" for call in calls):  # it is well-formed except for extra text
            calls = [unreadable(shown(body.strip()), "malformed_structure")]
        return calls, end

    def _ends(self, text: str, start: int, limit: int) -> Iterator[tuple[int, int]]:
        """Candidate ends of a call, as (end of the call's parts, end of the call's close). The candidates are the
        closes after `start`. In a syntax without closes, they are the beginnings of later attempts and the end of the
        text."""
        if not self.closes:
            later = (found.start() for found in self._begins.finditer(text, limit))
            return ((end, end) for end in chain(later, [len(text)]))
        return ((found.start(), found.end()) for found in self._closes.finditer(text, start))

    def _goes_on(self, text: str, end: int) -> bool:
        """True if another close comes before the next call, so that a value without quotes may extend to that close."""
        following = self._begins.search(text, end) if self.tags is not None else None
        limit = len(text) if following is None else following.start()
        return self.tags is not None and self._closes.search(text, end, limit) is not None

    def _calls(self, body: str, tools: Sequence[Mapping[str, Any]]) -> Sequence[ToolCall]:
        """Parse the text between a call's marks."""
        raw = shown(body.strip())
        if self.form == "python":
            return python_calls(raw, self.quote, lambda name: parameters_of(tools, name))
        if self.form == "marked":
            return [marked_call(body, self.mark)]
        if self.form != "whole":
            return [self._named(body) if self.tags is None else self._tagged(body, self.tags, tools)]
        value = read_json(raw)
        # A model may sample a single call without the list around it. Such a call is unambiguous, so it counts.
        if self.listed and isinstance(value, list):
            return [self._whole(item, json.dumps(item) if is_json(item) else raw) for item in value]
        return [self._whole(value, raw)]

    @property
    def _is_quoted(self) -> bool:
        """True if white space around the name belongs to it: `name="look"`, `<function=look>`."""
        return self.opens.endswith(('"', "="))

    def _whole(self, value: Any, raw: str) -> ToolCall:
        """A call in the form `whole`, from its parsed JSON."""
        if value is NOT_JSON:
            return unreadable(raw, "invalid_json")
        if not isinstance(value, dict):
            return unreadable(raw, "malformed_structure")
        if not value.get("name"):
            return unreadable(raw, "missing_name")
        if not self.others.issuperset(value.keys() - {"name", self.arguments}):
            return unreadable(raw, "malformed_structure")
        call_id = value.get("id")
        call = check_call(value["name"], value.get(self.arguments), "ok", raw)
        return replace(call, id=call_id) if isinstance(call_id, str) and is_json(call_id) else call

    def _bare(self, text: str) -> ToolCall | None:
        """Parse a call without marks: JSON with name and arguments, or the beginning of such JSON; None for an ordinary
        answer."""
        raw = shown(text.strip())
        value = read_json(raw)
        if value is NOT_JSON:
            begins = re.match(rf'\{{\s*"name"\s*:\s*"[^"]*"\s*,\s*"{re.escape(self.arguments)}"\s*:\s*\{{', raw)
            return unreadable(raw, "invalid_json") if begins else None
        named = isinstance(value, dict) and isinstance(value.get("name"), str)
        return self._whole(value, raw) if named and isinstance(value.get(self.arguments), dict) else None

    def _named(self, text: str) -> ToolCall:
        """A call in the form `named`."""
        raw = shown(text.strip())
        name, found, rest = _partition(text, self.after_name) if self.after_name else _before_brace(text)
        name = name if self._is_quoted else name.strip()
        if not name:
            return unreadable(raw, "missing_name")
        call_id, found_id, rest = _partition(rest, self.after_id) if self.after_id else ("", True, rest)
        value = read_json(shown(rest)) if found and found_id else NOT_JSON
        if value is NOT_JSON:
            return unreadable(raw, "invalid_json")
        name_of_id = _ID.fullmatch(name) if self.named_by_id else None
        is_name = _NAME.fullmatch(name) is not None and (name_of_id is not None or not self.named_by_id)
        is_id = not self.after_id or _NAME.fullmatch(call_id.strip()) is not None
        if not (is_name and is_id) or self._begins.search(name + call_id) is not None:  # another call begins inside
            return unreadable(raw, "malformed_structure")
        call = check_call(shown(name if name_of_id is None else name_of_id[1]), value, "ok", raw)
        # Formats that write a call's id expect the tool's answer to refer to it.
        return replace(call, id=shown(call_id.strip() if name_of_id is None else name))

    def _tagged(self, text: str, tags: ArgumentTags, tools: Sequence[Mapping[str, Any]]) -> ToolCall:
        """A call in the form `tagged`."""
        raw = shown(text.strip())
        space = "" if self._is_quoted else r"\s*"
        # If the format writes nothing after the name, white space or a tag ends it.
        ends = rf"{space}{spaced(self.after_name)}" if self.after_name else rf"\s*(?={spaced(tags.key)}|\Z)"
        named = re.match(rf"{space}({_NAME.pattern}){ends}", text)
        if named is None:
            is_missing = re.match(rf"\s*{ends}", text) is not None
            return unreadable(raw, "missing_name" if is_missing else "malformed_structure")
        name = shown(named[1])
        arguments, status = tags.read(text[named.end() :], name, tools)
        return check_call(name, arguments, status, raw) if status != "malformed_structure" else unreadable(raw, status)


def _is_tag(word: str) -> bool:
    """True if a word is a marker, that is, contains a character that does not occur in prose."""
    return any(not (c.isalnum() or c in ".,:;!?'\"()-") for c in word)


def _partition(text: str, words: str) -> tuple[str, bool, str]:
    """Like `str.partition`, but matching `words` with any white space between them: (before, found, after)."""
    found = re.search(spaced(words), text)
    return (text[: found.start()], True, text[found.end() :]) if found else (text, False, "")


def _before_brace(text: str) -> tuple[str, bool, str]:
    name, brace, rest = text.partition("{")
    return name, bool(brace), brace + rest
