"""A mixture of experts on a real vLLM server, which keeps them in two fused parameters of each layer."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from inference.vllm.test_real_server import TOLERANCE, Served
from inference.vllm.tiny_model import MoeModel
from verbatim.errors import SamplerFault
from verbatim.inference.vllm.command import PLUGIN
from verbatim.inference.vllm.process import free_port, make_process
from verbatim.inference.vllm.settings import VllmSettings

pytestmark = pytest.mark.vllm
PYTHON = os.environ.get("VERBATIM_VLLM_PYTHON", ".venv-vllm/bin/python")
FAULTY = Path(__file__).parent / "faulty_plugin"
EXPERTS = r"model\.layers\.0\.mlp\.experts"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("experts")
    trainer, fault = MoeModel(folder / "weights"), folder / "fault"
    fault.write_text("")
    settings = VllmSettings(
        python=PYTHON, args=("--enforce-eager", "--weight-transfer-config", '{"backend": "verbatim_faulty"}'),
        env={"PYTHONPATH": f"{PLUGIN}:{FAULTY}", "VERBATIM_TEST_FAULT": str(fault), "VLLM_CPU_KVCACHE_SPACE": "1"},
    )  # fmt: skip
    process = make_process(settings, 0, model=trainer.published, port=free_port(), context_length=512, logs=folder,
                           num_threads=1)  # fmt: skip
    with asyncio.Runner() as runner:
        runner.run(process.start(600.0))
        try:
            yield Served(process.url, trainer, fault)
        finally:
            runner.run(process.stop())


async def test_logprobs_are_the_trainers_and_every_expert_has_a_digest(served: Served):
    replica, trainer = served.replica(), served.trainer
    await replica.prove_path(trainer.published)
    ids, largest = trainer.ids(160), 0.0
    for version in range(1, 11):
        await replica.update_weights(served.step((1e-3, 1e-6)[version % 2]), version)
        assert replica.num_unverified == 0
        scored = (await replica.prompt_logprobs(ids))[1:]
        largest = max(largest, float(np.abs(scored - trainer.logprobs(ids)).max()))
    print(f"largest |delta logprob| over 10 updates: {largest:.2g}")
    assert largest <= TOLERANCE
    await replica.close()


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("swapped experts", rf"other values: {EXPERTS}\.0\.up_proj\.weight, {EXPERTS}\.1\.up_proj\.weight$"),
        ("stale expert", rf"other values: {EXPERTS}\.1\.down_proj\.weight$"),
        ("stale layer", r"were not built anew: .*model\.layers\.1\.mlp\.experts\.0\.down_proj\.weight"),
    ],
)
@pytest.mark.parametrize("size", [1e-3, 1e-6])
async def test_a_planted_fault_names_the_expert_and_can_be_mended(served: Served, fault: str, said: str, size: float):
    replica, trainer = served.replica(), served.trainer
    await replica.update_weights(served.step(size), 1)
    path = served.step(size)
    served.plant(fault)
    with pytest.raises(SamplerFault, match=said):
        await replica.update_weights(path, 2)
    served.plant("")
    await replica.update_weights(path, 2)
    ids = trainer.ids(30)
    assert np.abs((await replica.prompt_logprobs(ids))[1:] - trainer.logprobs(ids)).max() <= TOLERANCE
    await replica.close()
