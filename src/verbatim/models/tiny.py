"""Builds a tiny copy of a model: same class and configuration, random weights, few layers, small widths and windows.

A copy with a few thousand parameters shows the behaviour of a model class as well as the model itself does, and is
faster: 40 tokens are enough to cross a window of 16. The copy keeps every flag and every kind of layer. Only sizes
change.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn

from verbatim.core.errors import ModelError
from verbatim.core.machine_faults import is_out_of_memory
from verbatim.models.refusal import FAULTS, describe

_FAULTS = (*FAULTS, StrictDataclassError)
"""Exceptions raised by a model's code, or by a configuration that validates its sizes."""

VOCAB = 96
"""Vocabulary size of a tiny copy."""
WINDOW = 16
"""Maximum attention window, attention chunk and number of selected keys in a tiny copy, in tokens."""
MAX_POSITIONS = 2048
"""Maximum number of rows in a table of learned positions."""
_MOST_PARAMETERS = 30_000_000
"""Maximum accepted number of parameters. If a copy is larger, one of its size fields is missing in `SIZES`."""

_WIDTH, _HEADS, _HEAD, _INNER, _RANK, _EXPERTS = 64, 4, 16, 48, 16, 4

SIZES: Mapping[str, int] = {
    name: size
    for size, names in (
        (_WIDTH, "hidden_size d_model n_embd embedding_size input_embedding_size output_embedding_size "
                 "word_embed_proj_dim emb_dim backbone_hidden_size out_hidden_size linear_attn_hidden_size "
                 "projector_input_dim projector_output_dim embedding_dim mamba_d_ssm"),
        (_INNER, "intermediate_size ffn_dim n_inner d_ff dff dim_ff d_inner mlp_dim feed_forward_size encoder_ffn_dim "
                 "decoder_ffn_dim ffn_hidden_size expert_ffn_hidden_size moe_intermediate_size intermediate_size_mlp "
                 "shared_expert_intermediate_size shared_intermediate_size shared_experts_intermediate_size "
                 "dense_intermediate_size moe_shared_expert_intermediate_size router_hidden_size"),
        (_HEADS, "num_attention_heads n_head n_heads num_heads attention_heads encoder_attention_heads "
                 "decoder_attention_heads num_decoder_attention_heads num_encoder_attention_heads "
                 "swa_num_attention_heads linear_num_heads linear_num_value_heads"),
        (_HEAD, "head_dim d_head dim_head d_kv kv_channels attention_head_dim index_head_dim swa_head_dim "
                "global_head_dim linear_head_dim linear_key_head_dim linear_value_head_dim qk_head_dim mamba_d_head "
                "mamba_headdim"),
        (_HEAD // 2, "qk_nope_head_dim qk_rope_head_dim v_head_dim rotary_dim d_rel"),
        (16, "index_n_heads"),  # with few heads many keys score 0, and the selection among them is random
        (_RANK, "kv_lora_rank q_lora_rank o_lora_rank laurel_rank hidden_size_per_layer_input hc_lowrank"),
        (_EXPERTS, "num_experts num_local_experts n_routed_experts moe_num_experts zero_expert_num"),
        (8, "mamba_n_heads"),
        (2, "num_experts_per_tok num_experts_per_token moe_k moe_top_k moe_topk top_k_experts n_group num_expert_group "
            "n_groups linear_num_key_heads num_kv_shared_layers"),
        (1, "topk_group n_shared_experts num_shared_experts moe_num_shared_experts encoder_layers num_encoder_layers "
            "depth num_nextn_predict_layers num_global_layers first_k_dense_replace max_window_layers"),
        (VOCAB, "vocab_size decoder_vocab_size vocab_size_per_layer_input"),
        (MAX_POSITIONS, "max_position_embeddings n_positions n_ctx max_seq_len model_max_length context_length "
                        "max_target_positions max_source_positions"),
        (WINDOW, "sliding_window window_size sliding_window_size attention_window_size keep_window_size "
                 "attention_chunk_size local_attention index_topk local_attention_window_len mamba_chunk_size "
                 "chunk_size rel_extent"),
    )
    for name in names.split()
}  # fmt: skip
"""Upper limits of configuration fields. If a field is a per-layer list, its limit applies to each value."""

_KEY_HEADS = {
    "num_key_value_heads": "num_attention_heads",
    "num_kv_heads": "num_attention_heads",
    "num_global_key_value_heads": "num_attention_heads",
    "num_query_groups": "num_attention_heads",
    "swa_num_key_value_heads": "swa_num_attention_heads",
    "kv_n_heads": "n_heads",
}
"""Fields with the number of key/value heads, each with the matching field for query heads. A copy keeps the kind of
ratio between the two: equal, grouped or single."""

Sizes = Literal["narrow", "scaled", "true"]
"""How a copy is made small. "narrow": each size is cut independently. "scaled": width and heads are cut together, so
that the width stays a multiple of the heads. "true": only layers, vocabulary, positions and windows are cut."""
_WIDTHS = ("hidden_size", "n_embd", "d_model", "embedding_dim")
_QUERY_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads")
_TRUE: Mapping[str, int] = {
    name: size
    for name, size in SIZES.items()
    if size in (VOCAB, MAX_POSITIONS)
    or ("window" in name or "chunk" in name or name in ("local_attention", "index_topk", "rel_extent"))
}

_UNUSED = ("vision_config", "audio_config", "audio_encoder", "audio_encoder_config", "vq_config")
"""Configurations of components that text does not use, for which one layer is enough."""
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers")


class NoTinyCopy(ModelError):
    """No working small copy of a model can be made."""


def tiny_copy(model: Any, *, seed: int = 0) -> Any:
    """A tiny model of the same class and configuration, on the CPU, in float32 and eval mode, with its own attention.

    If the reduced sizes do not fit together, other ways to reduce them are tried, up to a copy with the model's own
    widths. If no copy returns logits when called with ids only, the first copy is returned; calling it raises an error,
    which the caller reports.

    Out-of-memory errors are raised unchanged, because then the model is not at fault.

    Raises:
        NoTinyCopy: the configuration cannot be made small.
    """
    problem: Exception | None = None
    silent: Any = None  # the first copy that could be built, although it returns no logits
    for sizes in get_args(Sizes):
        try:
            with torch.random.fork_rng(devices=[]), torch.device("cpu"):
                torch.manual_seed(seed)
                tiny = _fitting(model, sizes)
                _randomize(tiny)
        except _FAULTS as error:
            if is_out_of_memory(error):
                raise
            problem = problem or _said(error)
            continue
        if _gives_logits(tiny.eval()):
            return tiny
        silent = tiny if silent is None else silent
    if silent is not None:
        return silent
    assert problem is not None
    raise NoTinyCopy(
        f"{type(model).__name__} cannot be checked against its own attention, because no small copy of it can be "
        f"made ({describe(problem)}); use a model of another class"
    ) from problem


def _said(error: Exception) -> Exception:
    """The error of a configuration's own validation, without huggingface_hub's error around it; or the error itself."""
    cause = error.__cause__
    return cause if isinstance(error, StrictDataclassError) and isinstance(cause, Exception) else error


@torch.no_grad()
def _gives_logits(tiny: Any) -> bool:
    """True if the copy can be called with ids alone. Always true for fake tensors, which have no values."""
    if any(type(parameter.data) is not torch.Tensor for parameter in tiny.parameters()):
        return True
    try:
        tiny(input_ids=torch.arange(8, device=next(tiny.parameters()).device)[None], use_cache=False)
    except _FAULTS as error:
        if is_out_of_memory(error):
            raise
        return False
    return True


def _fitting(model: Any, sizes: Sizes) -> Any:
    """The shallowest copy that has every kind of layer.

    The right depth cannot be computed, because configurations place special layers by their own rules. So depths are
    tried in turn.
    """
    layers = decoder_layers(model)
    kinds = [_kind(layer) for layer in layers]
    first_with_all = 1 + max((kinds.index(kind) for kind in set(kinds)), default=0)
    problem: Exception | None = None
    most_likely = max(2, first_with_all) if first_with_all <= 8 else 2
    for depth in dict.fromkeys([most_likely, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, max(2, first_with_all)]):
        try:
            config = tiny_config(model.config, depth, sizes)
            with torch.device("meta") if sizes == "true" else contextlib.nullcontext():
                tiny = type(model)(config)
        except _FAULTS as error:
            if is_out_of_memory(error):
                raise
            problem = error
            continue
        size = sum(p.numel() for p in tiny.parameters())
        if size > _MOST_PARAMETERS:
            raise ValueError(f"it has {size:,} parameters")
        missing = set(kinds) - {_kind(layer) for layer in decoder_layers(tiny)}
        if not missing:
            return tiny if sizes != "true" else type(model)(config)  # known to be small, so now with real memory
    raise problem or ValueError(f"{len(missing)} of {len(set(kinds))} kinds of layer are missing in it")


def tiny_config(config: Any, depth: int, sizes: Sizes = "narrow") -> Any:
    """A configuration cut to `depth` layers, in the way named by `sizes`; all flags and other numbers stay."""
    values = _cut(config.to_dict(), depth, sizes)
    for name in ("dtype", "torch_dtype", "quantization_config", "_name_or_path"):
        values.pop(name, None)
    return type(config).from_dict(values)


def _cut(values: Mapping[str, Any], depth: int, sizes: Sizes) -> dict[str, Any]:
    """A configuration's fields cut to `depth` layers, with fixes for fields that depend on each other."""
    layers = next((values[name] for name in _LAYERS if isinstance(values.get(name), int)), 0)
    depth = min(depth, layers) if layers else depth
    cut = _Cut(values=values, layers=layers, depth=depth, sizes=sizes, limits=_limits(values, sizes))
    out = {name: cut.value(name, value) for name, value in values.items()}
    is_narrow = sizes != "true"
    if is_narrow and values.get("attention_hidden_size") and values.get("hidden_size"):  # RWKV; twice as wide in Zamba
        out["attention_hidden_size"] = _WIDTH * values["attention_hidden_size"] // values["hidden_size"]
        if values.get("attention_head_dim"):
            out["attention_head_dim"] = out["attention_hidden_size"] // _HEADS
    if values.get("rope_parameters"):  # RoPE needs no table of positions, and its scaling depends on the true length
        out.update({name: values[name] for name in ("max_position_embeddings",) if name in values})
    if isinstance(values.get("attention_types"), list | tuple) and values.get("attention_layers"):  # GPT-Neo's spelling
        out["attention_types"] = [[list(values["attention_layers"][:depth]), 1]]
    if values.get("qk_rope_head_dim") and values.get("head_dim") == values["qk_rope_head_dim"]:  # one size, two names
        out["head_dim"] = out["qk_rope_head_dim"]
    if isinstance(values.get("per_layer_config"), Mapping):
        kept = {i: part for i, part in values["per_layer_config"].items() if int(i) < depth}
        out["per_layer_config"] = {i: _cut(part, depth, sizes) for i, part in kept.items()} or None
    if out.get("num_kv_shared_layers"):
        out["num_kv_shared_layers"] = max(1, depth // 3)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):  # transformers warns of ids outside the vocabulary
        value = out.get(name)
        if isinstance(value, int):
            out[name] = min(value, VOCAB - 1)
        elif isinstance(value, list | tuple):
            out[name] = [min(x, VOCAB - 1) for x in value]
    return out


def _limits(values: Mapping[str, Any], sizes: Sizes) -> Mapping[str, int]:
    """Upper limits of a configuration's fields, for one way to cut."""
    if sizes == "true":
        return _TRUE
    width = next((values[name] for name in _WIDTHS if _is_int(values.get(name))), 0)
    heads = next((values[name] for name in _QUERY_HEADS if _is_int(values.get(name))), 0)
    if sizes == "narrow" or not width or not heads or width % heads:
        return SIZES
    head = min(width // heads, _HEAD)
    narrow = min(heads, _HEADS) * head
    equal = {name: narrow for name, value in values.items() if SIZES.get(name) == _WIDTH and value == width}
    return {**SIZES, **equal, "rotary_dim": min(SIZES["rotary_dim"], head)}


@dataclass(frozen=True, kw_only=True)
class _Cut:
    """Cuts the fields of one configuration to `depth` of its `layers` layers and to `limits`."""

    values: Mapping[str, Any]
    layers: int
    depth: int
    sizes: Sizes
    limits: Mapping[str, int]

    def value(self, name: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            if name == "rope_parameters":
                return value if self.sizes == "true" else _cut_rope(value, self.values)
            return _cut(value, 1 if name in _UNUSED else self.depth, self.sizes)
        if isinstance(value, bool) or value is None or isinstance(value, str | float):
            return value
        if isinstance(value, list | tuple):
            return self._several(name, value)
        if name in _LAYERS:
            return min(value, self.depth)
        if name in _KEY_HEADS and self.sizes != "true":
            return _key_heads(value, self.values.get(_KEY_HEADS[name]))
        return min(value, self.limits.get(name, value))

    def _several(self, name: str, value: Sequence[Any]) -> list[Any]:
        if self.layers and len(value) == self.layers:
            value = value[: self.depth]
        elif self.layers and name.endswith(("_idxs", "_ids", "_layers", "_indices")) and all(map(_is_int, value)):
            value = [x for x in value if x < self.depth]
        return [self.value(name, x) if _is_int(x) else x for x in value]


def _cut_rope(parameters: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Cut RoPE parameters: keep scalings, and cut per-angle factors to the number of angles of a narrow head."""
    out = copy.deepcopy(dict(parameters))
    partial = parameters.get("partial_rotary_factor") or values.get("partial_rotary_factor") or 1.0
    rotated = (values.get("qk_rope_head_dim") and SIZES["qk_rope_head_dim"]) or int(_HEAD * partial)
    for name, value in parameters.items():
        if isinstance(value, Mapping):
            out[name] = _cut_rope(value, values)
        elif name in ("short_factor", "long_factor"):
            out[name] = list(value[: rotated // 2])
    return out


def _key_heads(value: int, heads: Any) -> int:
    """The number of key/value heads of a copy. It divides the copy's number of query heads, and the ratio of the two
    keeps its kind: equal, grouped or single.

    >>> [_key_heads(value, heads) for value, heads in ((8, 8), (2, 8), (1, 8), (2, 2), (1, 2), (3, 3), (2, 6))]
    [4, 2, 1, 2, 1, 3, 2]
    """
    if value == 1 or not _is_int(heads):
        return min(value, 2)
    kept = min(heads, _HEADS)
    return kept if value >= heads else max(number for number in range(1, max(2, kept)) if kept % number == 0)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def decoder_layers(model: Any) -> list[nn.Module]:
    """The decoder layers: the module list with `num_hidden_layers` entries, or else the longest module list."""
    decoder = model.get_decoder() or model.base_model
    lists = [m for m in decoder.modules() if isinstance(m, nn.ModuleList)]
    depth = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    matching = [m for m in lists if len(m) == depth]
    return list(matching[0] if matching else max(lists, key=len, default=[]))


def _kind(layer: nn.Module) -> tuple[object, ...]:
    """What distinguishes a layer from others: its modules and their settings, but not weights and counts."""
    found = {_settings(re.sub(r"\d+", "#", name), module) for name, module in layer.named_modules()}
    return tuple(sorted(found, key=str))


def _settings(name: str, module: nn.Module) -> tuple[object, ...]:
    """A module's name, class, flags, and which of its windows and chunks are set."""

    def of() -> Iterator[tuple[str, object]]:
        for key, value in vars(module).items():
            if key.startswith("_") or key in ("training", "gradient_checkpointing"):  # how it is run, not what it is
                continue
            if isinstance(value, bool | str):
                yield key, value
            elif "window" in key or "chunk" in key:
                yield key, value is None

    return (name, type(module).__name__.removeprefix("FSDP"), *sorted(of()))


@torch.no_grad()
def _randomize(model: nn.Module) -> None:
    """Draw weights large enough for the context to change a token's logits. The 0.02 of `transformers` is too small."""
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            parameter.normal_(0, 0.15)
        else:
            parameter.add_(0.1 * torch.randn_like(parameter))
