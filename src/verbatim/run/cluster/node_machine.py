"""What `dtype = "auto"` measures for the parts of a run that are on nodes of the cluster."""

from __future__ import annotations

from typing import Any

from verbatim.config.schema import RunConfig
from verbatim.core.errors import UsageError, VerbatimError
from verbatim.rollouts.ray.cluster import said_by_ray
from verbatim.run.cluster.placement import RunPart, nodes_of, parts_of
from verbatim.run.machine import Kernel, Layers, Machine, Seconds, Side
from verbatim.run.measured_precision import ThisMachine
from verbatim.run.precision import SAMPLER, TRAINER


class NodeMachine:
    """A `Machine` that answers, for each side placed on the cluster, by a Ray task with the resources of one process of
    that side: it runs on a node that can hold such a process. A side that is not placed is measured here. Nodes are
    expected to be alike.

    Args:
        ray: The module, connected to the cluster.
        config: A configuration with [cluster].
    """

    def __init__(self, ray: Any, config: RunConfig) -> None:
        assert config.cluster is not None
        self._ray, self._patience = ray, config.cluster.start_timeout
        parts = parts_of(config, has_gpus=any(node.resources["GPU"] for node in nodes_of(ray)))
        self._parts: dict[str, RunPart] = {part.key.removeprefix("cluster."): part for part in parts}

    def place(self, side: Side) -> str:
        return "on a node" if side in self._parts else "here"

    def cuda_rounds(self, side: Side, device: str) -> bool | None:
        found: bool | None = self._ask(side, "cuda_rounds", side, device)
        return found

    def has_instructions(self, side: Side) -> bool:
        found: bool = self._ask(side, "has_instructions", side)
        return found

    def measure(self, side: Side, layers: Layers, rows: int, kernel: Kernel) -> Seconds:
        found: Seconds = self._ask(side, "measure", side, layers, rows, kernel)
        return found

    def _ask(self, side: Side, question: str, *given: Any) -> Any:
        """What a node of this side answers.

        Raises:
            UsageError: no node answered within `cluster.start_timeout`, or the measurement failed there.
        """
        if (part := self._parts.get(side)) is None:
            return answer(question, *given)
        task = self._ray.remote(answer).options(num_cpus=part.each["CPU"], num_gpus=part.each["GPU"])
        asked = task.remote(question, *given)
        errors, key = self._ray.exceptions, TRAINER if side == "trainer" else SAMPLER
        try:
            return self._ray.get(asked, timeout=self._patience)
        except errors.GetTimeoutError:
            self._ray.cancel(asked, force=True)
            raise UsageError(
                f"no node measured within {self._patience:g} s (cluster.start_timeout) which dtype is faster for the "
                f'{side}; wait until other jobs have ended, or set {key} to "float32" or "bfloat16"'
            ) from None
        except errors.RayError as error:
            cause = getattr(error, "cause", None)
            if isinstance(cause, VerbatimError):
                raise cause from None
            raise UsageError(
                f"a node could not measure which dtype is faster for the {side}: {said_by_ray(cause or error)}; set "
                f'{key} to "float32" or "bfloat16"'
            ) from error


def answer(question: str, *given: Any) -> Any:
    """What the machine of this process answers to one method of `Machine`."""
    machine: Machine = ThisMachine()
    return getattr(machine, question)(*given)
