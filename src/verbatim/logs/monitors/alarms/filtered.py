"""Alarms about rollouts that are sampled and teach nothing: filtered, pooled, or of an environment that starves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from verbatim.config.sections import Fraction, PositiveInt
from verbatim.core.trajectories import Fate
from verbatim.logs.monitors.alarms.base import Finding, StepFigures, Window, is_mastered
from verbatim.logs.monitors.alarms.figures import main_reason

_SHOWN = 5
_OF_ERRORS = ("error", "stale", "cancelled", "lost_worker", "lost_replica", "empty")
"""Reasons that no filter and no advantage gave."""
_UNTRAINED = "untrained/"

_CAUSES = {
    "filter:zero_advantage": (
        "all rollouts of a group earn the same, so no advantage differs from 0",
        "give partial reward or take examples that are solved sometimes; raise {group_size}; or set {online}",
    ),
    "difficulty": (
        "the examples are too easy or too hard: online difficulty filtering drops groups of equal rewards",
        "take other examples, raise {group_size}, or keep examples in play with {easy} and {hard}",
    ),
    "filter:gibberish": (
        "the mean logprob of what is sampled is very low: a model with random weights, or a policy that has collapsed",
        "give the model a [warm_start]; where a policy that could speak has collapsed, go back to a checkpoint and "
        "lower {lr}",
    ),
    "filter:repetition": (
        "the model repeats itself",
        "lower {max_tokens} and {lr}, and read some episodes before the filter's threshold is raised",
    ),
    "filter:truncated": (
        "nearly every rollout is cut off before its own end",
        "raise {max_tokens}, {seq_len} or the environment's max_turns; or leave the filter out, so that what is cut "
        "off is trained",
    ),
    "over_length": ("rollouts are longer than a training sample may be", "raise {seq_len}"),
    "missing_logprobs": (
        "the server returns no logprobs",
        "serve the model with one that does (`verbatim serve`, or {backend})",
    ),
}
"""By the reason of most of them: cause and advice."""
_KEYS = {
    "group_size": "orchestrator.group_size",
    "online": "orchestrator.buffer.online_difficulty_filtering",
    "easy": "orchestrator.buffer.easy_threshold",
    "hard": "orchestrator.buffer.hard_threshold",
    "lr": "trainer.optim.lr",
    "max_tokens": "orchestrator.sampling.max_tokens",
    "seq_len": "orchestrator.seq_len",
    "backend": "inference.backend",
}


@dataclass(frozen=True, kw_only=True)
class EverythingFiltered:
    """`share` of an environment's latest rollouts are filtered or cannot be trained, and the task is not solved.

    At least `rollouts` of them are counted, and `steps` steps: in few groups all rewards may be equal by chance. Where
    the success is `solved` or more, or every rollout earns the most, groups of equal rewards are what learning leads
    to. Rollouts that failed or are too old have alarms of their own.
    """

    share: Fraction = 0.95
    """Of the completed rollouts."""
    solved: Fraction = 0.9
    """Success from which on nothing is left to learn."""
    rollouts: PositiveInt = 100
    """Fewest that are counted."""
    steps: PositiveInt = 3
    """Fewest steps that are counted."""

    def __call__(self, window: Window) -> Iterator[Finding]:
        """What the last steps show."""
        for env in window.envs:
            steps = self._steps(window, env)
            if not steps or max(own.get("success", 0.0) for own in steps) >= self.solved:
                continue
            if is_mastered(window, self.steps, env):
                continue
            counts: Counter[str] = Counter()
            for own in steps:
                counts.update(_filtered(own))
            completed = sum(own.get("completed", 0.0) for own in steps)
            share = sum(counts.values()) / completed
            if share < self.share / 2:
                continue
            ((reason, _),) = counts.most_common(1)
            cause, advice = _CAUSES.get(reason, (f"the reason {reason}", f"look at ledger/dropped/{reason}"))
            yield Finding(
                env=env,
                level=share / max(self.share, 1e-9),
                message=f"{share:.0%} of the last {completed:.0f} rollouts of {env}, in {len(steps)} steps, were "
                f"dropped, most as {reason}; success is {steps[-1].get('success', 0.0):.2f}",
                cause=cause,
                advice=advice.format(**{name: window.now(key) for name, key in _KEYS.items()}),
                evidence={f"{_UNTRAINED}{name}": float(count) for name, count in counts.items()}
                | {name: steps[-1][name] for name in ("rollouts", "reward", "reward_std") if name in steps[-1]},
                trajectory_ids=_untrained(window.fates, env, reason),
            )

    def _steps(self, window: Window, env: str) -> list[Mapping[str, float]]:
        """The environment's figures of the fewest latest steps that are enough; empty where there are not so many."""
        found: list[Mapping[str, float]] = []
        completed = 0.0
        for figures in reversed(window.steps):
            own = figures.envs.get(env, {})
            found.insert(0, own)
            completed += own.get("completed", 0.0)
            if len(found) >= self.steps and completed >= self.rollouts:
                return found
        return []


