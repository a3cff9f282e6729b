"""Takes optimizer steps on fake tensors with the trainer's own code and measures the memory of one process.

The measurement covers the tensors that are alive between operations. It does not cover workspace inside a kernel or
memory that an allocator caches.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import _disable_current_modes

from verbatim.algorithms.losses import Loss
from verbatim.config.schema import TrainerConfig
from verbatim.core.errors import ModelError
from verbatim.core.records.fields import REFERENCE as REFERENCE_STREAM
from verbatim.core.types import MicroBatch, TrainingSample
from verbatim.inspection.plan.fake_attention import as_on_cuda
from verbatim.inspection.plan.fake_ranks import FakeRanks, fake_ranks
from verbatim.inspection.plan.live_memory import BATCH, GRADIENTS, OPTIMIZER, REFERENCE, WEIGHTS, LiveMemory
from verbatim.models.attention import AttentionPlan, follow_plans
from verbatim.models.experts import find_routers
from verbatim.models.head import CausalLM
from verbatim.models.mixing import plan_attention
from verbatim.models.own_attention import tiny_pair
from verbatim.models.refusal import refusing
from verbatim.models.shards import empty_model
from verbatim.models.tiny import tiny_copy
from verbatim.trainer.bfloat16 import can_round, round_products
from verbatim.trainer.compile import rounds_products
from verbatim.trainer.device_batch import DeviceBatch
from verbatim.trainer.frozen import base_under_adapters
from verbatim.trainer.fused import fuse_layers
from verbatim.trainer.last_layer import narrow_last_layer
from verbatim.trainer.linear import use_onednn
from verbatim.trainer.logprobs import TargetLogprobs
from verbatim.trainer.lora import Adapters
from verbatim.trainer.metrics import MetricSums
from verbatim.trainer.offload import ActivationOffload
from verbatim.trainer.optim import build_optimizer, clip_gradients
from verbatim.trainer.packer import CPU_MICRO_BATCH_TOKENS, MICRO_BATCH_TOKENS, StepPacker
from verbatim.trainer.parallel.sequence import refuse_slices, sequence_group
from verbatim.trainer.parallel.sharding import Sharding, refuse_rows_alone
from verbatim.trainer.recompute import checkpoint_layers
from verbatim.trainer.router_loss import router_loss
from verbatim.trainer.split import split_batch
from verbatim.trainer.step import GradientPass

MOST_RUN = 2
"""Maximum number of micro-batches to run. They include the micro-batch with the most targets, and the micro-batch with
the most tokens. The latter runs last, when gradients already exist."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StepCase:
    """A step whose memory is to be measured."""

    source: str
    """The model: a hub id, or a folder in Hugging Face format, from which only config.json is read."""
    trainer: TrainerConfig
    """The `[trainer]` table."""
    loss: Loss
    """The loss, with its parameters."""
    samples: Sequence[TrainingSample]
    """The batch."""
    processes: int = 1
    """Number of processes that train together."""
    on_cuda: bool = False
    """True if the processes compute on CUDA devices."""
    seq_len: int = 0
    """Maximum number of tokens in a sample; 0 if unknown."""
    reference: str | None = None
    """Folder or hub id of the frozen reference model; None if there is none. If adapters are trained, a reference that
    equals `source` takes no extra memory."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StepMemory:
    """The memory, in bytes, that a training step takes in the process with the largest micro-batch."""

    peak: int
    """Peak memory of every step except the first step, which creates the optimizer state."""
    parts: Mapping[str, int]
    """The memory at the peak, by kind of tensor (`live_memory.KINDS`)."""
    between_steps: int
    """Memory that is in use between two steps."""
    num_parameters: int
    """Number of parameters of the whole model."""
    num_trained: int
    """Number of parameters that are trained."""
    packing: str
    """The packing that holds most of the tokens: "rows" or "tree"."""
    dealt: Sequence[Sequence[MicroBatch]]
    """The micro-batches of the optimizer step with the most tokens. There is one list per process, or, with
    `trainer.parallel.sequence`, one list per group of processes that share each micro-batch."""
    config: Any
    """The text part of the model's `transformers` configuration."""

    @property
    def most_tokens(self) -> int:
        """Number of tokens in the largest micro-batch."""
        return max(map(_most_tokens, self.dealt))


