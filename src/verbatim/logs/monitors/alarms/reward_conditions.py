"""The conditions of the alarms about rewards and evaluations. See `conditions.py`."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterator, Sequence
from statistics import NormalDist

from verbatim.config.sections import Fraction, NonNegativeFloat, PositiveFloat, PositiveInt
from verbatim.core.records.failed import MAX_FAILED, too_many_failed
from verbatim.logs.monitors.alarms.change import SURE, falls, rises
from verbatim.logs.monitors.alarms.rule import (
    TOOL,
    TRAINING,
    TRAINING_ERROR,
    Figures,
    Sight,
    Window,
    error_of_share,
    over,
    training_before,
)

# -- a reward that rises without success


def reward_success_gap(
    window: Window, *, rise: NonNegativeFloat, fall: Fraction, steps: PositiveInt
) -> Iterator[Sight]:
    """The reward of an environment rises while its success falls.

    Both changes must be significant (`change.SURE`), relative to the run's first steps or to the steps about `4 *
    steps` ago. They must also be large: the reward must change by `rise` standard deviations of the rollouts, and the
    success by `fall`.
    """
    names = ("reward", "success")
    for env in window.envs:
        recent, spread = window.together(names, steps, env), window.median("reward_std", steps, env) or 0.0
        for earlier in window.earlier_together(names, steps, env) if recent else ():
            (rewards_before, successes_before), (rewards, successes) = (
                zip(*rows, strict=True) for rows in (earlier, recent)
            )
            if not (rises(rewards_before, rewards) and falls(successes_before, successes)):
                continue
            was, now = statistics.median(rewards_before), statistics.median(rewards)
            success_was, success = statistics.median(successes_before), statistics.median(successes)
            gained = (now - was) / spread if spread > 0 else math.inf
            yield Sight(
                level=min(over(gained, rise), over(success_was - success, fall)),
                env=env,
                values={"now": now, "success": success, "parts": _part_that_rose(window, env)},
                evidence={
                    f"reward/{env}/mean": now,
                    f"success/{env}": success,
                    "reward before": was,
                    "success before": success_was,
                },
            )
            break


def _part_that_rose(window: Window, env: str) -> str:
    """A clause that names the reward part that has risen most since the first step; empty if no part has risen."""
    first = window.first[0].metrics if window.first else {}
    parts = {
        name: value - first.get(name, value)
        for name, value in window.steps[-1].metrics.items()
        if name.startswith(f"reward_part/{env}/") and name.endswith("/mean")
    }
    name = max(parts, key=lambda name: parts[name], default="")
    return f"the part that rose most is {name} (by {parts[name]:.3g}); " if parts.get(name, 0.0) > 0 else ""


def reward_hacking(
    window: Window,
    *,
    growth: PositiveFloat,
    repetition: Fraction,
    tool_growth: PositiveFloat,
    tool_calls: PositiveFloat,
    rise: NonNegativeFloat,
    credit: Fraction,
    steps: PositiveInt,
) -> Iterator[Sight]:
    """The reward of an environment rises while length, repetition or the use of one tool explodes and is rewarded.

    All of the following must hold. The reward rose significantly (`change.SURE`), by `rise` standard deviations of the
    rollouts. The figure (length, repetition or calls) rose significantly and by a large amount, above both the run's
    first steps and the steps about `4 * steps` ago, so that neither slow growth nor a return after a dip counts. And
    within groups, the figure correlates with the reward by at least `credit`. A large amount is `growth` times the
    tokens per turn, an increase of the share of repeated 4-grams by `repetition`, or `tool_growth` times the calls of
    one tool and at least `tool_calls` more per rollout. If an evaluation's success, or the environment's own
    `is_success`, rises too, no alarm is raised.
    """

    def growths(env: str) -> Iterator[Sight]:
        for name in ("tokens_per_turn", "repetition", *(f for f in window.steps[-1].of(env) if f.startswith(TOOL))):
            change = _rise(window, name, steps, env, missing=0.0 if name.startswith(TOOL) else None)
            paid = window.median(f"credit/{name}", steps, env)
            if change is None or paid is None:
                continue
            was, now = change
            grown = {
                "tokens_per_turn": over(now, was * growth),
                "repetition": over(now - was, repetition),
                TOOL: min(over(now, was * tool_growth), (now - was) / tool_calls),
            }
            why = TOOL if name.startswith(TOOL) else name
            yield Sight(
                level=min(grown[why], over(paid, credit)),
                env=env,
                why=why,
                values={"tool": name.removeprefix(TOOL), "was": was, "now": now},
                evidence={name: now, f"{name} before": was, "correlation with the reward": paid},
            )

    for env in window.envs:
        reward, spread = _rise(window, "reward", steps, env), window.median("reward_std", steps, env) or 0.0
        if reward is None or _is_acquitted(window, env, steps):
            continue
        before, after = reward
        for most in sorted(growths(env), key=lambda sight: -sight.level)[:1]:
            yield dataclasses.replace(
                most,
                level=min(most.level, over(after - before, spread * rise)),
                values={**most.values, "reward_was": before, "reward": after},
                evidence={f"reward/{env}/mean": after, **most.evidence},
            )


def _rise(
    window: Window, name: str, count: int, env: str, *, missing: float | None = None
) -> tuple[float, float] | None:
    """The earlier median of a figure (the higher median, if there are two earlier windows) and its current median; None
    if the figure has not risen significantly above all earlier windows."""
    now, earlier = window.recent(name, count, env, missing=missing), window.earlier(name, count, env, missing=missing)
    if not now or not earlier or not all(rises(values, now) for values in earlier):
        return None
    return max(map(statistics.median, earlier)), statistics.median(now)


def _is_acquitted(window: Window, env: str, count: int) -> bool:
    """True if a measure of success that does not depend on the reward has risen too."""
    evaluations = window.evaluations.get(env, ())
    if len(evaluations) >= 2 and evaluations[-1][0] >= window.step - 4 * count:
        (_, before), (_, last) = evaluations[-2:]
        if "success" in last and "success" in before:
            p, n = last["success"], max(1.0, last.get("episodes", 1.0))
            # Two standard errors of the difference of two shares. 1 / n keeps the error above 0 for shares of 0 or 1.
            if p - before["success"] > 2 * math.sqrt(2 * max(p * (1 - p), 1 / n) / n):
                return True
    both = window.together(("success", "full_reward"), count, env)
    if all(abs(success - full) < 0.02 for success, full in both):
        return False  # without a definition by the environment, success is only a threshold on the reward
    return _rise(window, "success", count, env) is not None


# -- evaluations


def evaluation_flat(window: Window, *, rise: Fraction, evaluations: PositiveInt, solved: Fraction) -> Iterator[Sight]:
    """Training success rises over the last evaluations, but evaluation success does not.

    Over the last `evaluations`, evaluation success has not risen by more than its standard error, while training
    success has risen by `rise` and by three standard errors. In addition, training success is now above evaluation
    success by three standard errors of their difference, which happens by chance once in 700 evaluations if the policy
    is equally good at both. If evaluation success is `solved` or more, no alarm is raised, because there is little left
    to gain.
    """
    for env, kept in window.evaluations.items():
        (began, first), (step, last) = kept[-evaluations:][0], kept[-1]
        earlier = first if TRAINING in first else training_before(window.first[:5], env)
        is_known = TRAINING in earlier and TRAINING in last and "success" in first and "success" in last
        if len(kept) < evaluations or not is_known:
            continue
        had, has, was, now = earlier[TRAINING], last[TRAINING], first["success"], last["success"]
        of_first, of_last = (error_of_share(one["success"], one.get("episodes", 1.0)) for one in (first, last))
        is_flat = now - was <= math.hypot(of_first, of_last) and now < solved
        risen = (has - had) / (3 * math.hypot(earlier[TRAINING_ERROR], last[TRAINING_ERROR]))
        ahead = (has - now) / (3 * math.hypot(of_last, last[TRAINING_ERROR]))
        yield Sight(
            level=min(over(has - had, rise), risen, ahead) if is_flat else 0.0,
            env=env,
            values={"began": began, "step": step},
            evidence={
                "success of training": has,
                "success of training before": had,
                "success of evaluation": now,
                "success of evaluation before": was,
            },
        )


_Z95 = NormalDist().inv_cdf(0.975)
_Evaluation = tuple[int, Figures]
"""Step and metrics of an evaluation."""


def evaluation_drop(window: Window, *, fall: Fraction, reward_fall: NonNegativeFloat) -> Iterator[Sight]:
    """An evaluation's success or reward is significantly below the success or reward of the best earlier evaluation:
    success by `fall`, or the reward by `reward_fall` standard deviations. The standard deviation is the larger of the
    two evaluations' standard deviations.

    The evaluations are compared by their 95% intervals (Newcombe 1998, method 10). The best of many evaluations is best
    partly by luck, so the required significance grows with the number of evaluations: the chance of a false alarm, for
    success and reward together, is at most `change.SURE` divided by the number of earlier evaluations.
    """
    given = window.setting("orchestrator.eval.max_failed")
    most = MAX_FAILED if given is None else float(given)
    for env, evaluations in window.evaluations.items():
        bounds = (("success", fall), ("reward/mean", reward_fall))
        drops = [drop for each in bounds if (drop := _drop(env, evaluations, *each, most)) is not None]
        yield from sorted(drops, key=lambda drop: -drop.level)[:1]


def _drop(env: str, evaluations: Sequence[_Evaluation], name: str, bound: float, most: float) -> Sight | None:
    """The `Sight` about the drop of a metric from the best evaluation to the last evaluation; None unless both
    evaluations have the metric."""
    known = [evaluation for evaluation in evaluations if _has(name, evaluation[1], most)]
    if len(known) < 2 or known[-1] is not evaluations[-1]:
        return None
    (*before, (_, last)) = known
    began, best = max(before, key=lambda evaluation: evaluation[1][name])
    was, now = best[name], last[name]
    # If the rewards within each evaluation are all equal, the deviation is 0. Use the distance between the two means
    # instead.
    scale = max(one.get("reward/std", 0.0) for one in (best, last))
    scale = scale or abs(best.get("reward/mean", 0.0) - last.get("reward/mean", 0.0))
    (low, top), (bottom, high) = (_interval(one, name, scale) for one in (best, last))
    sure = NormalDist().inv_cdf(1 - SURE / (2 * len(before))) * math.hypot(was - low, high - now) / _Z95
    large = bound if name == "success" else bound * scale
    failed, failed_before = (one.get("failed", 0.0) / max(1.0, one.get("episodes", 0.0)) for one in (last, best))
    names = ("success", "reward/mean", "failed", "truncated", TRAINING)
    return Sight(
        level=max(0.0, min(over(was - now, sure), over(was - now, large))),
        env=env,
        why=_why_dropped(best, last, failed - failed_before),
        values={
            "what": "success" if name == "success" else "mean reward",
            "began": began,
            "was": was,
            "now": now,
            "intervals": f"{low:.3g} to {top:.3g} and {bottom:.3g} to {high:.3g}",
            "failed_share": failed,
            "failed_before": failed_before,
            "training_before": best.get(TRAINING),
        },
        evidence={**{each: last[each] for each in names if each in last}, f"best {name}": was},
    )


def _why_dropped(best: Figures, last: Figures, failed: float) -> str:
    """The cause that the evaluations' other metrics suggest, as a key of `AlarmRow.why`."""
    if failed > 0.5 * (best.get("success", 0.0) - last.get("success", 0.0)) > 0:
        return "failed"
    error = math.hypot(last.get(TRAINING_ERROR, 0.0), best.get(TRAINING_ERROR, 0.0))
    return "training" if last.get(TRAINING, -math.inf) >= best.get(TRAINING, math.inf) - error else ""


def _has(name: str, metrics: Figures, most: float) -> bool:
    """True if an evaluation has a valid value of this metric. Failed episodes count as unsuccessful, so success is
    always valid. The mean reward leaves failed episodes out, so it is not valid if too many episodes failed."""
    failed = too_many_failed(int(metrics.get("failed", 0)), int(metrics.get("episodes", 0)), most)
    return name in metrics and (name == "success" or failed is None)


def _interval(evaluation: Figures, name: str, scale: float) -> tuple[float, float]:
    """A metric's 95% interval: the interval that the evaluation reports, or else an interval computed as if episodes
    were independent. Even if all n rewards are equal, a share of up to z^2 / (n + z^2) of all possible rewards may
    differ (Wilson's interval for n of n). These other rewards are assumed to differ from the n equal rewards by
    `scale`."""
    value, start = evaluation[name], name.removesuffix("/mean")
    if f"{start}/low" in evaluation and f"{start}/high" in evaluation:
        return evaluation[f"{start}/low"], evaluation[f"{start}/high"]
    count = max(1.0, evaluation.get("episodes", 1.0))
    if name == "success":
        rounded = (value * count + 2) / (count + 4)  # Agresti and Coull: an interval around 0 or 1 has a width too
        half = _Z95 * math.sqrt(rounded * (1 - rounded) / (count + 4))
    elif evaluation.get("reward/std") == 0:
        half = scale * _Z95**2 / (count + _Z95**2)
    else:
        half = _Z95 * evaluation.get("reward/std", math.inf) / math.sqrt(count)
    return value - half, value + half