@dataclass(frozen=True, kw_only=True)
class PoolsDry:
    """At most `left` of an environment's examples are still sampled; all others are in the easy or the hard pool."""

    left: Fraction = 0.05
    """Of the examples."""

    def __call__(self, window: Window) -> Iterator[Finding]:
        """What this step shows."""
        metrics = window.steps[-1].metrics if window.steps else {}
        for name, normal in metrics.items():
            if not (name.startswith("pool/") and name.endswith("/normal")):
                continue
            env = name.removeprefix("pool/").removesuffix("/normal")
            easy, hard = (metrics.get(f"pool/{env}/{pool}", 0.0) for pool in ("easy", "hard"))
            pool = "hard" if hard > easy else "easy"
            yield Finding(
                env=env,
                level=(1 - normal) / max(1 - self.left, 1e-9),
                message=f"{normal:.1%} of the examples of {env} are still sampled; {easy:.1%} are in the easy pool and "
                f"{hard:.1%} in the hard one",
                cause="the examples are solved" if pool == "easy" else "the examples are too hard for the policy",
                advice=f"give {'harder' if pool == 'easy' else 'easier'} or more examples; or change "
                f"{window.now(f'orchestrator.buffer.{pool}_threshold')}, and let examples come back with "
                f"{window.now(f'orchestrator.buffer.{pool}_fraction')}",
                evidence={f"pool/{env}/{p}": metrics.get(f"pool/{env}/{p}", 0.0) for p in ("normal", "easy", "hard")},
            )


@dataclass(frozen=True, kw_only=True)
class EnvironmentStarves:
    """One of several environments has few rollouts, or none that can be trained, while others are trained.

    Expected are its `ratio` of the groups. The window is as long as it takes to expect 20 of them: independent draws
    give a quarter of that or less once in 14,000 windows. Rollouts that a filter dropped have an alarm of their own.
    """

    share: Fraction = 0.25
    """Of the rollouts that its ratio asks for."""
    steps: PositiveInt = 8
    """Fewest steps of the window."""

    def __call__(self, window: Window) -> Iterator[Finding]:
        """What the last steps show."""
        ratios = _ratios(window)
        if len(ratios) < 2:
            return
        for env, ratio in ratios.items():
            share = ratio / sum(ratios.values())
            steps = self._steps_that_expect_enough(window, share)
            if not steps:
                continue
            expected = share * sum(_total(steps, other, "rollouts") for other in ratios)
            usable = _total(steps, env, "completed") - _total(steps, env, "untrained/stale")
            cause, advice = _why_starved(window, steps, env)
            yield Finding(
                env=env,
                level=self.share * expected / max(usable, 1e-9 * expected),
                message=f"{usable:.0f} rollouts of {env} in {len(steps)} steps could be trained, where its ratio asks "
                f"for {expected:.0f}",
                cause=cause,
                advice=advice,
                evidence={
                    "rollouts": _total(steps, env, "rollouts"),
                    "failed": _total(steps, env, "failed"),
                    "expected": expected,
                },
                trajectory_ids=_untrained(window.fates, env, None) if usable <= self.share * expected else (),
            )

    def _steps_that_expect_enough(self, window: Window, share: float) -> Sequence[StepFigures]:
        """The fewest latest steps in which this share of the groups is at least 20; empty where there are not so many,
        or where no environment has a rollout that could be trained."""
        group_size = float(window.setting("orchestrator.group_size") or 1)
        expected = 0.0
        for count in range(1, len(window.steps) + 1):
            envs = window.steps[-count].envs.values()
            expected += share * sum(own.get("rollouts", 0.0) for own in envs) / group_size
            if expected >= _GROUPS and count >= self.steps:
                found = window.steps[-count:]
                return found if any(own.get("completed") for f in found for own in f.envs.values()) else ()
        return ()


_GROUPS = 20


def _why_starved(window: Window, steps: Sequence[StepFigures], env: str) -> tuple[str, str]:
    """Cause and advice."""
    started, failed = _total(steps, env, "rollouts"), _total(steps, env, "failed")
    if failed > started / 2:
        return (
            f"{failed:.0f} of its {started:.0f} rollouts failed",
            "look at the alarm repeated_error and at errors/{kind}; the log has the first traceback",
        )
    if _total(steps, env, "untrained/stale") > started / 2:
        return (
            "its rollouts are dropped as too old: its episodes take longer than the others', or new weights do not "
            "reach its sampler (then the alarm staleness says so)",
            f"raise {window.now('orchestrator.max_off_policy_steps')}, or shorten its episodes (max_turns)",
        )
    return (
        "its episodes take much longer than the others', so that others fill the batches",
        f"shorten its episodes (max_turns), raise {window.now('orchestrator.max_concurrent')}, or raise its ratio in "
        "[[orchestrator.train.env]]",
    )


def _filtered(own: Mapping[str, float]) -> dict[str, float]:
    """Completed rollouts without a trained token by reason, without those that are too old."""
    return {
        name.removeprefix(_UNTRAINED): count
        for name, count in own.items()
        if name.startswith(_UNTRAINED) and name.removeprefix(_UNTRAINED) not in _OF_ERRORS
    }


def _untrained(fates: Sequence[Fate], env: str, reason: str | None) -> tuple[str, ...]:
    found = [
        fate.trajectory.trajectory_id
        for fate in fates
        if fate.trajectory.env == env and (why := main_reason(fate)) is not None and reason in (None, why)
    ]
    return tuple(found[:_SHOWN])


def _ratios(window: Window) -> dict[str, float]:
    """The share of each training environment, by its name."""
    ratios = {}
    for env in window.setting("orchestrator.train.env") or ():
        name = env.get("name") or env.get("id") or env.get("import_path")
        ratios[str(name)] = float(env.get("ratio", 1.0))
    return ratios


def _total(steps: Sequence[StepFigures], env: str, name: str) -> float:
    return sum(figures.envs.get(env, {}).get(name, 0.0) for figures in steps)
