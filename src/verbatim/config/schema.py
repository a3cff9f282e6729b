"""Every key of a run's TOML file, as frozen typed records. Sections keep the names of the processes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
FinitePositive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
COLDEST = 1e-6
"""The lowest temperature above 0: below, logits divided by it leave float32."""
Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """A table of the file: frozen, and unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, use_attribute_docstrings=True)


class ComponentConfig(BaseModel):
    """A plug-in: `type` names a built-in, whose knobs are the other keys; or `type = "custom"` with
    `import_path` and `kwargs`. Knobs are checked against the component's own signature when it is resolved."""

    model_config = ConfigDict(extra="allow", frozen=True, use_attribute_docstrings=True)

    type: str = "default"
    """A name from the component's table, or "custom"."""
    import_path: str | None = None
    """With "custom": `module.function`."""
    kwargs: dict[str, Any] = Field(default={}, exclude_if=lambda kwargs: not kwargs)
    """With "custom": keyword arguments of the function."""

    @model_validator(mode="after")
    def _one_shape(self) -> Self:
        if self.type == "custom":
            if self.import_path is None:
                raise ValueError('type = "custom" needs import_path = "module.function"')
            if self.model_extra:
                names = ", ".join(self.model_extra)
                raise ValueError(f'{names}: with type = "custom" arguments go into kwargs = {{ ... }}')
        elif self.import_path is not None or self.kwargs:
            raise ValueError(f'import_path and kwargs belong to type = "custom", found type = "{self.type}"')
        return self

    @property
    def knobs(self) -> dict[str, Any]:
        """The keyword arguments for the component."""
        return dict(self.kwargs) if self.type == "custom" else dict(self.model_extra or {})


class BuildConfig(Section):
    """A small model made on the spot: random weights, and a tokenizer trained on the environments' own text."""

    hidden_size: PositiveInt = 128
    """Width."""
    num_layers: PositiveInt = 3
    """Depth."""
    num_heads: PositiveInt = 4
    """Query heads."""
    num_kv_heads: PositiveInt = 2
    """Key/value heads."""
    intermediate_size: PositiveInt = 384
    """Width of the feed-forward part."""
    vocab_size: Annotated[int, Field(ge=300)] = 1024
    """Most tokens the tokenizer learns."""
    context_length: PositiveInt = 2048
    """Longest sequence of the model."""

    @model_validator(mode="after")
    def _sizes_fit(self) -> Self:
        if self.hidden_size % (2 * self.num_heads):
            raise ValueError(
                f"hidden_size = {self.hidden_size} does not give {self.num_heads} heads an even width; for example "
                f"hidden_size = {2 * self.num_heads * max(1, self.hidden_size // (2 * self.num_heads))}"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads = {self.num_heads} is not a multiple of num_kv_heads = {self.num_kv_heads}; for example "
                f"num_kv_heads = {self.num_heads}"
            )
        return self


class ModelConfig(Section):
    """The model: a folder or hub id in Hugging Face format, or one to build."""

    name: str | None = None
    """A local folder or a hub id of a causal language model."""
    build: BuildConfig | None = None
    """Instead of a name: make a small model in the run folder."""

    @model_validator(mode="after")
    def _one_of(self) -> Self:
        if (self.name is None) == (self.build is None):
            raise ValueError("give either name = \"folder or hub id\" or a [model.build] table, not both or neither")
        return self


class OptimConfig(Section):
    """AdamW and its schedule."""

    lr: FinitePositive = 1e-6
    """Peak learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up."""
    warmup_steps: NonNegativeInt = 0
    """Optimizer steps from 0 to `lr`."""
    min_lr_ratio: Fraction = 0.0
    """Where linear and cosine end, as a share of `lr`."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled; not applied to norms and biases."""
    beta1: Decay = 0.9
    """AdamW."""
    beta2: Decay = 0.999
    """AdamW."""
    eps: FinitePositive = 1e-8
    """AdamW."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients are scaled down to this norm."""


class WarmStartConfig(Section):
    """Supervised steps before reinforcement learning, on the environment's own demonstrations or a file."""

    steps: PositiveInt = 100
    """Optimizer steps."""
    batch_size: PositiveInt = 64
    """Conversations per step."""
    conversations: PositiveInt = 1024
    """How many demonstrations the environment is asked for."""
    data: Path | None = None
    """A JSONL file of `{"messages": [...], "tools": [...]}` rows instead of the environment's demonstrations."""
    optim: OptimConfig = OptimConfig(lr=1e-3)
    """Its own optimizer, dropped afterwards."""


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


