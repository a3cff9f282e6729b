import pytest
import torch
from dense_attention import KINDS, attention_call, dense

from campaigns import sized
from pairs import all_rows, pairs
from verbatim.trainer.attention.rows import RowsPlan


def seen_in(row_lengths, window):
    """Who sees whom: bool [queries, keys]."""
    row = torch.repeat_interleave(torch.arange(len(row_lengths)), torch.tensor(row_lengths))
    at = torch.arange(len(row))
    seen = (row[:, None] == row[None]) & (at[None] <= at[:, None])
    if window is not None:
        seen &= at[:, None] - at[None] < window
    return seen


CASES = ([[1], [5], [3, 9, 10, 1, 10, 2], [4, 4, 4], [11, 10, 2], [2, 2, 4]], [None, 1, 3, 4, 100], list(KINDS))


@pytest.mark.campaign
@pytest.mark.parametrize(("row_lengths", "window", "kind"), sized(pairs(*CASES), all_rows(*CASES)))
def test_rows_attend_as_by_one_dense_mask_forward_and_backward(row_lengths, window, kind):
    attend_as_dense(row_lengths, window, kind)


def test_a_window_of_one_token_more_than_the_mask_has_is_found():
    with pytest.raises(AssertionError, match="not close"):
        attend_as_dense([11, 10, 2], 3, "plain", planned=4)


def attend_as_dense(row_lengths, window, kind, *, planned=None):
    """`planned` is another window than that of the dense mask."""
    torch.manual_seed(0)
    tokens = sum(row_lengths)
    qkv = [torch.randn(1, heads, tokens, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]
    outside = torch.randn(1, tokens, 4, 8, dtype=torch.float64)

    call = attention_call(kind, planned or window)
    asked = qkv if call.sinks_H is None else [*qkv, call.sinks_H]

    out = RowsPlan(row_lengths).attend(0, *qkv, call)
    expected = dense(*qkv, seen_in(row_lengths, window), call)
    found_grads = torch.autograd.grad(out, asked, outside)
    expected_grads = torch.autograd.grad(expected, asked, outside)

    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    for found, wanted in zip(found_grads, expected_grads, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_rows_of_like_length_share_a_bucket():
    assert RowsPlan([3, 9, 10]).shapes == [(2, 10), (1, 3)]
    assert RowsPlan([3, 8, 10]).shapes == [(1, 10), (1, 8), (1, 3)]


def test_a_nan_in_one_row_reaches_no_other():
    qkv = [torch.randn(1, 2, 8, 4) for _ in range(3)]
    for tensor in qkv:
        tensor[:, :, 3:7] = float("nan")
    out = RowsPlan([3, 4, 1]).attend(0, *qkv, attention_call("plain", None))
    assert out[0, [0, 1, 2, 7]].isfinite().all()
