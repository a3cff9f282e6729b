"""Attention over a prefix tree is attention from its definition: a token sees its ancestors and itself."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from dense_attention import KINDS, attention_call, dense
from trainer_helpers import make_sample

from campaigns import sized
from pairs import all_rows, pairs
from verbatim.trainer.attention import tree
from verbatim.trainer.attention.tree import TreePlan
from verbatim.trainer.packing import pack_tree


def forest(seed, count=12):
    """A micro-batch of samples that share random prefixes."""
    rng = np.random.default_rng(seed)
    texts = [list(rng.integers(0, 3, rng.integers(2, 20))) for _ in range(count)]
    samples = [make_sample(len(text), f"t{i}", seed=i) for i, text in enumerate(texts)]
    samples = [replace(s, token_ids=np.array(text, dtype=np.int32)) for s, text in zip(samples, texts, strict=True)]
    (batch,) = pack_tree(samples, micro_batch_tokens=10_000, keep_whole=False)
    return batch


def seen_in(starts, ends, depths, window):
    """k is seen by q if q lies in the subtree of k: bool [queries, keys]."""
    starts, ends, depths = (torch.from_numpy(x.astype(np.int64)) for x in (starts, ends, depths))
    seen = (starts[None] <= starts[:, None]) & (starts[:, None] < ends[None])
    if window is not None:
        seen &= depths[:, None] - depths[None] < window
    return seen


CASES = ([(0, 8), (1, 8), (2, 3), (3, 12)], [None, 1, 3, 100], [1, 7, 128], list(KINDS))


@pytest.mark.campaign
@pytest.mark.parametrize(("forest_of", "window", "block", "kind"), sized(pairs(*CASES), all_rows(*CASES)))
def test_a_tree_attends_as_by_one_dense_mask_forward_and_backward(forest_of, window, block, kind, monkeypatch):
    attends_as_dense(*forest_of, window, block, kind, monkeypatch)


def test_a_window_of_one_token_more_than_the_mask_has_is_found(monkeypatch):
    with pytest.raises(AssertionError, match="not close"):
        attends_as_dense(0, 8, 3, 7, "plain", monkeypatch, planned=4)


def attends_as_dense(seed, value_size, window, block, kind, monkeypatch, *, planned=None):
    """`planned` is another window than that of the dense mask."""
    monkeypatch.setattr(tree, "BLOCK", block)
    monkeypatch.setattr(tree, "KEY_MULTIPLE", 4)
    torch.manual_seed(seed)
    batch = forest(seed)
    assert not batch.is_rows
    tokens = batch.num_tokens
    qkv = [
        torch.randn(1, heads, tokens, size, dtype=torch.float64, requires_grad=True)
        for heads, size in ((4, 8), (2, 8), (2, value_size))
    ]
    outside = torch.randn(1, tokens, 4, value_size, dtype=torch.float64)
    plan = TreePlan(batch.position_ids, batch.ends)
    call = attention_call(kind, planned or window)
    asked = qkv if call.sinks_H is None else [*qkv, call.sinks_H]
    out = plan.attend(0, *qkv, call)
    expected = dense(*qkv, seen_in(batch.starts, batch.ends, batch.position_ids, window), call)
    found_grads = torch.autograd.grad(out, asked, outside)
    expected_grads = torch.autograd.grad(expected, asked, outside)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    for found, wanted in zip(found_grads, expected_grads, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
