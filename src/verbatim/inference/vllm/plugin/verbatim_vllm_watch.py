"""Computes the digest of every checkpoint tensor at the moment when vLLM builds a kernel from that tensor.

On a CPU, vLLM packs linear weights into opaque handles and empties the parameter, which cannot be read afterwards.
Therefore `Watch` wraps `process_weights_after_loading`, which builds the kernels. A layer whose kernel was not rebuilt
has no digest, which shows that the layer is stale. Parameters that still exist after the update (norms, embeddings, and
on a GPU all weights except the experts' weights, whose layout kernels change) are digested in their live state too.
"""

import time
from collections.abc import Iterator
from typing import Any

import verbatim_vllm_experts as experts
from torch import Tensor, nn
from verbatim_vllm_digest import digest
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

Piece = tuple[str | int | None, int, int, Tensor]
"""A part of a parameter, as (the shard of a fused module, such as "q" or 0, or None if the module is not fused; the
dimension along which the checkpoint's tensor is sliced; the index where the slice begins; the slice's values)."""


class Watch:
    """Context manager that records which tensors a model's kernels are built from.

    Args:
        model: This worker's model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._names = {module: name for name, module in model.named_modules()}
        self._expert_places = dict(
            place
            for module, name in self._names.items()
            if experts.are_known(module)
            for place in experts.places(module, name)
        )
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._built: dict[str, dict[str | int | None, list[Any]]] = {}
        self._wrapped: list[QuantizeMethodBase] = []
        self._began = time.perf_counter()
        self.unmapped: list[str] = []
        """Tensors of the checkpoint whose place in the model is unknown, and parameters of the server that no tensor of
        the checkpoint fills. No digest covers either of them."""

    # ---- expected tensors

    def expect(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """Register the checkpoint's tensors before any of them is loaded.

        Raises:
            ValueError: a parameter of the model has no tensor in the checkpoint.
        """
        self._shapes.update(shapes)
        places = self._places()
        self.unmapped = sorted(name for name, place in places.items() if place is None)
        # If a tensor is unmapped, it may fill any parameter, so it cannot be decided whether a parameter's tensor is
        # missing.
        if self.unmapped:
            return
        filled = set(places.values())
        missing = [
            (module, f"{param} ({shard})" if shard is not None else param)
            for module, param, shard in self._wanted()
            if (param, shard) not in filled
        ]
        known = [name for module, name in missing if is_of_a_checkpoint(module)]
        if known:
            raise ValueError(
                f"the folder has no tensors for {', '.join(known[:3])}"
                + (f" and {len(known) - 3} more" if len(known) > 3 else "")
            )
        self.unmapped = sorted(f"{name} (of the server)" for _, name in missing)

    def _places(self) -> dict[str, tuple[str, str | int | None] | None]:
        """The parameter and shard that each checkpoint tensor is loaded into; None if unknown."""
        known = {(param, shard) for _, param, shard in self._wanted()}
        found: dict[str, tuple[str, str | int | None] | None] = {}
        for name in self._shapes:
            found[name] = next((place for place in self._candidates(name) if place in known), None)
        return found

    def _candidates(self, name: str) -> Iterator[tuple[str, str | int | None]]:
        mapper = getattr(self._model, "hf_to_vllm_mapper", None)
        mapped = mapper._map_name_with_shard(name) if mapper is not None else (name, None)
        for start, shard in (mapped or (name, None), (name, None)):
            if not isinstance(shard, list):
                yield start, shard
            if start in self._expert_places:
                yield self._expert_places[start]
            parts = start.split(".")
            for fused, members in getattr(self._model, "packed_modules_mapping", {}).items():
                if len(parts) > 1 and parts[-2] in members:
                    index = members.index(parts[-2])
                    whole = ".".join([*parts[:-2], fused, parts[-1]])
                    yield whole, "qkv"[index] if len(members) == 3 else index
                    yield whole, index

    def _wanted(self) -> Iterator[tuple[nn.Module, str, str | int | None]]:
        """Every parameter with its module and shards. A tied head is left out: the embedding's tensor fills it."""
        for module, name in self._names.items():
            if isinstance(module, ParallelLMHead) and self._tied_to(module) is not None:
                continue
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    for shard in shards(module, key):
                        yield module, f"{name}.{key}" if name else key, shard

    def _tied_to(self, head: ParallelLMHead) -> str | None:
        """Name of the embedding's parameter whose weights the head shares, or None if the head has its own weights."""
        for module, name in self._names.items():
            if isinstance(module, VocabParallelEmbedding) and module is not head and module.weight is head.weight:
                return f"{name}.weight"
        return None

    # ---- recording

    def __enter__(self) -> "Watch":
        for module in self._names:
            method = getattr(module, "quant_method", None)
            if isinstance(method, QuantizeMethodBase) and method not in self._wrapped:
                self._wrapped.append(method)
                # Set on the instance, which hides the class's method for this model only.
                method.process_weights_after_loading = self._seeing(method.process_weights_after_loading)
        return self

    def __exit__(self, *_: object) -> None:
        for method in self._wrapped:
            del method.process_weights_after_loading  # makes the class's method visible again
        self._wrapped = []

    def _seeing(self, build: Any) -> Any:
        def build_and_see(layer: nn.Module) -> None:
            # Before the build, which may empty the parameters.
            self._built[self._names[layer]] = {
                f"{key}|{shard}": self._entry(dim, start, values, "kernel")
                for key, parameter in layer._parameters.items()
                if parameter is not None
                for shard, dim, start, values in pieces(layer, key, parameter.data)
            }
            if experts.are_known(layer):
                experts.build(layer, build)
            else:
                build(layer)

        return build_and_see

    def rebuild_heads(self) -> None:
        """Build the kernels of heads for which vLLM built none. vLLM skips tied heads, although on a CPU a tied head
        has a separate kernel."""
        for module, name in self._names.items():
            if isinstance(module, ParallelLMHead) and name not in self._built:
                module.quant_method.process_weights_after_loading(module)

    @staticmethod
    def _entry(dim: int, start: int, values: Tensor, source: str) -> list[Any]:
        return [dim, start, list(values.shape), str(values.dtype).removeprefix("torch."), digest(values), source]

    # ---- report

    def report(self, *, path: str | None, error: str | None, loaded: bool) -> dict[str, Any]:
        """What the kernels were built from, as JSON.

        `tensors`: `[name, dim, start, shape, dtype, digest, source]` for each part of a checkpoint's tensor on this
        worker; `source` is "kernel" if the digest was taken when a kernel was built, and "live" if it is the digest of
        the parameter in use now. `stale`: tensors that no kernel was built from.
        """
        tensors: list[list[Any]] = []
        stale: list[str] = []
        if loaded:
            by_place = {place: name for name, place in self._places().items() if place is not None}
            # Tied parameters share their storage, and each storage is digested only once.
            live: dict[tuple[int, int], list[list[Any]]] = {}
            for module, name in self._names.items():
                for found, tied, entries in self._of_module(module, name, by_place, live):
                    tensors.extend([found, *entry] for entry in entries)
                    if not entries:
                        stale.append(found + (f" (as {name})" if tied else ""))
        return {
            "path": path,
            "error": error,
            "loaded": loaded,
            "tensors": tensors,
            "stale": sorted(stale),
            "unmapped": self.unmapped,
            "seconds": time.perf_counter() - self._began,
        }

    def _of_module(
        self, module: nn.Module, name: str, by_place: dict[Any, str], live: dict[tuple[int, int], list[list[Any]]]
    ) -> Iterator[tuple[str, bool, list[list[Any]]]]:
        built = self._built.get(name)
        processed = isinstance(getattr(module, "quant_method", None), QuantizeMethodBase)
        tied = self._tied_to(module) if isinstance(module, ParallelLMHead) else None
        for key, parameter in module._parameters.items():
            if parameter is None:
                continue
            for shard, dim, start, values in pieces(module, key, parameter.data):
                place = f"{name}.{key}" if name else key
                found = by_place.get((place, shard)) or (by_place.get((tied, None)) if tied else None)
                if found is None:
                    continue
                entries = []
                if processed and built is not None and f"{key}|{shard}" in built:
                    entries.append(built[f"{key}|{shard}"])
                if values.numel() and (entries or not processed) and not experts.are_known(module):
                    storage = (values.data_ptr(), values.numel())
                    if storage not in live:
                        live[storage] = self._entry(dim, start, values, "live")
                    entries.append(live[storage])
                yield found, tied is not None, entries


