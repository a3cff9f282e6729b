"""Wrong tensors, by the name of the fault."""

from collections.abc import Iterator

import torch

GATE, UP, V = (f"model.layers.0.{name}_proj.weight" for name in ("mlp.gate", "mlp.up", "self_attn.v"))
DOWN, LAST_DOWN = "model.layers.0.mlp.down_proj.weight", "model.layers.1.mlp.down_proj.weight"
EMBEDDING = "model.embed_tokens.weight"
LAYER, Q, K = "model.layers.1.", "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight"
EXPERT = "model.layers.0.mlp.experts.{}.{}_proj.weight"

CHANGES = {
    "zeros": (GATE, torch.zeros_like),
    "other sign": (DOWN, torch.neg),
    "transposed": (Q, torch.t),
    "rounded": (UP, lambda tensor: tensor.bfloat16().float()),
    "rows moved": (EMBEDDING, lambda tensor: tensor.roll(1, 0)),
}


def wrong(fault: str, tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors as the fault has them."""
    if fault == "stale head":
        tensors.pop("lm_head.weight", None)
    elif fault == "stale layer":
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(LAYER)}
    elif fault == "swapped q and k":
        tensors[Q], tensors[K] = tensors[K], tensors[Q]
    elif fault == "not a number":
        tensors[Q] = tensors[Q].clone()
        tensors[Q][0, 0] = torch.nan
    elif fault == "one number":
        tensors[K] = tensors[K].clone()
        tensors[K][-1, -1] += 1e-6
    elif fault == "swapped experts":
        one, other = (EXPERT.format(expert, "up") for expert in (0, 1))
        tensors[one], tensors[other] = tensors[other], tensors[one]
    elif fault == "stale expert":
        tensors.pop(EXPERT.format(1, "down"))
    elif fault == "stale norm":
        tensors.pop("model.norm.weight")
    elif fault == "stale v":
        tensors.pop(V)
    elif fault == "swapped gate and up":
        tensors[GATE], tensors[UP] = tensors[UP], tensors[GATE]
    elif fault == "swapped layers":
        tensors[DOWN], tensors[LAST_DOWN] = tensors[LAST_DOWN], tensors[DOWN]
    elif fault in CHANGES:
        name, change = CHANGES[fault]
        tensors[name] = change(tensors[name]).contiguous()
    yield from tensors.items()
