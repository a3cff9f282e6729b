"""What the alarms look for: each condition reads a window, and says how far it has gone.

`table.py` has their thresholds, texts and evidence. A level of 1 is where the alarm is raised.
"""

from __future__ import annotations

import dataclasses
import math
import re
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate

from verbatim.config.sections import FinitePositive, Fraction, NonNegativeFloat, PositiveInt
from verbatim.core.records.equality import are_equal
from verbatim.core.trajectories import first_version
from verbatim.logs.monitors.alarms.break_reasons import cause_and_advice
from verbatim.logs.monitors.alarms.change import chance_of_rise
from verbatim.logs.monitors.alarms.rule import (
    HOLD,
    UNTRAINED,
    Sight,
    StepFigures,
    Window,
    over,
)

# -- the distance between the policy that sampled and the policy that is trained


def mismatch_kl(window: Window, *, bound: FinitePositive, steps: PositiveInt) -> Iterator[Sight]:
    """The mismatch KL between sampler and trainer is above `bound`, as the median of the last steps.

    A few bad batches are no alarm: more than half of the steps have to be above. Recipes that learn are below 0.005 on
    average; their policies fall for up to eight steps at times, and come back by themselves.
    """
    if (value := window.median("mismatch_kl", steps)) is not None:
        yield Sight(level=value / bound, values={"value": value}, why=_why_off_policy(window))


def masked_tokens(window: Window, *, share: Fraction, steps: PositiveInt) -> Iterator[Sight]:
    """The loss masks more than `share` of the trained tokens, as the median of the last steps."""
    counts = window.together(("masked_by_loss", "trained_tokens"), steps)
    if any(trained for _, trained in counts):
        value = statistics.median(masked / trained if trained else 0.0 for masked, trained in counts)
        yield Sight(level=over(value, share), values={"value": value}, why=_why_off_policy(window))


def kept_set_bytes(window: Window, *, bound: FinitePositive, steps: PositiveInt) -> Iterator[Sight]:
    """The ids among which tokens were drawn take more than `bound` bytes for each trained token, 4 for an id, as the
    median of the last steps. They are in every record, file and batch of the run."""
    if sizes := window.together(("kept_ids/mean", "kept_ids/cut"), steps):
        value = statistics.median(4 * mean * cut for mean, cut in sizes)
        yield Sight(level=value / bound, values={"value": value})


def _why_off_policy(window: Window) -> str:
    """The cause that the other metrics point to, the surest first."""
    canary, allowed = window.metric("weights/canary") or 0.0, window.metric("weights/canary_allowed") or 0.0
    asked, age = window.setting("orchestrator.max_async_level") or 0, window.metric("staleness/mean") or 0.0
    at_first = window.first[0].metrics.get("mismatch_kl", 0.0) if window.first else 0.0
    causes = {
        "other weights": canary > max(0.01, 0.5 * allowed),
        "cut distribution": (window.metric("truncation_mismatch") or 0.0) > 0,
        "old rollouts": age > float(asked) + 0.5,
        "precision": window.step <= 10 and at_first > 0.01,
        "optimizer steps": (window.setting("trainer.optimizer_steps_per_batch") or 1) > 1,
    }
    return next((name for name, holds in causes.items() if holds), "")


def staleness(window: Window, *, beyond: NonNegativeFloat, dropped: Fraction, steps: PositiveInt) -> Iterator[Sight]:
    """Rollouts are older than the run was set up for, or too many are dropped for their age.

    With `max_async_level` of k, rollouts are k steps old; those that take longer are a step older for each step. Their
    mean age may be `beyond` steps above k.
    """
    asked = float(window.setting("orchestrator.max_async_level") or 0)
    age = window.median("staleness/mean", steps)
    if age is None:
        return
    counts = window.together(("staleness/dropped", "rollouts"), steps)
    lost = statistics.median([lost / (lost + kept) if lost + kept else 0.0 for lost, kept in counts] or [0.0])
    records = [outcome.trajectory for outcome in window.outcomes]
    version, env = min(((v, t.env) for t in records if (v := first_version(t)) is not None), default=(None, None))
    yield Sight(
        level=max(over(age, asked + beyond), over(lost, dropped)),
        values={"age": age, "asked": asked, "lost": lost, "step": window.step, "version": version, "oldest": env},
        why="stuck" if version == 0 and window.step > 4 else "slow" if version is not None else "",
    )


# -- a policy that no longer explores


_STILL_RISES = 0.05
"""The chance below which a reward counts as still rising: less strict than for an alarm, so that a run that learns is
left alone."""


