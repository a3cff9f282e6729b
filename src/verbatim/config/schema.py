"""Defines every key of a run's TOML file as frozen, typed records. Top-level sections are named after the processes.

This module holds the whole file and the checks across its tables; [orchestrator] and [inference] have modules of their
own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from verbatim.config.alarms import AlarmsConfig
from verbatim.config.cluster import ClusterConfig
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
    "BuildConfig", "CheckpointConfig", "ClusterConfig", "ComponentConfig", "CriterionConfig",
    "EarlyStoppingConfig", "EnvConfig", "EvalConfig", "Fraction", "InferenceConfig", "LengthPenaltyConfig",
    "LoraConfig", "ModelConfig", "MonitorConfig", "NonNegativeFloat", "OptimConfig", "OrchestratorConfig",
    "ParallelConfig", "PositiveFloat", "PositiveInt", "ReferenceConfig", "RendererConfig", "RunConfig",
    "SamplingConfig", "TeacherConfig", "TrainerConfig", "WarmStartConfig",
]  # fmt: skip


class OptimConfig(Section):
    """AdamW and its learning rate schedule."""

    lr: FinitePositive = 1e-6
    """Peak learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up."""
    warmup_steps: NonNegativeInt = 0
    """Number of optimizer steps over which the learning rate rises from 0 to `lr`."""
    min_lr_ratio: Fraction = 0.0
    """Learning rate at the end of the linear and cosine schedules, as a fraction of `lr`."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay. It is not applied to norms and biases."""
    beta1: Decay = 0.9
    """Decay rate of AdamW's first moment."""
    beta2: Decay = 0.999
    """Decay rate of AdamW's second moment."""
    eps: FinitePositive = 1e-8
    """AdamW's epsilon, added to the denominator of the update."""
    max_grad_norm: PositiveFloat = 1.0
    """Maximum global L2 norm of the gradients; larger gradients are scaled down to it."""


class LoraConfig(Section):
    """Low-rank adapters instead of full fine-tuning: each adapted layer computes `W x + alpha / r * B A x`; only A and
    B are trained, checkpointed and sent to the sampler."""

    r: PositiveInt = 32
    """Rank: the number of rows of A and columns of B."""
    alpha: PositiveFloat = 32.0
    """Scale of the adapters; their output is multiplied by `alpha / r`."""
    dropout: float = 0.0
    """Must be 0: with dropout the trainer would train a different policy from the one that sampled."""
    target_modules: str | tuple[str, ...] = "all-linear"
    """Linear layers to adapt: "all-linear" (all except the output head), a list of name endings (["q_proj",
    "v_proj"]), or one regular expression that matches whole names."""
    merge_final: bool = False
    """Also write the trained model with the adapters merged into its weights, to final/merged."""

    @model_validator(mode="after")
    def _trains_what_sampled(self) -> Self:
        if self.dropout != 0:
            raise ValueError(
                f"dropout = {self.dropout}: the trainer would drop activations that the sampler used, and so would "
                "train a different policy from the one that sampled; use dropout = 0"
            )
        if not self.target_modules:
            raise ValueError('target_modules names no layer; use "all-linear", or names such as ["q_proj", "v_proj"]')
        return self


class ReferenceConfig(Section):
    """A frozen reference model in the trainer's process. Its logprobs of the sampled tokens form the stream
    "reference"."""

    model: str | None = None
    """A folder or hub id. Default: the model from which the run starts, after its warm start. With [trainer.lora] this
    default takes no extra memory, because it is the base model without the adapters."""


