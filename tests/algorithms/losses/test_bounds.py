"""A bound has the same gradient with every torch: that of the value, as far as it is not passed."""

import math

import pytest
import torch

from verbatim.algorithms.losses.ratios import at_least, at_most

VALUES = [-math.inf, 0.5, 2.0, 3.5, math.inf, math.nan]


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize(
    ("bounded", "expected", "slopes"),
    [
        (at_most, [-math.inf, 0.5, 2.0, 2.0, 2.0, math.nan], [1, 1, 1, 0, 0, 1]),
        (at_least, [2.0, 2.0, 2.0, 3.5, math.inf, math.nan], [0, 0, 1, 1, 1, 1]),
    ],
)
def test_at_the_bound_the_gradient_is_that_of_the_value(bounded, expected, slopes, as_tensor):
    values = torch.tensor(VALUES, requires_grad=True)
    found = bounded(values, torch.full((6,), 2.0) if as_tensor else 2.0)
    assert found.tolist() == pytest.approx(expected, nan_ok=True)
    assert torch.autograd.grad(found.sum(), values)[0].tolist() == slopes
