"""Refuses tools that cannot be called in a chat format, because a written call could not be parsed back.

Formats that write calls as JSON accept any name. In other formats a name ends at a space, a quote, a bracket or "<",
and formats that write Python need parameter names that are Python identifiers. In such a format, a model could not call
a tool named `get weather`.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from verbatim.core.errors import EnvironmentFault
from verbatim.core.types import Int32, ToolCall
from verbatim.models.renderers.probe_messages import ASK, NAME, VALUE, calling
from verbatim.models.renderers.renderer import Schemas

Write = Callable[[Sequence[Any], bool], Int32]
"""(messages, add_generation_prompt) -> ids. Raises EnvironmentFault if the format refuses the messages."""
Read = Callable[[Int32, Int32], Sequence[ToolCall]]
"""(completion ids, prompt ids) -> the calls in the completion."""

_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
"""Matches names that every format accepts, and Python's keywords, which some formats do not accept."""
_KNOWN = 1024
_KEY = "zqat"


class CallableTools:
    """Which tool and parameter names one chat format accepts, found by writing a call and parsing it.

    Args:
        write: Renders messages with the format.
        read: Parses the format's calls.
        who: The format's name, for messages.
    """

    def __init__(self, write: Write, read: Read, who: str) -> None:
        self._write, self._read, self._who = write, read, who
        self._is_read_back: Callable[[str, str], bool] = lru_cache(maxsize=_KNOWN)(self._comes_back)

    def refuse(self, tools: Schemas) -> None:
        """Refuse a tool if its name, or the name of a required parameter, would not be parsed back.

        Raises:
            EnvironmentFault: a tool cannot be called; the message suggests another name.
        """
        for place, tool in enumerate(tools or ()):
            function = tool.get("function", tool) if isinstance(tool, Mapping) else None
            name = function.get("name") if isinstance(function, Mapping) else None
            if not isinstance(function, Mapping) or not isinstance(name, str):
                continue
            if not self._takes(name, _KEY):
                raise EnvironmentFault(
                    f"tools[{place}]: a call of the tool {name!r:.80} could not be read back as {self._who} writes it; "
                    f"expected a name of letters, digits and _, such as {_plain(name)!r}"
                )
            for key in _required(function):
                if not self._takes(NAME, key):
                    raise EnvironmentFault(
                        f"tools[{place}]: a call of the tool {name!r:.80} with its parameter {key!r:.80} could not be "
                        f"read back as {self._who} writes it; expected a name of letters, digits and _, such as "
                        f"{_plain(key)!r}"
                    )

    def _takes(self, name: str, key: str) -> bool:
        if all(_PLAIN.fullmatch(given) and not keyword.iskeyword(given) for given in (name, key)):
            return True
        # If even a call with plain names is not parsed, the names are not at fault.
        return self._is_read_back(name, key) or not self._is_read_back(NAME, _KEY)

    def _comes_back(self, name: str, key: str) -> bool:
        """True if a call with these names is parsed as it was written."""
        turn = calling()
        turn["tool_calls"][0]["function"] = {"name": name, "arguments": {key: VALUE}}
        try:
            prompt, whole = self._write([ASK], True), self._write([ASK, turn], False)
        except EnvironmentFault:
            return False
        # The turn starts where the two renderings differ: a format may write a different generation prompt.
        shorter = min(len(prompt), len(whole))
        differing = np.flatnonzero(prompt[:shorter] != whole[:shorter])
        same = int(differing[0]) if len(differing) else shorter
        calls = self._read(whole[same:], prompt[:same])
        return [(call.status, call.name, call.arguments) for call in calls] == [("ok", name, {key: VALUE})]


def _required(function: Mapping[str, Any]) -> list[str]:
    """The parameters that a tool requires. Schemas come from environments; a malformed schema counts as requiring no
    parameters."""
    parameters = function.get("parameters")
    required = parameters.get("required") if isinstance(parameters, Mapping) else None
    return [key for key in required if isinstance(key, str)] if isinstance(required, (list, tuple)) else []


def _plain(name: str) -> str:
    """A similar name that every format accepts.

    >>> _plain("get weather"), _plain("2 + 2"), _plain("!")
    ('get_weather', 'n_2_2', 'n')
    """
    plain = re.sub(r"[^A-Za-z0-9]+", "_", name).strip("_")[:64]
    return plain if _PLAIN.fullmatch(plain) and not keyword.iskeyword(plain) else f"n_{plain}".strip("_")
