"""The compiled attention of trees is attention from its definition, and is taken only where it can be."""

from __future__ import annotations

import shutil
from itertools import product

import numpy as np
import pytest
import torch
from dense_attention import attention_call, dense
from test_attention_tree import forest, seen_in

from verbatim.models import native
from verbatim.models.attention import AttentionCall
from verbatim.trainer.attention import native_tree
from verbatim.trainer.attention.native_tree import NativeForest, has_tiles, keys_of_blocks
from verbatim.trainer.attention.tree import TreePlan

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="this machine has no C compiler"
)
SHAPES = [(4, 2, 32, 32), (2, 2, 16, 48), (9, 3, 64, 64), (8, 1, 32, 16), (14, 2, 48, 16)]
"""Query heads, key/value heads, size of keys, size of values."""


def tensors(tokens, shape, *, seed=0, dtype=torch.float32):
    """Queries, keys and values in the strides that models give them, and a gradient of the output."""
    torch.manual_seed(seed)
    heads, kv_heads, size, value_size = shape
    qkv = [
        torch.randn(1, tokens, count, width).transpose(1, 2).to(dtype).requires_grad_()
        for count, width in ((heads, size), (kv_heads, size), (kv_heads, value_size))
    ]
    return qkv, torch.randn(1, tokens, heads, value_size).to(dtype)


def difference(found, wanted):
    return float((found.double() - wanted).norm() / wanted.norm().clamp(min=1e-12))


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("seed", "count", "window"), [(0, 12, None), (1, 80, None), (1, 80, 3), (2, 40, 7)])
def test_it_is_attention_forward_and_backward(shape, seed, count, window, compiled_calls):
    batch = forest(seed, count)
    qkv, outside = tensors(batch.num_tokens, shape)
    plan = TreePlan(batch.position_ids, batch.ends)
    out = plan.attend(0, *qkv, attention_call("plain", window))
    grads = torch.autograd.grad(out, qkv, outside)
    assert {"forward", "backward"} <= {*compiled_calls}, "the compiled functions were not called"
    exact = [x.detach().double().requires_grad_() for x in qkv]
    expected = dense(*exact, seen_in(batch.starts, batch.ends, batch.position_ids, window), attention_call("plain", 1))
    expected_grads = torch.autograd.grad(expected, exact, outside.double())
    for found, wanted in zip((out, *grads), (expected, *expected_grads), strict=True):
        assert difference(found.detach(), wanted.detach()) < 1e-6


needs_tiles = pytest.mark.skipif(
    not any(map(shutil.which, ("cc", "gcc", "clang"))) or not has_tiles(),
    reason="this processor has no matrix tiles for bfloat16 (AMX)",
)


@pytest.mark.slow
@needs_tiles
@pytest.mark.parametrize("shape", [(4, 2, 32, 32), (9, 3, 64, 64), (8, 1, 64, 32), (3, 3, 32, 96)])
@pytest.mark.parametrize(("seed", "count", "window"), [(0, 12, None), (1, 80, None), (1, 80, 3), (2, 40, 7)])
def test_with_tiles_it_is_attention_with_rounded_factors(shape, seed, count, window, compiled_calls):
    """Each product rounds two factors, by 2^-9 of them at most; the errors of a tensor's elements are random."""
    batch = forest(seed, count)
    qkv, outside = tensors(batch.num_tokens, shape)
    plan = TreePlan(batch.position_ids, batch.ends)
    plan.rounds = True
    out = plan.attend(0, *qkv, attention_call("plain", window))
    grads = torch.autograd.grad(out, qkv, outside)
    assert {"forward_rounded", "backward_rounded"} <= {*compiled_calls}
    exact = [x.detach().double().requires_grad_() for x in qkv]
    expected = dense(*exact, seen_in(batch.starts, batch.ends, batch.position_ids, window), attention_call("plain", 1))
    expected_grads = torch.autograd.grad(expected, exact, outside.double())
    for found, wanted in zip((out, *grads), (expected, *expected_grads), strict=True):
        assert 1e-3 < difference(found.detach(), wanted.detach()) < 3 * 2.0**-9


@needs_tiles
def test_with_tiles_threads_do_not_change_a_bit_and_other_tiles_are_kept():
    """Products of bfloat16 in torch use the tiles too, with a configuration of their own."""
    batch = forest(1, 300)
    qkv, outside = tensors(batch.num_tokens, (4, 2, 32, 32))
    a, b = torch.randn(100, 70).bfloat16(), torch.randn(70, 90).bfloat16()
    before, found, product_before = torch.get_num_threads(), [], a @ b
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            plan = TreePlan(batch.position_ids, batch.ends)
            plan.rounds = True
            out = plan.attend(0, *qkv, attention_call("plain", None))
            assert torch.equal(a @ b, product_before)
            found.append([out, *torch.autograd.grad(out, qkv, outside)])
            assert torch.equal(a @ b, product_before)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(x, y) for other in found[1:] for x, y in zip(found[0], other, strict=True))


