"""Runs standalone vLLM servers for runs on other hosts. A server that ends is restarted."""

from __future__ import annotations

import asyncio
import logging

from verbatim.core.errors import SamplerFault, UsageError
from verbatim.core.machine_faults import describe
from verbatim.inference.backends import BackendInputs, Listening
from verbatim.inference.http.server import LAST_PORT
from verbatim.inference.vllm.process import ServerProcess, is_taken, make_process
from verbatim.inference.vllm.settings import VllmSettings

logger = logging.getLogger(__name__)

_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0
"""First and longest pause in seconds before a server that ended is restarted. The pause is doubled after each attempt,
and reset by a successful start."""


class StandingVllm:
    """The replicas of [inference.vllm], on consecutive ports.

    Args:
        inputs: The inputs that a run would give to its backend.
        settings: The table [inference.vllm].
        listening: Address, first port, key and upload folder.

    Raises:
        UsageError: another process listens on one of the ports, or a port would exceed the highest number.
    """

    def __init__(self, inputs: BackendInputs, settings: VllmSettings, listening: Listening) -> None:
        _refuse_taken_ports(listening, settings.replicas)
        self._start_timeout = settings.start_timeout
        uploads = listening.uploads.resolve() if listening.uploads is not None else None
        assert inputs.logs is not None
        self._processes = [
            make_process(
                settings,
                replica,
                model=inputs.model,
                port=listening.port + replica,
                context_length=inputs.context_length,
                logs=inputs.logs,
                host=listening.host,
                api_key=listening.api_key,
                adapter_rank=inputs.adapter_rank,
                return_routed_experts=inputs.return_routed_experts,
                return_kept_sets=inputs.return_kept_sets,
                # Each replica has a folder of its own, because a finished upload deletes the other versions next to it.
                uploads=uploads / f"replica_{replica}" if uploads is not None else None,
            )
            for replica in range(settings.replicas)
        ]
        self.urls = [process.url for process in self._processes]
        self.named = f"{settings.replicas} vLLM {'server' if settings.replicas == 1 else 'servers'}"

    async def start(self) -> None:
        """Start all servers.

        Raises:
            SamplerFault: a server does not start.
        """
        await asyncio.gather(*(process.start(self._start_timeout) for process in self._processes))

    async def keep_running(self) -> None:
        """Restart servers that end, until this call is cancelled."""
        async with asyncio.TaskGroup() as group:
            for process in self._processes:
                group.create_task(_keep_running(process, self._start_timeout))

    async def close(self) -> None:
        """Stop all servers."""
        await asyncio.gather(*(process.stop() for process in self._processes))


def _refuse_taken_ports(listening: Listening, replicas: int) -> None:
    port, last = listening.port, listening.port + replicas - 1
    if last > LAST_PORT:
        raise UsageError(
            f"--port {port}: {replicas} servers need ports up to {last}, but the highest port is {LAST_PORT}"
        )
    for taken in range(port, last + 1):
        if is_taken(listening.host, taken):
            raise UsageError(
                f"--port {port}: another process listens on port {taken}; {replicas} servers need the "
                f"ports {port} to {last}; choose another --port"
            )


async def _keep_running(process: ServerProcess, deadline: float) -> None:
    pause = _FIRST_PAUSE
    while True:
        await process.ended()
        logger.warning("%s ended (%s); restarting it", process.name, process.how_it_ended())
        await asyncio.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
        try:
            await process.start(deadline)
            pause = _FIRST_PAUSE
        except SamplerFault as fault:
            logger.warning("%s", fault)
        except OSError as error:  # the disk is full, or no process can be created, both of which may be temporary
            logger.warning("%s could not be restarted: %s", process.name, describe(error))
