"""The sampler's logprobs against `transformers` running the same weights on whole sequences."""

import numpy as np
import pytest
import torch

from campaigns import sized
from pairs import all_rows, pairs
from verbatim.inference import SampleRequest, SamplingParams
from verbatim.inference.embedded.decoder import Decoder
from verbatim.inference.embedded.pass_layout import shared_prefix
from verbatim.inference.embedded.settings import TorchSettings
from verbatim.models.head import CausalLM
from verbatim.models.loading import load_model, load_weights

VOCAB = 97
pytestmark = pytest.mark.usefixtures("kernel")
MODELS = ["tied", "untied", "half_sliding", "sliding"]


def make_decoder(folder, *, deterministic=False, num_slots=6, prefill_chunk=64, keep_cache=False):
    settings = TorchSettings(max_batch_size=num_slots, prefill_chunk=prefill_chunk, deterministic=deterministic)
    model = CausalLM(load_model(folder))
    return Decoder(
        model.__class__(model.model.requires_grad_(False)),
        settings,
        context_length=320,
        version=0,
        keep_cache=keep_cache,
    )


def play(decoder, requests):
    """Run requests to their end; returns (ids, logprobs, versions) in order."""
    waiting, running, results = list(enumerate(requests)), {}, {}
    while waiting or running:
        for entry in list(waiting):
            if decoder.has_idle_slot and (slot := decoder.add(entry[1])) is not None:
                running[slot] = entry[0]
                waiting.remove(entry)
        ended, faulty = decoder.step()
        assert not len(faulty)
        for slot in ended.tolist():
            table = decoder.table
            new = slice(table.prompt_length[slot], table.length[slot])
            results[running.pop(slot)] = tuple(a[slot, new].copy() for a in (table.ids, table.logprobs, table.versions))
            decoder.release(slot)
    return [results[i] for i in range(len(requests))]


def reference_logprobs(model, ids, temperature):
    with torch.no_grad():
        logits = model(torch.tensor(ids, dtype=torch.int64)[None]).logits[0].double() / temperature
    return logits.log_softmax(-1)[:-1].gather(-1, torch.tensor(ids[1:], dtype=torch.int64)[:, None])[:, 0].numpy()


def conversations(decoder, rng, turns=3, sessions=9, system=40):
    """Ragged multi-turn loads; yields (whole sequence, start of the completion, logprobs, temperature)."""
    system = rng.integers(0, VOCAB, system).astype(np.int32)
    histories = [np.concatenate([system, rng.integers(0, VOCAB, rng.integers(1, 50))]) for _ in range(sessions)]
    temperatures = rng.choice([0.7, 1.0, 1.3], sessions)
    for turn in range(turns):
        requests = [
            SampleRequest(
                prompt_ids=history.astype(np.int32),
                seed=100 * turn + i,
                session=f"s{i}",
                params=SamplingParams(temperature=temperatures[i], max_tokens=int(rng.integers(1, 30))),
            )
            for i, history in enumerate(histories)
        ]
        for i, (ids, logprobs, _) in enumerate(play(decoder, requests)):
            start = len(histories[i])
            whole = np.concatenate([histories[i], ids])
            yield whole, start, logprobs, temperatures[i]
            histories[i] = np.concatenate([whole, rng.integers(0, VOCAB, rng.integers(1, 20))])


KERNELS = ["torch", "compiled"]
WAYS = (KERNELS, MODELS, [False, True])


@pytest.mark.campaign
@pytest.mark.parametrize(("kernel", "name", "deterministic"), sized(pairs(*WAYS), all_rows(*WAYS)), indirect=["kernel"])
def test_logprobs_agree_with_a_whole_forward_pass(models, references, name, deterministic, campaign):
    campaign("sampled logprobs against transformers").add()
    decoder = make_decoder(models[name], deterministic=deterministic)
    deltas = []
    for whole, start, logprobs, temperature in conversations(decoder, np.random.default_rng(3)):
        expected = reference_logprobs(references[name], whole, temperature)[start - 1 :]
        deltas.append(np.abs(logprobs - expected))
    delta = np.concatenate(deltas)
    assert len(delta) > 200
    assert np.median(delta) <= 1e-6
    assert delta.max() <= 5e-5
    assert decoder.counts.prefix_hit_tokens > 500


