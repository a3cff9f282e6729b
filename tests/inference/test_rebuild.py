"""After new weights, what sequences in flight have in common is computed once; nothing else about them changes."""

import numpy as np
import pytest
from test_agreement import make_decoder, reference_logprobs, sequence

from verbatim.inference import SampleRequest, SamplingParams
from verbatim.inference.embedded.rebuild import Leader, leaders
from verbatim.inference.embedded.slots import SlotTable
from verbatim.models.loading import load_weights

pytestmark = pytest.mark.usefixtures("kernel")
VOCAB = 97
GROUPS, SIZE = 3, 4
SYSTEM, EXAMPLE, OWN = 40, 36, 5
"""Tokens that all prompts begin with, those that a group's prompts go on with, and those of each alone."""


def prompts(rng):
    """The prompts of all groups. Sequences of a group differ in the first token of their own, groups in that of their
    example."""
    system = rng.integers(0, VOCAB, SYSTEM)
    for group in range(GROUPS):
        example = np.concatenate([[group], rng.integers(0, VOCAB, EXAMPLE - 1)])
        for number in range(SIZE):
            yield np.concatenate([system, example, [number], rng.integers(0, VOCAB, OWN - 1)]).astype(np.int32)


def started(decoder, *, max_tokens=30):
    """The slots of all sequences, which decode."""
    rng = np.random.default_rng(4)
    params = SamplingParams(max_tokens=max_tokens)
    waiting = [SampleRequest(prompt_ids=ids, params=params, seed=i) for i, ids in enumerate(prompts(rng))]
    slots = []
    while waiting:
        while waiting and (slot := decoder.add(waiting[0])) is not None:
            slots.append(slot)
            waiting.pop(0)
        decoder.step()
    while (decoder.table.length[slots] - decoder.table.computed[slots] > 1).any():
        decoder.step()
    return slots


def finish(decoder, slots):
    """Decode to the end; ids and logprobs of each slot."""
    running = set(slots)
    while running:
        for slot in decoder.step()[0].tolist():
            running.remove(slot)
            decoder.release(slot)
    return [tuple(part.copy() for part in (sequence(decoder, slot)[0], sequence(decoder, slot)[2])) for slot in slots]


def decoder_of(models, name="tied", **settings):
    return make_decoder(models[name], num_slots=GROUPS * SIZE, **settings)


def table_of(*sequences):
    table = SlotTable(len(sequences), 0, 256)
    for slot, ids in enumerate(sequences):
        request = SampleRequest(prompt_ids=np.array(ids, dtype=np.int32), params=SamplingParams(), seed=0)
        table.start(slot, request, 0, 0)
    return table


def letters(text):
    return [10 * "ABCDE".index(letter) + place % 7 for letter in text for place in range(32)]


def test_the_first_that_has_as_much_in_common_leads():
    table = table_of(letters("AD"), letters("ABC"), letters("E"), letters("AB"))
    # AB (slot 3) is before ABC (slot 1) and AD (slot 0); E has no letter in common. AB is slot 3's whole sequence.
    assert leaders(table, range(4)) == {1: Leader(3, 4, 64), 0: Leader(3, 4, 32)}


def test_equal_sequences_leave_the_last_token_to_each():
    table = table_of(letters("AB"), letters("AB"), letters("AB"))
    assert leaders(table, range(3)) == {1: Leader(0, 1, 63), 2: Leader(0, 1, 63)}


def test_less_than_a_block_is_not_waited_for():
    table = table_of(letters("A")[:31] + letters("B"), letters("A")[:31] + letters("C"))
    assert leaders(table, range(2)) == {}


@pytest.mark.parametrize("prefill_chunk", [64, 16])
def test_what_is_in_common_is_computed_once(models, prefill_chunk):
    decoder = decoder_of(models, prefill_chunk=prefill_chunk)
    slots = started(decoder)
    computed = int(decoder.table.computed[slots].sum())
    hits = decoder.counts.prefix_hit_tokens
    decoder.set_version(1)
    finish(decoder, slots)
    # The system prompt once, each group's example once, and what each sequence has alone.
    shared = SYSTEM * (GROUPS * SIZE - 1) + EXAMPLE * GROUPS * (SIZE - 1)
    assert decoder.counts.recomputed_tokens == computed - shared
    assert decoder.counts.prefix_hit_tokens == hits


@pytest.mark.parametrize("deterministic", [False, True])
def test_tokens_and_logprobs_are_those_of_undisturbed_sequences(models, deterministic, kernel):
    """New weights that are the old ones change no bit where no bit depends on the company."""
    undisturbed = decoder_of(models, deterministic=deterministic)
    expected = finish(undisturbed, started(undisturbed))
    decoder = decoder_of(models, deterministic=deterministic)
    slots = started(decoder)
    for version in (1, 2):
        decoder.set_version(version)
        for _ in range(4):
            decoder.step()
    for (ids, logprobs), (other_ids, other_logprobs) in zip(finish(decoder, slots), expected, strict=True):
        np.testing.assert_array_equal(ids, other_ids)
        if deterministic or kernel == "compiled":
            assert logprobs.tobytes() == other_logprobs.tobytes()
        else:
            np.testing.assert_allclose(logprobs, other_logprobs, atol=5e-5)


