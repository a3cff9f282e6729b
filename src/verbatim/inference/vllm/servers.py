"""The servers of a run: started here, or found; each becomes a replica once it has shown that it samples exactly."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import tempfile
from collections.abc import Sequence
from pathlib import Path

from verbatim.errors import SamplerFault, UsageError
from verbatim.inference.backends import BackendInputs
from verbatim.inference.base import WeightCheck
from verbatim.inference.pool.pool import ReplicaPool
from verbatim.inference.vllm.command import MODEL_NAME
from verbatim.inference.vllm.process import ServerProcess, free_port, make_process
from verbatim.inference.vllm.replica import VllmReplica
from verbatim.inference.vllm.settings import VllmSettings

_ASK_EVERY = 2.0
"""Seconds between two looks for a server that was lost."""
_ATTEMPTS = 3
"""Starts of one server: its port may have been taken meanwhile."""


class Servers:
    """The vLLM servers behind a run's sampler, by index.

    Args:
        inputs: What the run gives to its backend.
        settings: [inference.vllm].

    Raises:
        UsageError: the servers' context is shorter than the run's sequences.
    """

    def __init__(self, inputs: BackendInputs, settings: VllmSettings) -> None:
        self.context_length = settings.max_model_len or inputs.context_length
        if self.context_length < inputs.context_length:
            raise UsageError(
                f"inference.vllm.max_model_len = {self.context_length} is shorter than orchestrator.seq_len = "
                f"{inputs.context_length}; leave it out, or make it at least that"
            )
        self._inputs, self._settings = inputs, settings
        self._vocab_size = _vocab_size(inputs.model)
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        if inputs.logs is not None:
            self._logs = inputs.logs
        else:
            self._temporary = tempfile.TemporaryDirectory(prefix="verbatim-vllm-")
            self._logs = Path(self._temporary.name)
        self._key = secrets.token_urlsafe(24) if self.are_ours else settings.api_key
        self._processes: dict[int, ServerProcess] = {}
        self.weights: tuple[Path, int] = (Path(inputs.model), inputs.policy_version)
        """Folder and version of what a server is started with."""

    @property
    def are_ours(self) -> bool:
        """Whether this run starts and ends them."""
        return not self._settings.urls

    def __len__(self) -> int:
        return self._settings.replicas if self.are_ours else len(self._settings.urls)

    async def open(self) -> list[VllmReplica]:
        """All of them, each checked, each with the weights that the run begins with.

        Raises:
            UsageError: a server that cannot sample exactly, or cannot take weights; says what to type.
            SamplerFault: a server that does not start or answer.
        """
        opened: dict[int, VllmReplica] = {}
        try:
            async with asyncio.TaskGroup() as group:
                for index in range(len(self)):
                    group.create_task(self._open(index, opened))
        except BaseException as error:
            for replica in opened.values():
                await replica.close()
            await self.close()
            if isinstance(error, BaseExceptionGroup):
                raise error.exceptions[0] from None
            raise
        return [opened[index] for index in sorted(opened)]

    async def _open(self, index: int, opened: dict[int, VllmReplica]) -> None:
        replica = await self.start(index) if self.are_ours else self._replica(index, self._settings.urls[index])
        opened[index] = replica
        await replica.check_server()
        path, _ = self.weights
        if path.is_dir():  # a hub id has no folder to send; the canary checks what the server loaded of it
            await replica.prove_path(path)

    async def start(self, index: int) -> VllmReplica:
        """Start a server, again if it was there before, with the weights of `weights`.

        Raises:
            SamplerFault: it does not start.
        """
        if (former := self._processes.pop(index, None)) is not None:
            await former.stop()
        for attempt in itertools.count(1):
            process = make_process(
                self._settings, index, model=self.weights[0], port=free_port(), context_length=self.context_length,
                logs=self._logs, num_threads=self._inputs.num_threads, api_key=self._key,
            )  # fmt: skip
            self._processes[index] = process
            try:
                await process.start(self._settings.start_timeout)
                return self._replica(index, process.url)
            except SamplerFault as fault:
                if attempt == _ATTEMPTS or "address already in use" not in str(fault).lower():
                    raise
        raise AssertionError("unreachable")

    async def find(self, index: int) -> VllmReplica:
        """A server of `urls` that was lost, once it answers again: whoever started it starts it again.

        Raises:
            UsageError: another server answers.
            SamplerFault: it does not answer before `start_timeout`.
        """
        replica = self._replica(index, self._settings.urls[index])
        try:
            async with asyncio.timeout(self._settings.start_timeout):
                while True:
                    try:
                        await replica.health()
                        break
                    except SamplerFault:
                        await asyncio.sleep(_ASK_EVERY)
            await replica.check_server()
        except BaseException as error:
            await replica.close()
            if isinstance(error, TimeoutError):
                raise SamplerFault(f"{replica.name} did not come back within {self._settings.start_timeout:g} s "
                                   "(inference.vllm.start_timeout)") from None  # fmt: skip
            raise
        return replica

    def _replica(self, index: int, url: str) -> VllmReplica:
        return VllmReplica(
            url,
            name=f"replica {index}" if self.are_ours else f"replica {index} ({url})",
            model=MODEL_NAME if self.are_ours else None,
            context_length=self.context_length,
            vocab_size=self._vocab_size,
            policy_version=self.weights[1],
            api_key=self._key,
            on_weight_update=self._inputs.on_weight_update,
            weight_transfer=self._settings.weight_transfer,
            phase_timeout=self._settings.update_timeout,
        )

    async def close(self) -> None:
        """End those that were started here; their logs go too, unless the run has a folder for them."""
        processes, self._processes = list(self._processes.values()), {}
        await asyncio.gather(*(process.stop() for process in processes))
        if self._temporary is not None:
            self._temporary.cleanup()


class ServerPool(ReplicaPool):
    """The replicas of these servers. A server that is started again begins with the newest weights."""

    def __init__(self, servers: Servers, replicas: Sequence[VllmReplica]) -> None:
        path, _ = servers.weights
        super().__init__(
            replicas, restart=servers.start if servers.are_ours else servers.find, on_close=servers.close,
            weights=path if path.is_dir() else None,
        )  # fmt: skip
        self._servers = servers

    async def update_replicas(self, path: Path, version: int, check: WeightCheck | None) -> None:
        """As `ReplicaPool.update_replicas`."""
        self._servers.weights = (path, version)
        await super().update_replicas(path, version, check)


def _vocab_size(model: str | Path) -> int:
    """The rows of the model's output head: ids are below this."""
    from transformers import AutoConfig

    try:
        return int(AutoConfig.from_pretrained(model).get_text_config().vocab_size)
    except (OSError, ValueError, AttributeError) as error:
        raise UsageError(f"model {str(model)!r} has no config.json with a vocab_size: {error}") from error
