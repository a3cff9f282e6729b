"""Every number here is worked out by hand from the formula in the docstring of `ipa_loss`."""

import math

import pytest
import torch

from algorithms.losses.loss_inputs import inputs, log_inputs, loss_and_gradient, metrics_of
from verbatim.algorithms.losses import LOSSES, ipa_loss
from verbatim.algorithms.losses.ratios import segment_means
from verbatim.core.errors import ComponentError


def slopes(data, **parameters):
    return loss_and_gradient(ipa_loss, data, **parameters)[1]


def test_a_good_chunk_is_imitated_at_full_weight():
    # rho = 1/2, G = 2: loss -2 (ln 0.1 + ln 0.1), whatever rho is.
    loss, gradient = loss_and_gradient(ipa_loss, inputs([0.1, 0.1], [0.4, 0.1], [2.0, 2.0], chunks=[0, 0]))
    assert loss == pytest.approx(-4 * math.log(0.1), abs=1e-12)
    assert gradient == pytest.approx([-2.0, -2.0], abs=1e-12)


def test_a_bad_chunk_is_pushed_down_by_its_ratio():
    # rho = 1/2, G = -1.
    loss, gradient = loss_and_gradient(ipa_loss, inputs([0.1, 0.1], [0.4, 0.1], [-1.0, -1.0], chunks=[0, 0]))
    assert loss == pytest.approx(math.log(0.1), abs=1e-12)
    assert gradient == pytest.approx([0.5, 0.5], abs=1e-12)


def test_the_ratio_of_a_bad_chunk_is_cut_at_one():
    # rho = 1.5, kept, cut to 1.
    assert slopes(inputs([0.3], [0.2], [-1.0], chunks=[0])) == pytest.approx([1.0], abs=1e-12)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_chunk_that_became_much_more_likely_is_dropped(advantage):
    # rho = sqrt(9 * 1) = 3 > 2: neither of its tokens learns, also not the one whose own ratio is 1.
    data = inputs([0.9, 0.1], [0.1, 0.1], [advantage] * 2, chunks=[3, 3])
    assert slopes(data) == [0.0, 0.0]
    assert slopes(data, max_ratio=3.5) == pytest.approx([-1.0, -1.0] if advantage > 0 else [1.0, 1.0], abs=1e-12)


def test_the_limit_is_one_sided():
    assert slopes(inputs([0.01], [0.9], [1.0], chunks=[0])) == pytest.approx([-1.0], abs=1e-12)


@pytest.mark.parametrize(("log_ratio", "slope"), [(math.log(2.0), -1.0), (math.log(2.0) + 1e-12, 0.0)])
def test_a_ratio_of_exactly_the_limit_is_kept(log_ratio, slope):
    assert slopes(log_inputs([log_ratio], [0.0], [1.0], chunks=[0])) == [slope]


def test_a_return_of_zero_teaches_nothing():
    data = inputs([0.3, 0.9], [0.2, 0.1], [0.0, 0.0], chunks=[0, 1])
    assert slopes(data) == [0.0, 0.0]


def test_adjacent_chunks_do_not_fuse():
    # w = 3 | 1/3. As one chunk rho would be 1 and both would learn; as two, the first is dropped, the second has 1/3.
    data = inputs([0.3, 0.1], [0.1, 0.3], [-1.0, -1.0], chunks=[0, 1])
    assert slopes(data) == pytest.approx([0.0, 1 / 3], abs=1e-12)


def test_a_token_that_is_not_trained_does_not_split_its_chunk():
    # w = 4, (masked), 1/4: one chunk with rho = 1, so both learn fully. Split, the first would be dropped.
    data = inputs([0.4, 0.5, 0.1], [0.1, 0.5, 0.4], [-1.0] * 3, mask=[True, False, True], chunks=[0, -1, 0])
    assert slopes(data) == pytest.approx([1.0, 0.0, 1.0], abs=1e-12)


def test_a_masked_token_inside_a_chunk_is_not_in_its_mean():
    # The masked token says chunk 0 too, and w = 100: without it rho = sqrt(1/4 * 1) = 1/2.
    data = inputs([0.1, 0.5, 0.1], [0.4, 0.005, 0.1], [-1.0] * 3, mask=[True, False, True], chunks=[0, 0, 0])
    assert slopes(data) == pytest.approx([0.5, 0.0, 0.5], abs=1e-12)


def test_a_chunk_need_not_stand_together():
    # Chunk 5 has w = 1/4 and 1: rho = 1/2. Chunk 2 between them has 1/3.
    data = inputs([0.1, 0.1, 0.2], [0.4, 0.3, 0.2], [-1.0] * 3, chunks=[5, 2, 5])
    assert slopes(data) == pytest.approx([0.5, 1 / 3, 0.5], abs=1e-12)


def test_metrics_are_of_chunks_and_tokens():
    # Chunk 0: w = 1/4, 1, rho 1/2. Chunk 1: rho 3, dropped. Chunk 2: rho 1.5, bad, cut. Chunk 3: rho 1.5, good.
    data = inputs(
        [0.1, 0.1, 0.3, 0.3, 0.3], [0.4, 0.1, 0.1, 0.2, 0.2], [-1.0, -1.0, -1.0, -1.0, 1.0], chunks=[0, 0, 1, 2, 3]
    )
    assert metrics_of(ipa_loss, data) == pytest.approx(
        {
            "chunk_ratio_mean": 6.5 / 4,
            "chunk_ratio_min": 0.5,
            "chunk_ratio_max": 3.0,
            "chunks_dropped": 0.25,
            "clipped_high": 0.2,
            "masked_by_loss": 1,
        },
        abs=1e-12,
    )


def test_the_example_of_its_docstring():
    data = inputs([0.1, 0.1, 0.3], [0.4, 0.1, 0.1], [-1.0] * 3, chunks=[0, 0, 1])
    assert slopes(data) == pytest.approx([0.5, 0.5, 0.0], abs=1e-12)


def test_segments_are_known_by_their_number():
    means, places = segment_means(torch.tensor([1.0, 4.0, 5.0]), torch.tensor([7, 2, 7]))
    assert (means.tolist(), places.tolist()) == ([4.0, 3.0], [1, 0, 1])


def test_without_chunk_ids_it_is_refused():
    with pytest.raises(ComponentError, match=r"expected LossInputs\.chunk_ids, found None"):
        ipa_loss(inputs([0.5], [0.5], [1.0]))


def test_a_limit_that_cannot_be_is_refused():
    with pytest.raises(ComponentError, match=r"trainer\.loss\.max_ratio: found 0\.0, expected greater than 0"):
        ipa_loss(inputs([0.5], [0.5], [1.0], chunks=[0]), max_ratio=0.0)


def test_it_sees_a_trajectory_whole_and_is_divided_by_tokens():
    assert (LOSSES["ipa"].level, LOSSES["ipa"].normalizer) == ("chunk", "tokens")
