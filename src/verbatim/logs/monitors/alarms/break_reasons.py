"""Finds the causes of breaks, and what to do about them, from the reasons that rollouts have recorded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from verbatim.logs.monitors.alarms.rule import Window
from verbatim.models.renderers import BreakReason
from verbatim.rollouts.loop import rendered_again

_SHOWN = 2
"""Maximum number of reasons that an alarm names, starting with the most common."""
KEYS: Mapping[BreakReason, str] = {
    **dict.fromkeys((BreakReason.CONTROL_TOKEN, BreakReason.OTHER_END, BreakReason.OPEN_THOUGHT), "warm_start.steps"),
    BreakReason.THOUGHT_DROPPED: "orchestrator.renderer.thinking_retention",
    BreakReason.FORMAT_UNKNOWN: "orchestrator.renderer.name",
    BreakReason.HISTORY_TEMPLATE: "orchestrator.renderer.history",
}
"""The configuration key with which a reason's advice ends. The alarm appends the key's current value."""
CAUSE = "the chat template rewrites history, or the environment changes messages that were sampled"
"""The cause to report if no reason was recorded, for example because the prompts come from an external agent
program."""
ADVICE = "`verbatim doctor RUN` shows the tokens and the reason"


def cause_and_advice(window: Window, env: str) -> tuple[str, str]:
    """Cause and advice for the rollouts of an environment in the latest step: the cause lists the most common reasons
    with their numbers of turns; the advice says what to change for each reason, and how many prompt tokens this change
    saves."""
    noted = [
        (reason, trajectory.turns[turn].num_prompt_tokens)
        for trajectory in (outcome.trajectory for outcome in window.outcomes)
        if trajectory.env == env and trajectory.error is None
        for turn, reason in rendered_again(trajectory.info)
        if 0 <= turn < len(trajectory.turns)
    ]
    common = Counter(reason for reason, _ in noted).most_common(_SHOWN)
    if not common:
        return CAUSE, ADVICE
    tokens = {reason: sum(count for other, count in noted if other is reason) for reason, _ in common}
    cause = "; ".join(f"{reason.sentence} ({reason}: {turns} turns)" for reason, turns in common)
    advice = "; ".join(
        f"{reason.advice}{window.now(KEYS[reason]).removeprefix(KEYS[reason]) if reason in KEYS else ''}, "
        f"which saves up to {tokens[reason]:,} prompt tokens in the step"
        for reason in tokens
    )
    return cause, f"{advice}. {ADVICE}"
