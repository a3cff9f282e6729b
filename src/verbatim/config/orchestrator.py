"""[orchestrator]: rollouts, scoring and batches."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from verbatim.config.environments import (
    FORMULATE_MODES,
    EvalConfig,
    LengthPenaltyConfig,
    SamplingConfig,
    TrainEnvsConfig,
    one_strategy,
)
from verbatim.config.sections import (
    BackendSection,
    ComponentConfig,
    Fraction,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
)


class RendererConfig(Section):
    """How messages become ids."""

    name: str = "auto"
    """"auto", a family such as "qwen3", or "template"."""
    tools: Literal["hermes"] | None = None
    """"hermes" writes tools as text of the messages, for a chat template that has none; otherwise the model's own."""

    @model_validator(mode="after")
    def _one_format(self) -> Self:
        if self.tools is not None and self.name not in ("auto", "template", "default", "DefaultRenderer"):
            raise ValueError(
                f'tools = "{self.tools}" beside name = "{self.name}", a family with a tool format of its own; remove '
                'one of them, or use name = "template"'
            )
        return self


class TeacherConfig(Section):
    """A second model that scores the sampled tokens (log probabilities), or, for "sft", plays the episodes."""

    model: str
    """A folder or hub id; with `base_url` the name that the server knows it by."""
    base_url: str | None = None
    """An OpenAI-compatible server such as "http://localhost:8000/v1", for "opd" with vLLM's `prompt_logprobs`; without
    it the model is loaded beside the orchestrator."""
    api_key_env: str = "OPENAI_API_KEY"
    """The environment variable that holds the server's key, if it wants one."""
    device: str = "auto"
    """Device of a model that is loaded here; "auto" uses CUDA where it is available."""


class BufferConfig(Section):
    """Difficulty pools: which examples are sampled, and which groups reach the trainer."""

    easy_threshold: float | None = None
    """Examples whose group earned this mean reward, or more, are sampled no more; none by default."""
    hard_threshold: float | None = None
    """Examples whose group earned this mean reward, or less, are sampled no more; none by default."""
    easy_fraction: Fraction = 0.0
    """Share of those easy examples that comes back: on resume, and when nothing else is left."""
    hard_fraction: Fraction = 0.0
    """Share of those hard examples that comes back: on resume, and when nothing else is left."""
    window: PositiveInt = 1
    """The mean is over the last so many groups of an example."""
    online_difficulty_filtering: bool = False
    """Drop groups whose rewards are all equal before they become part of a batch; others are sampled in their place."""

    @model_validator(mode="after")
    def _easy_above_hard(self) -> Self:
        easy, hard = self.easy_threshold, self.hard_threshold
        if easy is not None and hard is not None and easy <= hard:
            raise ValueError(f"easy_threshold = {easy} must be above hard_threshold = {hard}; for example 0.9 and 0.1")
        return self


class RolloutConfig(BackendSection):
    """Where episodes run. A backend's own settings are in the table of its name: [orchestrator.rollout.ray]."""

    what: ClassVar[str] = "rollout backend"

    backend: str = "local"
    """"local", in the orchestrator's own process; "processes", in child processes of this machine; "ray", in Ray actors
    on any number of hosts; or the import path of one of your own."""
    workers: PositiveInt = 2
    """Processes of each environment; with "ray" actors, for all environments together."""


