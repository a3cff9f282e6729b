"""Predicts the duration of a step: for the trainer from its floating-point operations, for the sampler from the bytes
that each pass reads.

The assumed rate is the device's peak rate times a utilisation. Tools, environments and weight loading are assumed to
take no time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from verbatim.config.schema import TrainerConfig
from verbatim.config.sections import Replicas
from verbatim.core.types import MicroBatch
from verbatim.inspection.plan.batches import PlannedBatch
from verbatim.inspection.plan.devices import Device
from verbatim.trainer.packing.cost import CostModel
from verbatim.trainer.packing.deal import lock_step_time

WIDTH = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Number of bytes that a number takes, by format."""
FORWARD_AND_BACKWARD = 3.0
"""Cost of a forward and a backward pass, in units of a forward pass: the backward pass has two matrix products for each
product of the forward pass."""
BACKWARD_OF_ADAPTERS = 1.0
"""Cost of a backward pass with adapters, in units of a forward pass: frozen weights need no gradient, so there is one
matrix product for each product of the forward pass."""
OPTIMIZER_BYTES = 28
"""Number of bytes that an optimizer step reads and writes per trained parameter: AdamW reads the weight, the gradient
and both moments, and writes all of these except the gradient, in float32."""


@dataclass(frozen=True, kw_only=True)
class TrainerSpeed:
    """The predicted speed of one trainer step, over all processes. Durations are in seconds."""

    seconds: float
    """Duration of the whole step."""
    compute_seconds: float
    """Duration of the forward and backward passes, including the time for which processes wait for each other."""
    exchange_seconds: float
    """Duration of gathering weights and reducing gradients, which overlaps with the forward and backward passes."""
    optimizer_seconds: float
    """Duration of the optimizer step, which is limited by memory bandwidth."""
    operations: float
    """Number of floating-point operations in the forward and backward passes."""
    tokens: int
    """Number of tokens that the passes compute."""
    tokens_per_second: float
    """`tokens` divided by `seconds`."""


@dataclass(frozen=True, kw_only=True)
class SamplerSpeed:
    """The predicted speed of the rollouts of one step, over all replicas. Durations are in seconds."""

    seconds: float
    """Duration of a batch's rollouts."""
    prefill_seconds: float
    """Duration of reading prompts and tool results."""
    decode_seconds: float
    """Duration of sampling tokens."""
    tokens_per_second: float
    """Number of sampled tokens divided by `seconds`."""
    in_flight: int
    """Number of sequences that a replica decodes at the same time."""
    bound_by: Literal["memory bandwidth", "compute", "the longest rollout"]
    """The name of what limits the speed of sampling."""
    weights: int
    """Size in bytes of the weights on each device of a replica."""
    packed: int
    """Size in bytes of the packed copy of the matrices that the compiled kernel uses; 0 if the kernel is not used."""
    cache: int
    """Size in bytes of the keys and values of the `in_flight` sequences on each device of a replica."""

    @property
    def memory(self) -> int:
        """Size in bytes of weights, packed copy and cache together on each device of a replica."""
        return self.weights + self.packed + self.cache


def trainer_speed(
    dealt: Sequence[Sequence[MicroBatch]],
    cost: CostModel,
    config: TrainerConfig,
    device: Device,
    *,
    num_parameters: int,
    num_trained: int,
    utilisation: float,
    num_forward_models: int = 0,
) -> TrainerSpeed:
    """Predict the speed of a training step that has `optimizer_steps_per_batch` optimizer steps, each with the given
    micro-batches.

    Args:
        dealt: The micro-batches of an optimizer step: one list per process, or per group of `parallel.sequence`
            processes.
        cost: The cost model of the micro-batches.
        config: The `[trainer]` table.
        device: The device of each process.
        num_parameters: Number of parameters of the whole model.
        num_trained: Number of parameters that are trained.
        utilisation: The share of the device's peak that forward and backward passes reach.
        num_forward_models: Number of frozen models that score the batch.
    """
    passes = FORWARD_AND_BACKWARD if config.lora is None else 1 + BACKWARD_OF_ADAPTERS
    passes += (1.0 if config.gradient_checkpointing else 0.0) + num_forward_models
    passes += 1.0 if config.router_aux_loss_coef else 0.0  # this pass measures the load of the experts
    costs = [[cost.micro_batch(m) for m in mine] for mine in dealt]
    rate = device.flops[config.dtype] * utilisation
    steps, share = config.optimizer_steps_per_batch, config.parallel.sequence
    processes = len(dealt) * share
    # `parallel.sequence` processes compute each micro-batch together.
    compute = steps * lock_step_time(costs) * cost.unit * passes / rate / share
    exchange = 0.0
    if processes > 1:
        # Weights are gathered for the forward pass and again for the backward pass. Gradients are reduced in float32.
        gathered = 2 * num_parameters * WIDTH[config.dtype] + num_trained * WIDTH["float32"]
        num_passes = max(map(len, dealt))
        # Each process already has its own share, which is not transferred.
        exchange = steps * num_passes * gathered * (processes - 1) / processes / device.link
    optimizer = steps * num_trained / processes * OPTIMIZER_BYTES / device.bandwidth
    tokens = steps * sum(m.num_tokens for mine in dealt for m in mine)
    seconds = max(compute, exchange) + optimizer
    return TrainerSpeed(
        seconds=seconds,
        compute_seconds=compute,
        exchange_seconds=exchange,
        optimizer_seconds=optimizer,
        operations=steps * sum(map(sum, costs)) * cost.unit * passes,
        tokens=tokens,
        tokens_per_second=tokens / seconds,
    )


