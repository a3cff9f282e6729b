"""Which nodes of a cluster hold a run, and what is said of those that do not."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from verbatim.cli.main import main
from verbatim.config import make_config
from verbatim.config.schema import RunConfig
from verbatim.core.errors import UsageError
from verbatim.run import cluster
from verbatim.run.cluster import placement
from verbatim.run.cluster.placement import check_cluster, nodes_of, parts_of, reserve
from verbatim.run.tables import component_tables

GB = 10**9


def node(cpus: float, gpus: float = 0.0, *, store: float = 4 * GB, alive: bool = True, address: str = "10.0.0.1"):
    """A node as Ray tells of it: a resource that it lacks has no entry."""
    has = {"CPU": cpus, "GPU": gpus, "memory": 1e10, "object_store_memory": store}
    resources = {name: amount for name, amount in has.items() if amount}
    return {"NodeManagerAddress": address, "Alive": alive, "Resources": resources}


def ray_of(*nodes: Mapping[str, Any]) -> Any:
    return SimpleNamespace(nodes=lambda: list(nodes))


def config_of(**keys: Any) -> RunConfig:
    """Two ranks, three embedded engines and four workers of one CPU each, on a cluster, with a model of a hub's."""
    base = {
        "model.name": "some/model",
        "orchestrator.train.env": [{"id": "guess_number"}],
        "orchestrator.rollout.backend": "ray",
        "orchestrator.rollout.workers": 4,
        "trainer.parallel.processes": 2,
        "cluster.replicas": 3,
    }
    document: dict[str, Any] = {}
    for key, value in {**base, **keys}.items():
        *tables, last = key.split(".")
        table = document
        for name in tables:
            table = table.setdefault(name, {})
        table[last] = value
    return make_config(document, tables=component_tables())


VLLM = {"inference.backend": "vllm", "orchestrator.rollout.backend": "local"}
TURNS = {
    **VLLM,
    "inference.vllm.colocate": True,
    "orchestrator.max_async_level": 0,
    "trainer.parallel.processes": 1,
}


def test_the_placement_has_a_line_for_each_part():
    lines = check_cluster(ray_of(node(4), node(3), node(2)), config_of())
    assert [line.removeprefix("cluster").strip() for line in lines] == [
        "3 nodes with 9 CPUs and 0 GPUs together",
        "2 trainer ranks, 1 CPU each, packed",
        "3 sampler replicas, 1 CPU each, spread",
        "4 rollout workers, 1 CPU each, spread",
    ]
    assert all(line.startswith("cluster ") for line in lines)


def test_one_node_is_named_in_the_singular():
    assert "1 node with 9 CPUs" in check_cluster(ray_of(node(9)), config_of())[0]


def test_a_run_needs_every_cpu_of_the_cluster_and_no_more():
    """2 + 3 + 4 processes of one CPU each: nine CPUs are enough, eight have no room for the last worker."""
    check_cluster(ray_of(node(5), node(4)), config_of())
    with pytest.raises(UsageError) as refused:
        check_cluster(ray_of(node(5), node(3)), config_of())
    assert str(refused.value) == (
        "the cluster cannot hold 4 rollout workers, 1 CPU each, spread: there is room for 3. It has 2 nodes with 8 "
        "CPUs and 0 GPUs together; the largest node has 5 CPUs and 0 GPUs. Add nodes, lower cluster.worker.cpus or "
        ".gpus, or start fewer"
    )


def test_nodes_that_are_gone_hold_nothing():
    nodes = ray_of(node(9, alive=False, address="10.0.0.7"), node(8, address="10.0.0.8"))
    assert [found.address for found in nodes_of(nodes)] == ["10.0.0.8"]
    with pytest.raises(UsageError, match="It has 1 node with 8 CPUs"):
        check_cluster(nodes, config_of())


def test_a_process_does_not_span_nodes():
    """Four CPUs in all, but no node has the three of a rank."""
    config = config_of(**{"cluster.trainer.cpus": 3, "trainer.parallel.processes": 1, "cluster.roles": ["trainer"]})
    with pytest.raises(UsageError, match=r"1 trainer rank, 3 CPU each, packed: there is room for 0.*2 nodes with 4"):
        check_cluster(ray_of(node(2), node(2)), config)


