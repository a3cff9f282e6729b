import pytest
import torch

from verbatim.inference.embedded.kv_cache import (
    BLOCK,
    KeyValueCache,
    KeyValueShape,
    Prefix,
    attend_at_once,
    attend_in_blocks,
)
from verbatim.models.attention import AttentionCall

CALLS = [
    AttentionCall(scale=1.0),
    AttentionCall(scale=1.0, softcap=0.7),
    AttentionCall(scale=1.0, sinks_H=torch.tensor([-3.0, 0.0, 1.0, 2.0, 4.0, 90.0])),
    AttentionCall(scale=1.0, softcap=0.7, sinks_H=torch.tensor([-3.0, 0.0, 1.0, 2.0, 4.0, 90.0])),
]
SHAPE = KeyValueShape(num_layers=2, num_kv_heads=2, key_size=8, value_size=4)


def naive(query_HD, keys_LKD, values_LKD, call):
    """A sink is one more key whose value is 0."""
    share = query_HD.shape[0] // keys_LKD.shape[1]
    out = []
    for head in range(query_HD.shape[0]):
        scores = keys_LKD[:, head // share].double() @ query_HD[head].double()
        if call.softcap is not None:
            scores = call.softcap * torch.tanh(scores / call.softcap)
        if call.sinks_H is not None:
            scores = torch.cat([scores, call.sinks_H[head : head + 1].double()])
        out.append(scores.softmax(0)[: len(keys_LKD)] @ values_LKD[:, head // share].double())
    return torch.stack(out)


def make(batch, queries, num_keys, seed=0):
    g = torch.Generator().manual_seed(seed)
    query = torch.randn(batch, queries, 6, 8, generator=g)
    keys = torch.randn(batch, 2, 8, num_keys, generator=g)
    values = torch.randn(batch, 2, num_keys, 4, generator=g)
    return query, keys, values


def bias_for(positions_BQ, num_keys):
    at = torch.arange(num_keys)
    return torch.zeros(()).masked_fill(at > positions_BQ[:, None, None, :, None], -torch.inf)


@pytest.mark.parametrize("call", CALLS, ids=["plain", "softcap", "sinks", "both"])
@pytest.mark.parametrize("attend", [attend_at_once, attend_in_blocks])
def test_it_is_softmax_attention(attend, call):
    query, keys, values = make(batch=3, queries=2, num_keys=3 * BLOCK)
    positions = torch.tensor([[0, 5], [63, 64], [130, 191]])
    out = attend(query, keys, values, bias_for(positions, 3 * BLOCK), call)
    for b in range(3):
        for q in range(2):
            seen = int(positions[b, q]) + 1
            seen_keys, seen_values = keys[b, :, :, :seen].permute(2, 0, 1), values[b, :, :seen].transpose(0, 1)
            expected = naive(query[b, q], seen_keys, seen_values, call)
            assert torch.allclose(out[b, q].double(), expected, atol=2e-6)


@pytest.mark.parametrize("call", CALLS, ids=["plain", "softcap", "sinks", "both"])
@pytest.mark.parametrize("queries", [1, 2])
def test_keys_that_all_sequences_share_are_read_once_with_the_same_result(call, queries):
    query, keys, values = make(batch=5, queries=queries, num_keys=3 * BLOCK)
    shared = Prefix(keys[0, ..., : 2 * BLOCK], values[0, :, : 2 * BLOCK])
    positions = torch.tensor([[2 * BLOCK + 7 * b] * queries for b in range(5)])
    own_keys, own_values = keys[..., 2 * BLOCK :], values[:, :, 2 * BLOCK :]
    found = attend_at_once(query, own_keys, own_values, bias_for(positions, 3 * BLOCK), call, shared)
    for b in range(5):
        own = positions[b, 0] + 1
        seen_keys = torch.cat([shared.keys, keys[b, ..., 2 * BLOCK : own]], dim=-1).permute(2, 0, 1)
        seen_values = torch.cat([shared.values, values[b, :, 2 * BLOCK : own]], dim=1).transpose(0, 1)
        for q in range(queries):
            assert torch.allclose(found[b, q].double(), naive(query[b, q], seen_keys, seen_values, call), atol=2e-6)


@pytest.mark.parametrize("call", CALLS, ids=["plain", "softcap", "sinks", "both"])
def test_in_blocks_keys_beyond_a_sequence_change_no_bit(call):
    query, keys, values = make(batch=32, queries=1, num_keys=6 * BLOCK)
    positions = torch.arange(32)[:, None] * 3
    few = 2 * BLOCK
    short = attend_in_blocks(query, keys[..., :few], values[:, :, :few], bias_for(positions, few), call)
    for num_keys in (3 * BLOCK, 4 * BLOCK, 6 * BLOCK):
        bias = bias_for(positions, num_keys)
        longer = attend_in_blocks(query, keys[..., :num_keys], values[:, :, :num_keys], bias, call)
        assert torch.equal(longer, short)


@pytest.mark.parametrize("call", CALLS, ids=["plain", "softcap", "sinks", "both"])
@pytest.mark.parametrize("batch", [1, 3, 32, 47])
def test_in_blocks_the_number_of_sequences_changes_no_bit(batch, call):
    query, keys, values = make(batch=64, queries=1, num_keys=2 * BLOCK)
    positions = torch.arange(64)[:, None] * 2
    bias = bias_for(positions, 2 * BLOCK)
    whole = attend_in_blocks(query, keys, values, bias, call)
    part = slice(5, 5 + batch)
    assert torch.equal(attend_in_blocks(query[part], keys[part], values[part], bias[part], call), whole[part])


def test_growing_keeps_what_is_cached_and_new_room_is_zero():
    cache = KeyValueCache(SHAPE, 3, dtype=torch.float32, device=torch.device("cpu"))
    assert cache.capacity == 0
    cache.reserve(10)
    assert cache.capacity == BLOCK
    cache.keys[1, 2, :, :, 9] = 7.0
    cache.reserve(BLOCK + 1)
    assert cache.capacity == 2 * BLOCK
    assert bool((cache.keys[1, 2, :, :, 9] == 7).all())
    assert float(cache.keys.sum()) == 7.0 * 2 * 8


def filled(num_slots, num_tokens):
    cache = KeyValueCache(SHAPE, num_slots, dtype=torch.float32, device=torch.device("cpu"))
    cache.reserve(num_tokens)
    cache.keys.normal_()
    cache.values.normal_()
    return cache


def test_a_kept_prefix_comes_back_in_any_slot_of_a_cache_that_may_have_to_grow():
    source = filled(2, 3 * BLOCK)
    kept = source.keep(1, BLOCK + 5)
    target = KeyValueCache(SHAPE, 5, dtype=torch.float32, device=torch.device("cpu"))
    target.restore(kept, 4, BLOCK + 1)
    assert torch.equal(target.keys[:, 4, ..., : BLOCK + 1], source.keys[:, 1, ..., : BLOCK + 1])
    assert torch.equal(target.values[:, 4, :, : BLOCK + 1], source.values[:, 1, :, : BLOCK + 1])
    assert float(target.keys[:, :4].abs().sum()) == float(target.keys[:, 4, ..., BLOCK + 1 :].abs().sum()) == 0


def test_a_kept_prefix_does_not_follow_its_old_slot():
    cache = filled(2, BLOCK)
    before = cache.keys[:, 0, ..., :9].clone()
    kept = cache.keep(0, 9)
    cache.clear(0)
    assert torch.equal(kept.keys, before)


def test_a_slot_takes_over_the_prefix_of_another():
    cache = filled(3, BLOCK)
    rest = cache.values[:, 0, :, 7:].clone()
    cache.copy_prefix(2, 0, 7)
    assert torch.equal(cache.keys[:, 0, ..., :7], cache.keys[:, 2, ..., :7])
    assert torch.equal(cache.values[:, 0, :, :7], cache.values[:, 2, :, :7])
    assert torch.equal(cache.values[:, 0, :, 7:], rest)


def test_bytes_per_token_counts_all_layers():
    # 2 layers x 2 heads x (8 + 4) numbers x 4 bytes
    assert SHAPE.bytes_per_token(torch.float32) == 192
