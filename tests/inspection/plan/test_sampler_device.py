"""Where the plan puts the sampler: beside the trainer where both name the same device, in whatever words."""

import pytest

from verbatim.config import make_config
from verbatim.inspection.plan.placement import place


def placed(sampler, trainer, *, is_cuda=True, gpus=None):
    config = make_config(
        {
            "orchestrator": {"train": {"env": [{"id": "guess_number"}]}},
            "model": {"name": "any"},
            "inference": {"backend": "torch", "torch": {"device": sampler}},
            "trainer": {"device": trainer},
        }
    )
    return place(config, is_cuda=is_cuda, gpus=gpus)


@pytest.mark.parametrize(
    ("sampler", "trainer"),
    [
        ("auto", "auto"),
        ("auto", "cuda"),
        ("cuda", "auto"),
        ("cuda:0", "cuda"),
        ("auto", "cuda:0"),
    ],
)
def test_two_names_of_the_first_device_are_one_device(sampler, trainer):
    found = placed(sampler, trainer)
    assert found.where == "beside the trainer" and found.devices == 1


@pytest.mark.parametrize(("sampler", "trainer"), [("cuda:1", "auto"), ("cuda", "cuda:1")])
def test_another_device_is_the_samplers_own(sampler, trainer):
    found = placed(sampler, trainer)
    assert found.where == "own devices" and found.devices == 2


def test_on_a_cpu_both_share_the_machine():
    assert placed("auto", "cpu", is_cuda=False).where == "beside the trainer"
