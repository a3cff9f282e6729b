"""Parses calls whose keys have no quotes and whose strings are between marks, as Gemma 4 writes them:

    look{at:<|"|>Bonn<|"|>,days:[1,2],deep:{warm:true}}

A string may contain anything: in sampled ids the mark is a control token, and text that merely looks like the mark is
hidden (`sampled_text`). A key cannot contain the characters that end a key.
"""

from __future__ import annotations

import json
import re

from verbatim.core.types import ToolCall
from verbatim.models.renderers.nesting import is_shallow
from verbatim.models.renderers.responses import NOT_JSON, check_call, read_json, unreadable
from verbatim.models.renderers.sampled_text import shown

_NAME = re.compile(r"""[^\s<>"'={}]+""")
_KEY = r"[^\s:,{}\[\]](?:[^:,{}\[\]]*[^\s:,{}\[\]])?"
_LITERAL = r"(?:true|false|null|-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?)(?=[,}\]])"
_PIECE = re.compile(rf"({_KEY}):|{_LITERAL}|[{{}}\[\],]")
"""Matches the syntax that is allowed outside strings."""


def marked_call(text: str, mark: str) -> ToolCall:
    """Parse one call.

    Args:
        text: The text between the marks of the call, as `sampled_text.hide` returns it.
        mark: The mark before and after each string.
    """
    raw = shown(text.strip())
    name, brace, arguments = text.partition("{")
    if not name:
        return unreadable(raw, "missing_name")
    value = read_json(_as_json(brace + arguments, mark))
    if value is NOT_JSON or not is_shallow(value) or _NAME.fullmatch(name) is None:
        return unreadable(raw, "malformed_structure")
    return check_call(shown(name), value, "ok", raw)


def _as_json(text: str, mark: str) -> str:
    """The value as JSON; "" if anything outside the strings is not what the format would write.

    >>> _as_json('{at:|Bonn|,days:[1,2]}', "|")
    '{"at":"Bonn","days":[1,2]}'
    """
    written = ""
    parts = text.split(mark)
    for place, part in enumerate(parts):
        if place % 2:
            written += json.dumps(shown(part))
        elif _PIECE.sub("", part):
            return ""
        else:
            written += _PIECE.sub(lambda found: f"{json.dumps(shown(found[1]))}:" if found[1] else found[0], part)
    return written
