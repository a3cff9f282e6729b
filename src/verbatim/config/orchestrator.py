"""[orchestrator]: environments, rollouts, scoring and batches."""

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
    """How tokens are drawn."""

    temperature: Annotated[float, AfterValidator(_temperature)] = SamplingParams.temperature
    """Divides the logits."""
    max_tokens: PositiveInt = SamplingParams.max_tokens
    """Most tokens of one turn."""
    top_p: Annotated[float, Field(ge=LEAST_NUCLEUS, le=1)] = SamplingParams.top_p
    """Nucleus; 1: off."""
    top_k: Annotated[int, Field(ge=0, lt=INT32_END)] = SamplingParams.top_k
    """0: off."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = SamplingParams.min_p
    """0: off."""
    stop: Annotated[tuple[str, ...], BeforeValidator(stop_strings)] = SamplingParams.stop
    """Stop strings, a text or a list of at most 16: a turn ends with the token that completes one. That token is part
    of the turn, and trained; the text that the environment gets ends before the string. Not sent to a teacher."""
    accept_truncation_mismatch: bool = False
    """Train under the whole distribution although top-p, top-k or min-p cut the one that was sampled from: for a
    sampler that does not return the ids that it kept. That is a bias, the metric `truncation_mismatch`."""

    @property
    def params(self) -> SamplingParams:
        """What a sampler is given."""
        return SamplingParams(**self.model_dump(exclude={"accept_truncation_mismatch"}))

    @property
    def training_params(self) -> SamplingParams:
        """The same for episodes that are trained: with the ids among which tokens were drawn."""
        return dataclasses.replace(self.params, return_kept_sets=not self.accept_truncation_mismatch)


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
    max_turns: PositiveInt = EpisodeLimits.max_turns
    """Most turns of one trajectory."""
    max_total_completion_tokens: PositiveInt | None = EpisodeLimits.max_total_completion_tokens
    """Most sampled tokens of one trajectory, all its turns and agents together: a turn's max_tokens is cut to what is
    left of them, and the trajectory ends as `length` (default: no limit)."""
    sampling: SamplingConfig | None = None
    """Overrides [orchestrator.sampling] as a whole."""
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
        """What metrics and records call it."""
        return self.name or self.id or str(self.import_path)


class TrainEnvsConfig(Section):
    """The training environments."""

    env: Annotated[tuple[EnvConfig, ...], Field(min_length=1)]
    """[[orchestrator.train.env]] tables."""


EVAL_METRICS = ("success", "success/low", "success/high", "reward/mean", "reward/std", "reward/low", "reward/high",
                "turns", "tool_calls", "valid_format", "tool_errors", "truncated", "malformed",
                "completion_tokens")  # fmt: skip
"""What every evaluation measures, `valid_format` only where a tool call was tried."""
_EVAL_FAMILIES = ("reward_part/", "agent_reward/", "judge/")
"""What the names of its other metrics begin with."""


def _eval_metric(name: str) -> str:
    if name in EVAL_METRICS or name.startswith(_EVAL_FAMILIES) or "@" in name:
        return name
    raise ValueError(
        f"found {name!r}, expected a metric of evaluations: {', '.join(EVAL_METRICS)}, or one that begins "
        f"with {', '.join(_EVAL_FAMILIES)}"
    )


class CriterionConfig(Section):
    """Which figure of the evaluations says how good a policy is."""

    metric: Annotated[str, AfterValidator(_eval_metric)] = "success"
    """A metric of evaluations: "success", "reward/mean", "reward_part/NAME/mean", ..."""
    mode: Literal["max", "min"] = "max"
    """Whether more of it is better, or less."""
    env: str | None = None
    """The environment whose evaluation counts, by its name; by default the mean over all that are evaluated."""


class EarlyStoppingConfig(CriterionConfig):
    """When evaluations that get no better end the run."""

    patience: PositiveInt = 3
    """That many evaluations in a row without an improvement end it."""
    min_delta: NonNegativeFloat = 0.0
    """An improvement is larger than this."""


class EvalConfig(Section):
    """When and on which environments the policy is evaluated: before, during and after training."""

    env: tuple[EnvConfig, ...] = ()
    """[[orchestrator.eval.env]] tables; the training environments if there are none."""
    interval: PositiveInt = 10
    """Steps between evaluations."""
    episodes: PositiveInt = 300
    """Most episodes of an environment: every example is played equally often, as often as fits; where there are more
    examples than episodes, the first ones are played once."""
    examples: PositiveInt | None = None
    """Only the first so many examples of each environment, at most `episodes` (default: all)."""
    seed: NonNegativeInt = 1_000_003
    """Its own seeds, whatever the run's seed is."""
    max_failed: Fraction = MAX_FAILED
    """Largest share of failed episodes of an environment with which an evaluation is compared with others: for the best
    checkpoint, early stopping, what was gained, and by `verbatim eval`. With more, it measures the survivors."""
    early_stopping: EarlyStoppingConfig | None = None
    """End the run when evaluations get no better; without this table it takes all its steps."""

    @model_validator(mode="after")
    def _examples_are_played(self) -> Self:
        if self.examples is not None and self.examples > self.episodes:
            raise ValueError(
                f"examples = {self.examples} cannot be played with episodes = {self.episodes}; set episodes to "
                f"{self.examples} or a multiple of it"
            )
        return self


class RendererConfig(Section):
    """How messages become ids."""

    name: str = "auto"
    """"auto", a family such as "qwen3", or "template"."""
    tools: Literal["hermes"] | None = None
    """"hermes" writes tools as text of the messages, for a chat template that has none; otherwise the model's own."""
    thinking_retention: Literal["tool_cycle", "all"] = "tool_cycle"
    """At a user's message, "tool_cycle" lets thoughts go where the model's format drops them, and the next turn starts
    a new sample; with "all" they stay, and the dialogue is one sample."""
    history: Literal["verbatim", "template"] = "verbatim"
    """"verbatim" continues what was sampled; "template" renders every prompt, as a chat endpoint does."""
    later_system: Literal["fold", "refuse"] = "fold"
    """A system or developer message that the model's format does not write where it stands: "fold" writes it in the
    first system message, or as a user's message in its place; "refuse" refuses it."""

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
    api_key_env: str | None = None
    """The environment variable that holds the server's key, if it wants one; OPENAI_API_KEY for api.openai.com only."""
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
    """New rollouts for batch n start with weights of version n minus this, or newer. 0: synchronous. A rollout that
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
    episode_timeout: PositiveFloat = EpisodeLimits.timeout
    """Seconds after which an episode fails, and is counted."""
    tool_timeout: PositiveFloat = EpisodeLimits.tool_timeout
    """Seconds after which a tool call becomes an error message to the model."""
    tool_output_limit: PositiveInt = EpisodeLimits.tool_output_limit
    """Characters of a tool's answer; the rest is cut and the model is told."""
    tool_error: Literal["message", "stop"] = EpisodeLimits.tool_error
    """What a tool that raises or hangs does: tells the model, or ends the episode as failed."""
    max_malformed_retries: NonNegativeInt = EpisodeLimits.max_malformed_retries
    """Turns in a row that may hold nothing but unreadable calls; one more ends the episode as malformed."""
    heartbeat_timeout: PositiveFloat = 30.0
    """Seconds without a sign of life after which the other process of a run is taken for dead; at least 120 while it
    starts."""
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
