"""Defines every key of a run's TOML file, as frozen typed records. Sections have the names of the processes.

Here is the whole file, and what has to fit between its tables; [orchestrator] and [inference] have their own modules.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from verbatim.config.alarms import AlarmsConfig
from verbatim.config.inference import InferenceConfig
from verbatim.config.orchestrator import (
    CriterionConfig,
    EarlyStoppingConfig,
    EnvConfig,
    EvalConfig,
    LengthPenaltyConfig,
    OrchestratorConfig,
    RendererConfig,
    SamplingConfig,
    TeacherConfig,
)
from verbatim.config.sections import (
    ComponentConfig,
    Decay,
    FinitePositive,
    Fraction,
    NamedComponents,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
)
from verbatim.core.errors import ConfigError
from verbatim.core.texts import shown

__all__ = [
    "BuildConfig", "CheckpointConfig", "ComponentConfig", "CriterionConfig",
    "EarlyStoppingConfig", "EnvConfig", "EvalConfig", "Fraction", "InferenceConfig", "LengthPenaltyConfig",
    "LoraConfig", "ModelConfig", "MonitorConfig", "NonNegativeFloat", "OptimConfig", "OrchestratorConfig",
    "ParallelConfig", "PositiveFloat", "PositiveInt", "ReferenceConfig", "RendererConfig", "RunConfig",
    "SamplingConfig", "TeacherConfig", "TrainerConfig", "WarmStartConfig",
]  # fmt: skip


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
    """Gradients are clipped to this norm."""


class LoraConfig(Section):
    """Low-rank adapters instead of all weights: each adapted layer computes `W x + alpha / r * B A x`, and A and B
    alone are trained, kept and sent to the sampler."""

    r: PositiveInt = 32
    """Rank: rows of A, columns of B."""
    alpha: PositiveFloat = 32.0
    """Scale of the adapters, divided by the rank."""
    dropout: float = 0.0
    """0, and nothing else: dropout would train another policy than the one that sampled."""
    target_modules: str | tuple[str, ...] = "all-linear"
    """The linear layers that are adapted: "all-linear", all but the output head; ends of their names, ["q_proj",
    "v_proj"]; or one regular expression for whole names."""
    merge_final: bool = False
    """Also write the trained model as plain weights, into final/merged."""

    @model_validator(mode="after")
    def _trains_what_sampled(self) -> Self:
        if self.dropout != 0:
            raise ValueError(
                f"dropout = {self.dropout}: the trainer would drop what the sampler computed with, and train another "
                "policy than the one that sampled; use dropout = 0"
            )
        if not self.target_modules:
            raise ValueError('target_modules names no layer; use "all-linear", or names such as ["q_proj", "v_proj"]')
        return self


class ReferenceConfig(Section):
    """A frozen model in the trainer's process whose logprobs of the sampled tokens are the stream "reference"."""

    model: str | None = None
    """A folder or hub id; by default the model that the run begins with, after its warm start. With [trainer.lora] that
    one takes no memory."""


class ParallelConfig(Section):
    """Several processes that train one model, each with its share of parameters, gradients and optimizer state."""

    processes: PositiveInt = 1
    """How many are started on this machine, each on a CUDA device of its own where there are any. A launcher such as
    torchrun, with `verbatim trainer`, starts them on many machines instead."""
    sequence: PositiveInt = 1
    """Processes that share the tokens of each micro-batch, for trajectories longer than one of them can hold. Divides
    the processes and the attention heads of the model."""
    deadline: FinitePositive = 600.0
    """Seconds for which one of them may keep the others waiting; then the run stops, and it is named."""

    @model_validator(mode="after")
    def _sequence_divides(self) -> Self:
        if self.processes > 1 and self.processes % self.sequence:
            fit = ", ".join(str(n) for n in range(1, self.processes + 1) if self.processes % n == 0)
            raise ValueError(
                f"sequence = {self.sequence} does not divide processes = {self.processes}; take one of {fit}"
            )
        return self


