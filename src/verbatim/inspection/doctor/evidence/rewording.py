"""Recognises breaks that change the form but not the content: dropped thinking, or changed tokens, JSON or white
space."""

from __future__ import annotations

import re

from verbatim.core.texts import counted
from verbatim.inspection.doctor.difference import Difference, common_prefix
from verbatim.inspection.doctor.evidence.json_text import json_at, same_json

_THINKING = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("<reasoning>", "</reasoning>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("◁think▷", "◁/think▷"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|channel>thought", "<channel|>"),
    ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
    ("<|channel|>analysis<|message|>", "<|end|>"),
)
"""The tags with which models enclose their thinking."""
_FOLLOWING = 8
"""Number of characters after the thinking, not counting white space, that must match for the answer to count as
kept."""


def thinking_stripped(d: Difference) -> str | None:
    """Recognise that one or more thinking blocks are missing or emptied. A block may be unclosed at the end of its
    turn.

    In the prompt, either the text after the thinking is present, or the whole turn except its end is missing.
    """
    assert d.text is not None
    earlier, now = d.texts
    same = common_prefix(earlier, now)
    ends = "|".join(re.escape(d.text.decode([stop])) for stop in sorted(d.stops)) or r"(?!)"
    for opened, closed in _THINKING:
        one = rf"\s*{re.escape(opened)}((?:(?!{ends}).)*?){re.escape(closed)}"
        pattern = re.compile(rf"(?:{one})+|\s*{re.escape(opened)}(?:(?!{ends}).)*(?={ends})", re.DOTALL)
        block = next((b for b in pattern.finditer(earlier) if b.start() <= same < b.end()), None)
        if block is None:
            continue
        tags = re.compile(f"{re.escape(opened)}|{re.escape(closed)}")
        thought = tags.sub("", block[0]).strip()
        begins = min(block.start(), same)
        kept = pattern.match(now, begins)
        if kept is not None and (tags.sub("", kept[0]).strip() or not thought):
            continue
        rest = _squeeze(now[kept.end() if kept else begins :])
        end = re.compile(ends).search(earlier, block.end())
        whole = rest.startswith(_squeeze(earlier[block.end() :])[:_FOLLOWING])
        if not whole and (end is None or not rest.startswith(_squeeze(earlier[end.start() :])[:_FOLLOWING])):
            continue
        others = 0 if kept or not whole else earlier.count(closed, block.end()) - now.count(closed, begins)
        more = f", nor is that of {counted(others, 'later answer')}" if others > 0 else ""
        more = more if whole else ", nor is what followed it"
        return (
            f"the {opened} block of turn {d.span.turn} is {'emptied' if kept else 'not'} in turn "
            f"{d.opening.turn}'s prompt{more}: {_quote(thought) if thought else 'an empty one'}"
        )
    return None


def retokenised(d: Difference) -> str | None:
    """Recognise that the text is the same but the ids differ."""
    assert d.text is not None
    earlier, now = d.texts
    if not now.startswith(earlier) and (d.changed_texts[0] != d.changed_texts[1] or not d.alignment.meets_again):
        return None
    change = d.change
    was, is_now = d.earlier[d.at : change.end], d.prompt[d.at : change.now_end]
    found = "the same text in different tokens"
    if d.alignment.meets_again:
        found = f"the same text in {counted(len(was), 'token')}, now in {len(is_now)}"
    control = [i for i in (*was, *is_now) if i in d.text.control]
    if control:
        return f"{found}: {d.text.piece(control[0])} is a control token on one side, text on the other"
    return found


def tool_arguments(d: Difference) -> str | None:
    """Recognise that JSON from the model was parsed and serialised again, so that the values are equal but the text
    differs."""
    if d.at < d.spans[0].start:
        return None
    earlier, now = d.texts
    same = common_prefix(earlier, now)
    braces = [i for i, c in enumerate(earlier[:same]) if c == "{"]
    # Try the nearest brace first. The limit bounds the number of attempts to parse.
    for start in reversed(braces[-64:]):
        was, is_now = json_at(earlier, start), json_at(now, start)
        if was is None or is_now is None or max(was[1], is_now[1]) <= same:
            continue
        if same_json(was[0], is_now[0]) and earlier[start : was[1]] != now[start : is_now[1]]:
            return (
                f"equal values, serialised again: turn {d.span.turn} sampled {_quote(earlier[start : was[1]])}, "
                f"turn {d.opening.turn} was sent {_quote(now[start : is_now[1]])}"
            )
    return None


def whitespace(d: Difference) -> str | None:
    """Recognise that the texts are equal except for white space."""
    earlier, now = d.changed_texts
    if earlier == now or _squeeze(earlier) != _squeeze(now):
        earlier, now = d.texts
        if now.startswith(earlier) or not _squeeze(now).startswith(_squeeze(earlier)):
            return None
    same = common_prefix(earlier, now)
    was, is_now = _spaces_at(earlier, same), _spaces_at(now, same)
    return f"only white space differs: {was!r} in turn {d.span.turn}, {is_now!r} in turn {d.opening.turn}'s prompt"


def _squeeze(text: str) -> str:
    return "".join(text.split())


def _spaces_at(text: str, place: int) -> str:
    """The white space around position `place`."""
    before = text[:place]
    start = len(before.rstrip())
    after = text[place:]
    return text[start : place + len(after) - len(after.lstrip())]


def _quote(text: str, length: int = 40) -> str:
    """The text in quotes on one line, with its middle elided if it is long."""
    line = " ".join(text.split())
    return f"“{line}”" if len(line) <= length else f"“{line[: length // 2]}…{line[-length // 2 :]}”"