def _one_strategy(section: Any) -> Any:
    """Let `formulate_mode` set `trajectory_strategy`, whose other name it is."""
    if section.formulate_mode is None:
        return section
    meant, given = FORMULATE_MODES[section.formulate_mode], section.trajectory_strategy
    if "trajectory_strategy" in section.model_fields_set and given != meant:
        raise ValueError(
            f'formulate_mode = "{section.formulate_mode}" means trajectory_strategy = "{meant}", found '
            f'trajectory_strategy = "{given}"; give one of the two'
        )
    section.__dict__["trajectory_strategy"] = meant  # frozen for everybody else
    return section


class LengthPenaltyConfig(Section):
    """What a rollout's length does to the reward that advantages see. Everything else sees the reward itself."""

    type: Literal["tokens", "turns"]
    """What is counted: sampled tokens, or turns."""
    kind: Literal["target", "relative"] = "target"
    """"target" takes `slope` for each one above `target`; "relative" raises the group's best rewards, up to twofold,
    the more the shorter they are beside each other."""
    target: NonNegativeInt | None = None
    """With "target": what costs nothing."""
    slope: NonNegativeFloat | None = None
    """With "target": of each one above it; by default 0.001 per token, 0.05 per turn."""

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
    """What metrics call it; its id or import path by default."""
    args: dict[str, Any] = {}
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
    trajectory_strategy: str | None = None
    """Overrides orchestrator.trajectory_strategy."""
    formulate_mode: Literal["traj", "step"] | None = None
    """Overrides orchestrator.formulate_mode."""
    on_break: Literal["split", "error"] | None = None
    """Overrides orchestrator.on_break."""

    _strategy = model_validator(mode="after")(_one_strategy)

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
    """What is trained on."""

    env: Annotated[tuple[EnvConfig, ...], Field(min_length=1)]
    """[[orchestrator.train.env]] tables."""


class EvalConfig(Section):
    """When and on what the policy is evaluated: before, during and after."""

    env: tuple[EnvConfig, ...] = ()
    """[[orchestrator.eval.env]] tables; the training environments if there are none."""
    interval: PositiveInt = 10
    """Batches between evaluations."""
    episodes: PositiveInt = 300
    """Per environment, the same number for every example (rounded up)."""
    seed: int = 1_000_003
    """Its own seeds, whatever the run's seed is."""


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
    """Another model that says what it would have given to the sampled tokens."""

    model: str
    """A folder or hub id; with `base_url` the name that the server knows it by."""
    base_url: str | None = None
    """An OpenAI-compatible server such as "http://localhost:8000/v1", for "opd" with vLLM's `prompt_logprobs`; without
    it the model is loaded beside the orchestrator."""
    api_key_env: str = "OPENAI_API_KEY"
    """The environment variable that holds the server's key, if it wants one."""
    device: str = "auto"
    """Of a model that is loaded here; "auto" takes CUDA where there is one."""


class BufferConfig(Section):
    """Which examples are sampled, and which groups reach the trainer, by how difficult they are."""

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


class RolloutConfig(Section):
    """Where episodes run."""

    backend: Literal["local", "processes", "ray"] = "local"
    """In the orchestrator's own process; in child processes of this machine; or in Ray actors, on any number of
    hosts."""
    workers: PositiveInt = 2
    """Processes of each environment; with "ray" actors, for all environments together."""
    worker_memory_mb: PositiveInt | None = None
    """Most memory of one process, in MB (2**20 bytes): one that takes more is replaced, and its episodes run
    again. Any by default. Not for "ray"."""
    cpus_per_worker: NonNegativeFloat = 1.0
    """With "ray": CPUs that an actor reserves on its host."""
    address: str | None = None
    """With "ray": the cluster; "auto" for the one that this machine belongs to, or "10.0.0.1:6379"; by default one is
    started here, and stopped at the end."""
    host: str = "127.0.0.1"
    """With "ray": this machine's address, as the actors' hosts know it: the sampler is served there."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """With "ray": the sampler's port; 0 takes a free one."""

    @model_validator(mode="after")
    def _knobs_of_the_backend(self) -> Self:
        if self.backend == "processes":
            changed = [
                name for name in ("cpus_per_worker", "address", "host", "port")
                if getattr(self, name) != type(self).model_fields[name].default
            ]  # fmt: skip
            if changed:
                raise ValueError(
                    f'{", ".join(changed)}: for backend = "ray" only, found backend = "processes", whose workers are '
                    'on this machine; remove it, or set backend = "ray"'
                )
        if self.backend == "ray" and self.worker_memory_mb is not None:
            raise ValueError(
                'worker_memory_mb is for processes of this machine, found backend = "ray"; remove it (Ray has limits '
                "of its own)"
            )
        return self