def measure(case: StepCase) -> StepMemory:
    """Take two steps on fake tensors and measure the second.

    Raises:
        ModelError: the trainer would reject the model or the number of processes for it, or the model computes each row
            in a separate pass, which fake tensors cannot represent.
    """
    with fake_ranks(case.processes) as ranks, contextlib.ExitStack() as stack:
        model = _model(case.source)
        if not case.on_cuda:
            fuse_layers(model)
            narrow_last_layer(model)
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        memory = LiveMemory(model.get_output_embeddings().weight.shape[0])
        stack.enter_context(fake)
        stack.enter_context(memory.running())
        if case.on_cuda and case.trainer.dtype == "float32":
            stack.enter_context(_float32_attention(model.config.get_text_config()))
        return _Step(case, model, ranks, fake, memory).measured()


def _float32_attention(config: Any) -> contextlib.AbstractContextManager[None]:
    """Make `scaled_dot_product_attention` take the memory that it takes on CUDA in float32, if several query heads
    share a key head.

    The flash kernel supports only 16-bit formats, and the memory-efficient kernel needs as many key heads as query
    heads. So CUDA falls back to the math kernel, which keeps all scores in memory.
    """
    heads = getattr(config, "num_attention_heads", None)
    shared = getattr(config, "num_key_value_heads", None) not in (None, heads)
    return sdpa_kernel([SDPBackend.MATH]) if shared else contextlib.nullcontext()


def _model(source: str) -> Any:
    """Build the model without weights, with attention that follows attention plans."""
    with refusing(f"the config.json of model {source!r} cannot be read"):
        model = empty_model(source, torch.float32).eval()
    other = plan_attention(tiny_copy(model))
    if other is not None:
        raise ModelError(
            f"{type(model).__name__} mixes tokens by {other}: each row is a separate pass, whose memory "
            "verbatim plan cannot measure"
        )
    tiny_pair(model, planned=True)  # cached for later, because fake tensors cannot be copied to a small model
    follow_plans(model)
    return model


class _FakeBatch(DeviceBatch):
    """A micro-batch whose attention allocates the same memory as on the device."""

    on_cuda = False

    def plan(self) -> AttentionPlan:
        """Make the attention plan of one pass. Its shapes depend on values, so it is made from real tensors."""
        with _disable_current_modes():
            made = super().plan()
        return as_on_cuda(made) if self.on_cuda else made


@dataclass(frozen=True)
class _FakeTargets(TargetLogprobs):
    """Makes micro-batches from real tensors, because the shapes in a micro-batch depend on values."""

    on_cuda: bool = False

    def batch(self, micro_batch: MicroBatch) -> DeviceBatch:
        """Make the micro-batch, or this rank's slice of it, on the device."""
        with _disable_current_modes():
            batch = _FakeBatch(micro_batch, self.model.device, self.sequence)
        batch.on_cuda = self.on_cuda
        return batch


class _Added:
    """Low-rank adapters that are injected outside of the fake mode, because the injection tests them on a small real
    copy of the model."""

    def __init__(self, adapters: Adapters) -> None:
        self._adapters = adapters

    def inject(self, model: Any) -> None:
        """Add the adapters to a model whose parameters are on the meta device."""
        with _disable_current_modes():
            self._adapters.inject(model)

    def hide(self) -> None:
        """Do nothing: no weights are loaded, so the adapters need not be hidden."""


