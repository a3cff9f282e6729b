"""Tokens in padded grids: every token stands once, and gradients come back to where they belong."""

import torch

from verbatim.trainer.attention.padding import Padding


def two_rows():
    """Tokens 0, 1, 2 in rows `[0, pad]` and `[1, 2]`."""
    return Padding(torch.tensor([0, 0, 1, 2]), torch.tensor([True, False, True, True]), "cpu")


def test_spread_shows_some_token_in_padding_and_collect_drops_it():
    places = two_rows()
    x = torch.arange(3.0).view(3, 1, 1) + 5
    (grid,) = places.spread(x, [(2, 2)])
    assert grid.flatten().tolist() == [5, 5, 6, 7]
    assert len(places) == 3
    assert places.collect(torch.arange(4.0).view(4, 1, 1)).flatten().tolist() == [0, 2, 3]


def test_the_gradient_of_padding_is_left_out():
    x = torch.zeros(3, 1, 1, requires_grad=True)
    (grid,) = two_rows().spread(x, [(2, 2)])
    grid.backward(torch.tensor([1.0, 0.0, 3.0, 4.0]).view(2, 2, 1, 1))
    assert x.grad.flatten().tolist() == [1, 3, 4]


def test_the_gradient_of_what_is_collected_goes_to_its_place():
    y = torch.zeros(4, 1, 1, requires_grad=True)
    two_rows().collect(y).backward(torch.tensor([1.0, 2.0, 3.0]).view(3, 1, 1))
    assert y.grad.flatten().tolist() == [1, 0, 2, 3]


def test_a_permutation_that_is_its_own_inverse_is_not_taken_for_no_permutation():
    swapped = Padding(torch.tensor([1, 0]), torch.tensor([True, True]), "cpu")
    (grid,) = swapped.spread(torch.tensor([5.0, 6.0]).view(2, 1, 1), [(1, 2)])
    assert grid.flatten().tolist() == [6, 5]
