import pytest
import torch
from torch import nn

from verbatim.trainer import linear
from verbatim.trainer.linear import LARGE, ROW_MULTIPLE, use_onednn


@pytest.fixture
def on_amd(monkeypatch):
    monkeypatch.setattr(linear, "onednn_is_faster", lambda: True)


def called(module):
    """Whether oneDNN computes this module's output for a number of rows."""

    def by_rows(rows, **kwargs):
        x = torch.randn(rows, module.in_features, **kwargs, requires_grad=True)
        return type(module(x).grad_fn).__name__ == "_LinearBackward"

    return by_rows


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("sizes", [(48, 80), (80, 48)])
def test_results_and_gradients_are_those_of_torch(on_amd, sizes, bias):
    torch.manual_seed(0)
    module = nn.Linear(*sizes, bias=bias)
    x = torch.randn(1, 2 * ROW_MULTIPLE, sizes[0], requires_grad=True)
    outside = torch.randn(1, 2 * ROW_MULTIPLE, sizes[1])
    expected = module(x)
    expected_grads = torch.autograd.grad(expected, [x, *module.parameters()], outside)
    use_onednn(module)
    out = module(x)
    grads = torch.autograd.grad(out, [x, *module.parameters()], outside)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    for grad, want in zip(grads, expected_grads, strict=True):
        assert grad.is_contiguous()
        torch.testing.assert_close(grad, want, rtol=1e-5, atol=1e-5)


def test_numbers_of_rows_that_may_not_recur_are_left_to_torch_unless_they_are_large(on_amd):
    small, large = nn.Linear(8, 8), nn.Linear(512, 1024)
    use_onednn(nn.Sequential(small, large))
    assert called(small)(ROW_MULTIPLE) and not called(small)(ROW_MULTIPLE + 1) and not called(small)(0)
    assert called(large)(LARGE // (512 * 1024) + 1) and not called(large)(3)


def test_other_precisions_are_left_to_torch(on_amd):
    module = nn.Linear(8, 8)
    use_onednn(module)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not called(module)(ROW_MULTIPLE)
        assert module(torch.randn(ROW_MULTIPLE, 8)).dtype == torch.bfloat16
    double = nn.Linear(8, 8, dtype=torch.float64)
    use_onednn(double)
    assert not called(double)(ROW_MULTIPLE, dtype=torch.float64)


def test_frozen_weights_get_no_gradient(on_amd):
    module = nn.Linear(8, 8).requires_grad_(False)
    use_onednn(module)
    x = torch.randn(ROW_MULTIPLE, 8, requires_grad=True)
    module(x).sum().backward()
    assert x.grad is not None and module.weight.grad is None


def test_elsewhere_nothing_is_changed(monkeypatch):
    monkeypatch.setattr(linear, "onednn_is_faster", lambda: False)
    module = nn.Linear(8, 8)
    use_onednn(module)
    assert not called(module)(ROW_MULTIPLE)
