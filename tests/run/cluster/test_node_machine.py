"""What `dtype = "auto"` asks is answered by a node with the resources of the side, or here where the side is here."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from verbatim.config import make_config
from verbatim.core.errors import UsageError
from verbatim.run.cluster import node_machine
from verbatim.run.cluster.node_machine import NodeMachine
from verbatim.run.machine import Layers, Seconds
from verbatim.run.precision import SAMPLER, resolve_dtypes
from verbatim.run.tables import component_tables

LARGE = {"hidden_size": 1024, "num_layers": 1, "num_heads": 8, "num_kv_heads": 8, "intermediate_size": 1024}


class Broken(Exception):
    """Ray's RayError. Has the task's exception, if that failed and not its process."""

    cause: Exception | None = None


class Late(Broken):
    """Ray's GetTimeoutError."""


class OneNode:
    """A cluster of one node. Its tasks run at once, or end with this error."""

    def __init__(self, error: Broken | None = None) -> None:
        self.error, self.reserved, self.cancelled = error, [], []
        self.exceptions = SimpleNamespace(GetTimeoutError=Late, RayError=Broken)

    def nodes(self) -> list[dict[str, Any]]:
        return [{"NodeManagerAddress": "10.0.0.1", "Alive": True, "Resources": {"CPU": 8.0, "GPU": 2.0}}]

    def remote(self, function: Callable[..., Any]) -> Any:
        def options(**reserved: float) -> Any:
            self.reserved.append(reserved)
            return SimpleNamespace(remote=lambda *given: (function, given))

        return SimpleNamespace(options=options)

    def get(self, task: Any, timeout: float) -> Any:
        if self.error is not None:
            raise self.error
        function, given = task
        return function(*given)

    def cancel(self, task: Any, force: bool) -> None:
        self.cancelled.append(task)


class Slow:
    """A machine whose trainer is twice as fast in bfloat16, and whose sampler is as fast as in float32."""

    def place(self, side: str) -> str:
        return "on a slow machine"

    def cuda_rounds(self, side: str, device: str) -> None:
        return None

    def has_instructions(self, side: str) -> bool:
        return True

    def measure(self, side: str, layers: Layers, rows: int, kernel: str) -> Seconds:
        return Seconds(float32=0.02, bfloat16=0.01 if side == "trainer" else 0.02, of="ten products")


def config_of(**cluster: Any) -> Any:
    return make_config(
        {
            "model": {"build": LARGE},
            "trainer": {"dtype": "auto", "device": "cpu"},
            "inference": {"torch": {"dtype": "auto", "device": "cpu"}},
            "orchestrator": {"train": {"env": [{"id": "guess_number"}]}},
            "cluster": cluster,
        },
        tables=component_tables(),
    )


@pytest.fixture(autouse=True)
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process is on a slow machine."""
    monkeypatch.setattr(node_machine, "ThisMachine", Slow)


def test_each_side_is_measured_with_the_resources_of_one_of_its_processes():
    ray = OneNode()
    config = config_of(trainer={"cpus": 4}, sampler={"cpus": 2})
    resolved, choices = resolve_dtypes(config, machine=NodeMachine(ray, config))
    assert (resolved.trainer.dtype, resolved.inference.torch.dtype) == ("bfloat16", "float32")
    # Three questions a side: the device, the instructions, the times. No GPU: both sides are on CPUs.
    assert ray.reserved == 3 * [{"num_cpus": 4.0, "num_gpus": 0.0}] + 3 * [{"num_cpus": 2.0, "num_gpus": 0.0}]
    assert "2.00 times as fast as float32 on a node" in str(choices[0])


def test_a_side_that_is_not_placed_is_measured_here():
    ray = OneNode()
    config = config_of(roles=["trainer"])
    _, choices = resolve_dtypes(config, machine=NodeMachine(ray, config))
    assert len(ray.reserved) == 3
    assert "float32 on a node" in str(choices[0])
    assert "float32 here" in str(choices[1])


def test_a_measurement_that_does_not_end_is_named_with_what_to_type():
    ray = OneNode(Late())
    config = config_of(start_timeout=7.0)
    with pytest.raises(UsageError) as refused:
        resolve_dtypes(config, machine=NodeMachine(ray, config))
    assert str(refused.value) == (
        "no node measured within 7 s (cluster.start_timeout) which dtype is faster for the trainer; wait until other "
        'jobs have ended, or set trainer.dtype to "float32" or "bfloat16"'
    )
    assert len(ray.cancelled) == 1


def test_a_process_that_dies_while_it_measures_is_named_with_what_to_type():
    ray, config = OneNode(Broken("The worker died.")), config_of(roles=["sampler"])
    with pytest.raises(UsageError) as refused:
        resolve_dtypes(config, machine=NodeMachine(ray, config), keys=(SAMPLER,))
    assert str(refused.value) == (
        "a node could not measure which dtype is faster for the sampler: The worker died.; set inference.torch.dtype "
        'to "float32" or "bfloat16"'
    )


def test_a_device_that_a_node_lacks_is_said_as_on_this_machine():
    error = Broken("a long text of Ray's")
    error.cause = UsageError("trainer.device: there is no cuda:7")
    config = config_of()
    with pytest.raises(UsageError, match=r"^trainer\.device: there is no cuda:7$"):
        resolve_dtypes(config, machine=NodeMachine(OneNode(error), config))
