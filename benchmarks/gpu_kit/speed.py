"""Part b: training steps on trees, on rows, and by plain `transformers` with SDPA, in bfloat16 with float32 masters.

The load of a step: 8 samples that share their first half; the second half of each is trained. `tokens a second` are the
samples' tokens over the seconds of a whole step (forward, backward, clipping, AdamW), so that packings compare.

MFU = F / (seconds x R). R is the rate of a bfloat16 product of two square matrices, measured in the same check. F are
the operations that the step needs, whoever computes it:

    F = 6 N T + 6 width V M + 12 L heads size P

N numbers in the matrices of the layers, T computed tokens (in a tree each shared one once), V the vocabulary, M trained
tokens, L layers, `size` of a head, P pairs of a token and one that it sees. The backward pass costs twice the forward
pass. What is recomputed, or computed and not needed, does not count.
"""

from __future__ import annotations

import gc
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from verbatim.algorithms.losses import LOSSES
from verbatim.config.schema import OptimConfig, TrainerConfig
from verbatim.core.machine_faults import is_out_of_memory
from verbatim.core.types import TrainingSample
from verbatim.inspection.plan.fake_step import StepCase, measure
from verbatim.trainer.trainer import Trainer

from .record import Check, Findings
from .setting import Setting, sample_of

SAMPLES = 8
WARM_UP, TIMED = 2, 5
OPTIM = OptimConfig(lr=1e-6, max_grad_norm=1.0)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A decoder's sizes."""

    width: int
    layers: int
    heads: int
    keys: int
    inner: int
    vocab: int = 151_936

    @property
    def size(self) -> int:
        """Numbers of a head."""
        return self.width // self.heads

    @property
    def numbers(self) -> int:
        """N: in the matrices of the layers."""
        attention = 2 * self.width * self.size * (self.heads + self.keys)
        return self.layers * (attention + 3 * self.width * self.inner)


SHAPES = {
    "0.5B": Shape(width=896, layers=24, heads=14, keys=2, inner=4864),
    "1.5B": Shape(width=1536, layers=28, heads=12, keys=2, inner=8960),
}
TINY = Shape(width=64, layers=2, heads=4, keys=2, inner=128, vocab=512)


def operations(shape: Shape, tokens: int, targets: int, pairs: int) -> int:
    """F.

    Example: one layer of width 2, one head of 2, inner 4, V 10 (N = 16 + 24 = 40); a row of 3 tokens, of which one is
    trained: 6 * 40 * 3 + 6 * 2 * 10 * 1 + 12 * 1 * 1 * 2 * 6 = 720 + 120 + 144 = 984.
    """
    attention = 12 * shape.layers * shape.heads * shape.size * pairs
    return 6 * shape.numbers * tokens + 6 * shape.width * shape.vocab * targets + attention


