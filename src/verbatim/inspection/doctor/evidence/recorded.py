"""Reads the reason that the run itself recorded for a break.

The run knew the messages and the parsed responses, whereas the log has only token ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verbatim.inspection.doctor.classes import BreakClass
from verbatim.models.renderers.conversation import BreakReason
from verbatim.rollouts.gateway.session import INFO
from verbatim.rollouts.gateway.threads import BranchReason
from verbatim.rollouts.loop import rendered_again

_CLASSES: Mapping[BranchReason, BreakClass] = {
    BranchReason.NEW_CONVERSATION: BreakClass.SUB_AGENT,
    BranchReason.SUB_AGENT: BreakClass.SUB_AGENT,
    BranchReason.PARALLEL_CALL: BreakClass.PARALLEL,
    BranchReason.SAME_PROMPT: BreakClass.PARALLEL,
    BranchReason.COMPACTION: BreakClass.HISTORY_COMPACTED,
    BranchReason.HISTORY_EDITED: BreakClass.HISTORY_REWRITTEN,
    BranchReason.REASONING_STRIPPED: BreakClass.THINKING_STRIPPED,
    BranchReason.TOOLS_CHANGED: BreakClass.TOOLS_CHANGED,
}
"""The class for each recorded reason. `rendered_again` is absent, because a comparison of the ids says more than this
reason."""


_RENDERED: Mapping[BreakReason, BreakClass] = {
    BreakReason.CONTROL_TOKEN: BreakClass.CONTROL_TOKEN,
    BreakReason.OTHER_END: BreakClass.STOP_TOKEN,
    BreakReason.OPEN_THOUGHT: BreakClass.OPEN_THOUGHT,
    BreakReason.TOOLS_CHANGED: BreakClass.TOOLS_CHANGED,
    BreakReason.OTHER_MESSAGES: BreakClass.OTHER_MESSAGES,
    BreakReason.THOUGHT_DROPPED: BreakClass.THINKING_STRIPPED,
    BreakReason.FORMAT_UNKNOWN: BreakClass.FORMAT_UNKNOWN,
    BreakReason.HISTORY_TEMPLATE: BreakClass.HISTORY_TEMPLATE,
}
"""The class for each recorded reason. `history_edited` is absent, because a comparison of the ids says more than this
reason."""


def recorded_reason(info: Mapping[str, Any], turn: int) -> tuple[BreakClass, str] | None:
    """The class of a break and the evidence, if the trajectory's `info` gives a reason for the turn; else None.

    `info` lists the gateway's branches, and the turns whose prompts were rendered from scratch.

    Example: `{"gateway": {"branches": [{"turn": 3, "reason": "parallel_call", "found": "another request that follows
    message 2 is under way"}]}}` explains turn 3.
    """
    ours = info.get(INFO)
    branches = ours.get("branches") if isinstance(ours, Mapping) else None
    for branch in branches if isinstance(branches, list) else ():
        if isinstance(branch, Mapping) and branch.get("turn") == turn and branch.get("reason") in _CLASSES:
            reason = BranchReason(branch["reason"])
            return _CLASSES[reason], f"{reason.replace('_', ' ')}: {branch.get('found', '')}"
    for index, why in rendered_again(info):
        if index == turn and why in _RENDERED:
            return _RENDERED[why], f"{why.replace('_', ' ')}: {why.sentence}"
    return None
