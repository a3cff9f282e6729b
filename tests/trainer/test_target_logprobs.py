import dataclasses
import math

import pytest
import torch
from torch import nn

from models.other_models import write_other
from verbatim.core.types import KeptSets
from verbatim.models.head import CausalLM
from verbatim.models.kept_sets import DeviceKeptSets
from verbatim.models.loading import load_model
from verbatim.trainer.logprobs import TargetLogprobs


@dataclasses.dataclass
class Asked:
    """Stands for `DeviceTargets`."""

    target_ids_M: torch.Tensor
    temperatures_M: torch.Tensor
    kept_sets: DeviceKeptSets | None = None


class Head:
    """Stands for `CausalLM`, and remembers how many rows of logits it made at a time."""

    def __init__(self, weight):
        self.weight = nn.Parameter(weight)
        self.rows = []

    def logits(self, hidden):
        self.rows.append(len(hidden))
        return hidden @ self.weight.T


@pytest.fixture
def problem():
    torch.manual_seed(0)
    hidden = torch.randn(10, 4, dtype=torch.float64, requires_grad=True)
    ids = torch.randint(0, 7, (10,))
    temperatures = torch.linspace(0.5, 2.0, 10)
    return Head(torch.randn(7, 4, dtype=torch.float64)), hidden, ids, temperatures


