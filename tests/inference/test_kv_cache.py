import torch

from verbatim.inference.kv_cache import BLOCK, KeyValueCache, KeyValueShape, attend_blocks

SHAPE = KeyValueShape(num_layers=2, num_kv_heads=2, key_size=8, value_size=4)


def naive(query_HD, keys_LKD, values_LKD):
    share = query_HD.shape[0] // keys_LKD.shape[1]
    out = []
    for head in range(query_HD.shape[0]):
        scores = keys_LKD[:, head // share].double() @ query_HD[head].double()
        out.append(scores.softmax(0) @ values_LKD[:, head // share].double())
    return torch.stack(out)


def make(batch, queries, blocks, seed=0):
    g = torch.Generator().manual_seed(seed)
    query = torch.randn(batch, queries, 6, 8, generator=g)
    keys = torch.randn(blocks, batch, 2, 8, BLOCK, generator=g)
    values = torch.randn(blocks, batch, 2, BLOCK, 4, generator=g)
    return query, keys, values


def bias_for(positions_BQ, blocks):
    at = torch.arange(blocks * BLOCK).view(blocks, 1, 1, 1, 1, BLOCK)
    return torch.zeros(()).masked_fill(at > positions_BQ[None, :, None, None, :, None], -torch.inf)


def test_attention_over_blocks_is_softmax_attention():
    query, keys, values = make(batch=3, queries=2, blocks=3)
    positions = torch.tensor([[0, 5], [63, 64], [130, 191]])
    out = attend_blocks(query, keys, values, bias_for(positions, 3))
    flat_keys = keys.permute(1, 0, 4, 2, 3).flatten(1, 2)
    flat_values = values.permute(1, 0, 3, 2, 4).flatten(1, 2)
    for b in range(3):
        for q in range(2):
            seen = int(positions[b, q]) + 1
            expected = naive(query[b, q], flat_keys[b, :seen], flat_values[b, :seen])
            assert torch.allclose(out[b, q].double(), expected, atol=2e-6)


def test_blocks_beyond_a_sequence_change_no_bit():
    query, keys, values = make(batch=32, queries=1, blocks=6)
    positions = torch.arange(32)[:, None] * 3
    short = attend_blocks(query, keys[:2], values[:2], bias_for(positions, 2))
    for blocks in (3, 4, 6):
        assert torch.equal(attend_blocks(query, keys[:blocks], values[:blocks], bias_for(positions, blocks)), short)


def test_growing_keeps_what_is_cached_and_new_room_is_zero():
    cache = KeyValueCache(SHAPE, 3, dtype=torch.float32, device=torch.device("cpu"))
    assert cache.capacity == 0
    cache.reserve(10)
    assert cache.capacity == BLOCK
    cache.keys[1, 0, 2, :, :, 9] = 7.0
    cache.reserve(BLOCK + 1)
    assert cache.capacity == 2 * BLOCK
    assert bool((cache.keys[1, 0, 2, :, :, 9] == 7).all())
    assert float(cache.keys.sum()) == 7.0 * 2 * 8


def test_a_prefix_is_copied_between_caches():
    cpu = torch.device("cpu")
    source = KeyValueCache(SHAPE, 2, dtype=torch.float32, device=cpu)
    source.reserve(3 * BLOCK)
    source.keys.normal_()
    source.values.normal_()
    target = KeyValueCache(SHAPE, 5, dtype=torch.float32, device=cpu)
    target.copy_prefix(source, 1, 4, BLOCK + 1)
    assert torch.equal(target.keys[:, :2, 4], source.keys[:, :2, 1])
    assert torch.equal(target.values[:, :2, 4], source.values[:, :2, 1])
    assert float(target.keys[:, :, :4].abs().sum()) == 0


def test_bytes_per_token_counts_all_layers():
    # 2 layers x 2 heads x (8 + 4) numbers x 4 bytes
    assert SHAPE.bytes_per_token(torch.float32) == 192
