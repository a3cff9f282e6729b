"""Real vLLM servers started otherwise: two workers, each with half of every weight (tensor parallelism, over gloo on a
CPU); and one that computes in bfloat16."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inference.vllm.test_real_server import TOLERANCE, Served
from inference.vllm.tiny_model import TinyModel
from verbatim.errors import SamplerFault
from verbatim.inference.vllm.command import PLUGIN
from verbatim.inference.vllm.process import free_port, make_process
from verbatim.inference.vllm.settings import VllmSettings
from verbatim.transport.canary import tolerance_of

pytestmark = pytest.mark.vllm
PYTHON = os.environ.get("VERBATIM_VLLM_PYTHON", ".venv-vllm/bin/python")
FAULTY = Path(__file__).parent / "faulty_plugin"


LAYOUTS: dict[str, dict[str, Any]] = {"halves": {"tensor_parallel_size": 2}, "bfloat16": {"dtype": "bfloat16"}}


@pytest.fixture(scope="module", params=[("halves", "tied"), ("halves", "untied"), ("bfloat16", "tied")], ids="-".join)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    layout, kind = request.param
    folder = tmp_path_factory.mktemp(f"{layout}-{kind}")
    trainer, fault = TinyModel(folder / "weights", tied=kind == "tied"), folder / "fault"
    fault.write_text("")
    settings = VllmSettings(
        python=PYTHON, **LAYOUTS[layout],
        args=("--enforce-eager", "--weight-transfer-config", '{"backend": "verbatim_faulty"}'),
        env={"PYTHONPATH": f"{PLUGIN}:{FAULTY}", "VERBATIM_TEST_FAULT": str(fault), "VLLM_CPU_KVCACHE_SPACE": "1",
             "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
    )  # fmt: skip
    process = make_process(settings, 0, model=trainer.published, port=free_port(), context_length=512, logs=folder,
                           num_threads=1)  # fmt: skip
    with asyncio.Runner() as runner:
        runner.run(process.start(600.0))
        try:
            yield Served(process.url, trainer, fault)
        finally:
            runner.run(process.stop())


@pytest.fixture
def differs(served: Served, request: pytest.FixtureRequest) -> Callable[[np.ndarray, np.ndarray], float]:
    """|delta logprob| in units of what is allowed: the largest in float32, the mean (the canary's) in bfloat16."""

    def measure(found: np.ndarray, ids: np.ndarray) -> float:
        differences = np.abs(found[1:] - served.trainer.logprobs(ids))
        if "bfloat16" in request.node.callspec.id:
            return float(differences.mean()) / tolerance_of("bfloat16")
        return float(differences.max()) / TOLERANCE

    return measure


@pytest.fixture(autouse=True)
def healthy(served: Served) -> None:
    served.plant("")


async def test_logprobs_are_the_trainers_and_every_tensor_has_a_digest(served: Served, differs):
    replica, trainer = served.replica(), served.trainer
    await replica.prove_path(trainer.published)
    ids, largest = trainer.ids(160), 0.0
    for version in range(1, 11):
        await replica.update_weights(served.step((1e-3, 1e-6)[version % 2]), version)
        assert replica.num_unverified == 0
        largest = max(largest, differs(await replica.prompt_logprobs(ids), ids))
    print(f"largest |delta logprob| over 10 updates: {largest:.2g} of what is allowed")
    assert largest <= 1
    await replica.close()


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("stale head", "were not built anew: .*(lm_head|embed_tokens)"),
        ("swapped q and k", r"other values: model\.layers\.0\.self_attn\.k_proj.*q_proj"),
        ("update skipped", "has loaded nothing in this update"),
        ("rows moved", r"other values: model\.embed_tokens"),
    ],
)
@pytest.mark.parametrize("size", [1e-3, 1e-6])
async def test_a_planted_fault_is_named_and_can_be_mended(served: Served, fault: str, said: str, size: float, differs):
    replica, trainer = served.replica(), served.trainer
    await replica.update_weights(served.step(size), 1)
    path = served.step(size)
    served.plant(fault)
    with pytest.raises(SamplerFault, match=said):
        await replica.update_weights(path, 2)
    served.plant("")
    await replica.update_weights(path, 2)
    ids = trainer.ids(30)
    assert differs(await replica.prompt_logprobs(ids), ids) <= 1
    await replica.close()
