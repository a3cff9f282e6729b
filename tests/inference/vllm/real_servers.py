"""Real vLLM servers that live as long as the tests, for all tests that neither kill nor misconfigure one.

A test that takes one begins with weights of its own and asks for nothing that another one left. The plug-in of
`faulty_plugin` stands in the place of ours: without a planted fault it does the same. The one of `quick_plugin` lets
these servers start faster. Servers that a run or `verbatim inference` starts do without it, as a user's do.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from inference.vllm.tiny_model import CONTEXT, TinyModel
from verbatim.inference.http.client import HttpClient, encode, read_json
from verbatim.inference.vllm.command import PLUGIN
from verbatim.inference.vllm.process import free_port, make_process
from verbatim.inference.vllm.replica import VllmReplica
from verbatim.inference.vllm.settings import VllmSettings
from waiting import HANGS

PYTHON = os.environ.get("VERBATIM_VLLM_PYTHON", ".venv-vllm/bin/python")
FAULTY, QUICK = Path(__file__).parent / "faulty_plugin", Path(__file__).parent / "quick_plugin"
TOLERANCE = 5e-5
"""Largest |delta logprob| between sampler and trainer, float32."""
SIZES = (1e-3, 1e-6)
"""By how much a step changes each weight."""
LONGEST_START = 2 * HANGS
SMALL_CACHE = ("--enforce-eager", "--num-gpu-blocks-override", "256")
"""Options of a server that starts as quickly as it can: neither compiles nor fills a gibibyte with zeros."""
ONE_PROCESS: Mapping[str, str] = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""A worker within the process of the engine, as on one GPU; else a vLLM for CPUs has a process for it."""

T = TypeVar("T", bound=TinyModel)


@dataclass
class Served(Generic[T]):
    """A real server, and the trainer of its model."""

    url: str
    trainer: T
    log: Path
    _fault: Path
    steps: int = 0

    def plant(self, fault: str) -> None:
        """This fault is in the server from here on; "" = none."""
        self._fault.write_text(fault)

    def step(self, size: float) -> Path:
        """The folder of the trainer's next weights."""
        self.steps += 1
        return self.trainer.step(f"step{self.steps}", size)

    def replica(self, **settings: Any) -> VllmReplica:
        """A client with nothing known of the server."""
        return VllmReplica(
            self.url,
            **{
                "name": "replica 0",
                "model": "policy",
                "context_length": CONTEXT,
                "phase_timeout": HANGS,
                "vocab_size": self.trainer.vocab_size,
                "policy_version": 0,
                **settings,
            },
        )


@contextlib.contextmanager
def served(
    folder: Path,
    trainer: T,
    *,
    args: tuple[str, ...] = (),
    env: Mapping[str, str] = ONE_PROCESS,
    settings: Mapping[str, Any] | None = None,
    **process: Any,
) -> Iterator[Served[T]]:
    """A server of the trainer's first weights. It takes folders, uploads and broadcasts.

    Args:
        folder: For its log, and for what is planted.
        trainer: Of its model.
        args: Further options.
        env: Further environment variables.
        settings: Further keys of [inference.vllm].
        process: As for `make_process`.
    """
    fault = folder / "fault"
    fault.write_text("")
    table = VllmSettings(
        python=PYTHON,
        args=(*SMALL_CACHE, "--middleware", "verbatim_faulty.FaultyRoutes", *args),
        env={
            "PYTHONPATH": f"{PLUGIN}:{FAULTY}:{QUICK}",
            "VERBATIM_TEST_FAULT": str(fault),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            **env,
        },
        **{"weight_transfer": "gloo", **(settings or {})},
    )
    server = make_process(
        table,
        0,
        model=trainer.published,
        port=free_port(),
        context_length=CONTEXT,
        logs=folder,
        num_threads=1,
        uploads=folder / "uploads",
        **process,
    )
    with asyncio.Runner() as runner:
        runner.run(server.start(LONGEST_START))
        try:
            yield Served(server.url, trainer, folder / "replica_0.log", fault)
        finally:
            runner.run(server.stop())


@contextlib.asynccontextmanager
async def asking(url: str, route: str = "/inference/v1/generate") -> AsyncIterator[Any]:
    """Sends JSON to a route of a server, and reads what it answers."""
    client = HttpClient(url, request_timeout=HANGS, max_retries=0)
    try:
        yield lambda body, read=read_json: client.ask("POST", route, encode(body), read)
    finally:
        await client.close()


async def until_drawn(replica: VllmReplica, more: int, *, requests: int = 1) -> None:
    """Wait until the server works on so many requests, and has drawn so many more tokens since."""
    async with asyncio.timeout(HANGS):
        while (found := await replica.load_metrics()).running < requests:  # noqa: ASYNC110 - the server sets no event
            await asyncio.sleep(0.01)
        while (await replica.load_metrics()).generated_tokens < found.generated_tokens + more:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def end_all_requests(url: str) -> None:
    """Requests in flight are answered with what they have drawn."""
    async with asking(url, "/abort_requests") as abort:
        await abort({})