@pytest.mark.parametrize("name", ["tied", "sliding"])
def test_logprobs_are_those_of_the_weights_of_their_version(models, references, name):
    decoder = decoder_of(models, name)
    slots = started(decoder)
    load_weights(decoder.model.model, models["tied_later"] if name == "tied" else models[name])
    decoder.set_version(7)
    finish(decoder, slots)
    later = references["tied_later" if name == "tied" else name]
    for slot in slots:
        whole, prompt, logprobs, versions = sequence(decoder, slot)
        new = versions == 7
        expected = reference_logprobs(later, whole, 1.0)[prompt - 1 :]
        assert new.sum() >= 20
        assert np.abs(logprobs - expected)[new].max() <= 5e-5


@pytest.mark.parametrize("kernel", ["compiled"], indirect=True)
def test_pages_are_shared_again(models):
    """PyTorch's cache has no pages."""
    decoder = decoder_of(models)
    slots = started(decoder)
    before = decoder.cache.used
    decoder.set_version(1)
    while (decoder.table.length[slots] - decoder.table.computed[slots] > 1).any():
        decoder.step()
    assert decoder.cache.used <= before + GROUPS * SIZE  # a page more for each sequence that has filled one


@pytest.mark.parametrize("how", ["released", "its slot has another request"])
def test_where_a_leader_ends_the_others_go_on(models, how):
    undisturbed = decoder_of(models)
    expected = finish(undisturbed, started(undisturbed))
    decoder = decoder_of(models, prefill_chunk=16)
    slots = started(decoder)
    decoder.set_version(1)
    decoder.step()  # 16 of the 40 tokens of the system prompt
    (first,) = np.flatnonzero(decoder.table.computed[slots])
    decoder.drop(slots[first])
    others = [slot for slot in slots if slot != slots[first]]
    if how != "released":
        other = SampleRequest(prompt_ids=np.arange(60, dtype=np.int32), params=SamplingParams(max_tokens=3), seed=9)
        assert decoder.add(other) == slots[first]
        others.append(slots[first])
    found = dict(zip(others, finish(decoder, others), strict=True))
    for number, slot in enumerate(slots):
        if number != first:
            np.testing.assert_array_equal(found[slot][0], expected[number][0])


def test_new_weights_while_some_still_wait(models):
    undisturbed = decoder_of(models)
    expected = finish(undisturbed, started(undisturbed))
    decoder = decoder_of(models, prefill_chunk=16)
    slots = started(decoder)
    for version in range(1, 6):
        decoder.set_version(version)
        decoder.step()
    for (ids, _), (other_ids, _) in zip(finish(decoder, slots), expected, strict=True):
        np.testing.assert_array_equal(ids, other_ids)


def test_a_new_sequence_takes_no_keys_of_weights_before_its_own(models, references, monkeypatch):
    """Where caches survive new weights, nothing is computed again but after memory ran out."""
    decoder = make_decoder(models["tied"], num_slots=4, prefill_chunk=16, keep_cache=True)
    rng = np.random.default_rng(5)
    one, other = (rng.integers(0, VOCAB, 80).astype(np.int32) for _ in range(2))
    other[70] = 0
    longer = np.concatenate([other[:70], [1, 2, 3]]).astype(np.int32)

    def add(prompt):
        return decoder.add(SampleRequest(prompt_ids=prompt, params=SamplingParams(max_tokens=40), seed=0))

    old, leader, follower = add(other), add(one), None
    while follower is None:
        decoder.step()
        follower = add(one)

    def no_room(num_tokens):
        if num_tokens:  # all of it can be given back
            raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(decoder.cache, "shrink", no_room)
        decoder.give_back_memory()
    for _ in range(3):
        decoder.step()
    computed = decoder.table.computed
    assert (computed[old], computed[leader], computed[follower]) == (48, 0, 0)
    load_weights(decoder.model.model, models["tied_later"])
    decoder.set_version(1)
    new = add(longer)  # it begins like a sequence whose first keys are of the weights before
    decoder.drop(leader)  # the one that waits for it looks for another leader
    while decoder.table.length[new] < 90:
        decoder.step()
    whole, prompt, logprobs, _ = sequence(decoder, new)
    expected = reference_logprobs(references["tied_later"], whole, 1.0)[prompt - 1 :]
    assert np.abs(logprobs - expected).max() <= 5e-5
