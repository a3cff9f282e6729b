"""The embedded sampler returns the ids among which it drew each token, and logprobs over these ids."""

import asyncio
import math

import numpy as np
import pytest
import torch
from step_gate import StepGate
from test_torch_engine import make, request

from waiting import until

pytestmark = [pytest.mark.usefixtures("kernel"), pytest.mark.realtime]


@pytest.fixture
async def sampler(models):
    sampler = make(models["tied"])
    yield sampler
    await sampler.close()


def by_definition(logits, *, top_k=0, top_p=1.0, min_p=0.0):
    """Ids by rank, the first k; of them the fewest with mass p; of them those with a share of the first one's."""
    order = sorted(range(len(logits)), key=lambda v: -logits[v])[: top_k or None]
    weights = {v: math.exp(logits[v] - logits[order[0]]) for v in order}
    nucleus, mass, total = [], 0.0, math.fsum(weights.values())
    for v in order:
        if top_p == 1 or mass < top_p * total:
            nucleus.append(v)
        mass += weights[v]
    return sorted(v for v in nucleus if weights[v] >= min_p)


CUTS = [{"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.3}, {"top_k": 20, "top_p": 0.8, "min_p": 0.02}]


@pytest.mark.parametrize("cut", CUTS, ids=str)
async def test_each_token_comes_with_the_ids_that_were_kept_and_its_logprob_over_them(sampler, references, cut):
    answers = await asyncio.gather(
        *(
            sampler.generate(
                request(seed=seed, max_tokens=12, temperature=0.5 + seed / 2, return_kept_sets=True, **cut)
            )
            for seed in range(4)
        ),
        sampler.generate(request(max_tokens=12)),
    )
    assert answers[-1].kept_sets is None
    for seed, answer in enumerate(answers[:-1]):
        kept = answer.kept_sets
        assert len(kept) == len(answer.ids) == 12 and kept.ids.dtype == np.int32
        with torch.no_grad():
            logits = references["tied"](torch.tensor([[1, 2, 3, *answer.ids]])).logits[0, 2:-1].double()
        logits /= 0.5 + seed / 2
        for place, (token, logprob) in enumerate(zip(answer.ids.tolist(), answer.logprobs.tolist(), strict=True)):
            row = logits[place]
            assert kept[place].tolist() == by_definition(row.tolist(), **cut)
            over_kept = row[kept[place].tolist()].logsumexp(0)
            assert abs(logprob - float(row[token] - over_kept)) <= 5e-5


async def test_sets_are_returned_where_they_are_asked_for_and_something_is_cut(sampler):
    for params in (
        {"top_k": 3},
        {"return_kept_sets": True},
        {"top_k": 3, "return_kept_sets": True, "temperature": 0.0},
    ):
        assert (await sampler.generate(request(max_tokens=3, **params))).kept_sets is None
    all_kept = await sampler.generate(request(max_tokens=3, top_k=10**6, return_kept_sets=True))
    assert all_kept.kept_sets.counts.tolist() == [0, 0, 0]


async def test_new_weights_leave_one_set_for_each_token(sampler, models, monkeypatch):
    gate = StepGate(sampler, monkeypatch, tokens=4)
    asked = asyncio.ensure_future(sampler.generate(request(max_tokens=100, top_k=4, return_kept_sets=True)))
    await until(lambda: sampler.stats().sampled_tokens >= 4)
    await sampler.update_weights(models["tied_later"], 1)
    gate.open()
    answer = await asked
    assert set(answer.policy_versions.tolist()) == {0, 1}
    assert answer.kept_sets.counts.tolist() == [4] * 100
    assert all(token in answer.kept_sets[place] for place, token in enumerate(answer.ids.tolist()))
