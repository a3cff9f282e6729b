"""The conditions of the alarms. Each reads a window and returns a level; at level 1 the alarm is raised.

`table.py` defines their thresholds, texts and evidence.
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

    A few bad batches do not raise the alarm, because at least half of the steps must be above `bound`. In recipes that
    learn, the average is below 0.005, though at times their policies degrade for up to eight steps and recover.
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
    """Kept sets take more than `bound` bytes per trained token (4 bytes per id), as the median of the last steps. Kept
    sets are stored in every record, file and batch of the run."""
    if sizes := window.together(("kept_ids/mean", "kept_ids/cut"), steps):
        value = statistics.median(4 * mean * cut for mean, cut in sizes)
        yield Sight(level=value / bound, values={"value": value})


def _why_off_policy(window: Window) -> str:
    """The cause that other metrics suggest: the first that applies, in the order of certainty."""
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
    """Rollouts are older than configured, or too many are dropped because of their age.

    With `max_async_level = k`, rollouts are k steps old, plus the number of steps that their episodes take. Their mean
    age may exceed k by `beyond` steps.
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
"""The p-value below which the reward counts as still rising. It is larger than `change.SURE`, so that a run that still
learns does not raise the alarm."""


def entropy_collapse(window: Window, *, share: Fraction, solved: Fraction, steps: PositiveInt) -> Iterator[Sight]:
    """The entropy has fallen to `share` of its value in the first steps, the task is not solved (success below
    `solved`), and the reward no longer rises.

    Entropy falls in every run that learns, to a hundredth or less in recipes that reach a success of 1. It is a problem
    only if the reward no longer improves. In modes other than "rl" the policy should match a teacher's entropy, so the
    condition does not apply.
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
    """True if the reward seems to be at its maximum, even if success does not show it: compared with the first steps,
    the reward has risen by at least its standard deviation in those steps, and the standard deviation has fallen to
    less than a quarter of what it was in those steps.

    Example: the rewards, which are between 0 and 0.5, first had a mean of 0.3 and a standard deviation of 0.1, and now
    are all 0.5.
    """
    names = ("reward/mean", "reward/std") if env is None else ("reward", "reward_std")
    was, spread = (window.median_at_first(name, count, env) for name in names)
    now, left = (window.median(name, count, env) for name in names)
    if was is None or spread is None or now is None or left is None:
        return False
    return now >= was + spread and not are_equal((was, was + spread)) and left < spread / 4


# -- calls that cannot be read, and prompts that do not extend the sampled tokens


_FEW_ROLLOUTS = 8
"""Minimum number of rollouts, or of turns after the first, in a step for these conditions to apply."""


def tool_format(window: Window, *, share: Fraction, gone: Fraction, steps: PositiveInt) -> Iterator[Sight]:
    """Tools are offered, but their calls cannot be read.

    Three cases are detected in each environment, over the last steps. `share` of the rollouts have text that looks like
    calls but no readable call, so the parser does not fit the model. Or `share` of the turns have calls that are all
    unreadable, so the model has lost the format. Or the share of rollouts with calls has fallen by `gone` since the
    first steps, without a gain in reward. A model that never used tools does not raise the alarm.
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
    """Prompts break: in each of the last steps, more than `share` of the turns after the first do not extend an earlier
    turn.

    Breaks count if the run's first steps had them too, because then a template or an environment causes them. Breaks
    that appear later count if at least half of the previous completion is missing from the prompt. Other late breaks
    come from the policy, which samples tokens that a message cannot represent. These turns become separate samples, and
    such breaks usually stop.

    Only the agent that speaks first counts, because a sub-agent's conversation may start from scratch at each call. The
    condition does not apply to the strategy "branching", for which breaks cost nothing.
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


# -- rollouts that are sampled but teach nothing


_OF_ERRORS = ("error", "stale", "cancelled", "lost_worker", "lost_replica", "empty")
"""Reasons for dropping rollouts that are failures instead of decisions of a filter or an advantage."""
_GROUPS = 20
"""Number of groups that an environment should have received, by its ratio, before the condition judges its share."""


def everything_filtered(
    window: Window, *, share: Fraction, solved: Fraction, rollouts: PositiveInt, steps: PositiveInt
) -> Iterator[Sight]:
    """`share` of an environment's latest rollouts are filtered or cannot be trained, and the task is not solved.

    At least `rollouts` completed rollouts and `steps` steps are counted, because the rewards of a few groups may be
    equal by chance. If success is `solved` or more, or all rewards are at their maximum, equal rewards are the result
    of learning. There are separate alarms for rollouts that failed or are too old.
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
    """At most the share `left` of an environment's examples are still sampled. The others are in the easy or the hard
    pool."""
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
    """One of several environments has few or no rollouts that can be trained, while others are trained.

    An environment should get its `ratio` of the groups, and starves if it gets no more than `share` of that number. The
    condition looks at the latest `steps` steps. If fewer than 20 groups of the environment are expected in these steps,
    it looks at as many steps as 20 expected groups need. If groups are sampled independently, a quarter of these groups
    or fewer occur by chance once in 14,000 windows. There is a separate alarm for rollouts that a filter dropped.
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
    """The smallest number of latest steps, but at least `steps`, whose amounts add up to `enough`; empty if there are
    too few."""
    totals = enumerate(accumulate(reversed(amounts)), start=1)
    count = next((count for count, total in totals if count >= steps and total >= enough), 0)
    return window.steps[-count:] if count else ()


def _total(steps: Sequence[StepFigures], env: str, name: str) -> float:
    return sum(figures.of(env).get(name, 0.0) for figures in steps)


def repeated_error(window: Window, *, share: Fraction, rollouts: PositiveInt, steps: PositiveInt) -> Iterator[Sight]:
    """In the last steps, the same error ended at least `share` of an environment's rollouts, and at least `rollouts`
    rollouts. At the start of a run, only the steps done so far are counted.

    Two errors are the same if they differ only in numbers and quoted values.
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