class ParallelConfig(Section):
    """Training with several processes (ranks), each with a share of the parameters, gradients and optimizer state."""

    processes: PositiveInt = 1
    """Number of ranks, on this machine or on the nodes of [cluster]; each has a CUDA device of its own if there are
    any. With a launcher such as torchrun, leave it out."""
    sequence: PositiveInt = 1
    """Sequence parallelism: the number of ranks that share the tokens of each micro-batch, for trajectories too long
    for one rank. Must divide `processes` and the model's number of attention heads."""
    deadline: FinitePositive = 600.0
    """Rank timeout in seconds: if a rank keeps the others waiting longer than this, the run stops and names that
    rank."""

    @model_validator(mode="after")
    def _sequence_divides(self) -> Self:
        # With 1, a launcher may start the ranks, and their number is not known here.
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
    """Weight of the load-balancing loss of a mixture of experts, added to the policy loss; 0 to leave it out."""
    lora: LoraConfig | None = None
    """Train low-rank adapters, and leave the model's own weights unchanged."""
    reference: ReferenceConfig | None = None
    """Compute reference logprobs of the sampled tokens, even if trainer.loss.kl_ref_tau does not need them."""
    packing: str = "auto"
    """How samples are laid out in memory: "rows" concatenates them, "tree" stores a shared prefix once, and "auto" uses
    trees where they save tokens. "tree" needs a model whose tokens mix only through attention. A packer of your own (an
    import path) is first tested on a small copy of the model."""
    micro_batch_tokens: PositiveInt | None = None
    """Maximum number of tokens in a forward pass, for each of the ranks that share the pass (parallel.sequence). A
    longer sample gets a micro-batch of its own. Default: 16,384, or 8,192 on a CPU, where more would not fit in the
    caches. Trajectories are never split for losses that need them whole."""
    logprob_chunk: PositiveInt = 1024
    """Number of target tokens whose vocabulary-sized logits are in memory at the same time."""
    optimizer_steps_per_batch: PositiveInt = 1
    """Number of optimizer steps per batch, each on a different part of the batch."""
    dtype: Literal["float32", "bfloat16", "auto"] = "float32"
    """Precision of the forward and backward pass; master weights are always float32. "auto" decides once, at the start
    of a run: bfloat16 if it measures faster, float32 for tiny models."""
    device: str = "auto"
    """Training device; "auto" chooses CUDA if it is available."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass, which saves memory and costs time."""
    activation_offload: bool = False
    """Move the layer inputs that gradient_checkpointing stores to host memory between the forward and the backward
    pass. This saves nothing on a CPU."""
    compile: bool = False
    """Compile each decoder layer with torch.compile. This needs a C++ compiler on a CPU, and on CUDA a GPU that Triton
    supports. The first passes take minutes; a model that cannot be compiled is refused."""
    separate_process: bool = True
    """Train in a separate process. With false, train on a thread of the orchestrator's process, where a debugger can
    reach it."""
    num_threads: PositiveInt | None = None
    """CPU threads for matrix products, per rank. Default: half of the cores, divided among the ranks, while the sampler
    computes on this machine at the same time; otherwise all cores for a single process."""
    parallel: ParallelConfig = ParallelConfig()
    """Training with several ranks."""

    @model_validator(mode="after")
    def _offloads_what_is_kept(self) -> Self:
        if self.activation_offload and not self.gradient_checkpointing:
            raise ValueError(
                "activation_offload = true moves the inputs that gradient_checkpointing stores, but that is off; set "
                "gradient_checkpointing = true too"
            )
        return self

    @model_validator(mode="after")
    def _processes_of_their_own(self) -> Self:
        if self.router_aux_loss_coef and self.lora is not None:
            raise ValueError(
                f"router_aux_loss_coef = {self.router_aux_loss_coef:g} with [trainer.lora]: the routers "
                "stay frozen under adapters; remove one of the two"
            )
        if self.parallel.processes > 1 and not self.separate_process:
            raise ValueError(
                f"parallel.processes = {self.parallel.processes} needs separate_process = true; with "
                "false the trainer is a thread of the orchestrator's process"
            )
        return self


class BuildConfig(Section):
    """A small model built for this run: random weights, and a tokenizer trained on the environments' own text."""

    hidden_size: PositiveInt = 128
    """Width of the hidden states."""
    num_layers: PositiveInt = 3
    """Number of decoder layers."""
    num_heads: PositiveInt = 4
    """Number of query heads."""
    num_kv_heads: PositiveInt = 2
    """Number of key/value heads."""
    intermediate_size: PositiveInt = 384
    """Width of the feed-forward layers."""
    # At least the 256 bytes and the 9 added tokens, with room for a few learned ones.
    vocab_size: Annotated[int, Field(ge=300)] = 1024
    """Maximum vocabulary size of the trained tokenizer."""
    context_length: PositiveInt = 2048
    """Maximum sequence length of the model, in tokens."""

    @model_validator(mode="after")
    def _sizes_fit(self) -> Self:
        # It must be even: rotary embeddings rotate pairs of dimensions of each head.
        if self.hidden_size % (2 * self.num_heads):
            raise ValueError(
                f"hidden_size = {self.hidden_size} does not give {self.num_heads} heads an even width each; for "
                f"example hidden_size = {2 * self.num_heads * max(1, self.hidden_size // (2 * self.num_heads))}"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads = {self.num_heads} is not a multiple of num_kv_heads = {self.num_kv_heads}; for example "
                f"num_kv_heads = {self.num_heads}"
            )
        return self


