"""Defines [orchestrator]: environments, rollouts, scoring and batches."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from verbatim.config.sections import (
    BackendSection,
    ComponentConfig,
    FinitePositive,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
)
from verbatim.core.episode_limits import EpisodeLimits
from verbatim.core.records.failed import MAX_FAILED
from verbatim.core.sampling import (
    INT32_END,
    LEAST_NUCLEUS,
    TEMPERATURES,
    SamplingParams,
    is_temperature,
    stop_strings,
)


def _temperature(value: float) -> float:
    if not is_temperature(value):
        raise ValueError(f"found {value}, expected {TEMPERATURES}")
    return value


class SamplingConfig(Section):
    """How tokens are sampled."""

    temperature: Annotated[float, AfterValidator(_temperature)] = SamplingParams.temperature
    """Divisor of the logits; 0 for greedy sampling."""
    max_tokens: PositiveInt = SamplingParams.max_tokens
    """Maximum number of sampled tokens per turn."""
    top_p: Annotated[float, Field(ge=LEAST_NUCLEUS, le=1)] = SamplingParams.top_p
    """Nucleus sampling: keep the most likely tokens with this total probability; 1 to keep all."""
    top_k: Annotated[int, Field(ge=0, lt=INT32_END)] = SamplingParams.top_k
    """Keep only this many of the most likely tokens; 0 to keep all."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = SamplingParams.min_p
    """Keep tokens whose probability is at least this fraction of the most likely token's probability; 0 to keep all."""
    stop: Annotated[tuple[str, ...], BeforeValidator(stop_strings)] = SamplingParams.stop
    """Stop strings: one string, or a list of at most 16. A turn ends with the token that completes a stop string. That
    token is part of the turn and is trained; the text for the environment ends before the string. Stop strings are not
    sent to a teacher."""
    accept_truncation_mismatch: bool = False
    """Train under the full distribution although tokens are sampled from a distribution that top-p, top-k or min-p cut,
    for a sampler that does not return kept sets. This introduces a bias; the metric `truncation_mismatch` reports
    it."""

    @property
    def params(self) -> SamplingParams:
        """The parameters for a sampler."""
        return SamplingParams(**self.model_dump(exclude={"accept_truncation_mismatch"}))

    @property
    def training_params(self) -> SamplingParams:
        """The parameters for a sampler in episodes that are trained: the sampler also returns the kept sets."""
        return dataclasses.replace(self.params, return_kept_sets=not self.accept_truncation_mismatch)


FORMULATE_MODES = {"traj": "interleaved", "step": "branching"}
"""The `trajectory_strategy` that each `formulate_mode` stands for."""


def one_strategy(section: Any) -> Any:
    """Refuse a `formulate_mode` that contradicts `trajectory_strategy`; the two are names for the same setting."""
    meant, given = FORMULATE_MODES.get(section.formulate_mode), section.trajectory_strategy
    if meant is not None and given != meant:
        raise ValueError(
            f'formulate_mode = "{section.formulate_mode}" means trajectory_strategy = "{meant}", found '
            f'trajectory_strategy = "{given}"; give one of the two'
        )
    return section


class LengthPenaltyConfig(Section):
    """How a rollout's length changes the reward that advantages use. Everything else uses the original reward."""

    type: Literal["tokens", "turns"]
    """Unit of the length: sampled tokens, or turns."""
    kind: Literal["target", "relative"] = "target"
    """"target": subtract `slope` for each token or turn above `target`. "relative": multiply the best rewards of a
    group by up to 2, with a higher factor for shorter rollouts."""
    target: NonNegativeInt | None = None
    """Maximum length without a penalty, with "target"."""
    slope: NonNegativeFloat | None = None
    """Penalty per token or turn above `target`, with "target". Default: 0.001 per token, 0.05 per turn."""

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if self.kind == "target" and self.target is None:
            example = 200 if self.type == "tokens" else 5
            raise ValueError(f"target is missing: how many {self.type} cost nothing? For example target = {example}")
        if self.kind == "relative" and (self.target is not None or self.slope is not None):
            raise ValueError('target and slope belong to kind = "target", found kind = "relative"')
        return self


