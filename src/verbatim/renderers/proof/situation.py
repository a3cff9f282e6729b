"""What is known of a history, of the turn that is sampled after it, and of what is appended; and nothing more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verbatim.renderers.proof.symbolic import Term
from verbatim.renderers.proof.values import Entry

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Where templates look for what a model thought."""


@dataclass(frozen=True, kw_only=True)
class Situation:
    """Every content is text, and messages have the fields of chat messages only."""

    roles: frozenset[str]
    """Of the history's messages."""
    last: str
    """The role of the last of them."""
    plain: bool
    """No content of the history holds a marker that the template looks for in texts."""
    thought: bool
    """An assistant's message of the history may have reasoning."""
    called: bool
    """An assistant's message of the history may have tool calls."""
    named: bool
    """Every tool's answer says which tool it is from, the appended ones too."""
    reply_thought: bool
    """The sampled turn has reasoning."""
    reply_called: bool
    """The sampled turn has tool calls."""
    appended: frozenset[str]
    """The roles of the appended messages."""

    @property
    def may_be_shown_by_one(self) -> bool:
        """Whether a single message is a history like this one, so far as a continuation may depend on it."""
        return self.last == "user" or "user" not in self.roles

    def past(self, name: str, role: str) -> Entry:
        """Any message of that role in the history."""
        return self._entry(name, role, Term("plain" if self.plain else "text", (name, "content")))

    def new(self, name: str, role: str) -> Entry:
        """Any message of that role among the appended ones."""
        return self._entry(name, role, Term("text", (name, "content")))

    def reply(self) -> Entry:
        """Any sampled turn of this kind."""
        known: list[tuple[str, Any]] = [("role", "assistant"), ("content", Term("text", ("reply", "content")))]
        if self.reply_thought:
            reasoning = Term("text", ("reply", "reasoning"))
            known += [("reasoning_content", reasoning), ("thinking", reasoning)]
        if self.reply_called:
            known.append(("tool_calls", Term("some", ("reply", "calls"))))
        return Entry("reply", tuple(known), rest=False)

    def _entry(self, name: str, role: str, content: Term) -> Entry:
        maybe = ["name", "tool_call_id"]
        if role == "assistant":
            maybe += REASONING if self.thought else ()
            maybe += ["tool_calls"] if self.called else ()
        fields = {key: Term("field", (name, key)) for key in maybe}
        if role == "tool" and self.named:
            fields["name"] = Term("word", (name, "name"))
        return Entry(name, (("role", role), ("content", content), *fields.items()), rest=False)
