"""The gradient of every loss is that of its formula, with what the formula calls detached held still.

The formulas are written out again here, on plain lists, and differentiated by finite differences.
"""

import math
import random
from dataclasses import replace

import pytest
import torch

from algorithms.losses.loss_inputs import log_inputs
from verbatim.algorithms.losses import LOSSES, LossInputs


def clip(x, low, high):
    return min(max(x, low), high)


def default_formula(now, then, m, a, t, chunks):
    total = 0.0
    for pi, l0, mu, adv in zip(now, then, m, a, strict=True):
        moved = math.exp(l0) - math.exp(mu)
        dropped = moved > 0.2 if adv > 0 else moved < -0.2
        total += (0.0 if dropped else -adv * min(math.exp(pi - mu), 8.0)) + 1e-3 * (pi - mu) ** 2
    return total


def ppo_term(w, adv, low, high):
    return -min(w * adv, clip(w, 1 - low, 1 + high) * adv)


def ppo_formula(now, then, m, a, t, chunks):
    return sum(ppo_term(math.exp(pi - mu), adv, 0.2, 0.28) for pi, mu, adv in zip(now, m, a, strict=True))


def gspo_formula(now, then, m, a, t, chunks):
    s = math.exp(sum(pi - mu for pi, mu in zip(now, m, strict=True)) / len(m))
    return sum(ppo_term(s, adv, 3e-4, 4e-4) for adv in a) / len(a)


def cispo_formula(now, then, m, a, t, chunks):
    return sum(-clip(math.exp(l0 - mu), 0.0, 6.0) * adv * pi for pi, l0, mu, adv in zip(now, then, m, a, strict=True))


def tis_formula(now, then, m, a, t, chunks):
    return sum(-min(math.exp(l0 - mu), 2.0) * adv * pi for pi, l0, mu, adv in zip(now, then, m, a, strict=True))


def ipa_formula(now, then, m, a, t, chunks):
    total = 0.0
    for chunk in set(chunks):
        mine = [i for i, c in enumerate(chunks) if c == chunk]
        rho = math.exp(sum(then[i] - m[i] for i in mine) / len(mine))
        if rho <= 2.0:
            weight = 1.0 if a[mine[0]] > 0 else clip(rho, 0.0, 1.0)
            total -= weight * a[mine[0]] * sum(now[i] for i in mine)
    return total


def opd_formula(now, then, m, a, t, chunks):
    terms = zip(now, then, m, t, strict=True)
    return sum(-(te - l0) * min(math.exp(pi - mu), 8.0) + 1e-3 * (pi - mu) ** 2 for pi, l0, mu, te in terms)


def sft_formula(now, then, m, a, t, chunks):
    return -sum(now)


FORMULAS = {
    "default": default_formula,
    "ppo": ppo_formula,
    "gspo": gspo_formula,
    "cispo": cispo_formula,
    "tis": tis_formula,
    "ipa": ipa_formula,
    "opd": opd_formula,
    "sft": sft_formula,
}


def some_tokens(seed):
    """Sixteen tokens in five chunks that are mixed up, each with the advantage of its chunk."""
    rng = random.Random(seed)
    chunks = [rng.randrange(5) for _ in range(16)]
    of_chunk = [rng.choice([-1.5, -0.5, 0.5, 1.5]) for _ in range(5)]
    probabilities = [[math.log(rng.uniform(0.02, 0.98)) for _ in chunks] for _ in range(3)]
    return probabilities, [of_chunk[c] for c in chunks], chunks