def test_weights_that_are_not_quite_the_models_are_found_out(models, references):
    """One row of a matrix is larger by a hundredth."""
    decoder, deltas = make_decoder(models["tied"]), []
    with torch.inference_mode():
        decoder.model.backbone.layers[0].self_attn.k_proj.weight[:1].mul_(1.01)
    decoder.set_version(0)  # the compiled kernel has a copy of its own
    for whole, start, logprobs, temperature in conversations(decoder, np.random.default_rng(3), turns=1):
        expected = reference_logprobs(references["tied"], whole, temperature)[start - 1 :]
        deltas.append(np.abs(logprobs - expected))
    assert np.concatenate(deltas).max() > 5e-5


def test_the_tests_own_distribution_is_peaked_enough_to_show_differences(models, references):
    decoder = make_decoder(models["tied"])
    logprobs = np.concatenate([c[2] for c in conversations(decoder, np.random.default_rng(3))])
    assert logprobs.min() < -4 and logprobs.max() > -0.5
    assert (logprobs <= 0).all()


def step_until(decoder, num_sampled):
    while decoder.counts.sampled_tokens < num_sampled:
        decoder.step()


def sequence(decoder, slot):
    table = decoder.table
    whole, prompt = table.ids[slot, : table.length[slot]], int(table.prompt_length[slot])
    new = slice(prompt, table.length[slot])
    return whole, prompt, table.logprobs[slot, new], table.versions[slot, new]


@pytest.mark.parametrize("deterministic", [False, True])
def test_recompute_makes_every_logprob_reproducible_by_the_weights_of_its_version(models, references, deterministic):
    decoder = make_decoder(models["tied"], deterministic=deterministic)
    rng = np.random.default_rng(0)
    slots = [
        decoder.add(
            SampleRequest(
                prompt_ids=rng.integers(0, VOCAB, n).astype(np.int32), seed=n, params=SamplingParams(max_tokens=40)
            )
        )
        for n in (3, 70, 20)
    ]
    step_until(decoder, 60)
    load_weights(decoder.model.model, models["tied_later"])
    decoder.set_version(7)
    while decoder.counts.sampled_tokens < 120:
        decoder.step()
    assert decoder.counts.recomputed_tokens > 60
    for slot in slots:
        whole, prompt, logprobs, versions = sequence(decoder, slot)
        assert set(versions.tolist()) == {0, 7} and (np.diff(versions) >= 0).all()
        for version, name in ((0, "tied"), (7, "tied_later")):
            expected = reference_logprobs(references[name], whole, 1.0)[prompt - 1 :]
            assert np.abs(logprobs - expected)[versions == version].max() <= 5e-5


def test_keep_goes_on_with_the_old_cache(models, references):
    decoder = make_decoder(models["tied"], keep_cache=True)
    prompt = np.arange(20, dtype=np.int32)
    slot = decoder.add(SampleRequest(prompt_ids=prompt, seed=0, params=SamplingParams(max_tokens=40)))
    step_until(decoder, 10)
    load_weights(decoder.model.model, models["tied_later"])
    decoder.set_version(1)
    step_until(decoder, 30)
    whole, _, logprobs, versions = sequence(decoder, slot)
    assert versions.tolist() == [0] * 10 + [1] * 20
    ids = torch.tensor(whole, dtype=torch.int64)[None]
    with torch.no_grad():  # 29 tokens were computed with the old weights, the 30th is the first of the new
        old = references["tied"](ids[:, :29], use_cache=True)
        new = references["tied_later"](ids[:, 29:-1], past_key_values=old.past_key_values)
    expected = new.logits[0].double().log_softmax(-1).gather(-1, ids[0, 30:, None])[:, 0].numpy()
    assert np.abs(logprobs[10:] - expected).max() <= 5e-5
    assert decoder.counts.recomputed_tokens == 0