class EnvConfig(Section):
    """One environment of the training or evaluation mixture."""

    id: str | None = None
    """Name of a bundled environment; hyphens and underscores are equivalent."""
    import_path: str | None = None
    """Import path, instead of an id: `module.Class`, or a `module.function` that returns an environment."""
    name: str | None = None
    """Name in metrics. Default: the id or import path."""
    args: dict[str, Any] = Field(default={})
    """Keyword arguments of the environment's class or function."""
    ratio: FinitePositive = 1.0
    """Share of the groups from this environment, relative to the others."""
    isolated: bool = False
    """Run this environment's episodes in child processes on this machine, as orchestrator.rollout.backend = "processes"
    does for all environments. The other environments stay in the orchestrator's process."""
    max_turns: PositiveInt = EpisodeLimits.max_turns
    """Maximum number of turns per trajectory."""
    max_total_completion_tokens: PositiveInt | None = EpisodeLimits.max_total_completion_tokens
    """Maximum number of sampled tokens per trajectory, over all its turns and agents. A turn's max_tokens is reduced to
    what is left of this number, and a trajectory that reaches it ends with stop reason `length`. Default: no limit."""
    sampling: SamplingConfig | None = None
    """Replaces [orchestrator.sampling] as a whole."""
    advantage: ComponentConfig | None = None
    """Overrides [orchestrator.advantage]."""
    length_penalty: LengthPenaltyConfig | None = None
    """Overrides [orchestrator.length_penalty]."""
    formulate_mode: Literal["traj", "step"] | None = None
    """Overrides orchestrator.formulate_mode."""
    trajectory_strategy: str | None = Field(default_factory=lambda data: FORMULATE_MODES.get(data["formulate_mode"]))
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
        """The environment's name in metrics and records."""
        return self.name or self.id or str(self.import_path)


class TrainEnvsConfig(Section):
    """The training environments."""

    env: Annotated[tuple[EnvConfig, ...], Field(min_length=1)]
    """[[orchestrator.train.env]] tables."""


EVAL_METRICS = ("success", "success/low", "success/high", "reward/mean", "reward/std", "reward/low", "reward/high",
                "turns", "tool_calls", "valid_format", "tool_errors", "truncated", "malformed",
                "completion_tokens")  # fmt: skip
"""Metrics that every evaluation has, except that `valid_format` exists only if a tool call was attempted."""
_EVAL_FAMILIES = ("reward_part/", "agent_reward/", "judge/")
"""Prefixes of the metrics that depend on the environment."""


def _eval_metric(name: str) -> str:
    if name in EVAL_METRICS or name.startswith(_EVAL_FAMILIES) or "@" in name:
        return name
    raise ValueError(
        f"found {name!r}, expected a metric of evaluations: {', '.join(EVAL_METRICS)}, or one that begins "
        f"with {', '.join(_EVAL_FAMILIES)}"
    )


class CriterionConfig(Section):
    """The evaluation metric by which policies are compared."""

    metric: Annotated[str, AfterValidator(_eval_metric)] = "success"
    """An evaluation metric: "success", "reward/mean", "reward_part/NAME/mean", ..."""
    mode: Literal["max", "min"] = "max"
    """Which values are better: higher or lower ones."""
    env: str | None = None
    """Name of the environment whose evaluation counts. Default: the mean over all evaluated environments."""


class EarlyStoppingConfig(CriterionConfig):
    """Ends the run when evaluations stop improving."""

    patience: PositiveInt = 3
    """Number of consecutive evaluations without an improvement that ends the run."""
    min_delta: NonNegativeFloat = 0.0
    """A change counts as an improvement only if it is larger than this."""


class EvalConfig(Section):
    """Evaluation of the policy before, during and after training."""

    env: tuple[EnvConfig, ...] = ()
    """[[orchestrator.eval.env]] tables. Default: the training environments."""
    interval: PositiveInt = 10
    """Steps between evaluations."""
    episodes: PositiveInt = 300
    """Maximum number of episodes per environment. Every example is played equally often, as many times as this number
    allows; if there are more examples than episodes, only the first examples are played, once each."""
    examples: PositiveInt | None = None
    """Number of examples to use from each environment, the first ones; at most `episodes`. Default: all."""
    seed: NonNegativeInt = 1_000_003
    """Seed of the evaluations, independent of the run's seed."""
    max_failed: Fraction = MAX_FAILED
    """Maximum share of failed episodes in an environment. An evaluation with more failures is not compared with others
    (best checkpoint, early stopping, improvement, `verbatim eval`), because it would measure only the survivors."""
    early_stopping: EarlyStoppingConfig | None = None
    """End the run when evaluations stop improving. Without this table the run takes all its steps."""

    @model_validator(mode="after")
    def _examples_are_played(self) -> Self:
        if self.examples is not None and self.examples > self.episodes:
            raise ValueError(
                f"examples = {self.examples} cannot be played with episodes = {self.episodes}; set episodes to "
                f"{self.examples} or a multiple of it"
            )
        return self


