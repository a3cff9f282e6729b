"""The alarms `tool_format` and `prompt_breaks`: calls that are not read, and prompts that do not extend what was
sampled."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from verbatim.config.sections import Fraction, PositiveInt
from verbatim.core.trajectories import Fate
from verbatim.logs.monitors.alarms.base import Finding, Window, median
from verbatim.logs.monitors.alarms.break_reasons import cause_and_advice
from verbatim.logs.monitors.alarms.figures import LOOKED_AT, looks_like_a_call, own_breaks
from verbatim.rollouts.loop import TOOLS_OFFERED

_SHOWN = 5
_FEW_ROLLOUTS = 8
"""Fewer in a step say nothing."""


@dataclass(frozen=True, kw_only=True)
class ToolFormat:
    """Tools are offered, and their calls cannot be read.

    Three things are looked for in each environment, over the last steps: text that looks like calls in rollouts
    without a single readable call (a parser that does not fit the model); turns with calls of which none can be read
    (the model has lost the format); and calls that were there in the first steps and have gone, without a gain in
    reward. A model that answers without tools, as it did from the start, is left alone.
    """

    share: Fraction = 0.3
    """Share of rollouts with unread text that looks like a call, or of turns with unreadable calls."""
    gone: Fraction = 0.5
    """By how much the share of rollouts with a readable call may fall."""
    steps: PositiveInt = 3
    """Steps of the median."""

    def __call__(self, window: Window) -> Iterator[Finding]:
        """What the last steps show."""
        for env in window.envs:
            if (window.metric("offered", env) or 0) >= _FEW_ROLLOUTS:
                yield from self._look_at(window, env)

    def _look_at(self, window: Window, env: str) -> Iterator[Finding]:
        like, unread, called = (window.median(name, self.steps, env) for name in ("call_like", "unread", "called"))
        if like is None or called is None:
            return
        before = median(_first(window, env, "called"))
        gone = 0.0 if before is None or _has_gained(window, env) else before - called
        found = {
            "parser": like / max(self.share, 1e-9),
            "unreadable": (unread or 0.0) / max(self.share, 1e-9),
            "gone": gone / max(self.gone, 1e-9),
        }
        which = max(found, key=lambda name: found[name])
        numbers = {"like": like, "unread": unread or 0.0, "called": called, "before": before or 0.0}
        message, cause, advice = _words(window, env, which, numbers)
        names = ("valid_format", "tool_calls", "malformed", "truncated")
        yield Finding(
            level=found[which],
            message=message,
            cause=cause,
            advice=advice,
            env=env,
            evidence={name: value for name in names if (value := window.metric(name)) is not None},
            trajectory_ids=_without_a_call(window.fates, env) if found[which] >= 1 else (),
        )


def _words(window: Window, env: str, which: str, numbers: Mapping[str, float]) -> tuple[str, str, str]:
    """Message, cause and advice."""
    lr = window.now("trainer.optim.lr")
    if which == "parser":
        return (
            f"in {numbers['like']:.0%} of the rollouts of {env} no call was read, though their text looks like calls; "
            f"{numbers['called']:.0%} have a readable one",
            "the parser does not fit the format in which the model writes calls",
            f"set {window.now('orchestrator.renderer.name')} to the model's family, or "
            f'{window.now("orchestrator.renderer.tools")} to "hermes"; `verbatim doctor --template MODEL` shows what '
            "is parsed",
        )
    if which == "unreadable":
        is_cut = (window.metric("truncated") or 0) > 0.2
        return (
            f"in {numbers['unread']:.0%} of the turns of {env} the calls cannot be read",
            "calls are cut off" if is_cut else "the model no longer writes calls in its template's format",
            f"if they are cut off, raise {window.now('orchestrator.sampling.max_tokens')}; otherwise lower {lr}, or "
            "begin with a [warm_start] on demonstrations",
        )
    return (
        f"{numbers['called']:.0%} of the rollouts of {env} have a readable call; in the first steps "
        f"{numbers['before']:.0%} had one, and the reward has not risen",
        "the policy has unlearned to call tools",
        f"go back to a checkpoint before that and lower {lr}; look at what is rewarded in rollouts without calls",
    )


def _first(window: Window, env: str, name: str) -> list[float]:
    """Values of the run's first steps."""
    return [value for figures in window.first[:8] if (value := figures.envs.get(env, {}).get(name)) is not None]


def _has_gained(window: Window, env: str) -> bool:
    """Whether the reward is above that of the first steps."""
    before, now = median(_first(window, env, "reward")), window.median("reward", 3, env)
    return before is None or now is None or now > before


def _without_a_call(fates: Sequence[Fate], env: str) -> tuple[str, ...]:
    found = [
        fate.trajectory
        for fate in fates
        if fate.trajectory.env == env
        and fate.trajectory.error is None
        and fate.trajectory.info.get(TOOLS_OFFERED)
        and not any(call.status == "ok" for turn in fate.trajectory.turns for call in turn.tool_calls)
    ]
    found.sort(key=lambda trajectory: not looks_like_a_call(trajectory))
    return tuple(trajectory.trajectory_id for trajectory in found[:_SHOWN])


@dataclass(frozen=True, kw_only=True)
class PromptBreaks:
    """Prompts do not extend what was sampled: in each of the last steps, more than `share` of the turns after the
    first.

    Breaks count where they were there in the run's first steps too: then a template or an environment makes them.
    Those that appear later count where at least half of what was sampled has gone from the prompt; otherwise they are
    the policy's own doing (it writes what its message cannot hold), become samples of their own, and pass.

    A sub-agent may begin anew whenever it is called; only the agent that speaks first counts. Nothing is looked for
    under the strategy "branching", to which breaks are nothing.
    """

    share: Fraction = 0.2
    """The largest share."""
    steps: PositiveInt = 3
    """Steps that have to show it."""

    def __call__(self, window: Window) -> Iterator[Finding]:
        """What the last steps show."""
        if window.setting("orchestrator.trajectory_strategy") == "branching":
            return
        for env in window.envs:
            broken, rewritten = (window.recent(name, self.steps, env) for name in ("broken", "rewritten"))
            turns = window.recent("later_turns", self.steps, env)
            if len(broken) < self.steps or min(turns, default=0) < _FEW_ROLLOUTS:
                continue
            began = median(_first(window, env, "broken")[: self.steps]) or 0.0
            share = max(min(rewritten), min(*broken, began))
            cause, advice = cause_and_advice(window, env)
            yield Finding(
                env=env,
                level=share / max(self.share, 1e-9),
                message=f"{broken[-1]:.0%} of the later turns of {env} extend no sample, so each of "
                "them is a sample of its own that repeats the history",
                cause=cause,
                advice=advice,
                evidence={
                    name: value
                    for name in ("breaks", "samples", "rollouts")
                    if (value := window.metric(name)) is not None
                },
                trajectory_ids=_broken(window.fates, env) if share >= self.share else (),
            )


def _broken(fates: Sequence[Fate], env: str) -> tuple[str, ...]:
    own = [f.trajectory for f in fates if f.trajectory.env == env and f.trajectory.error is None][:LOOKED_AT]
    found = sorted(((own_breaks(t)[1], t.trajectory_id) for t in own), key=lambda pair: -pair[0])
    return tuple(name for count, name in found[:_SHOWN] if count)