# -- a sampler or a trainer that has nothing to do


def sampler_idle(window: Window, *, share: Fraction, seconds: NonNegativeFloat, steps: PositiveInt) -> Iterator[Sight]:
    """The sampler is idle for `share` of the time and for `seconds` of a step, as medians of the last steps. The bound
    in seconds is needed because waiting costs little if steps are short.

    The condition does not apply if the two sides take turns (`max_async_level = 0`, or one device for both), or in mode
    "sft", in which a teacher plays the episodes and the sampler only plays the evaluations. If the trainer waits for as
    long, neither side is the bottleneck, and only `trainer_idle` raises an alarm.
    """
    own, other = (_waits(window, side, share, seconds, steps) for side in ("sampler", "trainer"))
    if own is not None and window.setting("orchestrator.training_mode") != "sft":
        yield dataclasses.replace(own, level=0.0) if other is not None and other.level >= HOLD else own


def trainer_idle(window: Window, *, share: Fraction, seconds: NonNegativeFloat, steps: PositiveInt) -> Iterator[Sight]:
    """The trainer is idle for `share` of the time and for `seconds` of a step, as medians of the last steps.

    If filters drop most rollouts, the trainer waits because it has little to train, not because the sampler is slow.
    The trainer's work is therefore extrapolated to all rollouts, by dividing its working time by the trained share of
    the tokens.
    """
    own, other = (_waits(window, side, share, seconds, steps) for side in ("trainer", "sampler"))
    if own is not None:
        both_wait = other is not None and other.level >= HOLD
        is_sft = window.setting("orchestrator.training_mode") == "sft"
        yield dataclasses.replace(own, why="teacher" if is_sft else "both wait" if both_wait else "")


def _waits(window: Window, side: str, share: float, seconds: float, count: int) -> Sight | None:
    """The `Sight` about the waiting of one side (sampler or trainer); None if the two sides take turns or nothing was
    measured.

    Shares are relative to `time/step`, the time from one finished step to the next, including evaluations and
    checkpoints.
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
    """Seconds that a side would have waited in a step if the tokens of all rollouts had been trained. `work`, the
    seconds for `trained` tokens, is extrapolated to `rollouts * tokens` tokens."""
    return max(0.0, min(wait, step - work * rollouts * tokens / trained))
