"""Defines every key of a run's TOML file, as frozen typed records. Sections have the names of the processes.

Here is the whole file, and what has to fit between its tables; each table's own module has the rest.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

from pydantic import ConfigDict, Field, model_validator

from verbatim.config.environments import (
    EnvConfig,
    EvalConfig,
    LengthPenaltyConfig,
    SamplingConfig,
    TrainEnvsConfig,
)
from verbatim.config.inference import InferenceConfig
from verbatim.config.model import BuildConfig, ModelConfig, WarmStartConfig
from verbatim.config.orchestrator import (
    BufferConfig,
    OrchestratorConfig,
    RendererConfig,
    RolloutConfig,
    TeacherConfig,
)
from verbatim.config.sections import (
    COLDEST,
    ComponentConfig,
    FinitePositive,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
)
from verbatim.config.trainer import OptimConfig, TrainerConfig

__all__ = [
    "COLDEST", "BufferConfig", "BuildConfig", "CheckpointConfig", "ComponentConfig", "EnvConfig", "EvalConfig",
    "FinitePositive", "Fraction", "InferenceConfig", "LengthPenaltyConfig", "ModelConfig", "MonitorConfig",
    "NonNegativeFloat", "NonNegativeInt", "OptimConfig", "OrchestratorConfig", "PositiveFloat", "PositiveInt",
    "RendererConfig", "RolloutConfig", "RunConfig", "SamplingConfig", "Section", "TeacherConfig", "TrainEnvsConfig",
    "TrainerConfig", "WarmStartConfig",
]  # fmt: skip


class CheckpointConfig(Section):
    """What is kept so that a run can go on."""

    interval: PositiveInt = 25
    """Steps between checkpoints; one is always written at the end and on Ctrl-C."""
    keep_last: PositiveInt = 2
    """Newest checkpoints kept."""
    keep_every: PositiveInt | None = None
    """Also keep every n-th."""


class MonitorConfig(Section):
    """What is written down. Every other key is a monitor's table: its name from `MONITORS`, or any name with
    `type = "custom"`."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, ComponentConfig] = Field(init=False)

    save_trajectories: bool = True
    """Every training trajectory as JSONL, with ids, logprobs, versions."""

    @model_validator(mode="before")
    @classmethod
    def _named_by_their_keys(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {
            key: {"type": key, **value} if key not in cls.model_fields and isinstance(value, dict) else value
            for key, value in data.items()
        }

    @property
    def components(self) -> dict[str, ComponentConfig]:
        """The monitors beside the run folder's own, by key."""
        return dict(self.__pydantic_extra__)


class RunConfig(Section):
    """One run: the whole file."""

    name: str | None = None
    """Names the folder under `runs/`; the file's name by default."""
    run_dir: Path | None = None
    """An explicit run folder; by default `runs/{name}/{time stamp}`."""
    max_steps: PositiveInt = 100
    """How many steps: batches trained and published."""
    seed: int = 0
    """Seed of every random choice."""
    model: ModelConfig
    """The model."""
    warm_start: WarmStartConfig | None = None
    """Supervised optimizer steps first."""
    orchestrator: OrchestratorConfig
    """Rollouts and batches."""
    trainer: TrainerConfig = TrainerConfig()
    """Optimizer steps."""
    inference: InferenceConfig = InferenceConfig()
    """The rollout engine."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints."""
    monitor: MonitorConfig = MonitorConfig()
    """Logs."""

    @property
    def follows_a_teacher(self) -> bool:
        """Whether the loss reads a teacher: then a token teaches also where its advantage is 0."""
        loss = self.trainer.loss
        beside_the_reward = loss.type == "default" and bool(loss.knobs.get("teacher_tau"))
        return self.orchestrator.training_mode != "rl" or beside_the_reward

    @property
    def needs_rewards(self) -> bool:
        """Whether a rollout without a reward teaches nothing."""
        loss = self.trainer.loss
        only_the_teacher = loss.type == "default" and loss.knobs.get("adv_tau") == 0
        return self.orchestrator.training_mode == "rl" and not only_the_teacher

    @model_validator(mode="after")
    def _fits_the_model(self) -> Self:
        build, seq_len = self.model.build, self.orchestrator.seq_len
        if build is not None and seq_len > build.context_length:
            raise ValueError(
                f"orchestrator.seq_len = {seq_len} is more than model.build.context_length = {build.context_length}; "
                f"lower the one to {build.context_length} or raise the other to {seq_len}"
            )
        return self

    @model_validator(mode="after")
    def _something_to_learn(self) -> Self:
        loss = self.trainer.loss
        mode, teacher = self.orchestrator.training_mode, self.orchestrator.teacher
        if loss.type == "sft" and mode != "sft":
            raise ValueError(
                'trainer.loss.type = "sft" imitates every rollout, whatever its reward; use "default", or '
                "`verbatim sft` with a [warm_start] table"
            )
        if mode == "opd" or loss.type == "opd":
            if teacher is None:
                raise ValueError('training_mode = "opd" needs an [orchestrator.teacher] table with a model')
            if mode != "opd" or (
                loss.type not in ("default", "opd") and loss.custom_path is None
            ):
                raise ValueError(
                    f'trainer.loss.type = "{loss.type}" and training_mode = "{mode}": distillation is asked for by '
                    'training_mode = "opd", which brings its own loss; remove type (kl_tau and delta may stay), or '
                    'give a loss that reads teacher_logprobs with type = "custom"'
                )
            return self
        if mode == "sft":
            if teacher is None or teacher.base_url is None:
                raise ValueError('training_mode = "sft" needs an [orchestrator.teacher] table with model and base_url')
            if loss.type not in ("default", "sft"):
                raise ValueError(
                    f'trainer.loss.type = "{loss.type}", but training_mode = "sft" brings its own loss; remove type'
                )
            return self
        teacher_tau = loss.knobs.get("teacher_tau") if loss.type == "default" else None
        if teacher_tau and teacher is None:
            raise ValueError("trainer.loss.teacher_tau needs an [orchestrator.teacher] table with a model")
        if loss.type == "default" and loss.knobs.get("adv_tau") == 0 and not teacher_tau:
            raise ValueError(
                "trainer.loss.adv_tau = 0 learns nothing; expected a number above 0, or a teacher to follow instead: "
                "an [orchestrator.teacher] table and trainer.loss.teacher_tau = 1.0"
            )
        return self

    @model_validator(mode="after")
    def _trainable_sampling(self) -> Self:
        places = [("orchestrator.sampling", self.orchestrator.sampling)]
        for i, env in enumerate(self.orchestrator.train.env):
            if env.sampling is not None:
                places.append((f"orchestrator.train.env.{i}.sampling", env.sampling))
        for where, sampling in places:
            if sampling.temperature == 0:
                raise ValueError(
                    f"{where}.temperature = 0: greedy tokens have no distribution to train on; use a temperature "
                    "above 0, for example 1.0 (evaluation may be greedy: set it on an [[orchestrator.eval.env]])"
                )
            teacher = self.orchestrator.teacher
            by_server = teacher is not None and teacher.base_url is not None
            if by_server and self.orchestrator.training_mode != "sft" and sampling.temperature != 1:
                raise ValueError(
                    f"{where}.temperature = {sampling.temperature}: a teacher's server gives logprobs at temperature 1 "
                    "only; use 1.0, or a teacher that is loaded here (remove orchestrator.teacher.base_url)"
                )
            if sampling.is_truncated and not sampling.accept_truncation_mismatch:
                raise ValueError(
                    f"{where} cuts the distribution (top_p, top_k or min_p), which the trainer cannot reproduce; "
                    "remove it, or accept the mismatch with accept_truncation_mismatch = true"
                )
        return self
