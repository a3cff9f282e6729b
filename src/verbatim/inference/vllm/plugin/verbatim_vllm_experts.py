"""Maps a checkpoint's tensors of experts to vLLM's parameters. vLLM keeps all experts of a layer in two parameters,
`w13_weight` (gate and up) and `w2_weight` (down), while a checkpoint has separate tensors for each expert.

Example: `model.layers.0.mlp.experts.3.up_proj.weight` is the part "3.w3" of `...experts.routed_experts.w13_weight`.
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

_SHARDS = {"w13_weight": ("w1", "w3"), "w2_weight": ("w2",)}


def are_known(module: nn.Module) -> bool:
    """True if the layout of these experts is known: not quantized, no replicas (EPLB), no fused shared experts."""
    return (
        isinstance(module, RoutedExperts)
        and isinstance(module.quant_method, UnquantizedFusedMoEMethod)
        and module.layer_name.endswith("experts")
        and module.moe_config.num_experts == module.moe_config.num_logical_experts
        and not module.moe_config.moe_parallel_config.enable_eplb
        and not module.expert_map_manager.num_fused_shared_experts
    )


def places(module: nn.Module, name: str) -> Iterator[tuple[str, tuple[str, str]]]:
    """For each tensor of experts in a checkpoint: its name, and where vLLM loads it, as (parameter, part of the
    parameter)."""
    for param, tensor, expert, shard in module.get_expert_mapping():  # "experts.w13_", "experts.3.up_proj.", 3, "w3"
        place = f"{name}.{param.removeprefix('experts.')}weight", f"{expert}.{shard}"
        yield f"{module.layer_name.removesuffix('experts')}{tensor}weight", place


def shards(module: nn.Module, key: str) -> list[str | int | None]:
    """The parts of a parameter on this worker."""
    if key not in _SHARDS:
        return [None]
    return [f"{expert}.{shard}" for expert, _ in _experts(module) for shard in _SHARDS[key]]


def pieces(module: nn.Module, key: str, values: Tensor) -> Iterator[tuple[str | int | None, int, int, Tensor]]:
    """The parts of a parameter, before its kernel is built. vLLM may pad the parts; the padding is cut off here."""
    if key not in _SHARDS:
        yield None, 0, 0, values
        return
    size, hidden = module.moe_config.intermediate_size_per_partition_unpadded, module.moe_config.hidden_dim_unpadded
    start, half = module.moe_config.tp_rank * size, values.shape[1] // 2
    for expert, at in _experts(module):
        if key == "w2_weight":
            yield f"{expert}.w2", 1, start, values[at, :hidden, :size]
        else:
            yield f"{expert}.w1", 0, start, values[at, :size, :hidden]
            yield f"{expert}.w3", 0, start, values[at, half : half + size, :hidden]


def build(module: nn.Module, build_kernel: Any) -> None:
    """Build the kernel. On a CPU, also pack the weights for the kernel, because vLLM itself packs only the first
    weights."""
    kernel = module.quant_method.moe_kernel
    build_kernel(module)
    if kernel is not None and module.w13_weight.device.type == "cpu":
        kernel.fused_experts.process_weights_after_loading(module)


def _experts(module: nn.Module) -> Iterator[tuple[int, int]]:
    """(global index, index on this worker) of each expert that this worker holds."""
    for expert in range(module.global_num_experts):
        at = module._map_global_expert_id_to_local_expert_id(expert)
        if at >= 0:
            yield expert, int(at)
