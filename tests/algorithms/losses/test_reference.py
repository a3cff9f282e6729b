"""The KL term to a reference: worked out by hand, on plain lists for every loss, and on average over a distribution."""

from __future__ import annotations

import inspect
import math
from dataclasses import replace

import pytest
import torch

from algorithms.losses.loss_inputs import inputs, log_inputs, loss_and_gradient
from algorithms.losses.test_gradients import some_tokens, with_teacher
from verbatim.algorithms.losses import LOSSES, Loss, LossInputs, LossOutputs, reference_term
from verbatim.algorithms.losses.ratios import k3
from verbatim.core.errors import ComponentError

LOG2 = 0.6931471805599453
LOSSES_WITH_A_REFERENCE = [name for name in LOSSES if name != "sft"]


def with_reference(data, logprobs):
    stream = torch.tensor(logprobs, dtype=torch.float64)
    return replace(data, logprob_streams={**data.logprob_streams, "reference": stream})


def found(kind, trainer, inference, reference, tau=1.0, **parameters):
    """The term and its gradient for one token of these probabilities."""
    data = with_reference(inputs([trainer], [inference], [0.0]), [math.log(reference)])
    (term,) = reference_term(data, kl_ref_tau=tau, kl_ref=kind, **parameters).terms
    return term.item(), torch.autograd.grad(term, data.trainer_logprobs)[0].item()


def test_k2_and_k3_on_policy_by_hand():
    # l - r = ln 2: (ln 2)^2 / 2, slope ln 2; and 1/2 + ln 2 - 1, slope 1 - 1/2.
    assert found("k2", 0.5, 0.5, 0.25) == pytest.approx((LOG2**2 / 2, LOG2), abs=1e-12)
    assert found("k3", 0.5, 0.5, 0.25) == pytest.approx((LOG2 - 0.5, 0.5), abs=1e-12)
    # l - r = -ln 2: 2 - ln 2 - 1, slope 1 - 2.
    assert found("k3", 0.25, 0.25, 0.5, tau=3.0) == pytest.approx((3 * (1 - LOG2), -3.0), abs=1e-12)


def test_k3_goes_on_along_its_tangent_where_a_token_was_given_up():
    """exp(20) - 21 = 485165174.40979, and 100 further on 100 (exp(20) - 1) = 48516519440.979 more."""
    for dtype, rel in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
        ahead = torch.tensor([-3.0, 0.0, 0.25, 20.0, 120.0, 1000.0], dtype=dtype, requires_grad=True)
        value = k3(ahead)
        expected = [2.0497870683678638, 0.0, 0.0340254166877415, 485165174.40979, 49001684615.38882, 475947055696.0043]
        assert value.tolist() == pytest.approx(expected, rel=max(rel, 1e-9), abs=1e-7)
        (slope,) = torch.autograd.grad(value.sum(), ahead)
        steepest = 485165194.40979
        assert slope.tolist() == pytest.approx(
            [-0.9502129316321361, 0.0, 0.2840254166877415, steepest, steepest, steepest], rel=max(rel, 1e-9), abs=1e-7
        )


def test_a_loss_stays_finite_where_a_token_was_given_up():
    data = with_reference(inputs([1e-100], [1e-100], [0.0]), [math.log(0.5)])
    data = replace(
        data,
        trainer_logprobs=data.trainer_logprobs.detach().float().requires_grad_(),
        inference_logprobs=data.inference_logprobs.float(),
    )
    (term,) = reference_term(data, kl_ref_tau=1e-3, kl_ref="k3").terms
    (grad,) = torch.autograd.grad(term, data.trainer_logprobs)
    assert term.isfinite() and grad.isfinite() and grad.item() < 0  # down the gradient, its probability rises


def test_off_policy_the_term_is_weighed_with_the_bounded_ratio_which_has_no_gradient():
    # w = 0.5 / 0.25 = 2, and 0.5 / 0.01 = 50, which is cut to 8, or to the delta of the loss.
    assert found("k2", 0.5, 0.25, 0.25) == pytest.approx((LOG2**2, 2 * LOG2), abs=1e-12)
    assert found("k2", 0.5, 0.01, 0.25) == pytest.approx((4 * LOG2**2, 8 * LOG2), abs=1e-12)
    assert found("k3", 0.5, 0.01, 0.25, delta=3.0) == pytest.approx((3 * (LOG2 - 0.5), 1.5), abs=1e-12)


def test_k1_is_taken_from_the_advantage():
    # A = 1 - 0.5 ln 2, w = 1: tis is -A l with the gradient -A.
    data = with_reference(inputs([0.5], [0.5], [1.0]), [math.log(0.25)])
    loss, gradient = loss_and_gradient(LOSSES["tis"].function, data, kl_ref_tau=0.5, kl_ref="k1")
    assert gradient == pytest.approx([-(1 - 0.5 * LOG2)], abs=1e-12)
    assert loss == pytest.approx((1 - 0.5 * LOG2) * LOG2, abs=1e-12)


def mean_gradient(kind, logits, reference):
    """The mean over what the policy samples, worked out over all tokens, of the term's gradient for the logits."""
    logits = torch.tensor(logits, dtype=torch.float64, requires_grad=True)
    logprobs, total = logits.log_softmax(0), 0.0
    for token, probability in enumerate(logprobs.exp().tolist()):
        data = LossInputs(
            logprobs[token : token + 1],
            logprobs.detach()[token : token + 1],
            advantages=torch.zeros(1, dtype=torch.float64),
            loss_mask=torch.tensor([True]),
            logprob_streams={"reference": reference.log()[token : token + 1]},
        )
        term = reference_term(data, kl_ref_tau=1.0, kl_ref=kind)
        if kind == "k1":
            total = total + probability * (term.penalty * logprobs[token : token + 1]).sum()
        else:
            total = total + probability * term.terms.sum()
    return torch.autograd.grad(total, logits)[0]


