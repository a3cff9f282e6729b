"""Runs a rollout engine as a Ray actor."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from verbatim.core.errors import UsageError
from verbatim.core.types import Trajectory
from verbatim.models.renderers.renderer_spec import RendererSpec, renderer_spec
from verbatim.rollouts.ray.cluster import connect, import_ray
from verbatim.rollouts.rollout import Conversation
from verbatim.rollouts.workers.worker import WorkerContext


def start_rollout(kind: Callable[..., Any], settings: Mapping[str, Any]) -> Any:
    """Start an actor that holds one rollout engine, and return its handle. Errors are as for
    `MultiTurnRollout.remote`."""
    ray = import_ray()
    try:
        inspect.signature(kind).bind(**settings)
    except TypeError as error:
        raise UsageError(f"{getattr(kind, '__name__', kind)}.remote: {error}") from None
    packed = {name: _pack(ray, name, value) for name, value in {"kind": kind, **settings}.items()}
    if not ray.is_initialized():
        connect(ray)
    return ray.remote(RolloutActor).remote(WorkerContext.current(), packed)


def _pack(ray: Any, name: str, value: Any) -> bytes:
    kind = type(value).__name__
    try:
        packed: bytes = ray.cloudpickle.dumps(renderer_spec(value) if name == "template" else value)
    except Exception as error:  # pickling may raise anything
        what = f"{name}: a {kind} cannot be sent to an actor ({type(error).__name__}: {error})"
        if name == "sampler":
            raise UsageError(
                f"{what}: it lives in this process. Serve it (`async with serve_sampler(sampler) as server`) and give "
                f"HttpSampler(server.url); or let the actor create its own: {name}=lambda: {kind}(...)"
            ) from error
        mend = f"let the actor create it: {name}=lambda: ..." if name in _MADE_THERE else "change what it holds"
        raise UsageError(f"{what}; {mend}") from error
    return packed


_MADE_THERE = {"sampler": "generate", "template": "render_ids"}
"""Settings that may be given as an object or as a function that creates the object. The value is the name of a method
that only the object has. The method is looked up on the object's type: `isinstance` would read properties of the
object, and to read a property a sampler over HTTP calls its server."""


class RolloutActor:
    """A rollout engine in a Ray process. Its calls run concurrently on the event loop of that process."""

    def __init__(self, context: WorkerContext, packed: Mapping[str, bytes]) -> None:
        context.apply()
        self._packed = packed
        self._rollout: Any = None

    async def run(self, trajectories: Sequence[Conversation], **overrides: Any) -> list[Trajectory]:
        """Run the engine, and return its trajectories."""
        if self._rollout is None:  # created here, not in __init__: its parts may need a running event loop
            settings = {name: _unpack(name, value) for name, value in self._packed.items()}
            self._rollout = settings.pop("kind")(**settings)
        result: list[Trajectory] = await self._rollout.run(trajectories, **overrides)
        return result

    __call__ = run


def _unpack(name: str, packed: bytes) -> Any:
    from ray import cloudpickle

    value = cloudpickle.loads(packed)
    if isinstance(value, RendererSpec):
        return value.make()
    method = _MADE_THERE.get(name)
    if method is None or hasattr(type(value), method) or not callable(value):
        return value
    made = value()
    if not hasattr(type(made), method):
        raise UsageError(f"{name}: the function returned a {type(made).__name__}, which has no `{method}`")
    return made
