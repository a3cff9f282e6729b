"""Measures what float32 and bfloat16 cost on this machine, with the matrix products and decode passes of a model."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from verbatim.core.sampling import SamplingParams
from verbatim.inference.embedded.decoder import Decoder
from verbatim.inference.embedded.engine_thread import torch_threads
from verbatim.inference.embedded.settings import TorchSettings
from verbatim.inference.sampler import SampleRequest
from verbatim.models.attention import follow_plans
from verbatim.models.head import CausalLM
from verbatim.models.instructions import has_bfloat16
from verbatim.models.loading import resolve_device
from verbatim.models.refusal import refusing
from verbatim.run.machine import Dtype, Kernel, Layers, Seconds, Side
from verbatim.trainer.bfloat16 import Products, round_linear
from verbatim.trainer.linear import use_onednn

REPEATS = 5
"""Number of measurements per dtype. The dtypes alternate, so that both see the same load on the machine."""
MOST_NUMBERS = 1 << 29
"""Maximum number of multiplications in one measured product; larger layers are measured with fewer rows."""
PASSES = 8
"""Number of decode passes per measurement."""
_PROMPT = 8  # tokens per prompt: only decode passes are measured
_VOCAB = 256  # small, so that the output head hardly counts


class ThisMachine:
    """The `Machine` that this process runs on."""

    def place(self, side: Side) -> str:
        return "here"

    def cuda_rounds(self, side: Side, device: str) -> bool | None:
        """True if the CUDA device named `device` computes in bfloat16; None if `device` means the CPU."""
        found = resolve_device(device)
        if found.type != "cuda":
            return None
        return torch.cuda.get_device_capability(found) >= (8, 0)  # bfloat16 arithmetic came with Ampere

    def has_instructions(self, side: Side) -> bool:
        """True if the processor has instructions that multiply bfloat16."""
        return has_bfloat16()

    def measure(self, side: Side, layers: Layers, rows: int, kernel: Kernel) -> Seconds:
        """Time one side's work with these layers, on one thread."""
        with torch_threads(1), torch.random.fork_rng(devices=()):  # keep the caller's random state
            return _products(layers, rows) if side == "trainer" else _passes(layers, rows, kernel)


def _products(layers: Layers, rows: int) -> Seconds:
    """Forward and backward of one layer of each size, weighted by the number of layers of that size."""
    totals = dict.fromkeys(("float32", "bfloat16"), 0.0)
    for (inputs, outputs), count in layers.sizes.items():
        fitting = max(64, min(rows, MOST_NUMBERS // (inputs * outputs) // 64 * 64))
        x = torch.randn(1, fitting, inputs, device="cpu", requires_grad=True)
        exact, rounded = nn.Linear(inputs, outputs, bias=False), nn.Linear(inputs, outputs, bias=False)
        use_onednn(exact)
        round_linear(rounded, Products())
        gradient = torch.randn(1, fitting, outputs, device="cpu")
        found = _medians(
            {"float32": partial(_both_ways, exact, x, gradient), "bfloat16": partial(_both_ways, rounded, x, gradient)}
        )
        for name, seconds in found.items():
            totals[name] += count * seconds * rows / fitting
    return Seconds(**totals, of=f"products of {rows} tokens forward and backward")


def _both_ways(module: nn.Module, x: torch.Tensor, gradient: torch.Tensor) -> None:
    torch.autograd.grad(module(x), [x, *module.parameters()], gradient)


def _passes(layers: Layers, rows: int, kernel: Kernel) -> Seconds:
    """Work that runs decode passes of a model with one such layer, random weights and a small vocabulary."""
    decoders: dict[Dtype, Decoder] = {
        "float32": _decoder(layers.config, rows, "float32", kernel),
        "bfloat16": _decoder(layers.config, rows, "bfloat16", kernel),
    }
    found = _medians({name: partial(_decode, decoder) for name, decoder in decoders.items()})
    return Seconds(
        **{name: seconds / PASSES for name, seconds in found.items()},
        of=f"decode passes of {rows} sequences in one layer",
    )


def _decoder(config: Any, rows: int, dtype: Dtype, kernel: Kernel) -> Decoder:
    """A decoder with `rows` sequences that are all past prefill."""
    small = copy.deepcopy(config)
    small.num_hidden_layers, small.vocab_size, small.pad_token_id = 1, _VOCAB, None
    if getattr(small, "layer_types", None):
        small.layer_types = small.layer_types[:1]
    context = _PROMPT + PASSES * (REPEATS + 1) + 2
    with refusing(f"a {type(config).__name__} of one layer cannot be made"):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(small, dtype=getattr(torch, dtype)).eval().requires_grad_(False)
        follow_plans(model)
    settings = TorchSettings(max_batch_size=rows, dtype=dtype, device="cpu", kernel=kernel)
    decoder = Decoder(CausalLM(model), settings, context_length=context, version=0, warns=False)
    rng = np.random.default_rng(0)
    for seed in range(rows):
        ids = rng.integers(0, _VOCAB, _PROMPT).astype(np.int32)
        params = SamplingParams(max_tokens=context - _PROMPT - 1)
        slot = decoder.add(SampleRequest(prompt_ids=ids, params=params, seed=seed))
        assert slot is not None, "max_batch_size is the number of rows"
    decoder.step()  # the prefill, which is not measured
    return decoder


def _decode(decoder: Decoder) -> None:
    for _ in range(PASSES):
        decoder.step()


def _medians(work: Mapping[Dtype, Callable[[], None]]) -> dict[str, float]:
    """Median processor time in seconds, by name. The first round is a warm-up and does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for repeat in range(REPEATS + 1):
        for name, do in work.items():
            began = time.thread_time()  # processor time of this thread: other load on the machine does not count
            do()
            if repeat:
                seconds[name].append(time.thread_time() - began)
    return {name: statistics.median(of_one) for name, of_one in seconds.items()}
