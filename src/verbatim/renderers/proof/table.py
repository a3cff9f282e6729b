"""For people: what is proven about a chat template, for each kind of message that may be appended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any, Literal

from verbatim.renderers.chat_template import parse_template
from verbatim.renderers.proof.claims import TOO_MANY, Prover
from verbatim.renderers.proof.side_by_side import Refusal
from verbatim.renderers.proof.situation import Situation

KINDS: Mapping[str, Mapping[str, Any]] = {
    "tool": {"appended": frozenset({"tool"}), "reply_called": True},
    "user": {"appended": frozenset({"user"}), "reply_called": False},
}
"""The answers of tools to a turn that called them; a user's message after an answer."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """What is proven for one kind of appended message."""

    kind: str
    outcome: Literal["always", "condition", "refused"]
    conditions: tuple[str, ...]
    """What is checked at run time, all of it."""
    line: int | None
    """The line of the template that forces a refusal, or the first condition."""
    reason: str
    """What may happen at that line."""


def proof_table(template: Any, variables: Sequence[str] = ("bos_token", "eos_token", "pad_token")) -> list[Row]:
    """A row for each kind of message; of a template's text, or of a tokenizer that has one.

    "always" is for every history and turn; a bridge also looks whether the turn is one that the template would write.

    Raises:
        ModelError: the template is no Jinja.
    """
    source = template
    if not isinstance(source, str):
        source, variables = template.get_chat_template(), tuple(template.special_tokens_map)
    prover = Prover(parse_template(source)[1], variables)
    return [_row(prover, kind) for kind in KINDS]


_PLAIN = "no message holds {markers}"
_CONDITIONS: Mapping[str, Mapping[str, Any]] = {
    _PLAIN: {"plain": True},
    "tools' answers carry their names": {"named": True},
    "nothing has been thought": {"thoughts": ((False, False),)},
    "the last message is a user's": {"lasts": ("user",)},
    "the last message is a tool's": {"lasts": ("tool",)},
    "no tool was called before": {
        "called": False, "lasts": ("user",), "roles": frozenset({"user", "assistant", "system"}),
    },
}  # fmt: skip
"""What is assumed under each."""


def _row(prover: Prover, kind: str) -> Row:
    first: Refusal | None = None
    for conditions in (c for number in range(4) for c in combinations(_CONDITIONS, number)):  # fewest first
        refusal = _refusal(prover, kind, conditions)
        if refusal is None:
            outcome: Literal["always", "condition"] = "condition" if conditions else "always"
            line, reason = (first.line, first.reason) if first else (None, "")
            sought = " or ".join(sorted(map(repr, prover.markers)))
            said = tuple(condition.format(markers=sought) for condition in conditions)
            return Row(kind=kind, outcome=outcome, conditions=said, line=line, reason=reason)
        first = first or refusal
        if refusal.reason == TOO_MANY:  # knowing more would hardly help, and take as long again
            break
    assert first is not None
    return Row(kind=kind, outcome="refused", conditions=(), line=first.line, reason=first.reason)


def _refusal(prover: Prover, kind: str, conditions: Sequence[str]) -> Refusal | None:
    known: dict[str, Any] = {
        "roles": frozenset({"user", "assistant", "tool", "system"}), "plain": False, "named": False, "called": True,
    }  # fmt: skip
    thoughts: Sequence[tuple[bool, bool]] = ((True, True), (True, False))
    lasts: Sequence[str] = ("user", "tool")
    for condition in conditions:
        known |= _CONDITIONS[condition]
        thoughts, lasts = known.pop("thoughts", thoughts), known.pop("lasts", lasts)
    for last, (thought, reply_thought) in product(lasts, thoughts):
        situation = Situation(**KINDS[kind], **known, last=last, thought=thought, reply_thought=reply_thought)
        refusal = prover.refusal(situation)
        if refusal is not None:
            return refusal
    return None
