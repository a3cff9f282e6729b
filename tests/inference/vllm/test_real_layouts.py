"""Real vLLM servers started otherwise: two workers, each with half of every weight (tensor parallelism, over gloo on a
CPU); and one that computes in bfloat16."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from inference.vllm.real_servers import SIZES, TOLERANCE, Served, served
from inference.vllm.tiny_model import TinyModel
from verbatim.core.errors import SamplerFault
from verbatim.trainer.transport.canary import tolerance_of

pytestmark = [pytest.mark.vllm, pytest.mark.realtime]
GROUPS = {"halves": "plain servers", "untied_halves": "other layouts", "bfloat16": "other layouts"}


@pytest.fixture(scope="module")
def untied_halves_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served[TinyModel]]:
    folder = tmp_path_factory.mktemp("untied_halves")
    trainer = TinyModel(folder / "weights", tied=False)
    with served(folder, trainer, settings={"tensor_parallel_size": 2}, env={}) as found:
        yield found


@pytest.fixture(scope="module")
def bfloat16_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served[TinyModel]]:
    folder = tmp_path_factory.mktemp("bfloat16")
    with served(folder, TinyModel(folder / "weights", tied=True), settings={"dtype": "bfloat16"}) as found:
        yield found


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.xdist_group(group)) for name, group in GROUPS.items()])
def layout(request: pytest.FixtureRequest) -> Served[TinyModel]:
    found: Served[TinyModel] = request.getfixturevalue(f"{request.param}_server")
    found.plant("")
    return found


@pytest.fixture
def differs(layout: Served[TinyModel], request: pytest.FixtureRequest) -> Callable[[np.ndarray, np.ndarray], float]:
    """|delta logprob| in units of what is allowed: the largest in float32, the mean (the canary's) in bfloat16."""

    def measure(found: np.ndarray, ids: np.ndarray) -> float:
        differences = np.abs(found[1:] - layout.trainer.logprobs(ids))
        if "bfloat16" in request.node.callspec.id:
            return float(differences.mean()) / tolerance_of("bfloat16")
        return float(differences.max()) / TOLERANCE

    return measure


async def test_logprobs_are_the_trainers_and_every_tensor_has_a_digest(layout: Served[TinyModel], differs):
    replica, trainer = layout.replica(), layout.trainer
    await replica.prove_path(trainer.published)
    ids, largest = trainer.ids(160), 0.0
    for version in range(1, 11):
        await replica.update_weights(layout.step(SIZES[version % 2]), version)
        assert replica.num_unverified == 0
        largest = max(largest, differs(await replica.prompt_logprobs(ids), ids))
    print(f"largest |delta logprob| over 10 updates: {largest:.2g} of what is allowed")
    assert largest <= 1
    await replica.close()


@pytest.mark.parametrize(
    ("fault", "size", "said"),
    [
        ("stale head", 1e-3, "were not rebuilt: .*(lm_head|embed_tokens)"),
        ("swapped q and k", 1e-6, r"other values: model\.layers\.0\.self_attn\.k_proj.*q_proj"),
        ("update skipped", 1e-3, "has loaded nothing in this update"),
        ("rows moved", 1e-6, r"other values: model\.embed_tokens"),
    ],
)
async def test_a_planted_fault_is_named_and_can_be_mended(
    layout: Served[TinyModel], fault: str, said: str, size: float, differs
):
    replica, trainer = layout.replica(), layout.trainer
    await replica.update_weights(layout.step(size), 1)
    path = layout.step(size)
    layout.plant(fault)
    with pytest.raises(SamplerFault, match=said):
        await replica.update_weights(path, 2)
    layout.plant("")
    await replica.update_weights(path, 2)
    ids = trainer.ids(30)
    assert differs(await replica.prompt_logprobs(ids), ids) <= 1
    await replica.close()