class RendererConfig(Section):
    """How messages are converted to ids."""

    name: str = "auto"
    """"auto" (chosen by model), a family such as "qwen3", or "template" (the model's chat template)."""
    tools: Literal["hermes"] | None = None
    """"hermes" writes tool definitions and calls into the message text, for chat templates without tool support.
    Default: the model's own tool format."""
    thinking_retention: Literal["tool_cycle", "all"] = "tool_cycle"
    """What happens to earlier reasoning when a new user message follows: "tool_cycle" drops the reasoning if the
    model's format does, and the next turn starts a new sample; "all" keeps it, and the dialogue stays one sample."""
    history: Literal["verbatim", "template"] = "verbatim"
    """"verbatim" extends the sampled ids; "template" renders each prompt from its messages, as a chat endpoint does."""
    later_system: Literal["fold", "refuse"] = "fold"
    """What happens to a system or developer message at a position that the model's format does not support: "fold"
    merges it into the first system message, or writes it as a user message at the same position; "refuse" raises an
    error."""

    @model_validator(mode="after")
    def _one_format(self) -> Self:
        if self.tools is not None and self.name not in ("auto", "template", "default", "DefaultRenderer"):
            raise ValueError(
                f'tools = "{self.tools}" with name = "{self.name}", a family with a tool format of its own; remove '
                'one of them, or use name = "template"'
            )
        return self


class TeacherConfig(Section):
    """A second model that computes logprobs of the sampled tokens or, for "sft", plays the episodes."""

    model: str
    """A folder or hub id; with `base_url`, the model's name on that server."""
    base_url: str | None = None
    """An OpenAI-compatible server such as "http://localhost:8000/v1"; for "opd" the server needs vLLM's
    `prompt_logprobs`. Without a `base_url` the model is loaded next to the orchestrator."""
    api_key_env: str | None = None
    """Environment variable with the server's API key, if the server needs a key. Default: OPENAI_API_KEY, for
    api.openai.com only."""
    device: str = "auto"
    """Device of a teacher without a `base_url`; "auto" chooses CUDA if it is available."""


class BufferConfig(Section):
    """Difficulty pools, which decide which examples are sampled and which groups reach the trainer."""

    easy_threshold: float | None = None
    """Stop sampling examples whose mean reward is at least this. Default: never."""
    hard_threshold: float | None = None
    """Stop sampling examples whose mean reward is at most this. Default: never."""
    easy_fraction: Fraction = 0.0
    """Share of the easy examples that are sampled again after a resume, and when no other examples are left."""
    hard_fraction: Fraction = 0.0
    """Share of the hard examples that are sampled again after a resume, and when no other examples are left."""
    window: PositiveInt = 1
    """Number of an example's most recent groups over which its mean reward is computed."""
    online_difficulty_filtering: bool = False
    """Drop groups whose rewards are all equal before batching, and sample other groups in their place."""

    @model_validator(mode="after")
    def _easy_above_hard(self) -> Self:
        easy, hard = self.easy_threshold, self.hard_threshold
        if easy is not None and hard is not None and easy <= hard:
            raise ValueError(f"easy_threshold = {easy} must be above hard_threshold = {hard}; for example 0.9 and 0.1")
        return self


class RolloutConfig(BackendSection):
    """Where episodes run. Each backend has its own settings in the table with its name:
    [orchestrator.rollout.processes]."""

    what: ClassVar[str] = "rollout backend"

    backend: str = "local"
    """"local": the orchestrator's own process; "processes": child processes on this machine; "ray": Ray actors on the
    nodes of [cluster], or on this machine without that table; or the import path of a backend of your own."""
    workers: PositiveInt = 2
    """Number of child processes per environment; with "ray", number of actors for all environments together."""