class OrchestratorConfig(Section):
    """Rollouts, scoring, and what becomes a batch."""

    train: TrainEnvsConfig
    """The training environments."""
    eval: EvalConfig | None = None
    """Evaluation; none without this table."""
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
    trajectory_strategy: str = "interleaved"
    """How a trajectory becomes training samples: "interleaved" (turns that extend each other exactly share one) or
    "branching" (one for each turn)."""
    formulate_mode: Literal["traj", "step"] | None = None
    """Another name for it: "traj" is "interleaved", "step" is "branching"."""
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
    """How rewards become advantages."""
    length_penalty: LengthPenaltyConfig | None = None
    """What length does to the rewards that advantages see; nothing without this table."""
    filters: tuple[ComponentConfig, ...] = tuple(
        ComponentConfig(type=name) for name in ("gibberish", "repetition", "zero_advantage")
    )
    """What is dropped between scoring and training. A list replaces the default wholesale."""

    _strategy = model_validator(mode="after")(_one_strategy)

    @model_validator(mode="after")
    def _isolated_here(self) -> Self:
        tables = {"train": self.train.env, "eval": self.eval.env if self.eval is not None else ()}
        where = [f"{purpose}.env.{i}" for purpose, envs in tables.items() for i, env in enumerate(envs) if env.isolated]
        if where and self.rollout.backend == "ray":
            raise ValueError(
                f'{where[0]}.isolated = true asks for processes of this machine, found rollout.backend = "ray", which '
                'runs every environment on its actors; remove isolated, or set rollout.backend = "local"'
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


class TrainerConfig(Section):
    """One optimizer step."""

    optim: OptimConfig = OptimConfig()
    """Optimizer and schedule."""
    loss: ComponentConfig = ComponentConfig()
    """What is minimised."""
    packing: Literal["auto", "rows", "tree"] = "auto"
    """How samples are laid out in memory: one after the other, or what they have in common once. "auto" takes the tree
    where that saves tokens. "tree" needs a model whose tokens mix by attention alone."""
    micro_batch_tokens: PositiveInt | None = None
    """Most tokens of one forward pass; a longer sample is one by itself. By default 16,384; on a CPU 8,192, where more
    leave its caches; never cut so for losses that see a trajectory whole."""
    logprob_chunk: PositiveInt = 1024
    """Targets whose vocabulary-sized logits exist at one time."""
    optimizer_steps_per_batch: PositiveInt = 1
    """Optimizer steps taken on each batch, on disjoint parts of it."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the forward and backward pass; master weights are float32."""
    device: str = "auto"
    """"auto" takes CUDA where there is one."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    separate_process: bool = True
    """Train in a process of its own. false: on a thread of the orchestrator's, where a debugger reaches it."""
    num_threads: PositiveInt | None = None
    """Threads of its matrix products on a CPU; by default half of the cores where both sides work at once."""


class InferenceConfig(Section):
    """The rollout engine."""

    backend: Literal["torch"] = "torch"
    """The embedded sampler."""
    max_batch_size: PositiveInt = 64
    """Sequences decoded together."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of weights and key/value cache."""
    device: str = "auto"
    """"auto" takes CUDA where there is one."""
    deterministic: bool = False
    """Same request, seed and weights: same ids and logprobs, bit for bit, whatever else is in the batch."""
    on_weight_update: Literal["recompute", "keep"] = "recompute"
    """What happens to the key/value cache of sequences in flight when new weights arrive."""
    prefill_chunk: PositiveInt = 2048
    """Most prompt tokens processed between two decode steps."""
    num_threads: PositiveInt | None = None
    """Threads of its matrix products on a CPU; by default half of the cores where both sides work at once."""
    canary_tolerance: PositiveFloat | None = None
    """Largest mean difference from the trainer's logprobs after a weight update; by default 1e-4, with bfloat16 0.1."""


class CheckpointConfig(Section):
    """What is kept so that a run can go on."""

    interval: PositiveInt = 25
    """Batches between checkpoints; one is always written at the end and on Ctrl-C."""
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
    """Batches."""
    seed: int = 0
    """Of everything that is random."""
    model: ModelConfig
    """The model."""
    warm_start: WarmStartConfig | None = None
    """Supervised steps first."""
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
                'trainer.loss.type = "sft" learns every rollout by heart, whatever it earned; use "default", or '
                "`verbatim sft` with a [warm_start] table"
            )
        if mode == "opd" or loss.type == "opd":
            if teacher is None:
                raise ValueError('training_mode = "opd" needs an [orchestrator.teacher] table with a model')
            if mode != "opd" or loss.type not in ("default", "opd", "custom"):
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
    def _groups_to_compare(self) -> Self:
        orchestrator = self.orchestrator
        if orchestrator.training_mode != "rl":
            return self  # advantages are not read
        for env in orchestrator.train.env:
            advantage = env.advantage or orchestrator.advantage
            if orchestrator.group_size == 1 and advantage.type in ("default", "normalized", "rloo"):
                raise ValueError(
                    f'orchestrator.group_size = 1 gives every rollout the advantage 0 under "{advantage.type}", which '
                    "compares it with the others of its group; expected at least 2"
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