def reference(head, hidden, ids, temperatures):
    logprobs = ((hidden @ head.weight.T) / temperatures[:, None].double()).log_softmax(-1)
    return logprobs.gather(1, ids[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


def test_two_tokens_by_hand():
    # Logits [ln 3, 0] at T = 1: p = 3/4; at T = 1/2 they double: p = 9/10.
    head = Head(torch.tensor([[math.log(3.0)], [0.0]], dtype=torch.float64))
    found = TargetLogprobs(head, 8).forward(
        torch.ones(2, 1, dtype=torch.float64), Asked(torch.tensor([0, 0]), torch.tensor([1.0, 0.5]))
    )
    assert found.logprobs_M.exp().tolist() == pytest.approx([0.75, 0.9], abs=1e-12)
    # -(3/4 ln 3/4 + 1/4 ln 1/4) and -(0.9 ln 0.9 + 0.1 ln 0.1)
    assert found.entropy_M.tolist() == pytest.approx([0.5623351446188083, 0.3250829733914482], abs=1e-12)


def test_the_head_is_in_float32_where_layers_are_cast_to_bfloat16():
    torch.manual_seed(0)
    head, ids = Head(torch.randn(7, 4)), torch.randint(0, 7, (10,))
    hidden = torch.randn(10, 4).bfloat16().requires_grad_()
    rounding = TargetLogprobs(head, 8, lambda: torch.autocast("cpu", dtype=torch.bfloat16))
    expected, _ = reference(head, hidden.float(), ids, torch.ones(10))
    found = rounding.forward(hidden.detach(), Asked(ids, torch.ones(10)))
    torch.testing.assert_close(found.logprobs_M.double(), expected.detach(), rtol=1e-6, atol=1e-6)
    wanted = torch.autograd.grad(-expected.sum(), [hidden, head.weight])
    rounding.backward(hidden, Asked(ids, torch.ones(10)), lambda at, found: -torch.ones_like(found.logprobs_M))
    torch.testing.assert_close(head.weight.grad, wanted[1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(hidden.grad, wanted[0])


@pytest.mark.parametrize("chunk", [1, 3, 10, 99])
def test_chunks_agree_with_one_log_softmax(problem, chunk):
    head, hidden, ids, temperatures = problem
    logprobs, entropy = reference(head, hidden, ids, temperatures)
    found = TargetLogprobs(head, chunk).forward(hidden, Asked(ids, temperatures))
    torch.testing.assert_close(found.logprobs_M, logprobs, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.entropy_M, entropy, rtol=1e-12, atol=1e-12)
    assert not found.logprobs_M.requires_grad
    assert max(head.rows) == min(chunk, 10)


@pytest.mark.parametrize("chunk", [1, 3, 10, 99])
def test_gradients_agree_with_one_log_softmax(problem, chunk):
    head, hidden, ids, temperatures = problem
    logprobs, _ = reference(head, hidden, ids, temperatures)
    expected = torch.autograd.grad(logprobs.exp().sum(), [hidden, head.weight])  # d exp(l) / d l = exp(l)
    seen = []

    def gradient(at, found):
        seen.append((at.start, at.stop))
        return found.logprobs_M.exp()

    TargetLogprobs(head, chunk).backward(hidden * 1, Asked(ids, temperatures), gradient)
    torch.testing.assert_close(hidden.grad, expected[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(head.weight.grad, expected[1], rtol=1e-12, atol=1e-12)
    assert seen == [(i, min(i + chunk, 10)) for i in range(0, 10, chunk)]
    assert max(head.rows) == min(chunk, 10)


def cut_problem(problem):
    """Sets of 1 to 7 of 7 ids that hold the target, and two targets of which nothing was cut."""
    head, hidden, ids, temperatures = problem
    sets = [[(token + k) % 7 for k in range(i)] for i, token in enumerate(ids.tolist()) if i < 8]
    kept = KeptSets.of([*sets, [], list(range(7))])
    outside = torch.zeros(10, 7, dtype=torch.bool)
    for row, own in enumerate(sets):
        outside[row] = torch.tensor([bool(own) and v not in own for v in range(7)])
    logits = ((hidden @ head.weight.T) / temperatures[:, None].double()).masked_fill(outside, -1e30)
    logprobs = logits.log_softmax(-1)
    return Asked(ids, temperatures, DeviceKeptSets(kept, ids.device)), logprobs, ids


@pytest.mark.parametrize("chunk", [1, 3, 10, 99])
def test_kept_sets_are_normalised_over_in_logprobs_entropies_and_gradients(problem, chunk):
    head, hidden, _, _ = problem
    asked, logprobs_MV, ids = cut_problem(problem)
    logprobs = logprobs_MV.gather(1, ids[:, None])[:, 0]
    found = TargetLogprobs(head, chunk).forward(hidden, asked)
    torch.testing.assert_close(found.logprobs_M, logprobs, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.entropy_M, -(logprobs_MV.exp() * logprobs_MV).sum(-1), rtol=1e-12, atol=1e-12)
    assert found.logprobs_M[1] == 0, "a set of one id has one outcome"
    expected = torch.autograd.grad(logprobs.exp().sum(), [hidden, head.weight])
    TargetLogprobs(head, chunk).backward(hidden * 1, asked, lambda at, found: found.logprobs_M.exp())
    torch.testing.assert_close(hidden.grad, expected[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(head.weight.grad, expected[1], rtol=1e-12, atol=1e-12)


def test_huge_logits_do_not_overflow():
    head = Head(torch.tensor([[3e4], [-3e4]]))
    found = TargetLogprobs(head, 1).forward(torch.ones(1, 1), Asked(torch.tensor([0]), torch.tensor([0.01])))
    assert found.logprobs_M.tolist() == [0.0]
    assert found.entropy_M.tolist() == [0.0]


def test_bfloat16_logits_are_summed_in_float32():
    # 1000 equal logits: 1/1000 each. A bfloat16 sum would stall at 256.
    head = Head(torch.ones(1000, 1, dtype=torch.bfloat16))
    found = TargetLogprobs(head, 1).forward(
        torch.ones(1, 1, dtype=torch.bfloat16), Asked(torch.tensor([3]), torch.ones(1))
    )
    assert found.logprobs_M.dtype == torch.float32
    assert found.logprobs_M.item() == pytest.approx(-math.log(1000), abs=1e-5)


@pytest.mark.parametrize("is_cut", [False, True])
def test_peak_memory_is_a_quarter_of_the_full_logits_at_the_default_chunk(is_cut):
    # 8,192 targets at the default of 1,024, shrunk by 16: 512 targets at 64, vocabulary 8,000.
    targets, chunk, vocab, width = 512, 64, 8_000, 8
    head = Head(0.02 * torch.randn(vocab, width))
    head.weight.grad = torch.zeros_like(head.weight)
    hidden = torch.randn(targets, width, requires_grad=True)
    ids = torch.randint(0, vocab, (targets,))
    kept = DeviceKeptSets(KeptSets.of([i, (i + 1) % vocab] for i in ids.tolist()), ids.device) if is_cut else None
    peak = peak_bytes(
        lambda: TargetLogprobs(head, chunk).backward(
            hidden * 1,
            Asked(ids, torch.ones(targets), kept),
            lambda at, found: -torch.ones_like(found.logprobs_M),
        )
    )
    assert peak <= 0.25 * targets * vocab * 4


def peak_bytes(function):
    """Most bytes of tensors alive at one time inside a call, by the profiler's allocation events."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        function()
    alive = peak = 0
    for event in sorted(
        (e for e in prof.profiler.kineto_results.events() if e.name() == "[memory]"), key=lambda e: e.start_ns()
    ):
        alive += event.nbytes()
        peak = max(peak, alive)
    assert peak > 0
    return peak


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_an_idle_pass_needs_no_plan_of_trees(name, tmp_path, monkeypatch):
    """On CUDA such a plan takes multiples of 128 tokens, and an idle pass has one."""
    lm = TargetLogprobs(CausalLM(load_model(write_other(name, tmp_path))), chunk=8)
    monkeypatch.setattr("verbatim.trainer.attention.rows.forest_plan", lambda *_: pytest.fail("a plan of trees"))
    lm.idle_pass()
    grads = [p.grad for p in lm.model.backbone.parameters() if p.grad is not None]
    assert grads
    assert not any(grad.any() for grad in grads)
