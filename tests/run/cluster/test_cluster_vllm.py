"""A run on a cluster whose replicas are real vLLM servers: `make campaigns-vllm`."""

from __future__ import annotations

import pytest

from e2e.test_vllm_runs import PYTHON, model
from e2e.tiny_runs import LOTS, train_lines
from inference.vllm.real_servers import ONE_PROCESS, SMALL_CACHE
from run.cluster.cluster_program import REPLICA
from run.cluster.test_cluster_runs import on_cluster

pytestmark = [pytest.mark.vllm, pytest.mark.on_demand, pytest.mark.realtime]
__all__ = ["model"]


def test_vllm_servers_on_two_nodes_hold_the_published_weights_and_one_that_is_killed_comes_back(model, tmp_path):
    """The servers verify the digests of each version; a server dies with its actor."""
    (tmp_path / "lots.py").write_text(LOTS)
    (tmp_path / "model").symlink_to(model)
    vllm = {
        "python": str(PYTHON),
        "replicas": 2,
        "args": [*SMALL_CACHE, "--block-size", "32"],
        "env": {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            **ONE_PROCESS,
        },
    }
    settings = {"inference": {"backend": "vllm", "vllm": vllm}, "trainer": {"num_threads": 1}}
    found = on_cluster(tmp_path, name="run", nodes=2, steps=4, kills={"2": [REPLICA]}, settings=settings)
    assert found["struck"] == [REPLICA]
    metrics = [line["metrics"] for line in train_lines(tmp_path / "run")]
    assert [line["step"] for line in train_lines(tmp_path / "run")] == [1, 2, 3, 4]
    last = metrics[-1]
    dropped = sum(value for name, value in last.items() if name.startswith("ledger/dropped/"))
    booked = last["ledger/trained"] + last["ledger/masked_by_loss"] + dropped + last["ledger/pending"]
    assert last["ledger/sampled"] == booked > 0
    assert all(values["weights/canary"] <= 1e-4 for values in metrics)
    assert last["replicas/lost"] == 1
    assert found["left"] == []
