"""Reads why the gateway opened a branch: it sees messages, of which the doctor's logs have only the ids."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verbatim.doctor.classes import BreakClass
from verbatim.gateway.session import INFO
from verbatim.gateway.threads import BranchReason

_CLASSES: Mapping[BranchReason, BreakClass] = {
    BranchReason.NEW_CONVERSATION: BreakClass.SUB_AGENT,
    BranchReason.SUB_AGENT: BreakClass.SUB_AGENT,
    BranchReason.PARALLEL_CALL: BreakClass.PARALLEL,
    BranchReason.SAME_PROMPT: BreakClass.PARALLEL,
    BranchReason.COMPACTION: BreakClass.HISTORY_COMPACTED,
    BranchReason.EDITED_HISTORY: BreakClass.HISTORY_REWRITTEN,
    BranchReason.REASONING_STRIPPED: BreakClass.THINKING_STRIPPED,
    BranchReason.TOOLS_CHANGED: BreakClass.TOOLS_CHANGED,
}
"""`rendered_anew` is left to the doctor, which compares the ids and says what differs."""


def recorded_reason(info: Mapping[str, Any], turn: int) -> tuple[BreakClass, str] | None:
    """The class of a break, and the evidence, where the trajectory's `info` holds the gateway's branches and this turn
    is one of them whose reason shows in messages.

    Example: `{"gateway": {"branches": [{"turn": 3, "reason": "parallel_call", "found": "another request that follows
    message 2 is under way"}]}}` explains turn 3.
    """
    ours = info.get(INFO)
    branches = ours.get("branches") if isinstance(ours, Mapping) else None
    for branch in branches if isinstance(branches, list) else ():
        if isinstance(branch, Mapping) and branch.get("turn") == turn and branch.get("reason") in _CLASSES:
            reason = BranchReason(branch["reason"])
            return _CLASSES[reason], f"{reason.replace('_', ' ')}: {branch.get('found', '')}"
    return None