class OrchestratorConfig(Section):
    """Rollouts, scoring, and how batches are made."""

    train: TrainEnvsConfig
    """The training environments."""
    eval: EvalConfig | None = None
    """Evaluation; without this table there is no evaluation."""
    batch_size: PositiveInt = 128
    """Rollouts per batch."""
    group_size: PositiveInt = 16
    """Rollouts per example."""
    seq_len: PositiveInt = 2048
    """Most tokens of one training sample, and of one trajectory's context."""
    max_concurrent: PositiveInt = 256
    """Episodes in flight."""
    max_async_level: NonNegativeInt = 1
    """New rollouts for batch n start with weights of version n minus this, or newer. 0 = synchronous. A rollout that
    takes long may be trained in a later batch than the one it was started for."""
    max_off_policy_steps: NonNegativeInt = 8
    """The oldest that is trained: rollouts whose first token was sampled by version n minus more than this are dropped
    from batch n as `stale`."""
    oversampling_factor: Annotated[float, Field(ge=1)] = 1.0
    """Groups in flight, over the groups of a batch: as many where online difficulty filtering replaces groups,
    otherwise up to max_async_level + 1."""
    formulate_mode: Literal["traj", "step"] | None = None
    """Another name for `trajectory_strategy`: "traj" is "interleaved", "step" is "branching"."""
    trajectory_strategy: str = Field(
        default_factory=lambda data: FORMULATE_MODES.get(data["formulate_mode"], "interleaved")
    )
    """How a trajectory becomes training samples: "interleaved" (turns that extend each other exactly share one),
    "branching" (one for each turn), or the import path of a strategy of your own."""
    on_break: Literal["split", "error"] = "split"
    """Where a prompt does not extend its agent's history exactly: start another sample, or stop the run and say where.
    Breaks are nothing to "branching"."""
    training_mode: Literal["rl", "opd", "sft"] = "rl"
    """What the trainer optimises: the reward; the nearness to a teacher on the policy's own samples (on-policy
    distillation); or the likelihood of what a teacher behind a server says when it acts."""
    teacher: TeacherConfig | None = None
    """For "opd" and "sft", and for trainer.loss.teacher_tau."""
    episode_timeout: PositiveFloat = 600.0
    """Seconds after which an episode fails, and is counted."""
    tool_timeout: PositiveFloat = 60.0
    """Seconds after which a tool call becomes an error message to the model."""
    tool_output_limit: PositiveInt = 16_384
    """Characters of a tool's answer; the rest is cut and the model is told."""
    tool_error: Literal["message", "stop"] = "message"
    """What a tool that raises or hangs does: tells the model, or ends the episode as failed."""
    max_malformed_retries: NonNegativeInt = 2
    """Turns in a row that may hold nothing but unreadable calls; one more ends the episode as malformed."""
    heartbeat_timeout: PositiveFloat = 30.0
    """Seconds without a sign of life after which the other process of a run is taken for dead."""
    stall_timeout: PositiveFloat = 1800.0
    """Seconds without progress after which it is taken for stuck: more than the longest optimizer step."""
    sampling: SamplingConfig = SamplingConfig()
    """How tokens are drawn."""
    renderer: RendererConfig = RendererConfig()
    """How messages become ids."""
    rollout: RolloutConfig = RolloutConfig()
    """Where episodes run."""
    buffer: BufferConfig = BufferConfig()
    """Difficulty pools, and online difficulty filtering."""
    advantage: ComponentConfig = ComponentConfig()
    """The advantage function."""
    length_penalty: LengthPenaltyConfig | None = None
    """How length changes the rewards that advantages read; without this table it does not."""
    filters: tuple[ComponentConfig, ...] = tuple(
        ComponentConfig(type=name) for name in ("gibberish", "repetition", "zero_advantage")
    )
    """Filters between scoring and training. A list replaces the default one as a whole."""

    _strategy = model_validator(mode="after")(one_strategy)

    @model_validator(mode="after")
    def _isolated_here(self) -> Self:
        tables = {"train": self.train.env, "eval": self.eval.env if self.eval is not None else ()}
        where = [f"{purpose}.env.{i}" for purpose, envs in tables.items() for i, env in enumerate(envs) if env.isolated]
        if where and self.rollout.backend not in ("local", "processes"):
            raise ValueError(
                f"{where[0]}.isolated = true asks for processes of this machine, found rollout.backend = "
                f'"{self.rollout.backend}", which runs every environment; remove isolated, or set rollout.backend = '
                '"local"'
            )
        return self

    @model_validator(mode="after")
    def _whole_groups(self) -> Self:
        if self.batch_size % self.group_size:
            down = max(1, self.batch_size // self.group_size) * self.group_size
            raise ValueError(
                f"batch_size = {self.batch_size} is not a whole number of groups of group_size = {self.group_size}; "
                f"for example batch_size = {down}"
            )
        return self
