"""Deterministic mode: one request, one seed, one set of weights, one result, bit for bit."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from test_agreement import make_decoder, play

from verbatim.inference import SampleRequest, SamplingParams
from verbatim.models.loading import load_weights

pytestmark = pytest.mark.usefixtures("kernel")
VOCAB = 97


def requests_of(rng, count, session=""):
    out = []
    for i in range(count):
        params = SamplingParams(
            temperature=float(rng.choice([0.6, 1.0, 1.5])),
            max_tokens=int(rng.integers(1, 60)),
            top_p=float(rng.choice([1.0, 0.9])),
            stop_token_ids=(3,) if i % 2 else (),
        )
        prompt = rng.integers(0, VOCAB, rng.integers(1, 150)).astype(np.int32)
        out.append(
            SampleRequest(
                prompt_ids=prompt, params=params, seed=int(rng.integers(1 << 60)), session=session and f"{session}{i}"
            )
        )
    return out


def same(a, b):
    return all(np.array_equal(x[0], y[0]) and x[1].tobytes() == y[1].tobytes() for x, y in zip(a, b, strict=True))


@pytest.fixture(scope="module", params=["tied", "half_sliding"])
def alone(models, request, kernel):
    """A model, eight requests, and what each gives when it runs by itself in a new engine."""
    requests = requests_of(np.random.default_rng(0), 8)
    decoder = make_decoder(models[request.param], deterministic=True)
    results = []
    for r in requests:
        decoder.set_version(0)  # drops every cached prefix
        results += play(decoder, [r])
    return models[request.param], requests, results


@pytest.mark.slow
def test_alone_or_in_a_crowd(alone):
    folder, requests, results = alone
    crowd = requests_of(np.random.default_rng(1), 8)
    mixed = [r for pair in zip(crowd, requests, strict=True) for r in pair]
    assert same(play(make_decoder(folder, deterministic=True), mixed)[1::2], results)


def test_whatever_the_order_of_arrival(alone):
    folder, requests, results = alone
    decoder = make_decoder(folder, deterministic=True)
    for seed in range(2):
        order = np.random.default_rng(seed).permutation(len(requests))
        played = play(decoder, [requests[i] for i in order])
        assert same(played, [results[i] for i in order])


def test_with_prefixes_reused_or_computed(alone):
    folder, requests, results = alone
    decoder = make_decoder(folder, deterministic=True, num_slots=16)
    play(decoder, requests)
    hits = decoder.counts.prefix_hit_tokens
    assert same(play(decoder, requests), results)
    assert decoder.counts.prefix_hit_tokens - hits > 500


def test_next_turns_on_sampled_keys_or_on_prompt_keys(alone):
    """Keys that were written while sampling have the bits of keys that are computed from a prompt."""
    folder, requests, results = alone
    turns = [
        SampleRequest(
            prompt_ids=np.concatenate([r.prompt_ids, ids, [5, 6]]).astype(np.int32), params=r.params, seed=r.seed + 1
        )
        for r, (ids, _, _) in zip(requests, results, strict=True)
    ]
    warm, cold = (make_decoder(folder, deterministic=True, num_slots=16) for _ in range(2))
    play(warm, requests)
    before = warm.counts.prefix_hit_tokens
    assert same(play(warm, turns), play(cold, turns))
    assert warm.counts.prefix_hit_tokens - before > 500


def test_in_a_cache_that_has_held_longer_sequences_and_with_other_prefill_chunks(alone):
    folder, requests, results = alone
    decoder = make_decoder(folder, deterministic=True, prefill_chunk=7)
    long = SampleRequest(prompt_ids=np.ones(300, np.int32), params=SamplingParams(max_tokens=19), seed=0)
    assert same(play(decoder, [long, *requests])[1:], results)


def test_after_weights_went_away_and_came_back(models):
    requests = requests_of(np.random.default_rng(0), 6)
    expected = play(make_decoder(models["tied"], deterministic=True), requests)
    decoder = make_decoder(models["tied"], deterministic=True)
    load_weights(decoder.model.model, models["tied_later"])
    decoder.set_version(1)
    assert not same(play(decoder, requests), expected)
    load_weights(decoder.model.model, models["tied"])
    decoder.set_version(2)
    assert same(play(decoder, requests), expected)


@pytest.mark.parametrize("threads", [1, 2])
def test_for_either_number_of_threads(models, threads):
    """Few and short requests: two threads that wait for each other take much of the processor."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        requests = requests_of(np.random.default_rng(5), 4)
        requests = [replace(r, params=replace(r.params, max_tokens=8)) for r in requests]
        alone = [play(make_decoder(models["untied"], deterministic=True), [r])[0] for r in requests[:2]]
        assert same(play(make_decoder(models["untied"], deterministic=True), requests)[:2], alone)
    finally:
        torch.set_num_threads(before)


def test_a_rebuilt_cache_goes_on_as_if_nothing_had_happened(models):
    """The bits of keys rebuilt from exact ids are those of keys that were never lost."""
    request = requests_of(np.random.default_rng(9), 1)[0]
    request = SampleRequest(prompt_ids=request.prompt_ids, params=SamplingParams(max_tokens=50), seed=4)
    expected = play(make_decoder(models["tied"], deterministic=True), [request])
    decoder = make_decoder(models["tied"], deterministic=True)
    slot = decoder.add(request)
    while decoder.counts.sampled_tokens < 20:
        decoder.step()
    decoder.set_version(1)
    while not len(decoder.step()[0]):
        pass
    new = slice(decoder.table.prompt_length[slot], decoder.table.length[slot])
    assert same([(decoder.table.ids[slot, new], decoder.table.logprobs[slot, new])], expected)
    assert decoder.counts.recomputed_tokens >= 20


def test_fast_mode_draws_the_same_tokens_up_to_rounding(models):
    requests = requests_of(np.random.default_rng(0), 12)
    fast = play(make_decoder(models["tied"]), requests)
    exact = play(make_decoder(models["tied"], deterministic=True), requests)
    equal = sum(np.array_equal(a[0], b[0]) for a, b in zip(fast, exact, strict=True))
    assert equal >= 11  # a rounding that crosses a boundary of the CDF may change one
