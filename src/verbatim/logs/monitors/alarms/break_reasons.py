"""Says why prompts did not continue what was sampled, and what to change, from what rollouts have noted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from verbatim.logs.monitors.alarms.base import Window
from verbatim.models.renderers import BreakReason
from verbatim.rollouts.loop import RENDERED_ANEW

_SHOWN = 2
"""Reasons that are named, the most common ones."""
_REASONS = frozenset(BreakReason)
KEYS: Mapping[BreakReason, str] = {
    **dict.fromkeys((BreakReason.CONTROL_TOKEN, BreakReason.OTHER_END, BreakReason.OPEN_THOUGHT), "warm_start.steps"),
    BreakReason.THOUGHT_DROPPED: "orchestrator.renderer.thinking_retention",
    BreakReason.FORMAT_UNKNOWN: "orchestrator.renderer.name",
    BreakReason.HISTORY_TEMPLATE: "orchestrator.renderer.history",
}
"""The key that a reason's advice names last; its present value is told behind it."""
CAUSE = "the chat template rewrites history, or the environment changes messages that were sampled"
"""Where nothing is noted: other people's agents send the prompts."""
ADVICE = "`verbatim doctor RUN` shows the tokens and the reason"


def cause_and_advice(window: Window, env: str) -> tuple[str, str]:
    """Both, for an environment's rollouts of a step: the reasons with their turns and the tokens of their prompts, and
    what helps against each."""
    turns: Counter[BreakReason] = Counter()
    tokens: Counter[BreakReason] = Counter()
    for fate in window.fates:
        trajectory = fate.trajectory
        noted = trajectory.info.get(RENDERED_ANEW) if trajectory.env == env and trajectory.error is None else None
        for one in noted if isinstance(noted, list) else ():  # `info` is the environment's
            reason, turn = (one.get("reason"), one.get("turn")) if isinstance(one, Mapping) else (None, None)
            if reason in _REASONS and isinstance(turn, int) and 0 <= turn < len(trajectory.turns):
                turns[BreakReason(reason)] += 1
                tokens[BreakReason(reason)] += trajectory.turns[turn].num_prompt_tokens
    common = [reason for reason, _ in turns.most_common(_SHOWN)]
    if not common:
        return CAUSE, ADVICE
    cause = "; ".join(f"{reason.sentence} ({reason}: {turns[reason]} turns)" for reason in common)
    advice = "; ".join(
        f"{reason.advice}{window.now(KEYS[reason]).removeprefix(KEYS[reason]) if reason in KEYS else ''}, "
        f"and the step computes up to {tokens[reason]:,} prompt tokens less"
        for reason in common
    )
    return cause, f"{advice}. {ADVICE}"
