"""Recognises breaks that change the content: a new conversation, changed tools, or a shortened or edited history."""

from __future__ import annotations

import re
from typing import Any

from verbatim.core.texts import counted
from verbatim.inspection.doctor.alignment import RUN
from verbatim.inspection.doctor.difference import Difference, common_prefix
from verbatim.inspection.doctor.evidence.json_text import json_at

_SCHEMA = re.compile(r'\{\s*"(?:type|name|function|description|parameters|strict)"')
_HEADER = 400
"""Maximum length in characters of the text that introduces the tool schemas and appears only together with them."""


def recorded_tools_changed(d: Difference) -> str | None:
    """Recognise that the logged requests offer different tools."""
    if not d.tools or d.at >= d.spans[0].start:
        return None
    turn, last = d.opening.turn, d.opening.against[-1]
    return f"turn {turn}'s request has different tools from turn {last}'s" if d.tools[turn] != d.tools[last] else None


def tools_changed(d: Difference) -> str | None:
    """Recognise that the first difference is in the tool schemas of the prompt, or in the text that introduces the
    schemas."""
    if d.at >= d.spans[0].start:
        return None
    earlier, now = d.opening_texts
    same = common_prefix(earlier, now)
    was, is_now = _schemas(earlier), _schemas(now)
    first = min((start for start, _, _ in (*was, *is_now)), default=None)
    last = max((end for _, end, _ in (*was, *is_now)), default=0)
    if first is None or not first - _HEADER <= same <= last:
        return None
    before, after = [schema for _, _, schema in was], [schema for _, _, schema in is_now]
    if before == after:
        moved = [start for start, _, _ in was] != [start for start, _, _ in is_now]
        return "the same tools in a different place" if moved else "the same tools, serialised differently"
    if sorted(map(_name, before)) == sorted(map(_name, after)):
        other = ", ".join(_name(schema) for schema in before if schema not in after)
        return f"a different schema for {other}" if other else "the same tools in a different order"
    gone = [n for n in map(_name, before) if n not in map(_name, after)]
    come = [n for n in map(_name, after) if n not in map(_name, before)]
    changes = (("tools removed", gone), ("tools added", come))
    return "; ".join(f"{what}: {', '.join(names)}" for what, names in changes if names)


def _schemas(text: str) -> list[tuple[int, int, Any]]:
    """The triples (start, end, schema) of all tool schemas in the text."""
    found, end = [], 0
    for begins in _SCHEMA.finditer(text):
        if begins.start() < end:
            continue
        parsed = json_at(text, begins.start())
        if parsed is not None and _name(parsed[0]):
            end = parsed[1]
            found.append((begins.start(), end, parsed[0]))
    return found


def _name(value: Any) -> str:
    """The name of a tool schema; empty if the value is not a tool schema. A value with `arguments` is a call, not a
    schema."""
    function = value.get("function", value)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or "arguments" in function:
        return ""
    return str(function["name"])


def sampled_again(d: Difference) -> str | None:
    """Recognise that the prompt is a prefix of the recorded tokens, so that nothing was changed."""
    if d.at < len(d.prompt):
        return None
    return f"nothing was changed: sampled again from a point inside the context of turn {d.opening.against[-1]}"


def not_read_back(d: Difference) -> str | None:
    """Recognise that parsing an answer dropped a part of it: a malformed call or a stray tag."""
    change, span = d.change, d.span
    inside = span.start <= change.start and change.end <= span.end and d.alignment.meets_again
    if not inside or change.now_end > change.now_start or d.is_gone(span):
        return None
    assert d.text is not None
    gone = d.earlier[change.start : change.end]
    markup = any(token in d.text.control and token not in d.stops for token in gone)
    status = d.turns[span.turn].parse_status
    if status == "ok" and not markup:
        return None
    why = f" ({status})" if status != "ok" else ""
    length = counted(len(gone), "token")
    return f"parsing dropped {length} of turn {span.turn}'s answer{why}"


def history_compacted(d: Difference) -> str | None:
    """Recognise that much of the history was removed, and replaced by at most half as many tokens."""
    changes = d.alignment.changes
    lost = sum(c.end - c.start for c in changes)
    put = sum(c.now_end - c.now_start for c in changes)
    if len(d.earlier) - changes[-1].end < RUN:
        # The alignment matched only fewer than `RUN` ids at the end of the earlier sequence. Such short ends, for
        # example a lone end-of-turn token, occur in any message. So the rest of the prompt may belong to the
        # replacement.
        put += len(d.prompt) - changes[-1].now_end
    turns = [s.turn for s in d.spans if d.is_gone(s)]
    if put * 2 > lost or not (turns or lost * 4 >= len(d.earlier)):
        return None
    named = f"turn{'s' * (len(turns) > 1)} {', '.join(map(str, turns))}"
    of_turns = f", including the whole of {named}" if turns else ""
    return f"the history lost {counted(lost, 'token')}{of_turns}; replaced by {counted(put, 'token')}"


def history_rewritten(d: Difference) -> str:
    """Describe a change that no other test recognises."""
    where = "answer" if d.at >= d.span.start else "prompt"
    change = d.change
    gone, put = counted(change.end - change.start, "token"), change.now_end - change.now_start
    if len(d.alignment.changes) == 1 and not d.alignment.meets_again:
        return f"turn {d.span.turn}'s {where} was changed: from here on, its last {gone} cannot be found"
    if change.end == change.start:
        return f"turn {d.span.turn}'s {where} was changed: {counted(put, 'token')} inserted"
    return f"turn {d.span.turn}'s {where} was changed: {gone} {f'replaced by {put}' if put else 'removed'}"


def cannot_tell(d: Difference) -> str | None:
    """Describe the position of the change if there is no tokenizer, because nothing else is known then."""
    return f"{history_rewritten(d)}; add a tokenizer to find out why" if d.text is None else None


def another_conversation(d: Difference) -> str | None:
    """Recognise that the prompt replaces no history, because the prompt's agent has no history yet or because the
    compared conversation continues later."""
    agent, last = d.turns[d.opening.turn].agent, d.opening.against[-1]
    if d.opening.first_of_agent:
        return f"the first turn of agent {agent!r}; its prompt shares {counted(d.at, 'token')} with turn {last}"
    if d.opening.goes_on and d.at < len(d.prompt):
        return f"another conversation: the one of turn {last} continues later"
    return None


def another_system_message(d: Difference) -> str | None:
    """Recognise that the system message differs and the prompt contains no completion of the earlier conversation."""
    if len({turn.agent for turn in d.turns}) > 1:
        return None  # this log names agents, so a new conversation would have a new agent
    earlier, now = d.opening_texts
    same = common_prefix(earlier, now)
    system, other = _system_message(d, earlier), _system_message(d, now)
    if system is None or other is None or not all(map(d.is_gone, d.spans)):
        return None
    if same * 2 >= min(len(system), len(other)):
        return None
    return "a different system message and none of the earlier completions: a separate conversation"


def _system_message(d: Difference, text: str) -> str | None:
    """The first message of the text, if that is a system message; else None."""
    assert d.text is not None
    ends = [text.find(end) for end in (d.text.decode([stop]) for stop in d.stops) if end in text]
    first = text[: min(ends)] if ends else text
    # Chat formats write the role at the start of a message.
    return first if "system" in first[:40] else None