class _Offload(ActivationOffload):
    """Offloads activations without counting the host memory that offloaded activations take."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))

    def hooks(self) -> saved_tensors_hooks:
        """Return a context in which, of each tensor that autograd saves, only the shape and the dtype are kept."""
        return saved_tensors_hooks(
            lambda tensor: (tensor.shape, tensor.dtype), lambda kept: torch.empty(kept[0], dtype=kept[1], device="cpu")
        )


class _Step:
    """A trainer on fake tensors. It runs the same parts as `Trainer` in the same order, except the parts that read
    values."""

    def __init__(
        self, case: StepCase, model: Any, ranks: FakeRanks | None, fake: FakeTensorMode, memory: LiveMemory
    ) -> None:
        self._case, self._ranks, self._fake, self._memory = case, ranks, fake, memory
        self._model = model
        self._num_parameters = sum(p.numel() for p in model.parameters())
        config = case.trainer
        added = None if config.lora is None else _Added(Adapters(config.lora, base=case.source, seed=0, ranks=ranks))
        self._sharding = None if ranks is None else Sharding(ranks, config.dtype, added=added)
        if added is not None and ranks is None:
            added.inject(model)
        self._give_room(model, self._sharding)
        if config.gradient_checkpointing:
            checkpoint_layers(model, _Offload() if config.activation_offload else None)
        rounds = not case.on_cuda and rounds_products(
            model, config, torch.device("cpu"), sharded=self._sharding is not None
        )
        self._autocast: Callable[[], Any] = contextlib.nullcontext
        if config.dtype == "bfloat16" and not rounds:
            self._autocast = partial(torch.autocast, "cpu", dtype=torch.bfloat16)
        routers = find_routers(model) if config.router_aux_loss_coef else None
        self._lm = CausalLM(model, self._sharding, routers)
        refuse_rows_alone(self._lm, ranks)
        self._sequence = sequence_group(ranks, config.parallel.sequence)
        if self._sequence is not None:
            refuse_slices(self._lm, self._sequence.size)
        self._targets = self._asked(self._lm)
        self._router_loss = router_loss(self._targets, config.router_aux_loss_coef)
        if not case.on_cuda:
            use_onednn(model)
        if rounds:
            round_products(model)
        memory.mark(model.buffers(), WEIGHTS)
        memory.mark(model.parameters(), WEIGHTS)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._notice_gradient)
        self._frozen = self._load_frozen()
        self._optimizer = build_optimizer(model, case.trainer.optim)

    def _asked(self, lm: CausalLM) -> _FakeTargets:
        return _FakeTargets(
            lm, self._case.trainer.logprob_chunk, self._autocast, self._sequence, on_cuda=self._case.on_cuda
        )

    def _give_room(self, model: Any, sharding: Sharding | None) -> None:
        for module in model.modules():
            _fake_buffers(module, self._fake)
        if sharding is None:
            _make_room(model)
        else:
            sharding.apply(model, lambda: None)

    def _load_frozen(self) -> dict[str, TargetLogprobs]:
        case = self._case
        if case.reference is None:
            return {}
        if case.trainer.lora is not None and case.reference == case.source:
            return {REFERENCE_STREAM: base_under_adapters(self._targets)}
        with _disable_current_modes():
            model = _model(case.reference)
        sharding = None if self._ranks is None else Sharding(self._ranks, case.trainer.dtype, trained=False)
        self._give_room(model, sharding)
        model.requires_grad_(False)
        if not case.on_cuda:
            use_onednn(model)
            if case.trainer.dtype == "bfloat16" and sharding is None and can_round(model):
                round_products(model)
        self._memory.mark(model.parameters(), REFERENCE)
        return {REFERENCE_STREAM: self._asked(CausalLM(model, sharding))}

    def _notice_gradient(self, parameter: Tensor) -> None:
        self._memory.mark([parameter.grad], GRADIENTS)

    def measured(self) -> StepMemory:
        with _disable_current_modes():
            dealt = self._deal()
        run, missing = _largest(max(dealt, key=_most_tokens))
        self._take_step(run[:1])  # creates the optimizer state
        self._memory.restart()
        self._take_step(run)
        parts = dict(self._memory.at_peak)
        # The trainer keeps all micro-batches of a step in memory. Add the micro-batches that were not run, in
        # proportion to their tokens.
        unseen = int(parts[BATCH] * missing)
        parts[BATCH] += unseen
        trees = sum(m.num_tokens for mine in dealt for m in mine if not m.is_rows)
        return StepMemory(
            peak=self._memory.peak + unseen,
            parts=parts,
            between_steps=self._memory.total,
            num_parameters=self._num_parameters,
            num_trained=sum(p.numel() for p in self._model.parameters() if p.requires_grad),
            packing="tree" if 2 * trees > sum(m.num_tokens for mine in dealt for m in mine) else "rows",
            dealt=dealt,
            config=self._lm.config,
        )

    def _deal(self) -> list[list[MicroBatch]]:
        """The micro-batches of the optimizer step with the most tokens, as one list per process."""
        case = self._case
        on_cpu = not case.on_cuda and case.loss.level == "token"
        budget = case.trainer.micro_batch_tokens or (CPU_MICRO_BATCH_TOKENS if on_cpu else MICRO_BATCH_TOKENS)
        config = case.trainer.model_copy(update={"micro_batch_tokens": budget})
        packer = StepPacker(self._targets, config, case.loss, seq_len=case.seq_len, ranks=self._ranks)
        if case.reference not in (None, case.source):
            packer.suit(self._frozen[REFERENCE_STREAM].model, REFERENCE_STREAM, str(case.reference))
        parts = split_batch(case.samples, case.trainer.optimizer_steps_per_batch)
        return packer.deal(max(parts, key=lambda part: sum(map(len, part))))

    def _take_step(self, micro_batches: Sequence[MicroBatch]) -> None:
        gradients = GradientPass(
            lm=self._targets,
            loss=self._case.loss,
            denominator=1,
            metrics=MetricSums(),
            frozen=self._frozen,
            ranks=self._ranks,
            router_loss=self._router_loss,
        )
        gradients.run(micro_batches)
        del gradients
        if self._sharding is not None:
            self._sharding.drop_unused()
        clip_gradients(self._model, self._case.trainer.optim.max_grad_norm, self._ranks)
        self._optimizer.step()
        for state in self._optimizer.state.values():
            self._memory.mark(state.values(), OPTIMIZER)
        self._optimizer.zero_grad(set_to_none=True)


def _most_tokens(micro_batches: Sequence[MicroBatch]) -> int:
    return max((m.num_tokens for m in micro_batches), default=0)


def _largest(micro_batches: Sequence[MicroBatch]) -> tuple[list[MicroBatch], float]:
    """Return (1) the micro-batches to run, and (2) the number of tokens in all other micro-batches, relative to the
    tokens in (1).

    The micro-batch with the most tokens is the last, because gradients exist by then, so that memory is highest.
    """
    by_tokens = sorted(micro_batches, key=lambda m: m.num_tokens)
    by_targets = max(micro_batches, key=lambda m: len(m.targets))
    run = [m for m in by_tokens[-MOST_RUN:] if m is not by_targets][-(MOST_RUN - 1) :]
    run = sorted([by_targets, *run], key=lambda m: m.num_tokens)
    tokens = sum(m.num_tokens for m in run)
    return run, sum(m.num_tokens for m in micro_batches) / tokens - 1


def _fake_buffers(module: nn.Module, fake: FakeTensorMode) -> None:
    for name, buffer in module._buffers.items():
        module._buffers[name] = None if buffer is None else fake.from_tensor(buffer)


def _make_room(model: nn.Module) -> None:
    """Move parameters from the meta device to the device of the fake tensors. Tied parameters stay tied."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if parameter not in made:
                    room = torch.empty_like(parameter, device="cpu")
                    made[parameter] = nn.Parameter(room, requires_grad=parameter.requires_grad)
                module._parameters[name] = made[parameter]
