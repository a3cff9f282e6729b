"""[[orchestrator.train.env]], [orchestrator.eval]: the environments, and the settings that each may override."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from verbatim.config.sections import (
    COLDEST,
    ComponentConfig,
    FinitePositive,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    Section,
)


def _temperature(value: float) -> float:
    if value != 0 and not COLDEST <= value < math.inf:
        raise ValueError(f"found {value}, expected 0, or a finite number of at least {COLDEST}")
    return value


class SamplingConfig(Section):
    """How tokens are drawn."""

    temperature: Annotated[float, AfterValidator(_temperature)] = 1.0
    """Divides the logits."""
    max_tokens: PositiveInt = 512
    """Most tokens of one turn."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus; 1 = off."""
    top_k: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """0 = off."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """0 = off."""
    accept_truncation_mismatch: bool = False
    """Train although top-p, top-k or min-p cut a distribution that the trainer cannot reproduce."""

    @property
    def is_truncated(self) -> bool:
        """Whether top-p, top-k or min-p cut the distribution."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


FORMULATE_MODES = {"traj": "interleaved", "step": "branching"}
"""What the values of `formulate_mode` mean."""


def one_strategy(section: Any) -> Any:
    """Refuse a `formulate_mode` that contradicts `trajectory_strategy`, whose other name it is."""
    meant, given = FORMULATE_MODES.get(section.formulate_mode), section.trajectory_strategy
    if meant is not None and given != meant:
        raise ValueError(
            f'formulate_mode = "{section.formulate_mode}" means trajectory_strategy = "{meant}", found '
            f'trajectory_strategy = "{given}"; give one of the two'
        )
    return section


class LengthPenaltyConfig(Section):
    """How a rollout's length changes the reward that advantages read. Everything else reads the reward itself."""

    type: Literal["tokens", "turns"]
    """What is counted: sampled tokens, or turns."""
    kind: Literal["target", "relative"] = "target"
    """"target" takes `slope` for each one above `target`; "relative" raises the group's best rewards, up to twofold,
    the more the shorter they are beside each other."""
    target: NonNegativeInt | None = None
    """With "target": the length that is free of charge."""
    slope: NonNegativeFloat | None = None
    """With "target": the penalty for each token or turn above it; by default 0.001 per token, 0.05 per turn."""

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if self.kind == "target" and self.target is None:
            example = 200 if self.type == "tokens" else 5
            raise ValueError(f"target is missing: how many {self.type} cost nothing? For example target = {example}")
        if self.kind == "relative" and (self.target is not None or self.slope is not None):
            raise ValueError('target and slope belong to kind = "target", found kind = "relative"')
        return self


class EnvConfig(Section):
    """One environment of the mixture."""

    id: str | None = None
    """A bundled environment; "alphabet-sort" and "alphabet_sort" are one."""
    import_path: str | None = None
    """Instead of an id: `module.Class` or `module.function` that makes one."""
    name: str | None = None
    """Its name in metrics; its id or import path by default."""
    args: dict[str, Any] = Field(default={})
    """Keyword arguments of the environment."""
    ratio: FinitePositive = 1.0
    """Its share of the groups, relative to the others."""
    isolated: bool = False
    """Play its episodes in processes of its own on this machine, as under orchestrator.rollout.backend = "processes",
    while those of the other environments run in the orchestrator's process."""
    max_turns: PositiveInt = 16
    """Most turns of one trajectory."""
    sampling: SamplingConfig | None = None
    """Overrides [orchestrator.sampling] as a whole."""
    advantage: ComponentConfig | None = None
    """Overrides [orchestrator.advantage]."""
    length_penalty: LengthPenaltyConfig | None = None
    """Overrides [orchestrator.length_penalty]."""
    formulate_mode: Literal["traj", "step"] | None = None
    """Overrides orchestrator.formulate_mode."""
    trajectory_strategy: str | None = Field(
        default_factory=lambda data: FORMULATE_MODES.get(data["formulate_mode"])
    )
    """Overrides orchestrator.trajectory_strategy."""
    on_break: Literal["split", "error"] | None = None
    """Overrides orchestrator.on_break."""

    _strategy = model_validator(mode="after")(one_strategy)

    @field_validator("id")
    @classmethod
    def _underscores(cls, name: str | None) -> str | None:
        return name.replace("-", "_") if name is not None else None

    @model_validator(mode="after")
    def _one_of(self) -> Self:
        if (self.id is None) == (self.import_path is None):
            raise ValueError('give either id = "bundled name" or import_path = "module.Class"')
        return self

    @property
    def label(self) -> str:
        """What metrics and records call it."""
        return self.name or self.id or str(self.import_path)


class TrainEnvsConfig(Section):
    """The training environments."""

    env: Annotated[tuple[EnvConfig, ...], Field(min_length=1)]
    """[[orchestrator.train.env]] tables."""


class EvalConfig(Section):
    """When and on which environments the policy is evaluated: before, during and after training."""

    env: tuple[EnvConfig, ...] = ()
    """[[orchestrator.eval.env]] tables; the training environments if there are none."""
    interval: PositiveInt = 10
    """Steps between evaluations."""
    episodes: PositiveInt = 300
    """Per environment, the same number for every example (rounded up)."""
    seed: int = 1_000_003
    """Its own seeds, whatever the run's seed is."""
