"""A vLLM that returns the ids among which it drew each token, over a double of its routes."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from inference.vllm.tiny_model import TinyModel
from inference.vllm.vllm_double import VllmDouble, serving
from verbatim.core.errors import RecordError, RunStopped, UsageError
from verbatim.inference import SampleRequest, SamplingParams
from verbatim.inference.vllm.replica import VllmReplica
from verbatim.run.orchestrator.weight_sync import WeightSync
from verbatim.trainer.transport.canary import Probes
from waiting import HANGS

pytestmark = pytest.mark.realtime


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return TinyModel(tmp_path_factory.mktemp("cut") / "weights", tied=False)


@contextlib.asynccontextmanager
async def connected(trainer: TinyModel, *, returns: bool = True, **settings: Any) -> AsyncIterator[Any]:
    """The server, which returns kept sets or does not, and a sampler over it that is used by a run that cuts."""
    double = VllmDouble(trainer.published)
    double.facts["returns_kept_sets"] = returns
    async with serving(double) as url:
        replica = VllmReplica(
            url,
            name="replica 0",
            model="policy",
            context_length=512,
            vocab_size=trainer.vocab_size,
            policy_version=0,
            phase_timeout=HANGS,
            **{"return_kept_sets": True, **settings},
        )
        try:
            yield double, replica
        finally:
            await replica.close()


def request(ids: np.ndarray, **params: Any) -> SampleRequest:
    return SampleRequest(prompt_ids=ids, params=SamplingParams(**params), seed=0)


def logits_of(trainer: TinyModel, ids: np.ndarray) -> torch.Tensor:
    """What predicts each token but the first: [L - 1, V]."""
    with torch.no_grad():
        found: torch.Tensor = trainer.model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0, :-1].double()
    return found


def kept_by_vllm(logits: list[float], *, top_k: int, top_p: float = 1.0, min_p: float = 0.0) -> list[int]:
    """The ids with a share `min_p` of the most likely one's probability; of them the first k; of them the fewest with
    mass p."""
    weights = np.exp(np.array(logits) - max(logits))
    order = [v for v in sorted(range(len(weights)), key=lambda v: -weights[v]) if weights[v] >= min_p][:top_k]
    before = np.cumsum(weights[order]) - weights[order]
    return sorted(v for v, mass in zip(order, before, strict=True) if mass < top_p * weights[order].sum())


@pytest.mark.parametrize(
    ("cut", "temperature"),
    [
        ({"top_k": 5}, 1.0),
        ({"top_k": 40, "top_p": 0.7}, 0.7),
        ({"top_k": 40, "min_p": 0.3}, 1.0),
        ({"top_k": 30, "top_p": 0.8, "min_p": 0.1}, 1.5),
    ],
)
async def test_logprobs_are_the_trainers_over_the_ids_that_were_kept(
    trainer: TinyModel, cut: dict[str, Any], temperature: float
):
    async with connected(trainer) as (_, replica):
        await replica.check_server()
        prompt = trainer.ids(20)
        asked = request(prompt, max_tokens=8, temperature=temperature, return_kept_sets=True, **cut)
        found = await replica.generate(asked)
        rows = logits_of(trainer, np.concatenate([prompt, found.ids]))[-8:] / temperature
        assert found.kept_sets is not None and len(found.kept_sets) == 8
        assert max(found.kept_sets.counts) > 1
        for place, row in enumerate(rows):
            kept = found.kept_sets[place].tolist()
            assert kept == kept_by_vllm(row.tolist(), **cut)
            over_kept = row[kept].log_softmax(-1)[kept.index(int(found.ids[place]))]
            assert abs(float(over_kept) - float(found.logprobs[place])) < 5e-5


async def test_greedy_requests_are_sent_as_the_first_of_one(trainer: TinyModel):
    async with connected(trainer) as (_, replica):
        prompt = trainer.ids(20)
        found = await replica.generate(request(prompt, max_tokens=4, temperature=0.0))
        whole = np.concatenate([prompt, found.ids])
        assert found.ids.tolist() == logits_of(trainer, whole).argmax(-1).tolist()[-4:]
        assert found.logprobs.tolist() == [0.0] * 4 and found.kept_sets is None


async def test_scores_are_those_of_the_whole_distribution(trainer: TinyModel):
    async with connected(trainer) as (_, replica):
        ids = trainer.ids(30)
        expected = trainer.logprobs(ids)
        assert np.abs((await replica.prompt_logprobs(ids))[1:] - expected).max() < 5e-5
        assert await replica.cached_logprob(ids) == pytest.approx(expected[-1], abs=5e-5)


async def test_sets_that_are_not_asked_for_are_not_recorded(trainer: TinyModel):
    """Those of an evaluation, which the server returns all the same."""
    async with connected(trainer) as (_, replica):
        assert (await replica.generate(request(trainer.ids(5), max_tokens=3, top_k=4))).kept_sets is None


async def test_a_request_without_top_k_is_refused_before_it_is_sent(trainer: TinyModel):
    async with connected(trainer) as (double, replica):
        for cut in ({}, {"top_p": 0.9}, {"min_p": 0.1}):
            with pytest.raises(
                RecordError, match=r"accepts only requests with a top_k, which bounds their size: set one, .* 512"
            ):
                await replica.generate(request(trainer.ids(5), **cut))
        assert double.calls == []


@pytest.mark.parametrize(
    ("returns", "wanted", "said"),
    [
        (
            False,
            True,
            "does not return the kept set of each token.*add --return-sampling-mask, which vLLM 0",
        ),
        (True, False, "refuses requests without top_k: leave out --return-sampling-mask"),
    ],
)
async def test_a_server_with_other_flags_is_refused_before_anything_is_sampled(
    trainer: TinyModel, returns: bool, wanted: bool, said: str
):
    async with connected(trainer, returns=returns, return_kept_sets=wanted) as (double, replica):
        with pytest.raises(UsageError, match=said):
            await replica.check_server()
        assert double.calls == ["/collective_rpc"]


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("", None),
        ("no kept sets", "returns no kept set for a token sampled with top_k = 4"),
        ("wrong kept sets", "from those computed over the returned kept set"),
    ],
)
async def test_the_canary_draws_from_a_cut_distribution_there_too(trainer: TinyModel, fault: str, said: str | None):
    async with connected(trainer) as (double, replica):
        double.fault = fault
        ids = tuple(trainer.ids(count, seed=count) for count in (9, 12, 40))
        probes = Probes(token_ids=ids, logprobs=tuple(map(trainer.logprobs, ids)))
        sync = WeightSync(replica, probes, 1e-4, cuts=True)
        if said is None:
            await sync.check_first()
        else:
            with pytest.raises(RunStopped, match=said):
                await sync.check_first()


def test_the_double_cuts_in_the_order_of_vllm(tmp_path: Path):
    """Of 0.5, 0.3, 0.15 and 0.05: `min_p = 0.2` leaves three, of which the nucleus of 0.6 is two (0.5 / 0.95 < 0.6)."""
    from inference.vllm.vllm_double import processed

    found = processed(np.log([0.3, 0.05, 0.5, 0.15]), {"min_p": 0.2, "top_k": 4, "top_p": 0.6})
    assert np.exp(found) == pytest.approx([3 / 8, 0, 5 / 8, 0])
