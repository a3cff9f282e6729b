"""FlexAttention's mask of a tree is the one of its intervals, pair by pair and block by block."""

import numpy as np
import pytest
import torch
from dense_attention import KINDS, attention_call
from test_attention_tree import forest
from torch.nn.attention.flex_attention import create_mask

from campaigns import sized
from pairs import all_rows, pairs
from verbatim.trainer.attention import flex
from verbatim.trainer.attention.flex import FlexPlan, visible_blocks
from verbatim.trainer.attention.forest import forest_plan
from verbatim.trainer.attention.tree import TreePlan

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


@pytest.fixture(params=[4, 32])
def block(request, monkeypatch):
    monkeypatch.setattr(flex, "BLOCK", request.param)
    return request.param


def padded(seed, block):
    """Depths and ends of a forest and a row of padding."""
    batch = forest(seed, count=40)
    padding = -batch.num_tokens % block
    end = batch.num_tokens + padding
    return (
        np.append(batch.position_ids, np.arange(padding)).astype(np.int32),
        np.append(batch.ends, np.full(padding, end)).astype(np.int32),
    )


def seen(depths, ends, window):
    """Who sees whom, from the definition: bool [queries, keys]."""
    at = np.arange(len(ends))
    found = (at[None] <= at[:, None]) & (at[:, None] < ends[None])
    return found if window is None else found & (depths[:, None] - depths[None] < window)


def masks_given(monkeypatch, depths, ends, *windows):
    """The masks that FlexAttention gets from a plan, for layers with these windows."""
    given = []

    def attention(query, key, value, *, block_mask, **_):
        given.append(block_mask)
        return value, None

    monkeypatch.setattr(flex, "flex_attention", attention)
    plan, x = FlexPlan(depths, ends, "cpu"), torch.zeros(1, 1, len(ends), 16)
    for layer, window in enumerate(windows):
        plan.attend(layer, x, x, x, attention_call("plain", window))
    return given


CASES = ([(0, 8), (1, 8), (2, 4)], [None, 1, 3, 100], [4, 32], list(KINDS))


@pytest.mark.slow
@pytest.mark.campaign
@pytest.mark.parametrize(
    ("forest_of", "window", "block", "kind"), sized(pairs(*CASES), all_rows(*CASES)), indirect=["block"]
)
def test_attention_is_that_of_the_exact_plan(forest_of, window, block, kind):
    seed, value_size = forest_of
    torch.manual_seed(seed)
    depths, ends = padded(seed, block)
    qkv = [
        torch.randn(1, heads, len(ends), size, dtype=torch.float64) for heads, size in ((4, 8), (2, 8), (2, value_size))
    ]
    call = attention_call(kind, window)
    found, expected = (plan(depths, ends, "cpu").attend(0, *qkv, call) for plan in (FlexPlan, TreePlan))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_a_window_that_is_one_token_too_wide_is_found(block):
    depths, ends = padded(0, block)
    qkv = [torch.randn(1, heads, len(ends), 8, dtype=torch.float64) for heads in (4, 2, 2)]
    found = FlexPlan(depths, ends, "cpu").attend(0, *qkv, attention_call("plain", 4))
    expected = TreePlan(depths, ends, "cpu").attend(0, *qkv, attention_call("plain", 3))
    with pytest.raises(AssertionError, match="not close"):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("seed", range(3))
def test_pairs_are_those_of_the_intervals(seed, window, block, monkeypatch):
    depths, ends = padded(seed, block)
    (mask,) = masks_given(monkeypatch, depths, ends, window)
    found = create_mask(mask.mask_mod, 1, 1, len(ends), len(ends), device="cpu")[0, 0].numpy()
    assert (found == seen(depths, ends, window)).all()


@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("seed", range(3))
def test_no_pair_lies_in_a_block_that_is_skipped_and_none_is_missing_in_a_full_one(seed, window, block):
    depths, ends = padded(seed, block)
    pairs = seen(depths, ends, window).reshape(len(ends) // block, block, -1, block).transpose(0, 2, 1, 3)
    partial, full = visible_blocks(depths, ends, window)
    assert not (partial & full).any()
    assert pairs[full].all()
    assert not pairs[~(partial | full)].any()
    if window is None:
        assert (full == pairs.all(axis=(2, 3))).all()
        assert (partial == pairs.any(axis=(2, 3)) & ~full).all()


def test_the_backward_pass_visits_the_same_blocks(block, monkeypatch):
    """Its kernel walks the mask by keys: the lists that torch derives for it are those of the forward pass, turned."""
    depths, ends = padded(0, block)
    (mask,) = masks_given(monkeypatch, depths, ends, None)
    partial, full = visible_blocks(depths, ends, None)
    for which, counts, numbers in (
        (partial, mask.q_num_blocks, mask.q_indices),
        (full, mask.full_q_num_blocks, mask.full_q_indices),
    ):
        for key in range(len(which)):
            assert sorted(numbers[0, 0, key, : counts[0, 0, key]].tolist()) == np.flatnonzero(which[:, key]).tolist()


def test_the_worked_example():
    ends = np.full(256, 256, dtype=np.int32)
    partial, full = visible_blocks(np.arange(256, dtype=np.int32), ends, None)
    assert partial.tolist() == [[True, False], [False, True]]
    assert full.tolist() == [[False, False], [True, False]]


def test_a_mask_is_made_once_for_all_layers_of_a_window(monkeypatch):
    depths, ends = np.arange(128, dtype=np.int32), np.full(128, 128, dtype=np.int32)
    first, second, *others = masks_given(monkeypatch, depths, ends, None, 5, None, 5)
    assert first is not second
    assert [first is others[0], second is others[1]] == [True, True]


@pytest.mark.slow
def test_values_set_the_dtype_as_autocast_leaves_them():
    plan = FlexPlan(np.arange(128, dtype=np.int32), np.full(128, 128, dtype=np.int32), "cpu")
    query, key = torch.randn(2, 1, 2, 128, 16)
    out = plan.attend(0, query, key, torch.randn(1, 2, 128, 16).bfloat16(), attention_call("plain", None))
    assert out.dtype == torch.bfloat16


def test_flex_attention_is_for_cuda():
    depths, ends = np.arange(128, dtype=np.int32), np.full(128, 128, dtype=np.int32)
    plans = {device: type(forest_plan(depths, ends, torch.device(device))) for device in ("cpu", "cuda", "mps")}
    assert plans == {"cpu": TreePlan, "cuda": FlexPlan, "mps": TreePlan}