class ModelConfig(Section):
    """The model: a folder or hub id in Hugging Face format, or a model to build."""

    name: str | None = None
    """A local folder or a hub id of a causal language model."""
    build: BuildConfig | None = None
    """Build a small model in the run folder, instead of naming a model."""

    @model_validator(mode="after")
    def _one_of(self) -> Self:
        if (self.name is None) == (self.build is None):
            raise ValueError('give either name = "folder or hub id" or a [model.build] table, not both or neither')
        return self


class WarmStartConfig(Section):
    """Supervised optimizer steps before reinforcement learning, on the environment's demonstrations or on a file."""

    steps: PositiveInt = 100
    """Number of optimizer steps."""
    batch_size: PositiveInt = 64
    """Number of conversations per optimizer step."""
    conversations: PositiveInt = 1024
    """Number of demonstrations requested from the environment."""
    data: Path | None = None
    """A JSONL file of `{"messages": [...], "tools": [...]}` rows instead of the environment's demonstrations."""
    optim: OptimConfig = OptimConfig(lr=1e-3)
    """Optimizer of the warm start; the optimizer's state is discarded afterwards."""


class CheckpointConfig(Section):
    """Which checkpoints of a run are written and kept."""

    interval: PositiveInt = 25
    """Steps between checkpoints. A checkpoint is always written at the end and on Ctrl-C."""
    keep_last: PositiveInt = 2
    """Number of most recent checkpoints to keep."""
    keep_every: PositiveInt | None = None
    """Also keep the checkpoint of every n-th step."""
    keep_best: CriterionConfig | None = None
    """Also keep the checkpoint with the best evaluation; RUN/best links to its weights."""
    upload_to: str | None = None
    """A URL, for example s3://bucket/runs or file:///mnt/share/runs: each checkpoint is uploaded with the logs, to
    URL/NAME/RUN, and --resume on a machine without the run folder downloads the checkpoint from there."""


class MonitorConfig(NamedComponents):
    """What a run records. Every key other than the fields below is the table of one monitor: a name from `MONITORS`, or
    any name with `type = "my_module.MyMonitor"`."""

    # pydantic checks extra keys against this type. `init=False` keeps it out of the constructor's signature.
    __pydantic_extra__: dict[str, ComponentConfig] = Field(init=False)

    save_trajectories: bool = True
    """Save every trajectory with ids, logprobs, policy versions and the outcome of its tokens, as one Parquet file per
    step."""
    trajectory_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the groups whose trajectories are saved; a group is saved whole or not at all."""
    keep_trajectory_steps: PositiveInt | None = None
    """Number of most recent steps whose trajectories are kept. Default: all."""
    max_trajectory_gb: Annotated[float, Field(gt=0)] | None = None
    """Maximum size of all saved trajectories in gigabytes; the oldest steps are removed first. Default: no limit."""
    alarms: AlarmsConfig = AlarmsConfig()
    """Conditions that raise an alarm."""

    @property
    def components(self) -> dict[str, ComponentConfig]:
        """The monitors in addition to the run folder's own, by key."""
        return dict(self.__pydantic_extra__)


def _folder_name(name: str) -> str:
    if name in ("", ".", "..") or "/" in name or not name.isprintable():
        raise ValueError(
            f'found {shown(name)}, expected the name of one folder, such as "first-try"; to write a run '
            "elsewhere than in runs/, set run_dir"
        )
    return name


