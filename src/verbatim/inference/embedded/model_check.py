"""Checks a model before sampling: a tiny copy, decoded with a KV cache, must reproduce the logprobs that the copy
computes with its own attention."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from verbatim.core.errors import ModelError
from verbatim.core.sampling import SamplingParams
from verbatim.inference.embedded.decoder import Decoder
from verbatim.inference.embedded.settings import TorchSettings
from verbatim.inference.sampler import SampleRequest
from verbatim.models.head import CausalLM
from verbatim.models.own_attention import LENGTH, TOLERANCE, TinyPair, mask_settings, probe_ids, tiny_pair
from verbatim.models.refusal import FAULTS, describe
from verbatim.models.round_trip import check_round_trip
from verbatim.models.tiny import WINDOW


def refuse_other_decoding(model: CausalLM, settings: TorchSettings) -> None:
    """Sample from a tiny copy of the model with the same settings, and compare the logprobs with the logprobs of a
    `transformers` forward pass over the sampled tokens.

    Raises:
        ModelError: the logprobs of the sampled tokens differ, or weights that a trainer saves cannot be loaded.
    """
    pair = tiny_pair(model.model, planned=True)
    check_round_trip(pair.own)
    fault = _decoding_fault(pair, settings)
    if fault is not None:
        raise ModelError(
            f"{type(model.model).__name__}{mask_settings(model.model.config)} cannot be sampled from by the embedded "
            f"sampler: in a small copy, {fault}; use an inference server that knows this architecture"
        )


def _decoding_fault(pair: TinyPair, asked: TorchSettings) -> str | None:
    """The fault of cached decoding as a sentence for a message, or None. The test decodes prompts of two lengths in
    several passes, then tokens one by one beyond the tiny copy's windows, then a second turn from the cache."""
    settings = TorchSettings(
        max_batch_size=2,
        # Less than the longer prompt and not a multiple of the window, so that passes end inside of windows.
        prefill_chunk=WINDOW - 3,
        deterministic=asked.deterministic,
        # Not "compiled", which would refuse a tiny copy that the kernel does not compute.
        kernel="torch" if asked.kernel == "torch" else "auto",
    )
    try:
        decoder = Decoder(pair.ours, settings, context_length=2 * LENGTH, version=0, warns=False)
        ids = probe_ids(pair, LENGTH).numpy().astype(np.int32)
        params = SamplingParams(max_tokens=LENGTH // 2)
        first = [
            SampleRequest(prompt_ids=prompt, params=params, seed=seed, session=str(seed))
            for seed, prompt in enumerate([ids[: LENGTH // 2], ids[LENGTH // 2 :][:5]])
        ]
        (longer, _), worst = _sample(decoder, pair, first)
        params = dataclasses.replace(params, max_tokens=2)
        again = SampleRequest(prompt_ids=np.concatenate([longer, ids[:4]]), params=params, seed=2, session="0")
        worst = max(worst, _sample(decoder, pair, [again])[1])
    except ModelError:  # a ValueError too, so among the FAULTS, but already written for users
        raise
    except FAULTS as error:
        return f"decoding fails ({describe(error)})"
    return f"sampled logprobs differ by {worst:.1g} from those of its own attention" if worst > TOLERANCE else None


@torch.no_grad()
def _sample(decoder: Decoder, pair: TinyPair, requests: list[SampleRequest]) -> tuple[list[np.ndarray], float]:
    """(prompt plus completion of each request, largest difference between recorded and true logprobs)."""
    table = decoder.table
    slots = [decoder.add(request) for request in requests]
    running = set(slots)
    while running:
        ended, failed = decoder.step()
        assert not len(failed), "logits that are not finite"
        running -= set(ended.tolist())
    found, worst = [], 0.0
    for slot in slots:
        assert slot is not None
        new = slice(int(table.prompt_length[slot]), int(table.length[slot]))
        # Copied, because the next request overwrites the slot.
        ids = table.ids[slot, : new.stop].copy()
        recorded = torch.from_numpy(table.logprobs[slot, new].copy())
        # These begin at the second token.
        own = pair.own_logprobs(torch.from_numpy(ids).long())[new.start - 1 :]
        # A NaN would be lost: `max(worst, nan)` is `worst`.
        worst = max(worst, float((recorded - own).abs().nan_to_num(nan=torch.inf).max()))
        found.append(ids)
        decoder.release(slot)
    return found, worst
