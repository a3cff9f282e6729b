"""Two real vLLM servers, one of them with two workers, that receive what a trainer broadcasts over gloo."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from inference.vllm.group_sender import GroupSender
from inference.vllm.test_real_server import PYTHON, TOLERANCE
from inference.vllm.test_server_pool import Trained
from inference.vllm.tiny_model import TinyModel
from verbatim.inference.backends import BackendInputs
from verbatim.inference.pool.servers import ServerPool
from verbatim.inference.vllm.backend import vllm_backend
from verbatim.inference.vllm.process import ServerProcess, free_port, make_process
from verbatim.inference.vllm.settings import VllmSettings

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(TinyModel(tmp_path_factory.mktemp("weights"), tied=True))


@pytest.fixture(scope="module")
def servers(
    trained: Trained, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[asyncio.Runner, list[ServerProcess]]]:
    found = []
    for replica, workers in enumerate((1, 2)):
        settings = VllmSettings(
            python=PYTHON, args=("--enforce-eager",), env={"VLLM_CPU_KVCACHE_SPACE": "1"}, weight_transfer="gloo",
            tensor_parallel_size=workers,
        )  # fmt: skip
        logs: Path = tmp_path_factory.mktemp(f"logs-{replica}")
        found.append(make_process(settings, replica, model=trained.trainer.published, port=free_port(),
                                  context_length=512, logs=logs, num_threads=1))  # fmt: skip
    with asyncio.Runner() as runner:
        for process in found:
            runner.run(process.start(600.0))
        try:
            yield runner, found
        finally:
            for process in found:
                runner.run(process.stop())


def test_tensors_of_the_trainer_reach_every_worker(
    trained: Trained, servers: tuple[asyncio.Runner, list[ServerProcess]]
):
    runner, found = servers
    runner.run(update_ten_times(trained, found))


async def update_ten_times(trained: Trained, servers: list[ServerProcess]) -> None:
    sender = GroupSender(trained.trainer.model)
    settings = VllmSettings(urls=tuple(s.url for s in servers), weight_transfer="gloo", update_timeout=300.0)
    inputs = BackendInputs(model=trained.trainer.published, context_length=512, sender=sender)
    pool = await vllm_backend(inputs, settings)
    assert isinstance(pool, ServerPool)
    await pool.check_replicas(trained.canary())
    ids, largest = trained.trainer.ids(160), 0.0
    for number in range(10):
        path, version, canary = trained.step((1e-3, 1e-6)[number % 2])
        await pool.update_replicas(path, version, canary)
        expected = trained.trainer.logprobs(ids)
        for member in pool._members:
            found = await member.replica.prompt_logprobs(ids)
            largest = max(largest, float(np.abs(found[1:] - expected).max()))
    assert [report.fault for report in sender.reports] == [None] * 11
    assert {order.size for order in sender.orders} == {4} and len({order.group for order in sender.orders}) == 1
    assert pool.metrics()["replicas/failed_checks"] == 0
    seconds = [report.seconds for report in sender.reports]
    print(f"largest |delta logprob| over 10 broadcasts: {largest:.2g}; seconds: {seconds}")
    assert largest <= TOLERANCE
    await pool.close()