class RunConfig(Section):
    """A run's configuration: the whole file."""

    name: Annotated[str, AfterValidator(_folder_name)] | None = None
    """Name of the folder under `runs/`. Default: the name of the file."""
    run_dir: Path | None = None
    """Run folder. Default: `runs/{name}/{time stamp}`."""
    max_steps: PositiveInt = 100
    """Number of steps; each trains on one batch and publishes the new weights."""
    seed: NonNegativeInt = 0
    """Seed of all random choices."""
    keys_in_config: bool = False
    """Allow keys and passwords in the configuration. The run folder, its checkpoints and forks then store them in clear
    text, readable only by their owner. Environment variables are safer: env_from, api_key_env."""
    model: ModelConfig
    """The model."""
    warm_start: WarmStartConfig | None = None
    """Supervised optimizer steps before reinforcement learning."""
    orchestrator: OrchestratorConfig
    """Rollouts and batches."""
    trainer: TrainerConfig = TrainerConfig()
    """Optimizer steps."""
    inference: InferenceConfig = InferenceConfig()
    """The rollout engine (sampler)."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints."""
    monitor: MonitorConfig = MonitorConfig()
    """Logs, saved trajectories and alarms."""
    cluster: ClusterConfig | None = None
    """The cluster. Default: none, everything runs on this machine."""

    def named(self, default: str) -> RunConfig:
        """The configuration with a name; `default` is used if the file gives none.

        Raises:
            ConfigError: `default` cannot be the name of a folder.
        """
        try:
            return self.model_copy(update={"name": self.name or _folder_name(default)})
        except ValueError as error:
            raise ConfigError(f"name is missing, and the default is not a folder name: {error}") from None

    @model_validator(mode="after")
    def _fits_the_model(self) -> Self:
        build, seq_len = self.model.build, self.orchestrator.seq_len
        if build is not None and seq_len > build.context_length:
            raise ValueError(
                f"orchestrator.seq_len = {seq_len} is more than model.build.context_length = {build.context_length}; "
                f"lower seq_len to {build.context_length} or raise context_length to {seq_len}"
            )
        return self

    @model_validator(mode="after")
    def _criteria_are_evaluated(self) -> Self:
        evaluation = self.orchestrator.eval
        if self.checkpoint.keep_best is not None and evaluation is None:
            raise ValueError(
                "checkpoint.keep_best keeps the checkpoint with the best evaluation, and this run has none; add "
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
        """The sampling settings of these environments, each with its key in the file."""
        if not envs or any(env.sampling is None for env in envs):
            yield "orchestrator.sampling", self.orchestrator.sampling
        for i, env in enumerate(envs):
            if env.sampling is not None:
                yield f"orchestrator.{table}.env.{i}.sampling", env.sampling

    @property
    def needs_kept_sets(self) -> bool:
        """True if trained tokens are sampled from a cut distribution whose kept sets the trainer must reproduce."""
        samplings = self._samplings(self.orchestrator.train.env, "train")
        is_cut = any(sampling.training_params.needs_kept_sets for _, sampling in samplings)
        return is_cut and self.orchestrator.training_mode != "sft"

    @property
    def _lacks_kept_sets(self) -> str | None:
        """Why training cannot use exactly the cut distribution from which tokens are sampled, or None if it can."""
        if self.orchestrator.training_mode == "sft":
            return None  # with sft a chat server samples, and no loss term uses its logprobs
        if self.orchestrator.teacher is not None and self.orchestrator.teacher.base_url is not None:
            return (
                "orchestrator.teacher.base_url returns logprobs of the full distribution; a teacher loaded here can "
                "cut it too (remove base_url)"
            )
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
                    f"{where}.temperature = {sampling.temperature}: a teacher's server returns logprobs at temperature "
                    "1 only; use 1.0, or a teacher that is loaded here (remove orchestrator.teacher.base_url)"
                )
            if sampling.training_params.needs_kept_sets and (reason := self._lacks_kept_sets) is not None:
                raise ValueError(
                    f"{where} cuts the distribution (top_p, top_k or min_p), and {reason}; remove it, or accept a bias "
                    "with accept_truncation_mismatch = true"
                )
        return self

    @model_validator(mode="after")
    def _bounded_kept_sets(self) -> Self:
        """Refuse settings under which vLLM would fail: it returns kept sets for all requests or for none, and if it
        returns them, it refuses requests without `top_k`.

        So this check covers evaluation too, although its tokens are not trained.
        """
        if self.inference.backend != "vllm" or not self.needs_kept_sets:
            return self
        places = [*self._samplings(self.orchestrator.train.env, "train")]
        # Without environments of its own, an evaluation plays those of training, which are covered.
        if self.orchestrator.eval is not None and self.orchestrator.eval.env:
            places += self._samplings(self.orchestrator.eval.env, "eval")
        for where, sampling in places:
            # Greedy requests are sent with top_k = 1.
            if sampling.temperature > 0 and not sampling.top_k:
                raise ValueError(
                    f"{where}.top_k = 0, and this run trains on a cut distribution (top_p, top_k or min_p): a vLLM "
                    "server that returns kept sets refuses requests without top_k, which bounds their size; set top_k "
                    '= 512, or inference.backend = "torch", which needs none, or accept a bias with '
                    "accept_truncation_mismatch = true"
                )
        return self