@dataclass(frozen=True, kw_only=True)
class Load:
    """The tokens of a step."""

    length: int
    """Tokens of each sample; an even number."""

    @property
    def targets(self) -> int:
        """M."""
        return SAMPLES * self.length // 2

    def computed(self, packing: str) -> tuple[int, int]:
        """T and P."""
        half = self.length // 2
        if packing == "rows":
            return SAMPLES * self.length, SAMPLES * _pairs(self.length)
        return half + SAMPLES * half, _pairs(half) + SAMPLES * (_pairs(self.length) - _pairs(half))

    def samples(self, vocab: int, seed: int) -> list[TrainingSample]:
        """A batch."""
        rng = np.random.default_rng(seed)
        shared, mask = rng.integers(0, vocab, self.length // 2), np.arange(self.length) >= self.length // 2
        return [
            sample_of(np.concatenate([shared, rng.integers(0, vocab, self.length // 2)]), mask, str(i), rng)
            for i in range(SAMPLES)
        ]


def _pairs(length: int) -> int:
    return length * (length + 1) // 2


def write_model(shape: Shape, folder: Path, device: str) -> None:
    """A model with random weights, drawn on the device, where that takes no time."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    if (folder / "config.json").exists():
        return
    config = Qwen2Config(
        vocab_size=shape.vocab,
        hidden_size=shape.width,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.keys,
        max_position_embeddings=32_768,
        tie_word_embeddings=True,
    )
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)


def matrix_rate(device: str, size: int) -> float:
    """R: operations a second of a bfloat16 product of random matrices of this size."""
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    for _ in range(3):
        a @ b
    _wait(device)
    began = time.perf_counter()
    for _ in range(10):
        a @ b
    _wait(device)
    return 10 * 2 * size**3 / (time.perf_counter() - began)


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


# ---- the two sides: each gives a function that takes one step


def our_step(folder: Path, config: TrainerConfig) -> Callable[[list[TrainingSample]], object]:
    """A step of our trainer."""
    return Trainer(folder, config, loss=LOSSES["default"], total_optimizer_steps=10_000).train_batch


def plain_step(folder: Path, device: str, *, recompute: bool) -> Callable[[list[TrainingSample]], object]:
    """A step as one writes it with `transformers`: full logits, policy gradient, clipping, fused AdamW."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa", dtype=torch.float32)
    model = model.to(device)
    if recompute:
        model.train()  # it recomputes in training only; these models have no dropout
        model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=OPTIM.lr, fused=True)

    def step(samples: list[TrainingSample]) -> None:
        ids = torch.tensor(np.stack([s.token_ids for s in samples]), device=device).long()
        mask = torch.tensor(np.stack([s.loss_mask for s in samples]), device=device)[:, 1:]
        sampled = torch.tensor(np.stack([np.nan_to_num(s.logprobs) for s in samples]), device=device)[:, 1:]
        advantages = torch.tensor(np.stack([s.advantages for s in samples]), device=device)[:, 1:]
        with torch.autocast(device, dtype=torch.bfloat16):
            logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        logprobs = -cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none").view_as(sampled)
        loss = -(advantages * (logprobs - sampled).exp() * mask).sum() / mask.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIM.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


# ---- measuring


def timed(step: Callable[[list[TrainingSample]], object], load: Load, vocab: int, device: str) -> dict[str, float]:
    """Median seconds of a step, and the most memory that it had."""
    seconds = []
    for number in range(WARM_UP + TIMED):
        samples = load.samples(vocab, number)
        if number == WARM_UP and device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        _wait(device)
        began = time.perf_counter()
        step(samples)
        _wait(device)
        seconds.append(time.perf_counter() - began)
    if device == "cuda":
        peak = torch.cuda.max_memory_allocated()
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # the process, of which the model is a part
    return {"seconds": statistics.median(seconds[WARM_UP:]), "first_seconds": seconds[0], "peak_bytes": peak}


def step_speed(
    setting: Setting, out: Findings, *, shape_name: str, tokens: int, recompute: bool = False, plain: bool = True
) -> None:
    """All sides on one load."""
    shape = TINY if setting.tiny else SHAPES[shape_name]
    load = Load(length=(512 if setting.tiny else tokens) // SAMPLES)
    folder = setting.folder / f"speed-{'tiny' if setting.tiny else shape_name}"
    write_model(shape, folder, setting.device)
    _empty(setting.device)
    rate = matrix_rate(setting.device, 256 if setting.tiny else 8192)
    out.figures.update(matrix_rate_tflops=round(rate / 1e12, 3), samples=SAMPLES, length=load.length)
    for packing in ("tree", "rows"):
        config = TrainerConfig(
            optim=OPTIM,
            device=setting.device,
            dtype="bfloat16",
            packing=packing,
            micro_batch_tokens=SAMPLES * load.length,
            gradient_checkpointing=recompute,
        )
        out.figures[packing] = _figures(setting, shape, load, packing, rate, lambda c=config: our_step(folder, c))
        planned = planned_bytes(folder, config, load.samples(shape.vocab, 0), on_cuda=setting.device == "cuda")
        out.figures[packing] |= {"planned_bytes": planned}
        if setting.device == "cuda" and "peak_bytes" in out.figures[packing]:
            out.figures[packing]["planned_over_peak"] = round(planned / out.figures[packing]["peak_bytes"], 3)
        out.holds(f"{packing} has trained", "seconds" in out.figures[packing])
    if plain:
        make = partial(plain_step, folder, setting.device, recompute=recompute)
        out.figures["plain"] = _figures(setting, shape, load, "rows", rate, make)


def _figures(
    setting: Setting, shape: Shape, load: Load, packing: str, rate: float, make: Callable[[], Any]
) -> dict[str, Any]:
    """Figures of one side, or the error if memory runs out."""
    try:
        found: dict[str, Any] = timed(make(), load, shape.vocab, setting.device)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        found = {"error": f"out of memory: {error}"[:300]}
    finally:
        _empty(setting.device)
    if "seconds" in found:
        computed, pairs = load.computed(packing)
        needed = operations(shape, computed, load.targets, pairs)
        found["tokens_per_second"] = round(SAMPLES * load.length / found["seconds"])
        found["computed_tokens"] = computed
        found["mfu"] = round(needed / (found["seconds"] * rate), 4)
        found["seconds"] = round(found["seconds"], 4)
        found["first_seconds"] = round(found["first_seconds"], 1)
    return found


def planned_bytes(folder: Path, config: TrainerConfig, samples: list[TrainingSample], *, on_cuda: bool) -> int:
    """The peak that `verbatim plan` predicts for these samples."""
    return measure(
        StepCase(source=str(folder), trainer=config, loss=LOSSES["default"], samples=samples, on_cuda=on_cuda)
    ).peak


def _empty(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


CHECKS = tuple(
    Check(
        name=f"{shape}, {tokens:,} tokens{', recomputed' * recompute}",
        about="seconds, tokens a second, MFU and memory of a step on trees, on rows, and by plain transformers",
        run=partial(step_speed, shape_name=shape, tokens=tokens, recompute=recompute),
        seconds=110,
    )
    for shape, tokens, recompute in (
        ("0.5B", 8192, False),
        ("1.5B", 8192, False),
        ("1.5B", 32_768, True),
        ("0.5B", 32_768, False),
    )
)
