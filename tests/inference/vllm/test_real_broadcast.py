"""Two real vLLM servers, one of them with two workers, that receive what a trainer broadcasts over gloo."""

from __future__ import annotations

import numpy as np
import pytest

from inference.vllm.group_sender import GroupSender
from inference.vllm.real_servers import SIZES, TOLERANCE, Served
from inference.vllm.test_server_pool import Trained
from inference.vllm.tiny_model import TinyModel
from verbatim.inference.backends import BackendInputs
from verbatim.inference.pool.servers import ServerPool
from verbatim.inference.vllm.backend import vllm_backend
from verbatim.inference.vllm.settings import VllmSettings

pytestmark = [pytest.mark.vllm, pytest.mark.realtime, pytest.mark.xdist_group("plain servers")]


async def test_tensors_of_the_trainer_reach_every_worker(
    tied_server: Served[TinyModel], halves_server: Served[TinyModel]
):
    servers = (tied_server, halves_server)
    for server in servers:
        server.plant("")
    path = tied_server.trainer.go_back()
    trained = Trained(tied_server.trainer)
    sender = GroupSender(trained.trainer.model)
    settings = VllmSettings(urls=tuple(s.url for s in servers), weight_transfer="gloo", update_timeout=300.0)
    pool = await vllm_backend(BackendInputs(model=path, context_length=512, sender=sender), settings)
    assert isinstance(pool, ServerPool)
    await pool.check_replicas(trained.canary())
    ids, largest, replicas = trained.trainer.ids(160), 0.0, [server.replica() for server in servers]
    for number in range(10):
        await pool.update_replicas(*trained.step(SIZES[number % 2], f"sent{number}"))
        expected = trained.trainer.logprobs(ids)
        for replica in replicas:
            found = await replica.prompt_logprobs(ids)
            largest = max(largest, float(np.abs(found[1:] - expected).max()))
    assert [report.fault for report in sender.reports] == [None] * 11
    assert {order.size for order in sender.orders} == {4} and len({order.group for order in sender.orders}) == 1
    assert pool.metrics()["replicas/failed_checks"] == 0
    seconds = [report.seconds for report in sender.reports]
    print(f"largest |delta logprob| over 10 broadcasts: {largest:.2g}; seconds: {seconds}")
    assert largest <= TOLERANCE
    for replica in replicas:
        await replica.close()
    await pool.close()
