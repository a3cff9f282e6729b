"""[trainer]: optimizer, loss and packing."""

from __future__ import annotations

from typing import Literal

from verbatim.config.sections import (
    ComponentConfig,
    Decay,
    FinitePositive,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
)


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


class TrainerConfig(Section):
    """The trainer: optimizer, loss, packing, precision, process."""

    optim: OptimConfig = OptimConfig()
    """Optimizer and schedule."""
    loss: ComponentConfig = ComponentConfig()
    """The loss."""
    packing: str = "auto"
    """How samples are laid out in memory: "rows", one after the other, or "tree", what they have in common once. "auto"
    takes the tree where that saves tokens. "tree" needs a model whose tokens mix by attention alone. The import path of
    a packer of your own is tried on a small copy of the model first."""
    micro_batch_tokens: PositiveInt | None = None
    """Most tokens of one forward pass; a longer sample is one by itself. By default 16,384; on a CPU 8,192, where more
    leave its caches; never cut so for losses that see a trajectory whole."""
    logprob_chunk: PositiveInt = 1024
    """Targets whose vocabulary-sized logits exist at one time."""
    optimizer_steps_per_batch: PositiveInt = 1
    """Optimizer steps taken on each batch, on disjoint parts of it."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the forward and backward pass; master weights are float32."""
    device: str = "auto"
    """"auto" takes CUDA where there is one."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    separate_process: bool = True
    """Train in a process of its own. false: on a thread of the orchestrator's, where a debugger reaches it."""
    num_threads: PositiveInt | None = None
    """Threads of its matrix products on a CPU; by default half of the cores where both sides work at once."""
