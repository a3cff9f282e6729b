"""Made-up runs in which nothing is wrong: noise that hangs together from step to step, and curves of learning."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from verbatim.logs.monitors.alarms import AlarmWatch, StepFigures

MIXTURE = [{"id": "one", "ratio": 2.0}, {"id": "two"}]
CONFIG = {"orchestrator": {"max_async_level": 1, "group_size": 8, "train": {"env": MIXTURE}}}
ENVS = ("one", "two")
INTERVAL = 10
"""Steps between evaluations."""


@dataclass
class Noise:
    """A first-order autoregression with deviation 1: each value keeps `memory` of the one before."""

    rng: np.random.Generator
    memory: float
    value: float = 0.0

    def __call__(self) -> float:
        self.value = self.memory * self.value + math.sqrt(1 - self.memory**2) * float(self.rng.standard_normal())
        return self.value


class HealthyRun:
    """A run of two environments. `learns` of False leaves every figure where it is, but for noise."""

    def __init__(self, seed: int, *, learns: bool, num_steps: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.num_steps, self.learns = num_steps, learns
        self._noises: dict[str, Noise] = {}
        draw = self.rng.uniform
        self.memory = draw(0.0, 0.6)
        self.batch = int(self.rng.choice([32, 96, 240]))
        self.start, self.end = draw(0.05, 0.5), draw(0.6, 1.0)
        self.middle, self.width = draw(0.2, 0.8) * num_steps, draw(0.05, 0.3) * num_steps
        self.grows = draw(0.7, 1.9)
        """Tokens of a turn at the end, over those at the beginning."""
        self.tokens, self.calls = draw(10, 800), draw(0.2, 2.0)
        self.more_calls = draw(0.5, 2.5)
        self.credits = {env: draw(-0.7, 0.7) for env in ENVS}
        self.busy = {"time/sampler_idle": draw(0, 0.6), "time/trainer_idle": draw(0, 0.7)}
        self.seconds, self.failing = draw(2, 200), draw(0.0, 0.05)
        self.partial = self.rng.random() < 0.5
        """Whether the reward is more than the success."""

    def noise(self, name: str) -> float:
        return self._noises.setdefault(name, Noise(self.rng, self.memory))()

    def progress(self, step: int) -> float:
        return 1 / (1 + math.exp(-(step - self.middle) / self.width)) if self.learns else 0.0

    def success(self, step: int) -> float:
        return self.start + (self.end - self.start) * self.progress(step)

    def steps(self) -> Iterator[StepFigures]:
        for step in range(1, self.num_steps + 1):
            envs = {env: self._env(env, step) for env in ENVS}
            failed = {env: int(own["failed"]) for env, own in envs.items()}
            errors = {env: {"environment: tool raised": count} for env, count in failed.items() if count}
            yield StepFigures(step=step, metrics=self._metrics(step, envs), envs=envs, errors=errors)

    def _env(self, env: str, step: int) -> dict[str, float]:
        done, rng = self.progress(step), self.rng
        rollouts = self.batch * (2 / 3 if env == "one" else 1 / 3) * math.exp(0.2 * self.noise(f"{env}/share"))
        rollouts = max(4, round(rollouts))
        failed = int(rng.binomial(rollouts, self.failing))
        success = float(rng.binomial(rollouts, self.success(step))) / rollouts
        spread = math.sqrt(max(1e-4, success * (1 - success)))
        # groups that are all right, or all wrong
        flat = min(1.0, 1 - 2 * spread + 0.1 * abs(self.noise(f"{env}/flat")))
        partial = 0.7 * success + 0.3 * (0.3 + 0.5 * done) + 0.02 * self.noise(f"{env}/partial")
        tokens = self.tokens * self.grows**done * math.exp(0.05 * self.noise(f"{env}/tokens"))
        calls = self.calls * self.more_calls**done * math.exp(0.05 * self.noise(f"{env}/calls"))
        return {
            "rollouts": rollouts,
            "failed": failed,
            "completed": rollouts - failed,
            "untrained/filter:zero_advantage": round(flat * (rollouts - failed)),
            "trained": round((1 - flat) * rollouts),
            "success": success,
            "full_reward": success,
            "reward": partial if self.partial else success,
            "reward_std": spread,
            "turns": 1 + calls,
            "tokens_per_turn": tokens,
            "completion_tokens": tokens * (1 + calls),
            "credit/tokens_per_turn": self.credits[env] + 0.15 * self.noise(f"{env}/c1"),
            "repetition": max(0.0, 0.08 + 0.02 * self.noise(f"{env}/repetition")),
            "credit/repetition": 0.2 * self.noise(f"{env}/c2"),
            "tool/look": calls,
            "credit/tool/look": self.credits[env] + 0.15 * self.noise(f"{env}/c3"),
            "offered": rollouts - failed,
            "called": min(1.0, 0.6 + 0.3 * done + 0.03 * self.noise(f"{env}/called")),
            "unread": abs(0.03 * self.noise(f"{env}/unread")),
            "call_like": abs(0.02 * self.noise(f"{env}/like")),
            "later_turns": round(rollouts * calls),
            "broken": abs(0.02 * self.noise(f"{env}/breaks")),
            "rewritten": 0.0,
        }

    def _metrics(self, step: int, envs: dict[str, dict[str, float]]) -> dict[str, float]:
        total = sum(own["rollouts"] for own in envs.values())
        success = sum(own["success"] * own["rollouts"] for own in envs.values()) / total
        reward = sum(own["reward"] * own["rollouts"] for own in envs.values()) / total
        tokens = sum(own["completion_tokens"] * own["completed"] for own in envs.values())
        trained = tokens * sum(own["trained"] for own in envs.values()) / total
        spike = 30.0 if self.rng.random() < 0.03 else 1.0  # a single bad batch
        seconds = self.seconds * math.exp(0.2 * self.noise("seconds"))
        return {
            "rollouts": total,
            "reward/mean": reward,
            "success": success,
            "completion_tokens": tokens / total,
            **{f"success/{env}": own["success"] for env, own in envs.items()},
            "entropy": 0.3 * max(0.02, 1 - self.success(step)) * math.exp(0.1 * self.noise("entropy")),
            "mismatch_kl": spike * 0.002 * math.exp(0.8 * self.noise("kl")),
            "trained_tokens": trained,
            "masked_by_loss": min(trained, spike * 0.003 * trained * math.exp(0.8 * self.noise("masked"))),
            "staleness/mean": max(0.0, 1.0 + 0.15 * self.noise("age")),
            "staleness/dropped": 0.0,
            "time/step": seconds,
            "seconds": 0.3 * seconds,
            **{name: seconds * min(0.75, share + 0.1 * abs(self.noise(name))) for name, share in self.busy.items()},
            **{f"pool/{env}/normal": max(0.3, 1 - 0.5 * self.progress(step)) for env in envs},
        }

    def evaluation(self, step: int) -> dict[str, float]:
        """Of 200 episodes, of the policy that the training has."""
        return {"success": float(self.rng.binomial(200, self.success(step))) / 200, "episodes": 200.0}


def alarms_of(run: HealthyRun, watch: AlarmWatch) -> list[str]:
    """The names of all alarms that are raised."""
    raised = []
    for figures in run.steps():
        raised += [alarm.name for alarm in watch.observe(figures) if alarm.state == "raised"]
        if figures.step % INTERVAL == 0:
            for env in ENVS:
                raised += [
                    alarm.name
                    for alarm in watch.on_eval(figures.step, env, run.evaluation(figures.step))
                    if alarm.state == "raised"
                ]
    return raised