@pytest.mark.parametrize("nodes", [(4, 2), (2, 4)])
def test_what_needs_most_gets_its_room_first(nodes: tuple[int, int]):
    """A replica of four CPUs and two ranks of one fill nodes of four and two: on the larger node, ranks would leave no
    room for the replica."""
    config = config_of(
        **{"cluster.sampler.cpus": 4, "cluster.replicas": 1, "orchestrator.rollout.backend": "local"},
    )
    check_cluster(ray_of(*map(node, nodes)), config)


def test_spread_replicas_use_what_is_free_wherever_it_is():
    """Three replicas on nodes with room for one and for two: the third begins at the first node, which is full."""
    config = config_of(**{"cluster.roles": ["sampler"], "orchestrator.rollout.backend": "local"})
    check_cluster(ray_of(node(1), node(2)), config)
    with pytest.raises(UsageError, match=r"3 sampler replicas.*there is room for 2"):
        check_cluster(ray_of(node(1), node(1)), config)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, {"cluster.trainer": (2, 1.0), "cluster.sampler": (3, 1.0), "cluster.worker": (4, 0.0)}),
        ({"trainer.device": "cpu"},
         {"cluster.trainer": (2, 0.0), "cluster.sampler": (3, 1.0), "cluster.worker": (4, 0.0)}),
        ({"inference.torch.device": "cpu", "cluster.worker.gpus": 0.25},
         {"cluster.trainer": (2, 1.0), "cluster.sampler": (3, 0.0), "cluster.worker": (4, 0.25)}),
        ({**VLLM, "inference.vllm.replicas": 5, "inference.vllm.tensor_parallel_size": 4},
         {"cluster.trainer": (2, 1.0), "cluster.sampler": (5, 4.0)}),
        (TURNS, {"cluster.trainer": (1, 0.5), "cluster.sampler": (1, 0.5)}),
        ({**TURNS, "cluster.trainer.gpus": 0.25, "cluster.sampler.gpus": 0.75},
         {"cluster.trainer": (1, 0.25), "cluster.sampler": (1, 0.75)}),
        ({"cluster.roles": []}, {"cluster.worker": (4, 0.0)}),
    ],
    ids=["embedded", "trainer on CPUs", "sampler on CPUs", "vLLM", "turns", "unequal turns", "workers alone"],
)  # fmt: skip
def test_each_process_has_the_gpus_that_it_computes_on(keys: dict[str, Any], expected: dict[str, tuple[int, float]]):
    parts = parts_of(config_of(**keys), has_gpus=True)
    assert {part.key: (part.count, part.each["GPU"]) for part in parts} == expected
    if keys.keys() <= TURNS.keys():
        assert all(part.each["GPU"] == 0.0 for part in parts_of(config_of(**keys), has_gpus=False))


def test_a_replica_has_all_of_its_gpus_on_one_node():
    config = config_of(**VLLM, **{"inference.vllm.tensor_parallel_size": 4, "cluster.roles": ["sampler"]})
    check_cluster(ray_of(node(8, 2), node(8, 4)), config)
    with pytest.raises(
        UsageError, match=r"1 CPU, 4 GPU each, spread: there is room for 0.*largest node has 8 CPUs and 3"
    ):
        check_cluster(ray_of(node(8, 3), node(9, 1)), config)


def test_a_rank_and_its_replica_that_take_turns_share_a_gpu_of_one_node():
    """Half a GPU each: one GPU holds both. Their CPUs must be on its node, too."""
    lines = check_cluster(ray_of(node(2, 1)), config_of(**TURNS))
    assert [line.removeprefix("cluster").strip() for line in lines[1:]] == [
        "1 trainer rank, 1 CPU, 0.5 GPU each, packed",
        "1 sampler replica, 1 CPU, 0.5 GPU each, spread",
    ]
    with pytest.raises(UsageError, match=r"1 trainer rank with its replica, 2 CPU, 1 GPU each.*there is room for 0"):
        check_cluster(ray_of(node(1, 1), node(1, 1)), config_of(**TURNS))


