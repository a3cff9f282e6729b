"""A loss that returns what cannot be minimised is refused with the answer, on a few tokens before a run begins."""

from __future__ import annotations

import pytest
import torch

from verbatim.algorithms.losses import LOSSES, Loss, LossInputs, LossOutputs
from verbatim.algorithms.losses.results import as_scalar, try_loss
from verbatim.core.errors import ComponentError


def total(inputs: LossInputs) -> torch.Tensor:
    return -(inputs.advantages * inputs.trainer_logprobs)[inputs.loss_mask].sum()


WRONG = {
    "nothing": (lambda inputs: None, r"returned None; return LossOutputs\(loss=\.\.\.\)"),
    "a bare tensor": (total, r"returned a bare tensor of shape \(\); return LossOutputs"),
    "a tuple": (lambda inputs: (total(inputs), {}), "returned tuple; return LossOutputs"),
    "a number": (lambda inputs: LossOutputs(loss=total(inputs).item()), "returned float; expected a scalar tensor"),
    "a vector": (lambda inputs: LossOutputs(loss=inputs.trainer_logprobs), r"returned shape \(6,\)"),
    "constant": (lambda inputs: LossOutputs(loss=torch.zeros(())), "requires_grad False"),
    "no metrics": (lambda inputs: LossOutputs(loss=total(inputs), metrics=None), "returned the metrics None"),
    "a vector as metric": (
        lambda inputs: LossOutputs(loss=total(inputs), metrics={"x": inputs.advantages}),
        r"metric 'x' .* shape \(6,\)",
    ),
    "a text as metric": (lambda inputs: LossOutputs(loss=total(inputs), metrics={"x": "1"}), "metric 'x' .* is '1'"),
    "something of another graph": (
        lambda inputs: LossOutputs(loss=torch.ones((), requires_grad=True) * 2),
        "does not depend on inputs.trainer",
    ),
    "an exception": (lambda inputs: inputs.old_logprobs, "tried on a trajectory of 6 tokens.*raised AttributeError"),
}


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("what", WRONG)
def test_a_result_that_cannot_be_minimised_is_refused(what, level):
    function, message = WRONG[what]
    with pytest.raises(ComponentError, match=message):
        try_loss(Loss(function, level=level), streams=())


def test_a_loss_that_needs_a_teacher_is_told_that_there_is_none():
    def distil(inputs):
        return LossOutputs(loss=-(inputs.teacher_logprobs * inputs.trainer_logprobs).sum())

    with pytest.raises(ComponentError, match=r"without a teacher \(teacher_logprobs = None\).*raised TypeError"):
        try_loss(Loss(distil, level="sequence"), streams=())
    try_loss(Loss(distil, level="sequence"), streams=("teacher",))


def test_a_loss_may_read_every_logprob_stream_of_the_run_and_is_refused_where_it_reads_another():
    def toward_a_reference(inputs):
        ratio = inputs.trainer_logprobs - inputs.logprob_streams["reference"]
        return LossOutputs(loss=ratio[inputs.loss_mask].sum())

    loss = Loss(toward_a_reference, level="sequence")
    try_loss(loss, streams=("reference", "teacher"))
    with pytest.raises(ComponentError, match=r"logprob_streams \['teacher'\], raised KeyError: 'reference'"):
        try_loss(loss, streams=("teacher",))


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_of_ours_passes(name):
    try_loss(LOSSES[name], streams=("teacher",))


NO_MEMORY = RuntimeError("[enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory")


@pytest.mark.parametrize("error", [MemoryError(), NO_MEMORY])
def test_memory_that_runs_out_is_not_the_losss_fault(error, monkeypatch):
    def full(*args, **kwargs):
        raise error

    with pytest.raises(type(error)):
        try_loss(Loss(full, level="token"), streams=("teacher",))
    monkeypatch.setattr(torch, "as_tensor", full)
    with pytest.raises(type(error)):
        as_scalar("entropy", torch.tensor(1.0))