def test_parked_sessions_find_their_prefix_again(models, references):
    decoder = make_decoder(models["tied"], num_slots=2)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, VOCAB, 60).astype(np.int32) for _ in range(5)]
    params = SamplingParams(max_tokens=4)
    first = play(
        decoder, [SampleRequest(prompt_ids=p, seed=i, session=str(i), params=params) for i, p in enumerate(prompts)]
    )
    assert decoder.counts.prefix_hit_tokens == 0
    longer = [np.concatenate([p, ids, [1, 2]]).astype(np.int32) for p, (ids, _, _) in zip(prompts, first, strict=True)]
    second = play(
        decoder, [SampleRequest(prompt_ids=p, seed=i, session=str(i), params=params) for i, p in enumerate(longer)]
    )
    assert decoder.counts.prefix_hit_tokens == 5 * 63  # all but the last sampled token, whose keys nobody needed
    assert decoder.counts.prefill_tokens == 5 * 60 + 5 * 3
    for prompt, (ids, logprobs, _) in zip(longer, second, strict=True):
        expected = reference_logprobs(references["tied"], np.concatenate([prompt, ids]), 1.0)[len(prompt) - 1 :]
        assert np.abs(logprobs - expected).max() <= 5e-5


def test_a_group_computes_its_common_prompt_once(models):
    decoder = make_decoder(models["tied"], num_slots=6, prefill_chunk=512)
    prompt = np.random.default_rng(2).integers(0, VOCAB, 100).astype(np.int32)
    play(decoder, [SampleRequest(prompt_ids=prompt, seed=i, params=SamplingParams(max_tokens=5)) for i in range(6)])
    assert decoder.counts.prefill_tokens == 100 + 5  # each of the others computes its last prompt token
    assert decoder.counts.prefix_hit_tokens == 5 * 99


def test_prompt_tokens_between_two_decode_steps_are_limited(models):
    decoder = make_decoder(models["tied"], prefill_chunk=16)
    decoder.add(SampleRequest(prompt_ids=np.ones(50, np.int32), seed=0, params=SamplingParams(max_tokens=2)))
    computed = []
    while decoder.counts.sampled_tokens == 0:
        decoder.step()
        computed.append(decoder.counts.prefill_tokens)
    assert computed == [16, 32, 48, 50]


@pytest.mark.campaign
@pytest.mark.parametrize(("kernel", "name", "keep_cache"), sized(pairs(*WAYS), all_rows(*WAYS)), indirect=["kernel"])
def test_logprobs_agree_where_many_sequences_begin_alike(
    models, references, name, keep_cache, monkeypatch, kernel, campaign
):
    """Their first 128 tokens are read once for all; where caches outlive weights they may differ, and are not."""
    campaign("sampled logprobs against transformers").add()
    shared = []
    monkeypatch.setattr(
        "verbatim.inference.embedded.pass_layout.shared_prefix",
        lambda *args: shared.append(shared_prefix(*args)) or shared[-1],
    )
    decoder = make_decoder(models[name], num_slots=24, keep_cache=keep_cache)
    deltas = []
    for whole, start, logprobs, temperature in conversations(
        decoder, np.random.default_rng(5), turns=2, sessions=24, system=150
    ):
        expected = reference_logprobs(references[name], whole, temperature)[start - 1 :]
        deltas.append(np.abs(logprobs - expected))
    if kernel == "torch":  # the compiled kernel's sequences name the same pages instead
        assert keep_cache == (not shared)
        assert keep_cache or set(shared) == {0, 128}, "few sequences are left at the end of a turn"
    delta = np.concatenate(deltas)
    assert np.median(delta) <= 1e-6
    assert delta.max() <= 5e-5