def is_of_a_checkpoint(module: nn.Module) -> bool:
    """True if a checkpoint must have the module's parameters. Other parameters, such as scales of the KV cache, may be
    absent."""
    return (
        isinstance(module, LinearBase | VocabParallelEmbedding)
        or "Norm" in type(module).__name__
        or experts.are_known(module)
    )


def shards(module: nn.Module, key: str) -> list[str | int | None]:
    """The shards of a fused module's parameter; `[None]` for a module that is not fused."""
    if experts.are_known(module):
        return experts.shards(module, key)
    if isinstance(module, QKVParallelLinear):
        return ["q", "k", "v"]
    if isinstance(module, MergedColumnParallelLinear):
        return list(range(len(module.output_sizes)))
    return [None]


def pieces(module: nn.Module, key: str, values: Tensor) -> Iterator[Piece]:
    """The parts of a parameter, each of which is a slice of one tensor of the checkpoint. Empty if the CPU's kernel
    packed the parameter."""
    empty = values.numel() == 0
    rank, whole = getattr(module, "tp_rank", 0), values.shape[0] if values.ndim else 0
    if experts.are_known(module):
        yield from experts.pieces(module, key, values)
    elif isinstance(module, QKVParallelLinear):
        heads, groups = module.num_heads * module.head_size, module.num_kv_heads * module.head_size
        group = rank // module.num_kv_head_replicas
        at = 0
        for shard, size, start in (
            ("q", heads, rank * heads),
            ("k", groups, group * groups),
            ("v", module.num_kv_heads * module.v_head_size, group * module.num_kv_heads * module.v_head_size),
        ):
            yield shard, 0, start, values if empty else values.narrow(0, at, size)
            at += size
    elif isinstance(module, MergedColumnParallelLinear):
        at = 0
        for index, total in enumerate(module.output_sizes):
            size = total // module.tp_size
            yield index, 0, rank * size, values if empty else values.narrow(0, at, size)
            at += size
    elif isinstance(module, VocabParallelEmbedding):
        indices = module.shard_indices
        yield None, 0, indices.org_vocab_start_index, values if empty else values[: indices.num_org_elements]
    elif isinstance(module, RowParallelLinear) and key != "bias":
        yield None, 1, rank * module.input_size_per_partition, values
    elif isinstance(module, ColumnParallelLinear) and not isinstance(module, ReplicatedLinear):
        yield None, 0, rank * whole, values
    else:
        yield None, 0, 0, values
