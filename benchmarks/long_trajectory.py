"""Measures how many bytes a rank keeps for a long trajectory between forward and backward pass, and how many bytes it
sends if several ranks share the trajectory.

The model has layers of the shape of Qwen3-0.6B, and computes one row in float32. The kept bytes are those of all
tensors that autograd saves, except parameters; each storage counts once. The figure for one layer is the difference
between a model with two layers and a model with one layer. All ranks of a group have tensors of the same shapes, so
only one rank is measured: its exchange counts the bytes that it would send, and returns the rank's own tensors.

Prints one JSON line: for each number of ranks, the bytes on each rank per layer and per token of the whole trajectory.

    OMP_NUM_THREADS=1 python benchmarks/long_trajectory.py [--tokens 1024]
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoModelForCausalLM, Qwen3Config

from verbatim.models.attention import ATTENTION
from verbatim.models.head import CausalLM
from verbatim.trainer.logprobs import TargetLogprobs, whole_sample
from verbatim.trainer.offload import ActivationOffload
from verbatim.trainer.packing import pack_rows
from verbatim.trainer.parallel.sequence import SequenceGroup
from verbatim.trainer.recompute import checkpoint_layers

SHAPE = {"hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8, "intermediate_size": 3072}
SIZES = (1, 2, 4, 8, 16)
HOST = torch.device("cpu")


class OneOfMany(SequenceGroup):
    """Rank 0 of a group whose other ranks do not exist."""

    def __init__(self, size: int) -> None:
        self.size, self.rank = size, 0
        self.sent = 0

    def _exchange(self, x_STF: Tensor) -> Tensor:
        self.sent += x_STF[1:].nbytes
        return x_STF.clone()


class Kept:
    """Counts the bytes of saved tensors, each storage once."""

    def __init__(self, model: Any) -> None:
        self._parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.storages: dict[int, Any] = {}

    def note(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._parameters:
            self.storages[storage.data_ptr()] = storage  # kept alive, so that its address is not reused
        return tensor

    @property
    def bytes(self) -> int:
        return sum(storage.nbytes() for storage in self.storages.values())


class Counted(ActivationOffload):
    """Counts the bytes that are offloaded to host memory."""

    def __init__(self) -> None:
        super().__init__(HOST)
        self.bytes = 0

    def _keep(self, tensor: Tensor) -> Any:
        self.bytes += tensor.nbytes
        return super()._keep(tensor)


def one_pass(layers: int, tokens: int, size: int, *, recompute: bool) -> dict[str, float]:
    """Run a forward pass; returns the bytes that it keeps (`kept`), offloads to host memory (`host`) and sends
    (`sent`)."""
    config = Qwen3Config(vocab_size=64, num_hidden_layers=layers, head_dim=128, max_position_embeddings=tokens, **SHAPE)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    model = model.to_empty(device=HOST).float()
    for tensor in (*model.parameters(), *model.buffers()):
        torch.nn.init.constant_(tensor, 0.01)
    model.set_attn_implementation(ATTENTION)
    offload = Counted()
    lm = CausalLM(model)
    if recompute:
        checkpoint_layers(model, offload)
    group = OneOfMany(size) if size > 1 else None
    targets = TargetLogprobs(lm, 64, sequence=group)
    ids = (np.arange(tokens) % 64).astype(np.int32)
    batch = targets.batch(pack_rows([whole_sample(ids)], micro_batch_tokens=tokens, keep_whole=False)[0])
    kept = Kept(model)
    with saved_tensors_hooks(kept.note, lambda tensor: tensor):
        targets.hidden(batch)
    return {"kept": kept.bytes, "host": offload.bytes, "sent": group.sent if group is not None else 0}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=1024)
    tokens = parser.parse_args().tokens
    found: dict[str, dict[str, float]] = {}
    for size in SIZES:
        one, two = (one_pass(layers, tokens, size, recompute=False) for layers in (1, 2))
        first, second = (one_pass(layers, tokens, size, recompute=True) for layers in (1, 2))
        found[str(size)] = {
            "all_kept": (two["kept"] - one["kept"]) / tokens,
            "layer_inputs": (second["host"] - first["host"]) / tokens,
            "with_offload": (second["kept"] - first["kept"]) / tokens,
            "sent_forward": (two["sent"] - one["sent"]) / tokens,
        }
    print(json.dumps({"tokens": tokens, "bytes_per_token_and_layer": found}))


if __name__ == "__main__":
    main()