def entropy_collapse(window: Window, *, share: Fraction, solved: Fraction, steps: PositiveInt) -> Iterator[Sight]:
    """The entropy has fallen to `share` of what it was in the first steps, the task is not solved (a success of
    `solved`), and the reward no longer rises.

    Entropy falls in every run that learns, to a hundredth and less in recipes that end with a success of 1. It is a
    fault only where nothing is gained by it any more. In other modes than "rl", a teacher's entropy is the aim.
    """
    before, now = window.median_at_first("entropy", steps), window.median("entropy", steps)
    success, earlier = window.median("success", steps), window.earlier("reward/mean", steps)
    is_rl = window.setting("orchestrator.training_mode") in (None, "rl")
    if not is_rl or not before or now is None or success is None or not earlier:
        return
    is_fine = (
        success >= solved
        or _is_mastered(window, steps)
        or chance_of_rise(earlier[-1], window.recent("reward/mean", steps)) < _STILL_RISES
    )
    yield Sight(
        level=0.0 if is_fine else before * share / max(now, 1e-12),
        values={"left": now / before},
        evidence={"entropy": now, "success": success, "entropy of the first steps": before},
    )


def _is_mastered(window: Window, count: int, env: str | None = None) -> bool:
    """Whether the reward is as high as it can be, though the success may not say so: it rose since the run's first
    steps by a standard deviation of their rollouts, and of that deviation less than a quarter is left.

    Example: rewards between 0 and 0.5 with a mean of 0.3 and a deviation of 0.1, which all are 0.5 now.
    """
    names = ("reward/mean", "reward/std") if env is None else ("reward", "reward_std")
    was, spread = (window.median_at_first(name, count, env) for name in names)
    now, left = (window.median(name, count, env) for name in names)
    if was is None or spread is None or now is None or left is None:
        return False
    return now >= was + spread and not are_equal((was, was + spread)) and left < spread / 4


# -- calls that are not read, and prompts that do not extend what was sampled


_FEW_ROLLOUTS = 8
"""Fewer in a step say nothing."""


def tool_format(window: Window, *, share: Fraction, gone: Fraction, steps: PositiveInt) -> Iterator[Sight]:
    """Tools are offered, and their calls cannot be read.

    Three things are looked for in each environment, over the last steps: text that looks like calls in `share` of the
    rollouts, without a single readable call (a parser that does not fit the model); `share` of the turns with calls of
    which none can be read (the model has lost the format); and calls that were there in the first steps and have gone
    from `gone` of the rollouts, without a gain in reward. A model that answers without tools, as it did from the start,
    is left alone.
    """
    for env in window.envs:
        like, unread, called = (window.median(name, steps, env) for name in ("call_like", "unread", "called"))
        if (window.metric("offered", env) or 0) < _FEW_ROLLOUTS or like is None or called is None:
            continue
        before, reward = (window.median_at_first(name, 8, env) for name in ("called", "reward"))
        now, unread = window.median("reward", 3, env), unread or 0.0
        is_worth = before is None or reward is None or now is None or now > reward
        is_cut = (window.metric("truncated") or 0) > 0.2
        levels = {
            "parser": over(like, share),
            "cut off" if is_cut else "unreadable": over(unread, share),
            "gone": 0.0 if before is None or is_worth else over(before - called, gone),
        }
        why = max(levels, key=lambda name: levels[name])
        values = {"like": like, "unread": unread, "called": called, "before": before or 0.0}
        yield Sight(level=levels[why], env=env, why=why, values=values)


def prompt_breaks(window: Window, *, share: Fraction, steps: PositiveInt) -> Iterator[Sight]:
    """Prompts do not extend what was sampled: in each of the last steps, more than `share` of the turns after the
    first.

    Breaks count where they were there in the run's first steps too: then a template or an environment makes them.
    Those that appear later count where at least half of what was sampled has gone from the prompt; otherwise they are
    the policy's own doing (it writes what its message cannot hold), become samples of their own, and pass.

    A sub-agent may begin anew whenever it is called; only the agent that speaks first counts. Nothing is looked for
    under the strategy "branching", to which breaks are nothing.
    """
    if window.setting("orchestrator.trajectory_strategy") == "branching":
        return
    for env in window.envs:
        broken, rewritten, turns = (window.recent(name, steps, env) for name in ("broken", "rewritten", "later_turns"))
        if len(broken) < steps or min(turns, default=0) < _FEW_ROLLOUTS:
            continue
        began = window.median_at_first("broken", steps, env) or 0.0
        cause, advice = cause_and_advice(window, env)
        yield Sight(
            level=over(max(min(rewritten), min(*broken, began)), share),
            env=env,
            values={"broken": broken[-1], "cause": cause, "advice": advice},
        )