@needs_compiler
@pytest.mark.parametrize("sizes", [(48, 48), (32, 16)])
def test_sizes_that_tiles_do_not_have_are_computed_in_float32(sizes, compiled_calls):
    batch = forest(0)
    qkv, _ = tensors(batch.num_tokens, (4, 2, *sizes))
    plan = TreePlan(batch.position_ids, batch.ends)
    exact = plan.attend(0, *qkv, attention_call("plain", None))
    plan.rounds = True
    assert torch.equal(plan.attend(0, *qkv, attention_call("plain", None)), exact)
    assert "forward_rounded" not in compiled_calls


@needs_compiler
def test_layers_may_differ_in_query_heads_of_each_key_value_head():
    """A plan is made for 96 / G tokens a block: with another layer's G a block would have more rows than there are."""
    batch = forest(1, 80)
    plan, call = TreePlan(batch.position_ids, batch.ends), attention_call("plain", None)
    for shape in ((2, 2, 16, 16), (8, 1, 16, 16)):
        qkv, _ = tensors(batch.num_tokens, shape)
        found = plan.attend(0, *qkv, call).detach()
        exact = [x.detach().double() for x in qkv]
        seen = seen_in(batch.starts, batch.ends, batch.position_ids, None)
        assert difference(found, dense(*exact, seen, attention_call("plain", 1))) < 1e-6


@needs_compiler
def test_more_query_heads_than_a_block_has_rows_are_left_to_torch(compiled_calls):
    batch = forest(0)
    for heads, is_native in ((96, True), (97, False)):
        compiled_calls.clear()
        qkv, _ = tensors(batch.num_tokens, (heads, 1, 16, 16))
        TreePlan(batch.position_ids, batch.ends).attend(0, *qkv, attention_call("plain", None))
        assert ("forward" in compiled_calls) == is_native


@needs_compiler
def test_more_keys_than_int32_counts_are_refused(monkeypatch):
    """A path of 100 tokens in blocks of 48: 48 + 96 + 100 keys."""
    depths, ends = np.arange(100, dtype=np.int32), np.full(100, 100, dtype=np.int32)
    monkeypatch.setattr(native_tree, "MOST_KEYS", 244)
    assert NativeForest(depths, ends, None, 2).num_blocks == 3
    monkeypatch.setattr(native_tree, "MOST_KEYS", 243)
    with pytest.raises(AssertionError, match="244 keys of 3 blocks"):
        NativeForest(depths, ends, None, 2)


@needs_compiler
def test_a_query_with_one_key_gives_scores_no_gradient():
    batch = forest(3)
    qkv, outside = tensors(batch.num_tokens, (4, 2, 32, 32))
    out = TreePlan(batch.position_ids, batch.ends).attend(0, *qkv, attention_call("plain", 1))
    grad_query, grad_key, _ = torch.autograd.grad(out, qkv, outside)
    # Two sums of 32 products, in an order that depends on the processor's vectors, are subtracted: 0 but for rounding.
    assert grad_query.abs().max() < 2e-6
    assert grad_key.abs().max() < 2e-6


@needs_compiler
def test_threads_do_not_change_a_bit():
    batch = forest(1, 300)
    qkv, outside = tensors(batch.num_tokens, (4, 2, 32, 32))
    before, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            out = TreePlan(batch.position_ids, batch.ends).attend(0, *qkv, attention_call("plain", None))
            found.append([out, *torch.autograd.grad(out, qkv, outside)])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


@needs_compiler
def test_bfloat16_is_computed_in_float32_and_rounded_once():
    batch = forest(0, 40)
    qkv, outside = tensors(batch.num_tokens, (4, 2, 32, 32), dtype=torch.bfloat16)
    exact = [x.detach().float().requires_grad_() for x in qkv]
    call = attention_call("plain", None)
    out, wanted = (TreePlan(batch.position_ids, batch.ends).attend(0, *x, call) for x in (qkv, exact))
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, wanted.bfloat16())
    grads, expected = torch.autograd.grad(out, qkv, outside), torch.autograd.grad(wanted, exact, outside.float())
    assert all(torch.equal(a, b.bfloat16()) for a, b in zip(grads, expected, strict=True))


