"""Finds breaks without changed history: the prompt belongs to another conversation."""

from __future__ import annotations

from verbatim.doctor.difference import Difference, common_prefix
from verbatim.doctor.text import counted


def another_conversation(d: Difference) -> str | None:
    """A prompt that replaces no history: its agent has none, or the compared conversation continues."""
    agent, last = d.turns[d.opening.turn].agent, d.opening.against[-1]
    if d.opening.first_of_agent:
        return f"the first turn of agent {agent!r}; its prompt shares {counted(d.at, 'token')} with turn {last}"
    if d.opening.goes_on and d.at < len(d.prompt):
        return f"another conversation: the one of turn {last} goes on after it"
    return None


def another_system_message(d: Difference) -> str | None:
    """Another system message, and no completion of the earlier conversation."""
    if len({turn.agent for turn in d.turns}) > 1:
        return None  # the log names the agents
    earlier, now = d.opening_texts
    same = common_prefix(earlier, now)
    system, other = _system_message(d, earlier), _system_message(d, now)
    if system is None or other is None or not all(map(d.is_gone, d.spans)):
        return None
    if same * 2 >= min(len(system), len(other)):
        return None
    return "another system message, and nothing that was said before: a conversation of its own"


def _system_message(d: Difference, text: str) -> str | None:
    """The text up to the first end of a message, if it is a system message; else None."""
    assert d.text is not None
    ends = [text.find(end) for end in (d.text.decode([stop]) for stop in d.stops) if end in text]
    first = text[: min(ends)] if ends else text
    return first if "system" in first[:40] else None
