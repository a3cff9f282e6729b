"""Two real vLLM servers behind one sampler, one of them with two workers.

The largest |delta logprob| between sampler and trainer over 20 updates, and planted faults on one server of two. What
the pool does about each fault is tested over doubles; `test_real_server` compares what doubles and real servers say.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from campaigns import Campaign, sized
from inference.vllm.real_servers import SIZES, TOLERANCE, Served
from inference.vllm.test_real_server import SAID
from inference.vllm.test_server_pool import PLANTED, Trained
from inference.vllm.tiny_model import TinyModel
from verbatim.inference import SampleRequest, SamplingParams
from verbatim.inference.pool.pool import ReplicaPool
from waiting import until

pytestmark = [pytest.mark.vllm, pytest.mark.realtime, pytest.mark.xdist_group("plain servers")]
CHOSEN = (
    "stale head",
    "stale layer",
    "swapped q and k",
    "version not advanced",
    "update skipped",
    "one number",
    "stale v",
    "rows moved",
    "stale prefix",
)


def said_of(fault: str, version: int) -> str:
    """What is said of a replica that has this fault at this version; `PLANTED` has it at version 2."""
    said = SAID.get(fault, PLANTED[fault])
    said = said.replace("version '1', expected 2", f"version '{version - 1}', expected {version}")
    return said.replace("version 2", f"version {version}")


@dataclass
class Two:
    """Two real servers, and the trainer of their model."""

    servers: list[Served[TinyModel]]
    trained: Trained

    async def pool(self) -> ReplicaPool:
        """A pool of both, healed, with the trainer's newest weights."""
        for server in self.servers:
            server.plant("")
        path = self.trained.trainer.publish(f"healed{self.trained.version}-{os.urandom(3).hex()}")
        replicas = [
            server.replica(name=f"replica {n}", policy_version=self.trained.version)
            for n, server in enumerate(self.servers)
        ]
        for replica in replicas:
            await replica.prove_path(path)
        pool = ReplicaPool(replicas, weights=path)
        await pool.check_replicas(self.trained.canary())
        return pool


@pytest.fixture(scope="module")
def two(tied_server: Served[TinyModel], halves_server: Served[TinyModel]) -> Two:
    return Two([tied_server, halves_server], Trained(tied_server.trainer))


async def test_logprobs_are_the_trainers_over_twenty_updates_of_two_replicas_that_sample(two: Two):
    pool, trained = await two.pool(), two.trained
    trainer, weights, found, going_on = trained.trainer, {}, [], True

    def remember() -> None:
        weights[trained.version] = {k: v.clone() for k, v in trainer.model.state_dict().items()}

    async def sample(session: int) -> None:
        number = 0
        while going_on:
            number += 1
            prompt = trainer.ids(30 + session, seed=1000 * session + number)
            params = SamplingParams(max_tokens=24)
            request = SampleRequest(prompt_ids=prompt, params=params, seed=number, session=f"s{session}")
            found.append((prompt, await pool.generate(request)))

    remember()
    sampling = [asyncio.ensure_future(sample(session)) for session in range(4)]
    first = trained.version
    for n in range(20):
        update = trained.step(SIZES[n % 2])
        remember()
        await pool.update_replicas(*update)
        seen = len(found)
        await until(lambda seen=seen: any(trained.version in done.policy_versions for _, done in found[seen:]))
    going_on = False
    await asyncio.gather(*sampling)
    metrics = pool.metrics()
    await pool.close()
    names = ("failed_checks", "lost", "tokens_lost", "requests_lost", "requests_failed")
    assert [metrics[f"replicas/{name}"] for name in names] == [0] * 5
    largest, num_tokens, newest = 0.0, 0, {k: v.clone() for k, v in trainer.model.state_dict().items()}
    for prompt, done in found:
        for version in np.unique(done.policy_versions):
            trainer.model.load_state_dict(weights[int(version)])
            expected = trainer.logprobs(np.concatenate([prompt, done.ids]))[-len(done.ids) :]
            largest = max(largest, float(np.abs(done.logprobs - expected)[done.policy_versions == version].max()))
        num_tokens += len(done.ids)
    trainer.model.load_state_dict(newest)
    print(f"largest |delta logprob| over 20 updates of two replicas: {largest:.2g}, {num_tokens} tokens")
    assert {int(v) for _, done in found for v in done.policy_versions} >= set(range(first + 1, first + 21))
    assert largest <= TOLERANCE


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("fault", "size"),
    sized(
        [("update skipped", 1e-3), ("one number", 1e-6), ("stale prefix", 1e-6)],
        [(fault, size) for fault in CHOSEN for size in SIZES],
    ),
)
async def test_a_planted_fault_on_one_of_two_is_named_and_the_other_goes_on(
    two: Two, fault: str, size: float, caplog: pytest.LogCaptureFixture, campaign: Callable[[str], Campaign]
):
    campaign("faults planted into one of two real vLLM servers").add()
    pool, trained = await two.pool(), two.trained
    await pool.update_replicas(*trained.step(size))
    two.servers[1].plant(fault)
    with caplog.at_level(logging.WARNING):
        await pool.update_replicas(*trained.step(size))
    said = [record.getMessage() for record in caplog.records if record.name.endswith(".replica_supervisor")]
    assert len(said) == 2 and all(re.search(said_of(fault, trained.version), line) for line in said), said
    await pool.update_replicas(*trained.step(size))
    metrics = pool.metrics()
    assert (metrics["replicas/serving"], metrics["replicas/failed_checks"]) == (1, 2)
    await pool.close()
