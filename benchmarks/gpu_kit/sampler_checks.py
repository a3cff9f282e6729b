"""Correctness of the embedded sampler: its logprobs against plain `transformers`, and against our trainer's."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verbatim.core.sampling import SamplingParams
from verbatim.core.types import RoutedExperts, TrainingSample
from verbatim.inference.embedded.decoder import Decoder
from verbatim.inference.embedded.settings import TorchSettings
from verbatim.inference.sampler import SampleRequest
from verbatim.models.experts import find_routers
from verbatim.models.head import CausalLM
from verbatim.models.loading import load_model

from .ours import trainer_of
from .record import Check, Findings
from .reference import IN_BFLOAT16, bound_of, plain_logits, plain_model
from .setting import Setting
from .trainer_checks import forced

TEMPERATURE = 0.8


def drawn(setting: Setting, kind: str, dtype: str, *, record_experts: bool = False) -> list[TrainingSample]:
    """Two turns of several sequences, drawn in one batch: prompts in pieces, tokens one by one, the second turn from
    what the first left in the cache. As samples, whose mask is what was drawn."""
    loaded = load_model(setting.model(kind), device=setting.device, dtype=dtype)
    loaded.requires_grad_(False)
    model = CausalLM(loaded, routers=find_routers(loaded) if record_experts else None)
    unit, vocab = setting.sizes["unit"], setting.sizes["vocab"]
    settings = TorchSettings(
        max_batch_size=4, prefill_chunk=5 * unit, device=setting.device, dtype=dtype, kernel="torch"
    )
    decoder = Decoder(model, settings, context_length=64 * unit, version=0, record_experts=record_experts)
    rng = np.random.default_rng(0)
    system = rng.integers(0, vocab, 3 * unit)
    first = [np.concatenate([system, rng.integers(0, vocab, unit + 5 * i)]) for i in range(4)]
    turns = _turn(decoder, first, 4 * unit, seed=0)
    second = [np.concatenate([ids, rng.integers(0, vocab, unit)]) for ids, _, _ in turns]
    return [_as_sample(str(i), *each) for i, each in enumerate(_turn(decoder, second, 2 * unit, seed=4))]


def _turn(decoder: Decoder, prompts: list[np.ndarray], tokens: int, seed: int) -> list[tuple[Any, Any, Any]]:
    """Ids, logprobs of the drawn ones, and experts of each sequence."""
    params = SamplingParams(max_tokens=tokens, temperature=TEMPERATURE)
    requests = [
        SampleRequest(prompt_ids=ids.astype(np.int32), params=params, seed=seed + i, session=str(i))
        for i, ids in enumerate(prompts)
    ]
    slots = [decoder.add(request) for request in requests]
    assert None not in slots, "a sequence found no slot"
    running = set(slots)
    while running:
        ended, failed = decoder.step()
        assert not len(failed), "logits that are not finite"
        running -= set(ended.tolist())
    table, found = decoder.table, []
    for slot in slots:
        assert slot is not None
        start, end = int(table.prompt_length[slot]), int(table.length[slot])
        logprobs = table.logprobs[slot, start:end].copy()
        found.append((table.ids[slot, :end].copy(), logprobs, decoder.routed_experts(slot, 0)))
        decoder.release(slot)
    return found


def _as_sample(name: str, ids: np.ndarray, logprobs: np.ndarray, experts: np.ndarray | None) -> TrainingSample:
    mask = np.arange(len(ids)) >= len(ids) - len(logprobs)
    whole = np.full(len(ids), np.nan, np.float32)
    whole[mask] = logprobs
    routed = None
    if experts is not None:
        last = np.zeros_like(experts[:1])
        known = np.arange(len(ids)) < len(ids) - 1
        routed = RoutedExperts(experts=np.concatenate([experts, last]), known=known)
    return TrainingSample(
        token_ids=ids,
        loss_mask=mask,
        logprobs=whole,
        advantages=np.zeros(len(ids), np.float32),
        chunk_ids=np.where(mask, 0, -1).astype(np.int32),
        policy_versions=np.where(mask, 0, -1).astype(np.int32),
        temperatures=np.where(mask, TEMPERATURE, 1.0).astype(np.float32),
        routed_experts=routed,
        trajectory_id=name,
    )


def plain_logprobs(model: Any, sample: TrainingSample) -> tuple[Tensor, float]:
    """Logprobs of the drawn tokens by plain `transformers`, and the largest logit."""
    ids = torch.tensor(sample.token_ids).long()
    with torch.no_grad():
        logits = plain_logits(model, ids).double().cpu()
    scores = (logits / TEMPERATURE).log_softmax(-1)
    found = scores.gather(1, ids[1:, None])[:, 0]
    return found[torch.tensor(sample.loss_mask[1:])], float(logits.abs().max())


def _own(sample: TrainingSample, logprobs: np.ndarray) -> Tensor:
    return torch.from_numpy(logprobs[sample.loss_mask]).double()


def _rms(values: list[Tensor]) -> float:
    return float(torch.cat(values).square().mean().sqrt())


def logprobs(kind: str, setting: Setting, out: Findings) -> None:
    """The sampler's recorded logprobs and those of the trainer for the same tokens."""
    exact = plain_model(setting.model(kind), torch.float64)
    samples = drawn(setting, kind, "float32")
    both = [plain_logprobs(exact, each) for each in samples]
    # An error of the logits is relative to the largest of them; two of them make a logprob.
    bound = 2 * bound_of(setting, torch.float32) * max(largest for _, largest in both) / TEMPERATURE
    trained = trainer_of(setting.model(kind), setting.device).logprobs(samples)
    for name, found in (("sampler", [each.logprobs for each in samples]), ("trainer", trained)):
        worst = [(_own(s, mine) - want).abs().max() for s, mine, (want, _) in zip(samples, found, both, strict=True)]
        out.at_most(f"{name} float32", float(torch.stack(worst).max()), bound)
    _in_bfloat16(kind, setting, out, exact)


