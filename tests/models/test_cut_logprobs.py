"""Of many model classes: what is sampled from a cut distribution has the trainer's logprobs over its kept sets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models import verdict
from models.architectures import Architecture, tiny_model
from verbatim.algorithms.losses import LOSSES
from verbatim.config.schema import TrainerConfig
from verbatim.core.types import Int32, TrainingSample
from verbatim.inference import SampleRequest, SamplingParams
from verbatim.inference.embedded.decoder import Decoder
from verbatim.inference.embedded.settings import TorchSettings
from verbatim.models.head import CausalLM
from verbatim.models.loading import load_model
from verbatim.trainer.trainer import Trainer

DENSE = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "gpt2", "phi3", "olmo2", "granite")
MIXTURES = ("mixtral", "qwen3_moe", "gpt_oss")
COMPILED = ("llama", "mistral", "qwen2", "qwen3")
"""Those that the compiled kernel takes."""
QUICK = {("llama", "compiled"), ("gemma2", "torch"), ("mixtral", "torch")}
CASES = [(name, "torch") for name in DENSE + MIXTURES] + [(name, "compiled") for name in COMPILED]
CUTS: list[dict[str, Any]] = [
    {"top_p": 0.9, "temperature": 0.5},
    {"top_k": 12, "temperature": 1.0},
    {"min_p": 0.05, "temperature": 1.4},
    {"top_k": 40, "top_p": 0.95, "min_p": 0.02, "temperature": 2.0},
]
LENGTH = 30


def drawn(folder: Path, kernel: str) -> list[TrainingSample]:
    """Completions of the embedded sampler, two under each cut, as they are trained."""
    settings = TorchSettings(max_batch_size=8, device="cpu", kernel=kernel, prefill_chunk=13)
    decoder = Decoder(CausalLM(load_model(folder).requires_grad_(False)), settings, context_length=64, version=0)
    rng = np.random.default_rng(0)
    slots = []
    for seed, cut in enumerate(CUTS * 2):
        params = SamplingParams(max_tokens=LENGTH, return_kept_sets=True, **cut)
        prompt = rng.integers(0, 96, rng.integers(3, 30)).astype(np.int32)
        slots.append(decoder.add(SampleRequest(prompt_ids=prompt, params=params, seed=seed)))
    while decoder.table.active.any():
        for slot in decoder.step()[0].tolist():
            decoder.release(slot)
    return [sample(decoder, slot, cut["temperature"]) for slot, cut in zip(slots, CUTS * 2, strict=True)]


def sample(decoder: Decoder, slot: int, temperature: float) -> TrainingSample:
    table = decoder.table
    start, end, kept = table.prompt_length[slot], table.length[slot], table.kept_sets(slot)
    mask = np.arange(end) >= start
    ids: Int32 = table.ids[slot, :end].copy()
    return TrainingSample(
        token_ids=ids,
        loss_mask=mask,
        logprobs=np.where(mask, table.logprobs[slot, :end], np.nan).astype(np.float32),
        advantages=np.zeros(end, np.float32),
        chunk_ids=np.where(mask, 0, -1).astype(np.int32),
        policy_versions=np.where(mask, 0, -1).astype(np.int32),
        temperatures=np.where(mask, temperature, 1).astype(np.float32),
        kept_sets=kept.spread(np.flatnonzero(mask), int(end)),
        trajectory_id=str(slot),
    )


@pytest.mark.parametrize(
    ("name", "kernel"),
    [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in CASES],
)
def test_sampler_and_trainer_have_the_same_logprobs_over_the_kept_sets(tmp_path: Path, name: str, kernel: str):
    with verdict.quiet():
        tiny_model(Architecture(name)).save_pretrained(tmp_path)
        samples = drawn(tmp_path, kernel)
        trainer = Trainer(tmp_path, TrainerConfig(device="cpu"), loss=LOSSES["default"], total_optimizer_steps=1)
    sampled = np.concatenate([each.logprobs[each.loss_mask] for each in samples])
    assert len(sampled) == LENGTH * len(samples)

    def log_ratios(asked: list[TrainingSample]) -> np.ndarray:
        found = trainer.logprobs(asked)
        return np.concatenate([x[each.loss_mask] for each, x in zip(asked, found, strict=True)]) - sampled

    assert np.abs(log_ratios(samples)).max() <= 5e-5
    whole = log_ratios([without_kept_sets(each) for each in samples])
    assert np.exp(whole).mean() < 0.95, "the bias of logprobs over the whole vocabulary"


def without_kept_sets(given: TrainingSample) -> TrainingSample:
    fields = {name: getattr(given, name) for name in given.__dataclass_fields__}
    return TrainingSample(**{**fields, "kept_sets": None})
