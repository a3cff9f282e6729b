"""The alarm `repeated_error`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from verbatim.config.sections import Fraction, PositiveInt
from verbatim.core.trajectories import Fate
from verbatim.logs.monitors.alarms.base import Finding, Window
from verbatim.rollouts.tally import failure_kind

_SHOWN = 5
_ADVICE = {
    "environment": "its code raised: run `verbatim env check` on it; the log has the first traceback of each kind",
    "judge": "the judge gave no verdict: look at its server, its prompt and its limits",
    "template": "the chat template failed: `verbatim doctor --template MODEL` plays it; see {renderer}",
    "sampler": "the inference engine failed on these requests: look at its log; lower {concurrent}",
    "timeout": "raise {timeout}, or shorten its episodes (max_turns); a tool that hangs has {tool_timeout}",
    "record": "what the server returned is no record of tokens: look at its version and its options",
    "reward": "score returned nothing that can be learned from: a missing, infinite or not-a-number reward",
    "advantage": "the advantage function raised on these groups: look at {advantage}",
    "worker": "worker processes were lost: their memory limit is orchestrator.rollout.processes.worker_memory_mb",
}
"""By the first word of the error."""
_KEYS = {
    "renderer": "orchestrator.renderer.name",
    "concurrent": "orchestrator.max_concurrent",
    "timeout": "orchestrator.episode_timeout",
    "tool_timeout": "orchestrator.tool_timeout",
    "advantage": "orchestrator.advantage.type",
}


@dataclass(frozen=True, kw_only=True)
class RepeatedError:
    """The same error ends `share` of an environment's rollouts, and at least `rollouts` of them, in the last steps.

    Two errors are the same if they differ in numbers and quoted values only.
    """

    share: Fraction = 0.2
    """Of the environment's rollouts."""
    rollouts: PositiveInt = 8
    """That ended with this error."""
    steps: PositiveInt = 3
    """Steps that are counted together; in the first steps fewer."""

    def __call__(self, window: Window) -> Iterator[Finding]:
        """What the last steps show."""
        steps = window.steps[-self.steps :]
        for env in window.envs:
            kinds: Counter[str] = Counter()
            for figures in steps:
                kinds.update(figures.errors.get(env, {}))
            total = sum(figures.envs.get(env, {}).get("rollouts", 0.0) for figures in steps)
            if not kinds or not total:
                continue
            kind, count = kinds.most_common(1)[0]
            others = f"; {len(kinds) - 1} other kinds" if len(kinds) > 1 else ""
            advice = _ADVICE.get(kind.partition(":")[0], "look at the log: it has the first traceback of each kind")
            yield Finding(
                env=env,
                level=min(count / total / max(self.share, 1e-9), count / self.rollouts),
                message=f"{count} of {total:.0f} rollouts of {env} in {len(steps)} steps failed with: {kind}{others}",
                cause=f"episodes of {env} fail at the same place",
                advice=advice.format(**{name: window.now(key) for name, key in _KEYS.items()}),
                evidence={
                    "rollouts": total,
                    "failed": float(sum(kinds.values())),
                    f"errors/{kind.partition(':')[0]}": float(count),
                },
                trajectory_ids=_failed(window.fates, env, kind),
            )


def _failed(fates: Sequence[Fate], env: str, kind: str) -> tuple[str, ...]:
    records = [fate.trajectory for fate in fates]
    return tuple(
        t.trajectory_id for t in records if t.env == env and t.error is not None and failure_kind(t.error) == kind
    )[:_SHOWN]