def _in_bfloat16(kind: str, setting: Setting, out: Findings, exact: Any) -> None:
    """Weights and passes in bfloat16, against plain `transformers` in bfloat16."""
    samples = drawn(setting, kind, "bfloat16")
    rounded = plain_model(setting.model(kind), torch.bfloat16, setting.device)
    wanted = [plain_logprobs(exact, each)[0] for each in samples]
    plain = [plain_logprobs(rounded, each)[0] - want for each, want in zip(samples, wanted, strict=True)]
    ours = [_own(each, each.logprobs) - want for each, want in zip(samples, wanted, strict=True)]
    out.at_most("sampler bfloat16", _rms(ours), IN_BFLOAT16 * _rms(plain))


def recorded_experts(setting: Setting, out: Findings) -> None:
    """With the experts that the sampler recorded, the trainer and plain `transformers` have the sampler's logprobs."""
    samples = drawn(setting, "experts", "float32", record_experts=True)
    exact = plain_model(setting.model("experts"), torch.float64)
    trained = trainer_of(setting.model("experts"), setting.device).logprobs(samples)
    for sample, mine in zip(samples, trained, strict=True):
        with forced(exact, sample):
            want, largest = plain_logprobs(exact, sample)
        bound = 2 * bound_of(setting, torch.float32) * largest / TEMPERATURE
        out.at_most(
            f"sampler, sequence {sample.trajectory_id}",
            float((_own(sample, sample.logprobs) - want).abs().max()),
            bound,
        )
        out.at_most(f"trainer, sequence {sample.trajectory_id}", float((_own(sample, mine) - want).abs().max()), bound)


CHECKS = (
    *(
        Check(
            name=f"sampler: {kind}",
            about="sampler and trainer have the logprobs of plain transformers, over two turns from the cache",
            run=partial(logprobs, kind),
        )
        for kind in ("dense", "window", "soft caps", "sinks", "two windows")
    ),
    Check(
        name="sampler: experts",
        about="with the experts that the sampler recorded, the trainer has its logprobs",
        run=recorded_experts,
    ),
)
