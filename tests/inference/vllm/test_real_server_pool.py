"""Two real vLLM servers behind one sampler.

The largest |delta logprob| between sampler and trainer over 20 updates, and planted faults on one server of two.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from inference.vllm.test_real_server import FAULTY, PYTHON
from inference.vllm.test_server_pool import PLANTED, Trained
from inference.vllm.tiny_model import TinyModel
from verbatim.inference import SampleRequest, SamplingParams
from verbatim.inference.pool.pool import ReplicaPool
from verbatim.inference.vllm.command import PLUGIN
from verbatim.inference.vllm.process import free_port, make_process
from verbatim.inference.vllm.replica import VllmReplica
from verbatim.inference.vllm.settings import VllmSettings

pytestmark = pytest.mark.vllm
TOLERANCE = 5e-5
SIZES = (1e-3, 1e-6)
CHOSEN = ("stale head", "stale layer", "swapped q and k", "version not advanced", "update skipped", "one number",
          "stale v", "rows moved", "stale prefix")  # fmt: skip


def said_of(fault: str, version: int) -> str:
    """What is said of a replica that has this fault at this version; `PLANTED` has it at version 2."""
    if fault == "stale v":  # the kernel is built anew from all three, one of them old; the double has a kernel for each
        return r"other values: model\.layers\.0\.self_attn\.v_proj"
    said = PLANTED[fault].replace("version '1', expected 2", f"version '{version - 1}', expected {version}")
    return said.replace("version 2", f"version {version}")


@dataclass
class Two:
    """Two real servers, and the trainer of their model."""

    urls: list[str]
    trained: Trained
    faults: list[Path]

    async def pool(self) -> ReplicaPool:
        """A pool of both, healed, with the trainer's newest weights."""
        for fault in self.faults:
            fault.write_text("")
        path = self.trained.trainer.publish(f"healed{self.trained.version}-{os.urandom(3).hex()}")
        replicas = [
            VllmReplica(url, name=f"replica {n}", model="policy", context_length=512,
                        vocab_size=self.trained.trainer.vocab_size, policy_version=self.trained.version)
            for n, url in enumerate(self.urls)
        ]  # fmt: skip
        for replica in replicas:
            await replica.prove_path(path)
        pool = ReplicaPool(replicas, weights=path)
        await pool.check_replicas(self.trained.canary())
        return pool


@pytest.fixture(scope="module", params=["tied", "untied"])
def two(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    folder = tmp_path_factory.mktemp(request.param)
    trainer = TinyModel(folder / "weights", tied=request.param == "tied")
    faults = [folder / f"fault{n}" for n in range(2)]
    processes = []
    for n, fault in enumerate(faults):
        fault.write_text("")
        settings = VllmSettings(
            python=PYTHON,
            args=("--enforce-eager", "--weight-transfer-config", '{"backend": "verbatim_faulty"}', "--middleware",
                  "verbatim_faulty.FaultyRoutes"),
            env={"PYTHONPATH": f"{PLUGIN}:{FAULTY}", "VERBATIM_TEST_FAULT": str(fault), "VLLM_CPU_KVCACHE_SPACE": "1"},
        )  # fmt: skip
        processes.append(make_process(settings, n, model=trainer.published, port=free_port(), context_length=512,
                                      logs=folder, num_threads=1))  # fmt: skip

    async def start() -> None:
        await asyncio.gather(*(process.start(900.0) for process in processes))

    async def stop() -> None:
        await asyncio.gather(*(process.stop() for process in processes))

    with asyncio.Runner() as runner:
        try:
            runner.run(start())
            yield Two([process.url for process in processes], Trained(trainer), faults)
        finally:
            runner.run(stop())


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
        while len(found) < seen + 4:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
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


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("fault", CHOSEN)
async def test_a_planted_fault_on_one_of_two_is_named_and_the_other_goes_on(
    two: Two, fault: str, size: float, caplog: pytest.LogCaptureFixture
):
    pool, trained = await two.pool(), two.trained
    await pool.update_replicas(*trained.step(size))
    two.faults[1].write_text(fault)
    with caplog.at_level(logging.WARNING):
        await pool.update_replicas(*trained.step(size))
    said = [record.getMessage() for record in caplog.records if record.name.endswith(".roster")]
    assert len(said) == 2 and all(re.search(said_of(fault, trained.version), line) for line in said), said
    await pool.update_replicas(*trained.step(size))
    metrics = pool.metrics()
    assert (metrics["replicas/serving"], metrics["replicas/failed_checks"]) == (1, 2)
    await pool.close()