def cache_bytes_per_token(model_config: Any, width: int) -> float:
    """The size in bytes of one token's keys and values, in all layers with full attention. Layers with a sliding window
    are not counted.

    Example: 28 layers with 8 key/value heads of 128 numbers, at two bytes per number: 2 x 28 x 8 x 128 x 2 = 114,688.
    """

    def get(name: str, default: int) -> int:
        return int(getattr(model_config, name, None) or default)

    heads, layers = get("num_attention_heads", 1), get("num_hidden_layers", 1)
    size = get("head_dim", get("hidden_size", 1) // heads)
    kinds = getattr(model_config, "layer_types", None) or ["full_attention"] * layers
    everything = sum("sliding" not in kind for kind in kinds) if get("sliding_window", 0) else len(kinds)
    return 2.0 * everything * get("num_key_value_heads", heads) * size * width


def packed_parameters(model_config: Any, num_parameters: int) -> int:
    """The number of parameters in the packed copy of the embedded sampler's compiled kernel.

    The copy contains all matrices that are multiplied, so it contains the embeddings only if they are also the output
    head. The result is 0 for a mixture of experts, which the kernel does not support.

    Example: a model with 1,000,000 parameters and 1,000 embeddings of 64 numbers has 936,000 parameters in the copy, or
    all 1,000,000 if the embeddings are tied to the output head.
    """

    def get(name: str) -> int:
        return int(getattr(model_config, name, None) or 0)

    if any(map(get, ("num_experts", "num_local_experts", "n_routed_experts"))):
        return 0
    return num_parameters - (0 if get("tie_word_embeddings") else get("vocab_size") * get("hidden_size"))


def sampler_speed(
    batch: PlannedBatch,
    replicas: Replicas,
    cost: CostModel,
    model_config: Any,
    device: Device,
    *,
    num_parameters: int,
    in_flight: int,
    utilisation: float,
    bandwidth_utilisation: float,
) -> SamplerSpeed:
    """Predict the speed of sampling the rollouts of a batch.

    A decoding pass takes the longer of two durations: reading all weights and the cache of each sequence, or computing.

    Args:
        batch: The batch to sample.
        replicas: The sampler's replicas.
        cost: The model's cost model.
        model_config: The model's `transformers` configuration.
        device: The sampler's device.
        num_parameters: Number of parameters of the model.
        in_flight: Number of episodes in flight, over all replicas.
        utilisation: The share of the peak compute rate that is reached.
        bandwidth_utilisation: The share of the memory bandwidth that is reached.
    """
    width, share = WIDTH[replicas.dtype], replicas.devices_each
    weights = num_parameters * width / share
    packed = packed_parameters(model_config, num_parameters) * width if replicas.packs else 0
    # The compiled kernel keeps keys and values in float32, unless this processor has AMX, which is not assumed.
    per_token = cache_bytes_per_token(model_config, WIDTH["float32"] if packed else width) / share
    of_one = max(1.0, batch.mean_context * per_token)
    room = max(0.0, device.memory * replicas.memory_share - weights - packed)
    sequences = max(1, min(replicas.most_sequences, -(-in_flight // replicas.count), int(room / of_one)))
    rate = device.flops["float32" if replicas.dtype == "float32" else "bfloat16"] * utilisation
    read = (weights + sequences * of_one) / (device.bandwidth * bandwidth_utilisation)
    token = cost.unit * (1 + cost.per_target) / share
    computed = sequences * token / rate
    a_pass = max(read, computed)
    passes = batch.sampled_tokens / (sequences * replicas.count)
    # The longest rollout needs one pass for each of its tokens, even after all others have ended.
    alone = batch.longest_sampled * (weights + of_one) / (device.bandwidth * bandwidth_utilisation)
    decode = max(passes * a_pass, alone)
    bound_by: Any = (
        "the longest rollout" if alone > passes * a_pass else ("compute" if computed > read else "memory bandwidth")
    )
    prefill = batch.prompt_tokens * cost.unit / share / replicas.count / rate
    return SamplerSpeed(
        seconds=decode + prefill,
        prefill_seconds=prefill,
        decode_seconds=decode,
        tokens_per_second=batch.sampled_tokens / (decode + prefill),
        in_flight=sequences,
        bound_by=bound_by,
        weights=int(weights),
        packed=packed,
        cache=int(sequences * of_one),
    )


def step_seconds(trainer: float, sampler: float, *, level: int) -> Mapping[str, float]:
    """The duration of a step, and the time for which each side (trainer, sampler) waits in a step. At level 0, the
    sides take turns; at higher levels, their work overlaps.

    Example: a trainer that needs 3 s and a sampler that needs 5 s take 8 s in turns. If they overlap, they take 5 s, of
    which the trainer waits 2 s.
    """
    if level == 0:
        return {"step": trainer + sampler, "trainer_waits": sampler, "sampler_waits": trainer}
    step = max(trainer, sampler)
    return {"step": step, "trainer_waits": step - trainer, "sampler_waits": step - sampler}