def test_on_policy_k1_and_k2_are_the_gradient_of_the_reverse_kl_and_k3_is_not():
    logits, reference = [0.3, -1.2, 0.8, 0.0], torch.tensor([0.1, 0.4, 0.3, 0.2], dtype=torch.float64)
    free = torch.tensor(logits, dtype=torch.float64, requires_grad=True)
    policy = free.softmax(0)
    (expected,) = torch.autograd.grad((policy * (policy / reference).log()).sum(), free)
    for kind in ("k1", "k2"):
        assert torch.allclose(mean_gradient(kind, logits, reference), expected, rtol=0, atol=1e-12)
    assert not torch.allclose(mean_gradient("k3", logits, reference), expected, rtol=0, atol=1e-2)


@pytest.mark.parametrize("kind", ["k2", "k3"])
@pytest.mark.parametrize("name", LOSSES_WITH_A_REFERENCE)
def test_the_term_is_added_to_every_loss(name, kind):
    """A sum over trained tokens; a mean in gspo, whose other terms are meant too."""
    (now, m, t), a, chunks = some_tokens(5)
    r = [0.8 * x - 0.1 for x in m]
    mask = [i % 4 != 2 for i in range(len(now))]
    data = with_reference(with_teacher(log_inputs(now, m, a, mask=mask, chunks=chunks), t), r)
    plain = loss_and_gradient(LOSSES[name].function, data)
    loss, gradient = loss_and_gradient(LOSSES[name].function, data, kl_ref_tau=0.3, kl_ref=kind)
    share = 1 / sum(mask) if name == "gspo" else 1.0
    expected, slopes = 0.0, []
    for pi, mu, ref, keep in zip(now, m, r, mask, strict=True):
        weight = 0.3 * share * min(math.exp(pi - mu), 8.0) * keep
        expected += weight * ((pi - ref) ** 2 / 2 if kind == "k2" else math.exp(ref - pi) - (ref - pi) - 1)
        slopes.append(weight * (pi - ref if kind == "k2" else 1 - math.exp(ref - pi)))
    assert loss - plain[0] == pytest.approx(expected, abs=1e-10)
    assert [x - y for x, y in zip(gradient, plain[1], strict=True)] == pytest.approx(slopes, abs=1e-10)


@pytest.mark.parametrize("name", LOSSES_WITH_A_REFERENCE)
def test_k1_shifts_the_advantage_of_every_loss(name):
    (now, m, t), a, chunks = some_tokens(5)
    r = [0.8 * x - 0.1 for x in m]
    data = with_reference(with_teacher(log_inputs(now, m, a, chunks=chunks), t), r)
    found = loss_and_gradient(LOSSES[name].function, data, kl_ref_tau=0.3, kl_ref="k1")
    penalties = [0.3 * (pi - ref) for pi, ref in zip(now, r, strict=True)]
    if name == "opd":  # its advantage is the teacher's log ratio, t - l
        shifted = with_teacher(data, [x - p for x, p in zip(t, penalties, strict=True)])
    else:
        shifted = replace(data, advantages=data.advantages - torch.tensor(penalties, dtype=torch.float64))
    expected = loss_and_gradient(LOSSES[name].function, shifted)
    assert found[0] == pytest.approx(expected[0], rel=1e-12)
    assert found[1] == pytest.approx(expected[1], rel=1e-10, abs=1e-12)


def test_every_loss_but_sft_has_the_parameters_and_sft_has_no_policy_to_weigh_with():
    for name, loss in LOSSES.items():
        parameters = inspect.signature(loss.function).parameters
        assert ("kl_ref_tau" in parameters, "kl_ref" in parameters) == (name != "sft", name != "sft")
        assert not loss.reads_a_reference
        assert replace(loss, parameters={"kl_ref_tau": 0.1}).reads_a_reference


def test_a_loss_of_ones_own_asks_for_it_by_a_parameter_of_that_name():
    def mine(data: LossInputs, kl_ref_tau: float = 0.1) -> LossOutputs:
        terms = reference_term(data, kl_ref_tau=kl_ref_tau).terms
        return LossOutputs(loss=(terms - data.trainer_logprobs[data.loss_mask]).sum())

    loss = Loss(mine, level="token")
    assert loss.reads_a_reference
    assert not replace(loss, parameters={"kl_ref_tau": 0.0}).reads_a_reference
    data = with_reference(inputs([0.5], [0.5], [0.0]), [math.log(0.25)])
    assert loss(data).loss.item() == pytest.approx(LOG2 + 0.1 * LOG2**2 / 2, abs=1e-12)


@pytest.mark.parametrize("name", LOSSES_WITH_A_REFERENCE)
def test_without_the_stream_it_is_refused(name):
    data = inputs([0.5], [0.5], [1.0], chunks=[0], teacher=[0.5])
    with pytest.raises(ComponentError, match=r'no logprob stream "reference"; add a \[trainer\.reference\] table'):
        LOSSES[name].function(data, kl_ref_tau=0.1)


@pytest.mark.parametrize(("parameter", "value"), [("kl_ref_tau", -1.0), ("kl_ref", "k4")])
def test_parameters_that_cannot_be_are_refused(parameter, value):
    with pytest.raises(ComponentError, match=rf"trainer\.loss\.{parameter}: found"):
        LOSSES["default"].function(inputs([0.5], [0.5], [1.0]), **{parameter: value})