class OrchestratorConfig(Section):
    """Rollouts, scoring and batching."""

    train: TrainEnvsConfig
    """The training environments."""
    eval: EvalConfig | None = None
    """Evaluation; without this table there is no evaluation."""
    batch_size: PositiveInt = 128
    """Number of rollouts per batch; a multiple of `group_size`."""
    group_size: PositiveInt = 16
    """Number of rollouts per example."""
    seq_len: PositiveInt = 2048
    """Maximum number of tokens in a training sample, and in a trajectory's context."""
    max_concurrent: PositiveInt = 256
    """Maximum number of episodes in flight."""
    max_async_level: NonNegativeInt = 1
    """How far rollouts may run ahead: new rollouts for batch n start with weights of version n - max_async_level or
    newer. 0 means synchronous. A slow rollout may end up in a batch later than the one for which it was started."""
    max_off_policy_steps: NonNegativeInt = 8
    """Maximum staleness: rollouts whose first token was sampled by a version older than n - max_off_policy_steps are
    dropped from batch n as `stale`."""
    oversampling_factor: Annotated[float, Field(ge=1)] = 1.0
    """Number of groups in flight, as a multiple of the number of groups in a batch. Values above max_async_level + 1
    have an effect only if online difficulty filtering replaces groups."""
    formulate_mode: Literal["traj", "step"] | None = None
    """Another name for `trajectory_strategy`: "traj" is "interleaved", "step" is "branching"."""
    trajectory_strategy: str = Field(
        default_factory=lambda data: FORMULATE_MODES.get(data["formulate_mode"], "interleaved")
    )
    """How a trajectory becomes training samples: "interleaved" (turns that extend each other exactly share a sample),
    "branching" (one sample per turn), or the import path of a strategy of your own."""
    on_break: Literal["split", "error"] = "split"
    """At a break (a prompt that does not extend its agent's history exactly): "split" starts another sample, "error"
    stops the run and names the position. Does not affect "branching"."""
    training_mode: Literal["rl", "opd", "sft"] = "rl"
    """Training objective: "rl" maximises the reward; "opd" moves the policy towards a teacher on the policy's own
    samples (on-policy distillation); "sft" maximises the likelihood of a teacher's responses from a server."""
    teacher: TeacherConfig | None = None
    """The teacher for "opd", "sft" and trainer.loss.teacher_tau."""
    episode_timeout: PositiveFloat = EpisodeLimits.timeout
    """Episode timeout in seconds; an episode that exceeds it fails and is counted."""
    tool_timeout: PositiveFloat = EpisodeLimits.tool_timeout
    """Tool timeout in seconds; a call that exceeds it returns an error message to the model."""
    tool_output_limit: PositiveInt = EpisodeLimits.tool_output_limit
    """Maximum length of a tool result in characters; the rest is cut off, and a note tells the model so."""
    tool_error: Literal["message", "stop"] = EpisodeLimits.tool_error
    """What happens if a tool raises or times out: "message" tells the model, "stop" ends the episode as failed."""
    max_malformed_retries: NonNegativeInt = EpisodeLimits.max_malformed_retries
    """Number of consecutive turns that may contain only unreadable tool calls; one more ends the episode as
    malformed."""
    heartbeat_timeout: PositiveFloat = 30.0
    """Heartbeat timeout in seconds: the other process of a run counts as dead after this long without a heartbeat; at
    least 120 while it starts."""
    stall_timeout: PositiveFloat = 1800.0
    """Time in seconds without progress after which the other process counts as stuck; must be longer than any optimizer
    step."""
    sampling: SamplingConfig = SamplingConfig()
    """How tokens are sampled."""
    renderer: RendererConfig = RendererConfig()
    """How messages are converted to ids."""
    rollout: RolloutConfig = RolloutConfig()
    """Where episodes run."""
    buffer: BufferConfig = BufferConfig()
    """Difficulty pools, and online difficulty filtering."""
    advantage: ComponentConfig = ComponentConfig()
    """The advantage function."""
    length_penalty: LengthPenaltyConfig | None = None
    """How length changes the rewards that advantages use. Default: no change."""
    filters: tuple[ComponentConfig, ...] = tuple(
        ComponentConfig(type=name) for name in ("gibberish", "repetition", "zero_advantage")
    )
    """Filters between scoring and training. A list given here replaces the default list as a whole."""

    _strategy = model_validator(mode="after")(one_strategy)

    @model_validator(mode="after")
    def _has_its_teacher(self) -> Self:
        if self.training_mode == "opd" and self.teacher is None:
            raise ValueError('training_mode = "opd" needs an [orchestrator.teacher] table with a model')
        if self.training_mode == "sft" and (self.teacher is None or self.teacher.base_url is None):
            raise ValueError('training_mode = "sft" needs an [orchestrator.teacher] table with model and base_url')
        return self

    @model_validator(mode="after")
    def _isolated_here(self) -> Self:
        tables = {"train": self.train.env, "eval": self.eval.env if self.eval is not None else ()}
        where = [f"{purpose}.env.{i}" for purpose, envs in tables.items() for i, env in enumerate(envs) if env.isolated]
        if where and self.rollout.backend not in ("local", "processes"):
            raise ValueError(
                f"{where[0]}.isolated = true needs child processes on this machine, found rollout.backend = "
                f'"{self.rollout.backend}", which runs every environment; remove isolated, or set rollout.backend = '
                '"local"'
            )
        return self

    @model_validator(mode="after")
    def _whole_groups(self) -> Self:
        if self.batch_size % self.group_size:
            down = max(1, self.batch_size // self.group_size) * self.group_size
            raise ValueError(
                f"batch_size = {self.batch_size} is not a multiple of group_size = {self.group_size}; "
                f"for example batch_size = {down}"
            )
        return self
