"""Random calls of tools with values that are hard to read back, and texts in which one of them was damaged."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np

ASK = {"role": "user", "content": "How warm is it?"}
TYPES = {
    "old_string": "string",
    "new_string": "string",
    "count": "integer",
    "least": "number",
    "warm": "boolean",
    "days": "array",
    "deep": "object",
    "note": ["string", "null"],
    "zip": ["integer", "string"],
    "either": ["array", "boolean", "string"],
    "any": [],
}
"""The JSON types of each parameter; none are declared for the last one."""
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Look at the sky.",
            "parameters": {
                "type": "object",
                "properties": {key: {"type": kind} if kind else {} for key, kind in TYPES.items()},
            },
        },
    }
    for name in ("look", "look_again")
]

_TEXTS = (
    "", " ", "\n", "\n\n", "    if x:\n        return 1\n", "\n\nfirst", "last\n\n\n", "\ttab\t", " x ", "Köln",
    "日本語\n",
    "🙂", "e\u0301", "\u00a0x\u00a0", "\u2028", "5", "007", "1e3", "true", "None", "null", '"quoted"', "it's",
    "\\n", "C:\\new\\u0041", '{"a": 1}', '{"name": "look", "arguments": {"count": 2}}', "[1, 2]", "{", "}", "```",
    "```json\n{}\n```", "<", ">", "</", "<b>x</b>", "&lt;&amp;", "a = b", "look(count=2)", "count=2, ", "')", "\r\n",
    "\x7f", "x" * 300,
)  # fmt: skip
_TAGS = (
    "</parameter>", "</function>", "</tool_call>", "<tool_call>", "</arg_value>", "<arg_key>", "</arg_key>", "</think>",
    "<think>", "</invoke>", "</minimax:tool_call>", "<|tool_call_end|>", "<|tool_call_start|>",
    "<|im_end|>", "<|call|>",
    "<｜tool▁call▁end｜>",
    "</atem:parameter>", "</atem:invoke>", "<|message|>", "</tool_response>", "<parameter=",
    "<parameter=nothing>", "</parameter>\n</function>", "</parameter>\n</function>\n</tool_call>",
    "<function=look>", '<parameter name="', "[TOOL_CALLS]",
    '<|"|>', "to=functions.look", "<|eot_id|>", "\ufdd5", "\ufdd0",
)  # fmt: skip
"""What begins and ends the parts of calls, as texts of a value."""
_NUMBERS = (0, -1, 5, 2**53 + 1, -(2**53) - 1, 2**63, 10**30, 9_007_199_254_740_993)
_FLOATS = (0.1, -0.5, 1e-7, 1.5e300, 3.141592653589793, 5e-324, 1.0)


class RandomCalls:
    """Random values of one seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def calls(self, most: int) -> list[dict[str, Any]]:
        """One or more calls, as a message holds them."""
        return [self._call(number) for number in range(self._random.randint(1, most))]

    def damaged(self, text: str, marks: list[str]) -> str:
        """The text with one change: a part taken out, doubled, moved or cut off, a mark put in or another one."""
        for _ in range(20):
            found = self._damaged(text, [mark for mark in marks if mark])
            if found != text:
                return found
        return text[:-1]

    def _damaged(self, text: str, marks: list[str]) -> str:
        choose = self._random.choice
        a, b = sorted(self._random.randrange(len(text) + 1) for _ in range(2))
        b = choose((b, min(b, a + self._random.randint(1, 12))))
        mark = choose([*marks, "\n", " ", '"', "{", "}", ">", "=", ": ", ", ", "</", "look", "count", "x"])
        places = [place for place in range(len(text)) if text.startswith(mark, place)]
        kind = choose(("out", "out", "twice", "cut", "mark in", "mark out", "mark out", "other mark", "swap", "case"))
        if kind == "out":
            return text[:a] + text[b:]
        if kind == "twice":
            return text[:b] + text[a:b] + text[b:]
        if kind == "cut":
            return text[:a]
        if kind == "mark in":
            return text[:a] + mark + text[a:]
        if kind == "swap":
            return text[:a] + text[b:] + text[a:b]
        if kind == "case":
            return text[:a] + text[a:b].swapcase() + text[b:]
        if not places:
            return text
        place = choose(places)
        return text[:place] + (choose(marks) if kind == "other mark" and marks else "") + text[place + len(mark) :]

    def _call(self, number: int) -> dict[str, Any]:
        name = self._random.choice(("look", "look_again"))
        keys = self._random.sample(list(TYPES), self._random.randint(0, 4))
        return {
            "id": f"functions.{name}:{number}",
            "type": "function",
            "function": {"name": name, "arguments": {key: self._value(TYPES[key]) for key in keys}},
        }

    def _value(self, kind: Any, depth: int = 0) -> Any:
        choose = self._random.choice
        if isinstance(kind, list):
            value = self._value(choose(kind or ("string", "null", "integer", "boolean", "array")))
            return "as it is" if isinstance(value, str) and _may_be_another(value) else value
        if kind == "null":
            return None
        if kind == "string":
            return "".join(choose(_TEXTS + _TAGS) for _ in range(choose((1, 1, 1, 2, 3))))
        if kind == "integer":
            return choose(_NUMBERS)
        if kind == "number":
            return choose(_FLOATS)
        if kind == "boolean":
            return choose((True, False))
        kinds = ["string", "integer", "number", "boolean", *(["array", "object"] if depth < 3 else [])]
        items = [self._value(choose(kinds), depth + 1) for _ in range(self._random.randint(0, 3))]
        if kind == "array":
            return [*items, *choose(([], [None]))]
        return {self._value("string"): item for item in items}


def _may_be_another(text: str) -> bool:
    """Whether a format without quotes writes another value as this text."""
    try:
        return text in ("True", "False", "None") or not isinstance(json.loads(text), str)
    except ValueError:
        return False


def written(renderer: Any, calls: list[dict[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
    """(prompt, completion): the ids with which the format writes these calls, as if they had been sampled."""
    prompt = renderer.write_ids([ASK], TOOLS, True)
    reply = {"role": "assistant", "content": "", "reasoning_content": "", "tool_calls": calls}
    whole = renderer.write_ids([ASK, reply], TOOLS, False)
    shorter = min(len(prompt), len(whole))
    same = next((i for i in range(shorter) if prompt[i] != whole[i]), shorter)
    return prompt[:same], whole[same:]


def functions(calls: Any) -> list[str]:
    """Names and arguments, exactly: 1, 1.0 and True are three values."""
    return [json.dumps([call["name"], call["arguments"]], sort_keys=True) for call in calls]


def canonical(text: str) -> str:
    """A text in which every JSON object is written in one way, and which has no white space outside of those."""
    parts, place = [], 0
    decoder = json.JSONDecoder()
    while True:
        brace = text.find("{", place)
        if brace < 0:
            return "".join([*parts, *text[place:].split()])
        try:
            value, end = decoder.raw_decode(text, brace)
        except (ValueError, RecursionError):
            value, end = "{", brace + 1
        parts += [*text[place:brace].split(), value if value == "{" else json.dumps(value, sort_keys=True)]
        place = end
