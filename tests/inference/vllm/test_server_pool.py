"""Two vLLM servers behind one sampler, over doubles: a planted fault on one of them costs its tokens, and no others."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import shutil
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from campaigns import Campaign, sized
from inference.vllm.test_replica import FAULTS
from inference.vllm.tiny_model import TinyModel
from inference.vllm.vllm_double import VllmDouble, serving
from verbatim.inference import SampleRequest, SamplingParams
from verbatim.inference.backends import BackendInputs
from verbatim.inference.pool.servers import ServerPool
from verbatim.inference.vllm.backend import vllm_backend
from verbatim.inference.vllm.settings import VllmSettings
from verbatim.run.orchestrator.weight_sync import Canary
from verbatim.trainer.transport.canary import Probes, probe_sequences
from waiting import until

pytestmark = pytest.mark.realtime

WAYS = [("tied", 1e-3), ("untied", 1e-6), ("tied", 1e-6), ("untied", 1e-3)]
"""The kind of the model, and by how much a step changes its weights."""
PLANTED = {
    **FAULTS,
    "version not advanced": "its weights are of version '1', expected 2",
    "nothing done": r"other values: .* and \d+ more",
    "half a file": "SafetensorError",
    "weights before": r"other values: .* and \d+ more",
    "stale prefix": r"read \d+ tokens from the prefix cache of the weights before version 2",
    "stale v": r"were not rebuilt: model\.layers\.0\.self_attn\.v_proj",
    "swapped gate and up": r"other values: model\.layers\.0\.mlp\.gate_proj\.weight, model\.layers\.0\.mlp\.up_proj",
    "swapped layers": r"other values: model\.layers\.0\.mlp\.down_proj\.weight, model\.layers\.1\.mlp\.down_proj",
    "zeros": r"other values: model\.layers\.0\.mlp\.gate_proj",
    "other sign": r"other values: model\.layers\.0\.mlp\.down_proj",
    "transposed": r"other values: model\.layers\.0\.self_attn\.q_proj",
    "rounded": r"other values: model\.layers\.0\.mlp\.up_proj",
    "rows moved": r"other values: model\.embed_tokens",
}
"""Each fault, and what is said of the replica that has it."""
MENDED = ("stale head", "update skipped", "half a file", "stale prefix")


def pairs(faults: Iterable[str]) -> list[tuple[str, str, float]]:
    """Each fault with one of the ways, and the one fault that looks otherwise with tied weights with both kinds."""
    return [*((fault, *WAYS[number % 4]) for number, fault in enumerate(faults)), ("stale head", "untied", 1e-6)]


@dataclass
class Trained:
    """A trainer and what it publishes: a folder and a canary for each version."""

    trainer: TinyModel

    def __post_init__(self) -> None:
        self.version = 0
        self.probes = self._probe()

    def _probe(self) -> Probes:
        ids = probe_sequences(self.trainer.vocab_size, 512)
        return Probes(token_ids=ids, logprobs=tuple(self.trainer.logprobs(sequence) for sequence in ids))

    def canary(self, before: Probes | None = None) -> Canary:
        return Canary(self.probes, before=before, tolerance=1e-4)

    def step(self, size: float, name: str | None = None) -> tuple[Path, int, Canary]:
        """The next version, as the pool is told of it."""
        self.version += 1
        path = self.trainer.step(name or f"v{self.version}", size)
        before, self.probes = self.probes, self._probe()
        return path, self.version, self.canary(before)


@contextlib.asynccontextmanager
async def two_servers(trained: Trained, **settings: float) -> AsyncIterator[tuple[ServerPool, list[VllmDouble]]]:
    folder = trained.trainer.published
    doubles = [VllmDouble(folder) for _ in range(2)]
    async with contextlib.AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(serving(double)) for double in doubles]
        found = VllmSettings(urls=tuple(urls), **settings)
        pool = await vllm_backend(BackendInputs(model=folder, context_length=512), found)
        assert isinstance(pool, ServerPool)
        stack.push_async_callback(pool.close)
        await pool.check_replicas(trained.canary())
        yield pool, doubles


@pytest.fixture
def trained(tmp_path: Path, kind: str) -> Trained:
    return Trained(TinyModel(tmp_path / "weights", tied=kind == "tied"))


def request(trained: Trained, session: str) -> SampleRequest:
    return SampleRequest(
        prompt_ids=trained.trainer.ids(12), params=SamplingParams(max_tokens=5), seed=0, session=session
    )


async def update_with_a_fault(
    trained: Trained, pool: ServerPool, double: VllmDouble, fault: str, size: float, *, mended: bool
) -> None:
    """An update that goes wrong on one server. Each server draws five tokens after the update has begun for it: those
    of the faulty one are withheld, booked, and drawn once more elsewhere.

    Args:
        mended: Whether the second attempt goes well.
    """
    double.fault, gate = fault, asyncio.Event()
    double.calls.clear()
    double.gates["/pause"] = gate
    path, version, canary = trained.step(size)
    updating = asyncio.ensure_future(pool.update_replicas(path, version, canary))
    await until(lambda: "/pause" in double.calls)
    drawn = double.generated
    asking = [asyncio.ensure_future(pool.generate(request(trained, f"{version} {n}"))) for n in range(2)]
    await until(lambda: double.generated == drawn + 5)
    if mended:
        second = double.gates["/pause"] = asyncio.Event()
        gate.set()
        await until(lambda: double.calls.count("/pause") == 2)
        double.fault = ""
        second.set()
    gate.set()
    await updating
    del double.gates["/pause"]
    done = await asyncio.gather(*asking)
    assert sorted(completion.num_lost_tokens for completion in done) == [0, 5]
    for completion in done:
        assert len(completion.ids) == 5 and completion.logprobs is not None and completion.policy_versions is not None
        if set(completion.policy_versions.tolist()) == {version}:
            whole = trained.trainer.logprobs(np.concatenate([trained.trainer.ids(12), completion.ids]))
            assert np.abs(completion.logprobs - whole[-5:]).max() < 5e-5


@pytest.mark.slow
@pytest.mark.campaign
@pytest.mark.parametrize(
    ("fault", "kind", "size"), sized(pairs(PLANTED), [(fault, *way) for fault in PLANTED for way in WAYS])
)
async def test_a_replica_with_a_planted_fault_is_named_reloaded_once_and_taken_out(
    trained: Trained, fault: str, size: float, caplog: pytest.LogCaptureFixture, campaign: Callable[[str], Campaign]
):
    """The campaign of healthy updates shows that none is named without a fault."""
    campaign("faults planted into one of two vLLM replicas").add()
    async with two_servers(trained) as (pool, doubles):
        await pool.update_replicas(*trained.step(size))
        with caplog.at_level(logging.WARNING):
            await update_with_a_fault(trained, pool, doubles[1], fault, size, mended=False)
        found = [record.getMessage() for record in caplog.records if record.name.endswith(".replica_supervisor")]
        assert len(found) == 2, found
        again, out = found
        assert again.startswith("replica 1") and "does not hold policy version 2: " in again
        assert "replica 1" in out and "is out for the rest of the run, 1 of 2 replicas are left: " in out
        for said in (again, out):
            assert re.search(PLANTED[fault], said), said
        assert doubles[1].calls.count("/pause") == 2
        await pool.update_replicas(*trained.step(size))
        done = [await pool.generate(request(trained, f"later {n}")) for n in range(3)]
        assert [completion.policy_versions.tolist() for completion in done] == [[3] * 5] * 3
        metrics = pool.metrics()
    assert (metrics["replicas/serving"], metrics["replicas/failed_checks"], metrics["replicas/lost"]) == (1, 2, 0)
    assert (metrics["replicas/tokens_lost"], metrics["replicas/requests_lost"]) == (5, 0)
    assert (metrics["replica/0/policy_version"], metrics["replica/1/policy_version"]) == (3, 1)


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "kind", "size"), pairs(MENDED))
async def test_a_fault_that_the_second_load_mends_costs_the_tokens_that_were_withheld_and_no_replica(
    trained: Trained, fault: str, size: float
):
    async with two_servers(trained) as (pool, doubles):
        await pool.update_replicas(*trained.step(size))
        await update_with_a_fault(trained, pool, doubles[1], fault, size, mended=True)
        await pool.update_replicas(*trained.step(size))
        done = await asyncio.gather(*(pool.generate(request(trained, f"later {n}")) for n in range(2)))
        assert [completion.policy_versions.tolist() for completion in done] == [[3] * 5] * 2
        metrics = pool.metrics()
    assert (metrics["replicas/serving"], metrics["replicas/failed_checks"], metrics["replicas/lost"]) == (2, 1, 0)
    assert (metrics["replicas/tokens_lost"], metrics["replicas/requests_lost"]) == (5, 0)
    assert (metrics["replica/0/policy_version"], metrics["replica/1/policy_version"]) == (3, 3)


@pytest.mark.campaign
@pytest.mark.slow
@pytest.mark.parametrize("kind", sized(["untied"], ["tied", "untied"]))
async def test_healthy_updates_raise_no_alarm_while_both_servers_sample(
    trained: Trained, caplog: pytest.LogCaptureFixture, campaign: Callable[[str], Campaign]
):
    """The campaign of planted faults shows that an alarm can be raised."""
    row, num_updates = campaign("healthy updates of two vLLM replicas that sample"), sized(20, 200)
    async with two_servers(trained) as (pool, doubles):
        going_on, lost = True, 0

        async def sample(session: str) -> None:
            nonlocal lost
            while going_on:
                lost += (await pool.generate(request(trained, session))).num_lost_tokens

        sampling = [asyncio.ensure_future(sample(f"s{n}")) for n in range(2)]
        for number in range(num_updates):
            path, version, canary = trained.step((1e-3, 1e-6)[number % 2], "next")
            drawn = {double: double.drawn for double in doubles}
            await pool.update_replicas(path, version, canary)
            shutil.rmtree(path)
            for double, was in drawn.items():
                await until(lambda double=double, was=was: double.drawn > was)
            row.add()
        going_on = False
        await asyncio.gather(*sampling)
        metrics = pool.metrics()
    assert [metrics[f"replica/{n}/policy_version"] for n in range(2)] == [num_updates] * 2
    names = ("failed_checks", "lost", "requests_failed", "requests_resent", "requests_lost", "tokens_lost")
    assert [metrics[f"replicas/{name}"] for name in names] == [0] * 6
    assert lost == 0
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tied"])
async def test_an_engine_that_answers_and_draws_nothing_for_stall_timeout_is_given_up(trained: Trained):
    async with two_servers(trained, stall_timeout=0.5) as (pool, doubles):
        doubles[0].running.clear()
        doubles[1].draws_for_others = True  # it stays however long it takes this busy machine to answer
        done = await pool.generate(request(trained, "a"))
        metrics = pool.metrics()
    assert (len(done.ids), done.num_lost_tokens) == (5, 0)
    names = ("lost", "requests_resent", "requests_lost", "failed_checks")
    assert [metrics[f"replicas/{name}"] for name in names] == [1, 1, 1, 0]
