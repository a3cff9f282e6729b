"""Says why prompts did not continue what was sampled, and what to change, from what rollouts have noted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from verbatim.logs.monitors.alarms.rule import Window
from verbatim.models.renderers import BreakReason
from verbatim.rollouts.loop import rendered_anew

_SHOWN = 2
"""Reasons that are named, the most common ones."""
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
    noted = [
        (reason, trajectory.turns[turn].num_prompt_tokens)
        for trajectory in (outcome.trajectory for outcome in window.outcomes)
        if trajectory.env == env and trajectory.error is None
        for turn, reason in rendered_anew(trajectory.info)
        if 0 <= turn < len(trajectory.turns)
    ]
    common = Counter(reason for reason, _ in noted).most_common(_SHOWN)
    if not common:
        return CAUSE, ADVICE
    tokens = {reason: sum(count for other, count in noted if other is reason) for reason, _ in common}
    cause = "; ".join(f"{reason.sentence} ({reason}: {turns} turns)" for reason, turns in common)
    advice = "; ".join(
        f"{reason.advice}{window.now(KEYS[reason]).removeprefix(KEYS[reason]) if reason in KEYS else ''}, "
        f"and the step computes up to {tokens[reason]:,} prompt tokens less"
        for reason in tokens
    )
    return cause, f"{advice}. {ADVICE}"
