"""The embedded sampler computes on CUDA devices: no pass of it meets a tensor of another device."""

import numpy as np
import pytest
import torch

from verbatim.core.sampling import SamplingParams
from verbatim.inference.embedded.decoder import Decoder
from verbatim.inference.embedded.model_check import refuse_other_decoding
from verbatim.inference.embedded.settings import TorchSettings
from verbatim.inference.embedded.whole_sequence import sequence_logprobs
from verbatim.inference.sampler import SampleRequest
from verbatim.models.experts import find_routers
from verbatim.models.head import CausalLM
from verbatim.models.loading import load_model

LENGTH = 128


def make_decoder(folder, *, record_experts=False, **settings):
    loaded = load_model(folder, device="cuda", dtype=settings.get("dtype", "float32"))
    model = CausalLM(loaded, routers=find_routers(loaded) if record_experts else None)
    model.model.requires_grad_(False)
    settings = {"max_batch_size": 3, "prefill_chunk": 12, **settings}
    refuse_other_decoding(model, TorchSettings(**settings))
    return Decoder(model, TorchSettings(**settings), context_length=LENGTH, version=0, record_experts=record_experts)


def request(ids, session, **params):
    params = SamplingParams(max_tokens=params.pop("max_tokens", 4), **params)
    return SampleRequest(prompt_ids=np.array(ids, np.int32), params=params, seed=0, session=session)


def played(decoder, requests):
    """Decode until all have ended; their ids. On fake tensors each token is the last id of the vocabulary, or 0."""
    slots = [decoder.add(each) for each in requests]
    assert None not in slots
    found = {}
    while len(found) < len(slots):
        ended, failed = decoder.step()
        assert not len(failed)
        for slot in ended.tolist():
            found[slot] = decoder.table.ids[slot, : decoder.table.length[slot]].copy()
            decoder.release(slot)
    return [found[slot] for slot in slots]


def play(decoder):
    """Prompts in parts beside decoding, next turns on what is cached, sessions that are parked and come back."""
    first = played(decoder, [request(range(20), "a"), request(range(5), "b", temperature=0.0)])
    hits = decoder.counts.prefix_hit_tokens
    played(
        decoder,
        [
            request([*first[0], 1, 2], "a", top_k=5, top_p=0.9, min_p=0.01),
            request(range(20), "c"),
            request([*range(17), 9], "d"),
        ],
    )
    played(decoder, [request([*first[1], 3], "b"), request([7], "e"), request(range(30), "f", max_tokens=1)])
    assert decoder.counts.prefix_hit_tokens > hits
    decoder.set_version(1)
    played(decoder, [request([*first[0], 4], "a")])
    return first


def test_a_tensor_on_the_wrong_device_is_found(cuda, folders, monkeypatch):
    decoder = make_decoder(folders("dense"))
    on_the_host = "verbatim.inference.embedded.torch_forward.as_tensor"
    monkeypatch.setattr(on_the_host, lambda array, device: torch.from_numpy(array))
    with pytest.raises(RuntimeError, match=r"at least two devices|found two different devices"):
        played(decoder, [request(range(20), "a")])


@pytest.mark.parametrize("name", ["dense", "window", "sinks", "softcap", "two windows", "experts"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_prompts_and_tokens_of_every_kind_of_attention(cuda, folders, name, deterministic):
    decoder = make_decoder(folders(name), deterministic=deterministic)
    assert [len(ids) for ids in play(decoder)] == [24, 9]
    assert decoder.cache.keys.device.type == "cuda"


def test_in_bfloat16(cuda, folders):
    decoder = make_decoder(folders("dense"), dtype="bfloat16")
    play(decoder)
    assert decoder.cache.keys.dtype == torch.bfloat16


def test_experts_are_recorded(cuda, folders):
    decoder = make_decoder(folders("experts"), record_experts=True)
    play(decoder)
    slot = decoder.add(request(range(20), "z", max_tokens=1))
    while slot not in decoder.step()[0]:
        pass
    assert decoder.routed_experts(slot, 0).shape == (20, 3, 2)


def test_memory_is_given_back(cuda, folders):
    decoder = make_decoder(folders("dense"))
    play(decoder)
    decoder.give_back_memory()
    played(decoder, [request(range(40), "a")])


def test_a_whole_sequence_is_scored(cuda, folders):
    model = CausalLM(load_model(folders("dense"), device="cuda"))
    ids = torch.arange(30, device="cuda")
    assert sequence_logprobs(model, ids, 0.7).device.type == "cuda"