# -- rollouts that are sampled and teach nothing


_OF_ERRORS = ("error", "stale", "cancelled", "lost_worker", "lost_replica", "empty")
"""Reasons that no filter and no advantage gave."""
_GROUPS = 20
"""Groups that an environment's share has to be expected of, until it is compared."""


def everything_filtered(
    window: Window, *, share: Fraction, solved: Fraction, rollouts: PositiveInt, steps: PositiveInt
) -> Iterator[Sight]:
    """`share` of an environment's latest rollouts are filtered or cannot be trained, and the task is not solved.

    At least `rollouts` completed ones are counted, and `steps` steps: in few groups all rewards may be equal by chance.
    Where the success is `solved` or more, or every rollout earns the most, groups of equal rewards are what learning
    leads to. Rollouts that failed or are too old have alarms of their own.
    """
    for env in window.envs:
        found = _fewest_steps(window, steps, rollouts, [step.of(env).get("completed", 0.0) for step in window.steps])
        names = dict.fromkeys(name for step in found for name in step.of(env) if name.startswith(UNTRAINED))
        reasons = [name.removeprefix(UNTRAINED) for name in names]
        counts = Counter({why: _total(found, env, f"{UNTRAINED}{why}") for why in reasons if why not in _OF_ERRORS})
        is_solved = max((own.of(env).get("success", 0.0) for own in found), default=0.0) >= solved
        if not counts or is_solved or _is_mastered(window, steps, env):
            continue
        completed, latest = _total(found, env, "completed"), found[-1].of(env)
        dropped = counts.total() / completed
        ((reason, _),) = counts.most_common(1)
        yield Sight(
            level=over(dropped, share),
            env=env,
            why=reason,
            values={
                "dropped": dropped,
                "completed": completed,
                "counted": len(found),
                "reason": reason,
                "success": latest.get("success", 0.0),
            },
            evidence={f"{UNTRAINED}{name}": float(count) for name, count in counts.items()}
            | {name: latest[name] for name in ("rollouts", "reward", "reward_std") if name in latest},
        )


def pools_dry(window: Window, *, left: Fraction) -> Iterator[Sight]:
    """At most `left` of an environment's examples are still sampled; all others are in the easy or the hard pool."""
    metrics = window.steps[-1].metrics if window.steps else {}
    for env in (name[len("pool/") : -len("/normal")] for name in metrics if re.fullmatch("pool/.*/normal", name)):
        pools = {f"pool/{env}/{pool}": metrics.get(f"pool/{env}/{pool}", 0.0) for pool in ("normal", "easy", "hard")}
        normal, easy, hard = pools.values()
        yield Sight(
            level=over(1 - normal, 1 - left),
            env=env,
            why="hard" if hard > easy else "easy",
            values={"normal": normal, "easy": easy, "hard": hard},
            evidence=pools,
        )


def environment_starves(window: Window, *, share: Fraction, steps: PositiveInt) -> Iterator[Sight]:
    """One of several environments has few rollouts, or none that can be trained, while others are trained.

    Expected are its `ratio` of the groups; it starves at `share` of them. The window has at least `steps` steps, and is
    as long as it takes to expect 20 groups: independent draws give a quarter of that or less once in 14,000 windows.
    Rollouts that a filter dropped have an alarm of their own.
    """
    ratios = {
        str(env.get("name") or env.get("id") or env.get("import_path")): float(env.get("ratio", 1.0))
        for env in window.setting("orchestrator.train.env") or ()
    }
    if len(ratios) < 2:
        return
    started = [sum(step.of(env).get("rollouts", 0.0) for env in ratios) for step in window.steps]
    groups = float(window.setting("orchestrator.group_size") or 1) * _GROUPS * sum(ratios.values())
    for env, ratio in ratios.items():
        enough = groups / ratio if ratio else math.inf
        found = _fewest_steps(window, steps, enough, started)
        if not any(_total(found, other, "completed") for other in ratios):
            continue
        rollouts, failed, stale = (_total(found, env, name) for name in ("rollouts", "failed", f"{UNTRAINED}stale"))
        usable = _total(found, env, "completed") - stale
        expected = ratio / sum(ratios.values()) * sum(_total(found, other, "rollouts") for other in ratios)
        yield Sight(
            level=share * expected / max(usable, 1e-9 * expected),
            env=env,
            why="failed" if failed > rollouts / 2 else "stale" if stale > rollouts / 2 else "",
            values={"usable": usable, "counted": len(found)},
            evidence={"rollouts": rollouts, "failed": failed, "expected": expected},
        )