class TrainerConfig(Section):
    """The trainer: optimizer, loss, packing, precision, process."""

    optim: OptimConfig = OptimConfig()
    """Optimizer and schedule."""
    loss: ComponentConfig = ComponentConfig()
    """The loss."""
    router_aux_loss_coef: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Weight of the load-balancing loss of a mixture of experts, beside the loss; 0: without."""
    lora: LoraConfig | None = None
    """Train low-rank adapters, and leave the model's own weights as they are."""
    reference: ReferenceConfig | None = None
    """Score the sampled tokens with a reference, also where trainer.loss.kl_ref_tau does not ask for it."""
    packing: str = "auto"
    """How samples are laid out in memory: "rows", one after the other, or "tree", what they have in common once. "auto"
    takes the tree where that saves tokens. "tree" needs a model whose tokens mix by attention alone. The import path of
    a packer of your own is tried on a small copy of the model first."""
    micro_batch_tokens: PositiveInt | None = None
    """Most tokens of one forward pass, on each of the processes that share it (parallel.sequence); a longer sample is
    one by itself. By default 16,384; on a CPU 8,192, where more leave its caches; never cut so for losses that see a
    trajectory whole."""
    logprob_chunk: PositiveInt = 1024
    """Targets whose vocabulary-sized logits exist at one time."""
    optimizer_steps_per_batch: PositiveInt = 1
    """Optimizer steps taken on each batch, on disjoint parts of it."""
    dtype: Literal["float32", "bfloat16", "auto"] = "float32"
    """Precision of the forward and backward pass; master weights are float32. "auto" is chosen once, when a run begins:
    bfloat16 where that is faster, by measuring; float32 for tiny models."""
    device: str = "auto"
    """"auto" takes CUDA where there is one."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    activation_offload: bool = False
    """Keep what gradient_checkpointing keeps, the inputs of the layers, in host memory between the two passes. On a CPU
    this saves nothing."""
    compile: bool = False
    """Compile each decoder layer by torch.compile, which needs a C++ compiler on a CPU, and a GPU that Triton knows on
    CUDA. The first passes take minutes; a model that cannot be compiled is refused."""
    separate_process: bool = True
    """Train in a process of its own. false: on a thread of the orchestrator's, where a debugger reaches it."""
    num_threads: PositiveInt | None = None
    """Threads of its matrix products on a CPU, of each process; by default half of the cores while the sampler
    computes on this machine too, shared among the processes, and of one process all of them while it does not."""
    parallel: ParallelConfig = ParallelConfig()
    """Several processes."""

    @model_validator(mode="after")
    def _offloads_what_is_kept(self) -> Self:
        if self.activation_offload and not self.gradient_checkpointing:
            raise ValueError(
                "activation_offload = true moves what gradient_checkpointing keeps, and that is off; set "
                "gradient_checkpointing = true too"
            )
        return self

    @model_validator(mode="after")
    def _processes_of_their_own(self) -> Self:
        if self.router_aux_loss_coef and self.lora is not None:
            raise ValueError(
                f"router_aux_loss_coef = {self.router_aux_loss_coef:g} with [trainer.lora]: the routers "
                "stay as they are under adapters; remove one of both"
            )
        if self.parallel.processes > 1 and not self.separate_process:
            raise ValueError(
                f"parallel.processes = {self.parallel.processes} needs separate_process = true; with "
                "false the trainer is a thread of the orchestrator's process"
            )
        return self


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
            raise ValueError('give either name = "folder or hub id" or a [model.build] table, not both or neither')
        return self


class WarmStartConfig(Section):
    """Supervised optimizer steps before reinforcement learning, on the environment's own demonstrations or a file."""

    steps: PositiveInt = 100
    """How many optimizer steps."""
    batch_size: PositiveInt = 64
    """Conversations of each optimizer step."""
    conversations: PositiveInt = 1024
    """How many demonstrations the environment is asked for."""
    data: Path | None = None
    """A JSONL file of `{"messages": [...], "tools": [...]}` rows instead of the environment's demonstrations."""
    optim: OptimConfig = OptimConfig(lr=1e-3)
    """Its own optimizer, dropped afterwards."""


class CheckpointConfig(Section):
    """What is kept so that a run can go on."""

    interval: PositiveInt = 25
    """Steps between checkpoints; one is always written at the end and on Ctrl-C."""
    keep_last: PositiveInt = 2
    """Newest checkpoints kept."""
    keep_every: PositiveInt | None = None
    """Also keep every n-th."""
    keep_best: CriterionConfig | None = None
    """Also keep the one of the best evaluation; RUN/best is a link to its weights."""


class MonitorConfig(NamedComponents):
    """What is written down. Every other key is a monitor's table: its name from `MONITORS`, or any name with
    `type = "my_module.MyMonitor"`."""

    __pydantic_extra__: dict[str, ComponentConfig] = Field(init=False)

    save_trajectories: bool = True
    """Every trajectory with ids, logprobs, versions and the outcome of its tokens, as a Parquet file for each step."""
    trajectory_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the groups whose trajectories are saved, whole groups."""
    keep_trajectory_steps: PositiveInt | None = None
    """Newest steps whose trajectories are kept; all if it is not given."""
    max_trajectory_gb: Annotated[float, Field(gt=0)] | None = None
    """Gigabytes that they may have together: those of the oldest steps are removed; no limit if it is not given."""
    alarms: AlarmsConfig = AlarmsConfig()
    """What the run is watched for."""

    @property
    def components(self) -> dict[str, ComponentConfig]:
        """The monitors beside the run folder's own, by key."""
        return dict(self.__pydantic_extra__)


