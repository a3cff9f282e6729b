"""Parses the arguments of calls in formats that write each argument between tags.

A value has no quotes, so it may contain text that looks like a tag. It ends where its closing tag is followed by the
next argument or by the end of the call:

    <parameter=text>
    a </parameter> in a text
    </parameter>
    <parameter=times>
    2
    </parameter>

has two arguments, "a </parameter> in a text" and 2. If the text could also be read as a different list of arguments,
the call is malformed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from verbatim.core.types import ParseStatus
from verbatim.models.renderers.bare_values import typed
from verbatim.models.renderers.responses import NOT_JSON, parameters_of, read_json, types_of
from verbatim.models.renderers.sampled_text import shown

_TEXT = frozenset({"string"})
_KEY = r'[^<>"\n]+?'


@dataclass(frozen=True, kw_only=True)
class ArgumentTags:
    """The text around an argument, without leading and trailing white space.

    Example, GLM: key `<arg_key>`, value `</arg_key>\\n<arg_value>`, ends `</arg_value>`.
    """

    key: str
    """The text before the key."""
    value: str
    """The text between key and value."""
    ends: str
    """The text after the value."""
    json: str = ""
    """The text between a key and a value that is not a string, if the format marks such values differently; else ""."""
    padding: tuple[str, str] = ("", "")
    """The white space that the format writes before and after a value; it is not part of the value."""
    gap: str = ""
    """The white space that the format writes between two arguments."""
    python_words: bool = False
    """True if null and booleans are written as Python's words, such as `None`."""

    def read(self, text: str, name: str, tools: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], ParseStatus]:
        """Parse the arguments of a call of the tool `name`. The status is "ok" if the text contains nothing else.

        The text is first parsed with exactly the white space that the format writes, so that white space in values is
        preserved. If that fails, white space around the tags is ignored.
        """
        arguments, status = self._read(text, name, tools, self._exact)
        return (arguments, status) if status == "ok" else self._read(text, name, tools, self._spaced)

    @cached_property
    def _exact(self) -> tuple[re.Pattern[str], re.Pattern[str]]:
        """Patterns of (the beginning of an argument, the end of a value), with the format's own white space."""
        value, json, key, ends = map(re.escape, (self.value, self.json, self.key, self.ends))
        before, behind = self.padding
        begins = rf"{key}({_KEY})(?:{value}{f'|({json})' if json else '()'}){before}"
        return re.compile(rf"\s*{begins}"), re.compile(rf"{behind}{ends}(?={self.gap}{begins}|\s*\Z)")

    @cached_property
    def _spaced(self) -> tuple[re.Pattern[str], re.Pattern[str]]:
        """Like `_exact`, but with any white space."""
        json = rf"|({spaced(self.json)})" if self.json else "()"
        begins = rf"\s*{spaced(self.key)}({_KEY})(?:{spaced(self.value)}{json})"
        before, behind = (f"(?:{space})?" for space in self.padding)
        return re.compile(begins + before), re.compile(rf"{behind}{spaced(self.ends)}(?={begins}|\s*\Z)")

    def _read(
        self, text: str, name: str, tools: Sequence[Mapping[str, Any]], form: tuple[re.Pattern[str], re.Pattern[str]]
    ) -> tuple[dict[str, Any], ParseStatus]:
        begins, ends = form
        arguments = dict[str, Any]()
        known = parameters_of(tools, name)
        status: ParseStatus = "ok"
        place = 0
        while text[place:].strip():
            begun = begins.match(text, place)
            ended = ends.search(text, begun.end()) if begun else None
            if begun is None or ended is None:
                return {}, "malformed_structure"
            key, value = shown(begun[1]), text[begun.end() : ended.start()]
            if key in arguments or (arguments and known and key not in known) or self._holds_another(value, known):
                return {}, "malformed_structure"
            if begun[2]:
                arguments[key] = read_json(shown(value))
                if arguments[key] is NOT_JSON or isinstance(arguments[key], str):
                    return {}, "malformed_structure"
            else:
                types = types_of(tools, name, key) if not self.json else _TEXT
                arguments[key] = typed(shown(value), types, python_words=self.python_words)
            status = "invalid_json" if arguments[key] is NOT_JSON else status
            place = ended.end()
        return arguments, status

    def _holds_another(self, value: str, known: frozenset[str]) -> bool:
        """True if a value may also be two arguments, the first without its closing tag."""
        return any(not known or shown(found[1]) in known for found in self._spaced[0].finditer(value))


def spaced(words: str) -> str:
    """The pattern of these words and tags, with any white space between them."""
    return r"\s*".join(map(re.escape, re.split(r"\s+|(?<=>)(?=<)", words.strip())))