def test_a_rank_and_its_replica_that_take_turns_are_reserved_as_one(monkeypatch: pytest.MonkeyPatch):
    """Ray gives a whole GPU to one bundle: two bundles of half a GPU could be two devices."""
    asked = []

    def reserved(ray: Any, part: Any, bundles: Any) -> object:
        asked.append([dict(bundle) for bundle in bundles])
        return object()

    monkeypatch.setattr(placement, "_reserve", reserved)
    found = reserve(ray_of(node(4, 2)), config_of(**TURNS))
    assert asked == [[{"CPU": 2.0, "GPU": 1.0}]]
    assert found["cluster.trainer"].group is found["cluster.sampler"].group
    assert [found[key].each for key in ("cluster.trainer", "cluster.sampler")] == [{"CPU": 1.0, "GPU": 0.5}] * 2
    asked.clear()
    found = reserve(ray_of(node(9)), config_of())
    one = {"CPU": 1.0, "GPU": 0.0}
    assert asked == [[one] * 2, [one] * 3]  # workers are placed by the runner
    assert found["cluster.trainer"].group is not found["cluster.sampler"].group


# ---- object stores


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with 300,000,000 parameters, as far as the headers of its files say."""
    folder = tmp_path / "model"
    folder.mkdir()
    for name, shape in (("a", (1000, 100_000)), ("b", (200_000, 1000))):
        # The file is sparse: its header names a tensor of bfloat16 that is not written.
        size = 2 * shape[0] * shape[1]
        head = json.dumps({name: {"dtype": "BF16", "shape": shape, "data_offsets": [0, size]}}).encode()
        with (folder / f"{name}.safetensors").open("wb") as file:
            file.write(len(head).to_bytes(8, "little") + head)
            file.truncate(8 + len(head) + size)
    return folder


BATCHES = {"orchestrator.batch_size": 512, "orchestrator.seq_len": 16384, "orchestrator.max_async_level": 1}
"""Two batches of 512 x 16,384 tokens are in flight, of 25 bytes each: 2 x 8,388,608 x 25 = 419,430,400 bytes."""
NEEDED = 2 * 4 * 300_000_000 + 419_430_400
"""Two versions of the weights in float32, and the batches."""


def test_a_store_holds_two_versions_of_the_weights_and_the_batches_in_flight(model: Path):
    config = config_of(**BATCHES, **{"model.name": str(model)})
    stores = ray_of(node(9), node(9, store=NEEDED, address="10.0.0.2"))
    assert check_cluster(stores, config)[-1].endswith("object store: up to 2.82 GB per node, of at least 2.82 GB")
    with pytest.raises(UsageError) as refused:
        check_cluster(ray_of(node(9), node(9, store=NEEDED - 1, address="10.0.0.2")), config)
    said = str(refused.value)
    assert said.startswith("the object store of node 10.0.0.2 has 2.82 GB, but 2 versions of the weights and the ")
    assert f"`ray start --object-store-memory {NEEDED}`" in said and 'cluster.transfer = "folder"' in said


@pytest.mark.parametrize(
    "keys",
    [{"cluster.transfer": "folder"}, {"cluster.roles": []}],
    ids=["a folder", "workers alone"],
)
def test_a_run_that_ships_nothing_needs_no_store(model: Path, keys: dict[str, Any]):
    config = config_of(**BATCHES, **{"model.name": str(model)}, **keys)
    lines = check_cluster(ray_of(node(9, store=1)), config)
    assert not [line for line in lines if "object store" in line]


def test_adapters_need_room_for_batches_alone(model: Path):
    config = config_of(**BATCHES, **{"model.name": str(model), "trainer.lora.r": 8})
    assert check_cluster(ray_of(node(9, store=419_430_400)), config)[-1].endswith(
        "up to 0.419 GB per node, of at least 0.419 GB"
    )
    with pytest.raises(UsageError, match=r"need 0\.419 GB"):
        check_cluster(ray_of(node(9, store=419_430_399)), config)


@pytest.mark.parametrize("name", ["some/model", "a folder without weights"])
def test_a_store_is_not_checked_for_weights_of_unknown_size(tmp_path: Path, name: str):
    folder = tmp_path / name
    if name != "some/model":
        folder.mkdir()
        save_file({"x": np.zeros(3, np.float32)}, folder / "other.bin")
    config = config_of(**BATCHES, **{"model.name": name if name == "some/model" else str(folder)})
    assert "object store" not in check_cluster(ray_of(node(9, store=1)), config)[-1]


# ---- contradictions


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            {**VLLM, "inference.vllm.urls": ["http://10.0.0.9:8000"]},
            r"inference\.vllm\.urls names servers .*leave out urls",
        ),
        ({**VLLM, "inference.vllm.devices": ["3"]}, r"inference\.vllm\.devices names servers or devices of your own"),
        ({**TURNS, "cluster.roles": ["sampler"]}, r"inference\.vllm\.colocate: one replica takes turns with one"),
        ({**TURNS, "inference.vllm.replicas": 2}, r"inference\.vllm\.colocate: one replica takes turns with one"),
    ],
)
def test_what_contradicts_a_cluster_is_refused(keys: dict[str, Any], said: str):
    with pytest.raises(UsageError, match=said):
        check_cluster(ray_of(node(99, 9)), config_of(**keys))


def test_servers_of_ones_own_are_kept_where_the_cluster_has_the_trainer_alone():
    keys = {**VLLM, "inference.vllm.urls": ["http://10.0.0.9:8000"], "cluster.roles": ["trainer"]}
    assert len(check_cluster(ray_of(node(2)), config_of(**keys))) == 2


# ---- commands

FILE = """\
[model.build]
[[orchestrator.train.env]]
id = "guess_number"
[cluster]
address = "127.0.0.1:1"
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "run.toml"
    path.write_text(FILE)
    return str(path)


