import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trainer_helpers import make_sample

from verbatim.core.errors import ComponentError
from verbatim.trainer.metrics import MetricSums
from verbatim.trainer.split import split_batch


def trained(length, trajectory_id):
    """A sample with `length` trained tokens."""
    return make_sample(length + 1, trajectory_id, seed=0, trained=1.1)


def names(parts):
    return [[sample.trajectory_id for sample in part] for part in parts]


def test_trajectories_go_largest_first_to_the_lightest_part():
    samples = [trained(n, t) for n, t in [(3, "a"), (5, "b"), (2, "c"), (4, "d")]]
    assert names(split_batch(samples, 2)) == [["b", "c"], ["a", "d"]]


def test_samples_of_a_trajectory_are_never_parted():
    samples = [trained(4, "a"), trained(4, "b"), trained(4, "a")]
    assert names(split_batch(samples, 2)) == [["a", "a"], ["b"]]


def test_fewer_trajectories_than_parts_are_fewer_parts():
    assert names(split_batch([trained(2, "a"), trained(1, "b")], 5)) == [["a"], ["b"]]
    assert split_batch([], 3) == []


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.sampled_from("abcdef")), max_size=12), st.integers(1, 5))
def test_parts_are_a_partition_by_trajectory(shape, num_parts):
    samples = [trained(n, t) for n, t in shape]
    parts = split_batch(samples, num_parts)
    assert sorted(map(id, (s for part in parts for s in part))) == sorted(map(id, samples))
    assert len(parts) == min(num_parts, len({t for _, t in shape}))
    for t in "abcdef":
        assert sum(t in {s.trajectory_id for s in part} for part in parts) <= 1


def test_metrics_are_weighted_means_extremes_and_counts():
    sums = MetricSums()
    sums.add({"x": torch.tensor(1.0), "r_max": torch.tensor(2.0), "r_min": torch.tensor(2.0), "num_x": 2}, 3)
    sums.add({"x": 2.0, "r_max": 5.0, "r_min": 5.0, "num_x": torch.tensor(5)}, 1)
    sums.add({"masked_by_loss": torch.tensor(4), "late": torch.tensor(7.0, dtype=torch.float64)}, 10)
    sums.add({"masked_by_loss": torch.tensor(3)}, 10)
    assert sums.result() == {"x": 1.25, "r_max": 5.0, "r_min": 2.0, "num_x": 7, "masked_by_loss": 7, "late": 7.0}


def test_a_metric_that_is_no_scalar_is_explained():
    with pytest.raises(ComponentError, match=r"'ratio'.*shape \(3,\)"):
        MetricSums().add({"ratio": torch.ones(3)}, 1)