def _folder_name(name: str) -> str:
    if name in ("", ".", "..") or "/" in name or not name.isprintable():
        raise ValueError(
            f'found {shown(name)}, expected the name of one folder, such as "first-try"; a run that '
            "is to stand elsewhere than in runs/ has a run_dir"
        )
    return name


class RunConfig(Section):
    """One run: the whole file."""

    name: Annotated[str, AfterValidator(_folder_name)] | None = None
    """Names the folder under `runs/`; the file's name by default."""
    run_dir: Path | None = None
    """An explicit run folder; by default `runs/{name}/{time stamp}`."""
    max_steps: PositiveInt = 100
    """How many steps: batches trained and published."""
    seed: NonNegativeInt = 0
    """Seed of every random choice."""
    keys_in_config: bool = False
    """Whether keys and passwords may stand in the configuration, which the run folder, its checkpoints and its forks
    keep in clear, for their owner's eyes. Better name an environment variable: env_from, api_key_env."""
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

    def named(self, default: str) -> RunConfig:
        """The configuration with a name: `default` where it has none.

        Raises:
            ConfigError: `default` cannot be the name of a folder.
        """
        try:
            return self.model_copy(update={"name": self.name or _folder_name(default)})
        except ValueError as error:
            raise ConfigError(f"name is missing, and what would take its place is not a name: {error}") from None

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
    def _criteria_are_evaluated(self) -> Self:
        evaluation = self.orchestrator.eval
        if self.checkpoint.keep_best is not None and evaluation is None:
            raise ValueError(
                "checkpoint.keep_best keeps the checkpoint of the best evaluation, and there is none; add "
                "[orchestrator.eval], or remove keep_best"
            )
        if evaluation is None:
            return self
        labels = [env.label for env in evaluation.env or self.orchestrator.train.env]
        criteria = {
            "checkpoint.keep_best": self.checkpoint.keep_best,
            "orchestrator.eval.early_stopping": evaluation.early_stopping,
        }
        for where, criterion in criteria.items():
            if criterion is not None and criterion.env not in (None, *labels):
                raise ValueError(
                    f"{where}.env: found {criterion.env!r}, expected an environment that is evaluated: "
                    f"{', '.join(labels)}"
                )
        return self

    def _samplings(self, envs: Sequence[EnvConfig], table: str) -> Iterator[tuple[str, SamplingConfig]]:
        """How tokens are drawn in these environments, each with its place in the file."""
        if not envs or any(env.sampling is None for env in envs):
            yield "orchestrator.sampling", self.orchestrator.sampling
        for i, env in enumerate(envs):
            if env.sampling is not None:
                yield f"orchestrator.{table}.env.{i}.sampling", env.sampling

    @property
    def needs_kept_sets(self) -> bool:
        """Whether something that is trained is drawn from a cut distribution, and not under an accepted bias."""
        samplings = self._samplings(self.orchestrator.train.env, "train")
        is_cut = any(sampling.training_params.needs_kept_sets for _, sampling in samplings)
        return is_cut and self.orchestrator.training_mode != "sft"

    @property
    def _lacks_kept_sets(self) -> str | None:
        """What keeps a cut distribution from being trained as it was sampled."""
        if self.orchestrator.training_mode == "sft":
            return None  # a chat server samples, and nothing is compared with its logprobs
        if self.orchestrator.teacher is not None and self.orchestrator.teacher.base_url is not None:
            return "orchestrator.teacher.base_url gives logprobs of the whole one; a teacher that is loaded here can"
        return None

    @model_validator(mode="after")
    def _trainable_sampling(self) -> Self:
        for where, sampling in self._samplings(self.orchestrator.train.env, "train"):
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
            if sampling.training_params.needs_kept_sets and (reason := self._lacks_kept_sets) is not None:
                raise ValueError(
                    f"{where} cuts the distribution (top_p, top_k or min_p), and {reason}; remove it, or accept a bias "
                    "with accept_truncation_mismatch = true"
                )
        return self

    @model_validator(mode="after")
    def _bounded_kept_sets(self) -> Self:
        """vLLM returns the kept sets of all requests or of none, and of those takes none without `top_k`."""
        if self.inference.backend != "vllm" or not self.needs_kept_sets:
            return self
        places = [*self._samplings(self.orchestrator.train.env, "train")]
        if self.orchestrator.eval is not None and self.orchestrator.eval.env:
            places += self._samplings(self.orchestrator.eval.env, "eval")
        for where, sampling in places:
            if sampling.temperature > 0 and not sampling.top_k:
                raise ValueError(
                    f"{where}.top_k = 0, and this run trains on a cut distribution (top_p, top_k or min_p): a vLLM "
                    "that returns the ids that it kept takes no request without top_k, which bounds them; set top_k = "
                    '512, or inference.backend = "torch", which needs none, or accept a bias with '
                    "accept_truncation_mismatch = true"
                )
        return self