@pytest.fixture
def a_cluster(monkeypatch: pytest.MonkeyPatch):
    """Two nodes of two CPUs, in place of the cluster that the configuration names."""
    there = ray_of(node(2), node(2))
    monkeypatch.setattr(cluster, "ray_running", lambda address, only_episodes: contextlib.nullcontext(there))


@pytest.fixture
def unconnected(monkeypatch: pytest.MonkeyPatch):
    """This process is not connected to the Ray of other tests."""
    monkeypatch.setattr("ray.is_initialized", lambda: False)


PLACED = [
    "2 nodes with 4 CPUs and 0 GPUs together",
    "1 trainer rank, 1 CPU each, packed",
    "1 sampler replica, 1 CPU each, spread",
]


@pytest.mark.slow
def test_config_shows_the_placement_apart_from_the_file(a_cluster, file: str, capsys):
    assert main(["config", file]) == 0
    printed = capsys.readouterr()
    told = [line for line in printed.err.splitlines() if line.startswith("cluster ")]
    assert [line.removeprefix("cluster").strip() for line in told] == PLACED
    assert "packed" not in printed.out and "[cluster]" in printed.out


@pytest.mark.parametrize("command", ["config", "plan"])
def test_a_run_that_the_cluster_cannot_hold_is_refused(a_cluster, file: str, capsys, command: str):
    assert main([command, file, "--cluster.sampler.cpus", "3"]) == 2
    said = capsys.readouterr().err
    assert "the cluster cannot hold 1 sampler replica, 3 CPU each, spread: there is room for 0. It has 2 nodes" in said


@pytest.mark.extras
@pytest.mark.realtime
def test_config_refuses_a_cluster_that_cannot_be_reached(unconnected, file: str, capsys):
    assert main(["config", file]) == 2
    assert 'no Ray at address = "127.0.0.1:1"' in capsys.readouterr().err


@pytest.mark.slow
def test_plan_shows_the_placement(a_cluster, file: str, capsys):
    assert main(["plan", file, "--gpu", "h100"]) == 0
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("cluster ")]
    assert [line.removeprefix("cluster").strip() for line in told] == PLACED


@pytest.mark.slow
@pytest.mark.extras
@pytest.mark.realtime
def test_plan_works_where_the_cluster_cannot_be_reached_and_says_so(unconnected, file: str, capsys):
    assert main(["plan", file, "--gpu", "h100", "--json"]) == 0
    (said,) = json.loads(capsys.readouterr().out)["cluster"]
    assert said.startswith(
        'cluster     not checked: no Ray at address = "127.0.0.1:1": [Errno 111] Connection refused.'
    )