def with_teacher(data, logprobs):
    return replace(data, teacher_logprobs=torch.tensor(logprobs, dtype=torch.float64))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradient_are_those_of_the_formula(name, seed):
    (now, m, t), a, chunks = some_tokens(seed)
    mask = [i % 5 != 3 for i in range(len(now))]
    kept = [[x for x, keep in zip(column, mask, strict=True) if keep] for column in (now, m, a, t, chunks)]
    l0, formula, step = kept[0], FORMULAS[name], 1e-6

    def at(change, place):
        moved = [pi + change * (i == place) for i, pi in enumerate(l0)]
        return formula(moved, l0, *kept[1:])

    data = with_teacher(log_inputs(now, m, a, mask=mask, chunks=chunks), t)
    loss = LOSSES[name](data).loss
    (gradient,) = torch.autograd.grad(loss, data.trainer_logprobs)
    expected = iter([(at(step, i) - at(-step, i)) / (2 * step) for i in range(len(l0))])
    assert loss.item() == pytest.approx(formula(l0, l0, *kept[1:]), rel=1e-12)
    assert gradient.tolist() == pytest.approx([next(expected) if keep else 0.0 for keep in mask], abs=2e-8)


def test_every_loss_has_its_formula_here():
    assert FORMULAS.keys() == LOSSES.keys()


def of_one_token(log_ratio, advantage, dtype):
    trainer = torch.tensor([-1.0 if log_ratio > 0 else log_ratio - 1.0], dtype=dtype, requires_grad=True)
    inference = trainer.detach() - log_ratio
    teacher = trainer.detach() + advantage
    mask, chunks = torch.tensor([True]), torch.tensor([0])
    return LossInputs(trainer, inference, teacher, torch.tensor([advantage], dtype=dtype), mask, chunks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("log_ratio", "advantage"),
    [
        (1000.0, 1.0),
        (1000.0, 0.0),
        (-1000.0, 1.0),
        (-1000.0, 0.0),
        (-1000.0, -1.0),
        (0.0, -1.0),
    ],
)
@pytest.mark.parametrize("name", LOSSES)
def test_a_ratio_that_overflows_leaves_the_gradient_finite(name, log_ratio, advantage, dtype):
    data = of_one_token(log_ratio, advantage, dtype)
    loss = LOSSES[name](data).loss
    (gradient,) = torch.autograd.grad(loss, data.trainer_logprobs)
    assert loss.dtype == dtype and torch.isfinite(loss) and torch.isfinite(gradient).all()


@pytest.mark.parametrize("name", ["ppo", "gspo"])
def test_an_unbounded_push_down_is_infinite_and_not_nan(name):
    """Where the formula itself has no bound, the loss says so; the trainer refuses it by name."""
    assert LOSSES[name](of_one_token(1000.0, -1.0, torch.float64)).loss.item() == math.inf


@pytest.mark.parametrize("name", LOSSES)
def test_what_lies_outside_the_mask_is_never_read(name):
    (now, m, t), a, chunks = some_tokens(0)
    mask = [i % 3 != 0 for i in range(len(now))]

    def outputs(outside):
        def hide(column, hidden=outside):
            return [x if keep else hidden for x, keep in zip(column, mask, strict=True)]

        data = log_inputs(hide(now), hide(m), hide(a), mask=mask, chunks=hide(chunks, -1))
        return LOSSES[name](with_teacher(data, hide(t)))

    zeros, nans = outputs(0.0), outputs(math.nan)
    assert zeros.loss.item() == nans.loss.item()
    assert {k: v.item() for k, v in zeros.metrics.items()} == {k: v.item() for k, v in nans.metrics.items()}
    assert not any(value.requires_grad for value in zeros.metrics.values())


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "sft"])
def test_every_loss_says_how_many_tokens_it_masks(name):
    """Those have no policy gradient: without a KL term, none at all."""
    (now, m, t), a, chunks = some_tokens(3)
    data = with_teacher(log_inputs(now, m, a, chunks=chunks), t)
    parameters = {"kl_tau": 0.0, "delta": math.inf} if name in ("default", "opd") else {}
    outputs = LOSSES[name].function(data, **parameters)
    (gradient,) = torch.autograd.grad(outputs.loss, data.trainer_logprobs)
    assert outputs.metrics["masked_by_loss"].item() == (gradient == 0).sum().item()
