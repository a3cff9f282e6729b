"""Low-rank adapters on a real vLLM server: exact logprobs under a new name for each version, proven from its slots.

Run by `make test-vllm`; VERBATIM_VLLM_PYTHON names the Python of an environment with vLLM.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from inference.vllm.real_servers import TOLERANCE, Served, end_all_requests, served, until_drawn
from inference.vllm.test_vllm_adapters import RANK, AdaptedModel, request
from inference.vllm.tiny_model import CONTEXT
from verbatim.core.errors import SamplerFault
from verbatim.inference.vllm.replica import VllmReplica
from verbatim.run.orchestrator.weight_sync import WeightSync
from verbatim.trainer.transport import StepReport

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.realtime,
    pytest.mark.xdist_group("adapters"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:peft"),
]


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served[AdaptedModel]]:
    folder = tmp_path_factory.mktemp("adapters")
    trainer = AdaptedModel(folder / "weights")  # alpha / r = 0.5: vLLM multiplies it into B
    with served(
        folder,
        trainer,
        args=("--block-size", "32", "--num-gpu-blocks-override", "1024"),
        settings={"weight_transfer": "files"},
        adapter_rank=RANK,
    ) as found:
        yield found


def replica_of(adapted: Served[AdaptedModel]) -> VllmReplica:
    return adapted.replica(adapter_rank=RANK)


async def test_every_version_is_the_trainers_and_proves_it(adapted: Served[AdaptedModel]):
    replica, trainer = replica_of(adapted), adapted.trainer
    try:
        await replica.check_server()
        await replica.prove_path(trainer.published)
        sync = WeightSync(replica, trainer.probes() if trainer.num_steps == 0 else None, 1e-4)
        await sync.check_first()
        largest = 0.0
        for version in range(1, 6):
            path = trainer.adapter_step()
            await sync.load(
                StepReport(version=version, weights=path, num_trained_tokens=1, metrics={}, probes=trainer.probes())
            )
            asked = request(40, max_tokens=30)
            found = await replica.generate(asked)
            assert found.policy_versions.tolist() == [version] * 30
            whole = np.concatenate([asked.prompt_ids, found.ids])
            expected = trainer.adapted_logprobs(whole)[len(asked.prompt_ids) - 1 :]
            largest = max(largest, float(np.abs(found.logprobs - expected).max()))
            assert replica.num_unverified == 0
        print(f"largest |delta logprob| over 5 versions: {largest:.2g}")
        assert largest <= TOLERANCE
        assert not replica._former or len(replica._former) == 1  # the last but one is let go by the next update
    finally:
        await replica.close()


async def test_the_canary_may_ask_while_others_sample(adapted: Served[AdaptedModel]):
    """Prompt logprobs beside other requests in one step: with the output head wrapped for adapters, vLLM 0.32 ends."""
    replica, trainer = replica_of(adapted), adapted.trainer
    try:
        await replica.update_weights(trainer.adapter_step(), 6)
        sampling = [asyncio.ensure_future(replica.generate(request(20 + i, max_tokens=60))) for i in range(8)]
        probes = trainer.probes()
        for _ in range(6):
            for ids, expected in zip(probes.token_ids, probes.logprobs, strict=True):
                assert np.abs((await replica.prompt_logprobs(ids))[1:] - expected).max() <= TOLERANCE
        for found in await asyncio.gather(*sampling):
            assert found.policy_versions.tolist() == [6] * 60
    finally:
        await replica.close()


async def test_requests_in_flight_end_with_their_adapter(adapted: Served[AdaptedModel]):
    replica, trainer = replica_of(adapted), adapted.trainer
    try:
        first = trainer.adapter_step()
        kept = {name: value.detach().clone() for name, value in trainer.adapted.named_parameters()}
        path = trainer.adapter_step()
        await replica.update_weights(first, 11)
        asked = request(24, max_tokens=CONTEXT - 200)
        running = asyncio.ensure_future(replica.generate(asked))
        await until_drawn(replica, 5)
        await replica.update_weights(path, 12)
        assert not running.done()
        newer = await replica.generate(request(25, max_tokens=5))
        assert newer.policy_versions.tolist() == [12] * 5
        whole = np.concatenate([request(25).prompt_ids, newer.ids])
        assert np.abs(newer.logprobs - trainer.adapted_logprobs(whole)[24:]).max() <= TOLERANCE
        await end_all_requests(adapted.url)
        found = await running
        assert found.policy_versions.tolist() == [11] * len(found.ids) != []
        trainer.adapted.load_state_dict(kept, strict=False)
        whole = np.concatenate([asked.prompt_ids, found.ids])
        assert np.abs(found.logprobs - trainer.adapted_logprobs(whole)[len(asked.prompt_ids) - 1 :]).max() <= TOLERANCE
    finally:
        await replica.close()


def there(path: Path) -> Any:
    """What has been published stands at this path of the server's host."""

    async def found(*given: object, **about: object) -> str:
        return str(path)

    return mock.patch("verbatim.inference.vllm.replica.path_there", found)


async def test_another_adapter_than_the_published_one_is_named(adapted: Served[AdaptedModel], tmp_path: Path):
    replica, trainer = replica_of(adapted), adapted.trainer
    try:
        other, path = trainer.adapter_step(), trainer.adapter_step(1e-6)
        with (
            there(other),
            pytest.raises(SamplerFault, match=r"other values: .*lora_A.* and \d+ more"),
        ):
            await replica.update_weights(path, 21)
        with (
            there(tmp_path / "nothing"),
            pytest.raises(SamplerFault, match=r"replica 0: load adapter: .*No adapter found"),
        ):
            await replica.update_weights(path, 21)
        await replica.update_weights(path, 21)
        assert (await replica.generate(request(30, max_tokens=2))).policy_versions.tolist() == [21, 21]
    finally:
        await replica.close()