@needs_compiler
def test_a_nan_is_not_lost():
    batch = forest(0, 40)
    qkv, _ = tensors(batch.num_tokens, (4, 2, 32, 32))
    with torch.no_grad():
        qkv[1][0, 0, 0] = torch.nan  # a key of the first root
    out = TreePlan(batch.position_ids, batch.ends).attend(0, *qkv, attention_call("plain", None))
    assert out[0, 0, :2].isnan().all()


@pytest.mark.parametrize(
    ("kind", "size", "dtype"),
    [("softcap", 32, torch.float32), ("plain", 24, torch.float32), ("plain", 32, torch.float64)],
)
def test_what_it_cannot_compute_is_left_to_torch(kind, size, dtype, compiled_calls):
    batch = forest(0)
    qkv, _ = tensors(batch.num_tokens, (4, 2, size, size), dtype=dtype)
    TreePlan(batch.position_ids, batch.ends).attend(0, *qkv, attention_call(kind, None, dtype=dtype))
    assert compiled_calls == []


def test_without_it_the_result_is_the_same(monkeypatch):
    batch = forest(2, 40)
    qkv, outside = tensors(batch.num_tokens, (4, 2, 32, 32))
    found = []
    for _ in range(2):
        out = TreePlan(batch.position_ids, batch.ends).attend(0, *qkv, attention_call("plain", None))
        found.append([out, *torch.autograd.grad(out, qkv, outside)])
        monkeypatch.setenv(native.SWITCH, "0")
        native.build.cache_clear()
    monkeypatch.undo()
    native.build.cache_clear()
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_the_example_of_its_keys():
    """A path of 3 tokens with branches of 2 and of 1; the keys of the second block of 3 are all six tokens. Where the
    third and the fifth one have no query, the first block sees the first four tokens."""
    depths = np.array([0, 1, 2, 3, 4, 3], np.int32)
    of_all = keys_of_blocks(depths, np.arange(6, dtype=np.int32), 3, None)
    assert [keys.tolist() for keys in of_all] == [[0, 1, 2], [0, 1, 2, 3, 4, 5]]
    of_some = keys_of_blocks(depths, np.array([0, 1, 3, 5], np.int32), 3, None)
    assert [keys.tolist() for keys in of_some] == [[0, 1, 2, 3], [0, 1, 2, 5]]


@needs_compiler
def test_a_block_has_as_many_queries_as_its_rows_hold():
    """96 rows, one for each query head of a key/value head."""
    depths, ends = np.array([0, 1, 2, 3, 4, 3], np.int32), np.array([6, 6, 6, 5, 5, 6], np.int32)
    found = NativeForest(depths, ends, None, groups=32)
    assert (found.queries_per_block, found.num_blocks) == (3, 2)


@needs_compiler
def test_every_number_of_tokens_around_a_block():
    for tokens, groups in product((1, 2, 15, 47, 48, 49, 97), (1, 2, 4)):
        depths, ends = np.arange(tokens, dtype=np.int32), np.full(tokens, tokens, np.int32)
        qkv, _ = tensors(tokens, (2 * groups, 2, 16, 16), seed=tokens)
        out = TreePlan(depths, ends).attend(0, *qkv, AttentionCall(scale=0.25))
        wanted = torch.nn.functional.scaled_dot_product_attention(
            *(x.double() for x in qkv), is_causal=True, scale=0.25, enable_gqa=True
        )
        assert difference(out.detach(), wanted.detach().transpose(1, 2)) < 1e-6


@needs_compiler
@pytest.mark.parametrize(("seed", "count", "window"), [(0, 12, None), (1, 80, None), (1, 80, 3), (2, 300, 7)])
def test_attention_of_some_queries_is_that_of_all_at_these(seed, count, window):
    batch = forest(seed, count)
    qkv, _ = tensors(batch.num_tokens, (4, 2, 32, 32))
    wanted = np.sort(np.random.default_rng(seed).permutation(batch.num_tokens)[: batch.num_tokens // 2])
    tokens = np.append(wanted, [wanted[-1]] * 3).astype(np.int32)  # padding repeats the last one
    outside = torch.randn(1, len(tokens), 4, 32)
    plan, call = TreePlan(batch.position_ids, batch.ends), attention_call("plain", window)
    found = plan.attend_some(tokens, qkv[0][:, :, tokens], *qkv[1:], call)
    grads = torch.autograd.grad(found, qkv, outside)
    whole = plan.attend(0, *qkv, call)[:, tokens]
    expected = torch.autograd.grad(whole, qkv, outside)
    for mine, theirs in zip((found.detach(), *grads), (whole.detach(), *expected), strict=True):
        assert difference(mine, theirs.double()) < 1e-6