def _fewest_steps(window: Window, steps: int, enough: float, amounts: Sequence[float]) -> Sequence[StepFigures]:
    """The fewest latest steps, at least `steps`, whose amounts add up to enough; empty where all do not."""
    totals = enumerate(accumulate(reversed(amounts)), start=1)
    count = next((count for count, total in totals if count >= steps and total >= enough), 0)
    return window.steps[-count:] if count else ()


def _total(steps: Sequence[StepFigures], env: str, name: str) -> float:
    return sum(figures.of(env).get(name, 0.0) for figures in steps)


def repeated_error(window: Window, *, share: Fraction, rollouts: PositiveInt, steps: PositiveInt) -> Iterator[Sight]:
    """The same error ends `share` of an environment's rollouts, and at least `rollouts` of them, in the last steps; in
    the run's first steps fewer are counted together.

    Two errors are the same if they differ in numbers and quoted values only.
    """
    found = window.steps[-steps:]
    for env in window.envs:
        kinds = sum((Counter(step.errors.get(env, {})) for step in found), Counter[str]())
        total = _total(found, env, "rollouts")
        if not kinds or not total:
            continue
        ((kind, count),) = kinds.most_common(1)
        yield Sight(
            level=min(over(count / total, share), count / rollouts),
            env=env,
            why=kind.partition(":")[0],
            values={
                "kind": kind,
                "count": count,
                "total": total,
                "counted": len(found),
                "others": f"; {len(kinds) - 1} other kinds" if len(kinds) > 1 else "",
            },
            evidence={
                "rollouts": total,
                "failed": float(kinds.total()),
                f"errors/{kind.partition(':')[0]}": float(count),
            },
        )


# -- a side of the run that has nothing to do


def sampler_idle(window: Window, *, share: Fraction, seconds: NonNegativeFloat, steps: PositiveInt) -> Iterator[Sight]:
    """The sampler has nothing to do for `share` of the time, and for `seconds` of a step, as the median of the last
    steps. Where steps are short, waiting costs little.

    Where the two sides take turns (`max_async_level = 0`, or one device for both) that is how the run was set up; so it
    is in the mode "sft", where a teacher plays the episodes and the sampler the evaluations alone. Where the trainer
    waits as much, neither side is the slower one, and `trainer_idle` says what to do.
    """
    own, other = (_waits(window, side, share, seconds, steps) for side in ("sampler", "trainer"))
    if own is not None and window.setting("orchestrator.training_mode") != "sft":
        yield dataclasses.replace(own, level=0.0) if other is not None and other.level >= HOLD else own


def trainer_idle(window: Window, *, share: Fraction, seconds: NonNegativeFloat, steps: PositiveInt) -> Iterator[Sight]:
    """The trainer has nothing to do for `share` of the time, and for `seconds` of a step, as the median of the last
    steps.

    A trainer that is given little, because filters dropped most rollouts, is counted as if it had been given all of
    them: what it needed, over the trained share of the tokens.
    """
    own, other = (_waits(window, side, share, seconds, steps) for side in ("trainer", "sampler"))
    if own is not None:
        both_wait = other is not None and other.level >= HOLD
        is_sft = window.setting("orchestrator.training_mode") == "sft"
        yield dataclasses.replace(own, why="teacher" if is_sft else "both wait" if both_wait else "")


def _waits(window: Window, side: str, share: float, seconds: float, count: int) -> Sight | None:
    """How much a side waits; None where the sides take turns or nothing is measured.

    The time of the step is what the side waited and worked, at least the time between two steps: an evaluation and a
    checkpoint are in it.
    """
    if not window.setting("orchestrator.max_async_level") or window.metric("time/sampler_asleep") is not None:
        return None
    names = ("seconds", "rollouts", "completion_tokens", "trained_tokens") if side == "trainer" else ()
    found = window.together((f"time/{side}_idle", "time/step", *names), count)
    rows = [row for row in found if row[1] and row[-1]]
    if not rows or 2 * len(rows) < count:
        return None
    waits = [_waited(*row) for row in rows]
    idle, waiting = statistics.median(waits), statistics.median(w / row[1] for w, row in zip(waits, rows, strict=True))
    return Sight(
        level=min(over(waiting, share), over(idle, seconds)),
        values={
            "idle": idle,
            "waits": waiting,
            "step": window.median("time/step", count),
            "backend": window.setting("inference.backend"),
        },
    )


def _waited(
    wait: float, step: float, work: float = 0.0, rollouts: float = 0.0, tokens: float = 0.0, trained: float = 1.0
) -> float:
    """Seconds of a step in which a side that works so many seconds for its trained tokens would wait if all tokens of
    all rollouts were trained."""
    return max(0.0, min(wait, step - work * rollouts * tokens / trained))
