"""What a rank keeps of a long trajectory between the forward and the backward pass, and what ranks that share one send.

A layer of the shape of Qwen3-0.6B on one row, float32. Kept is what autograd saves and is no parameter, each
storage once; of one layer: the difference of a model of two layers and one of one. The ranks of a group have tensors of
the same shapes, so one of them is measured: an exchange notes what it would send, and gives back its own.

Prints one JSON line: bytes of a token of the whole trajectory on each rank, in one layer.

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
    """Rank 0 of a group whose others are not there."""

    def __init__(self, size: int) -> None:
        self.size, self.rank = size, 0
        self.sent = 0

    def _exchange(self, x_STF: Tensor) -> Tensor:
        self.sent += x_STF[1:].nbytes
        return x_STF.clone()


class Kept:
    """Bytes of what is saved, by storage."""

    def __init__(self, model: Any) -> None:
        self._parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.storages: dict[int, Any] = {}

    def note(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._parameters:
            self.storages[storage.data_ptr()] = storage  # holds it, so that its memory is not another's
        return tensor

    @property
    def bytes(self) -> int:
        return sum(storage.nbytes() for storage in self.storages.values())


class Counted(ActivationOffload):
    """Counts what goes to host memory."""

    def __init__(self) -> None:
        super().__init__(HOST)
        self.bytes = 0

    def _keep(self, tensor: Tensor) -> Any:
        self.bytes += tensor.nbytes
        return super()._keep(tensor)


def one_pass(layers: int, tokens: int, size: int, *, recompute: bool) -> dict[str, float]:
    """Bytes that a forward pass keeps, in host memory with offload, and sends."""
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
