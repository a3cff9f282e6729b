"""The main program of a worker process: runs episodes for the run, with which it communicates over a socket."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import functools
import logging
import os
import selectors
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from verbatim.core.children import end_with_parent
from verbatim.core.ctrl_c import end_at_presses, leave_presses_to_the_run, users_errors
from verbatim.core.descriptors import raise_descriptor_limit
from verbatim.core.errors import SamplerFault, UsageError, VerbatimError
from verbatim.core.redaction import WithoutSecrets
from verbatim.core.texts import error_text
from verbatim.core.types import Float32, Int32
from verbatim.inference.sampler import Completion, SampleRequest
from verbatim.rollouts.main_loop import run_main
from verbatim.rollouts.processes.rpc_connection import RpcConnection
from verbatim.rollouts.runner import EpisodeTask
from verbatim.rollouts.workers.episodes import RunEpisode, open_episodes
from verbatim.rollouts.workers.worker import WorkerContext, loaded


def main(descriptor: int, parent: int) -> None:
    """Run episodes until the other end of the socket closes. `parent` is the process id of the run."""
    end_with_parent(parent)
    _prepare_process()
    faulthandler.enable()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # keeps output that precedes a crash
    handler = logging.StreamHandler()
    handler.setFormatter(WithoutSecrets(f"%(asctime)s {os.getpid()} %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    leave_presses_to_the_run()  # Ctrl-C: the run decides when its workers end
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)
    selector = selectors.DefaultSelector()
    os.register_at_fork(after_in_child=functools.partial(_be_a_copy, connection, selector))
    run_main(_serve(connection), new_loop=lambda: asyncio.SelectorEventLoop(selector))


def _be_a_copy(connection: socket.socket, selector: selectors.BaseSelector) -> None:
    """Detach a forked copy of this process from the run, and restore the copy's signal handlers. Both processes share
    one epoll instance: if the copy continued to use this instance, the copy would consume or change the events of the
    original process."""
    connection.close()
    selector.close()
    end_at_presses()


def _prepare_process() -> None:
    """Set `oom_score_adj` to 800 (the maximum is 1000), so that the kernel kills workers before trainer and sampler
    when memory runs out. Also raise this process's limit of open files, for the sake of environments."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("800")
    raise_descriptor_limit()


async def _serve(connection: socket.socket) -> None:
    child = _RpcServer()
    await asyncio.get_running_loop().create_unix_connection(lambda: child.rpc, sock=connection)
    await child.rpc.closed
    # Cancelled and then awaited, so that running episodes close their environments.
    await asyncio.gather(*child.rpc.cancel(), return_exceptions=True)
    await child.open.aclose()


class ParentSampler:
    """A `Sampler` that forwards requests to the run's sampler through `call`. Its policy version is the version that
    sampled the last completion."""

    def __init__(
        self, call: Callable[..., Awaitable[Any]], *, context_length: int, vocab_size: int, policy_version: int
    ) -> None:
        self._call = call
        self.context_length = context_length
        self.vocab_size = vocab_size
        self.policy_version = policy_version

    async def generate(self, request: SampleRequest) -> Completion:
        """Sample a completion in the run's process. If this call is cancelled, the request there is cancelled too."""
        completion: Completion = await self._call("generate", request)
        if completion.policy_versions is not None and len(completion.ids):
            self.policy_version = int(completion.policy_versions[-1])
        return completion

    async def prompt_logprobs(self, token_ids: Int32, temperature: float = 1.0) -> Float32:
        """Return the logprob of each token given the tokens before it: float32 [L]. The first logprob is NaN."""
        return np.asarray(await self._call("prompt_logprobs", token_ids, temperature), dtype=np.float32)

    async def update_weights(self, path: Path, version: int) -> None:
        """Raise a SamplerFault, because only the run updates weights."""
        raise SamplerFault("only the run updates weights")

    async def close(self) -> None:
        """Do nothing, because the sampler belongs to the run."""


class _RpcServer:
    """Answers the calls of the run."""

    def __init__(self) -> None:
        self.rpc = RpcConnection({"begin": self._begin, "run": self._run})
        self.open = contextlib.AsyncExitStack()
        """The resources of the environments, which are released at the end."""
        self._run_episode: RunEpisode | None = None

    async def _begin(self, context: WorkerContext, facts: Mapping[str, int], packed: bytes) -> int:
        """Create everything that episodes need, and return the id of this process."""
        with users_errors(lambda error: UsageError(error_text(error)), UsageError, asyncio.CancelledError):
            context.apply_exactly()
            sampler = ParentSampler(self.rpc.call, **facts)
            self._run_episode = await self.open.enter_async_context(open_episodes(packed, sampler))
        return os.getpid()

    async def _run(self, label: str, packed: bytes) -> bytes:
        """Run an episode, and return the packed trajectory."""
        assert self._run_episode is not None
        task: EpisodeTask = loaded(packed)
        try:
            return await self._run_episode(label, task)
        except VerbatimError:
            raise
        except Exception as error:  # a bug in this package, or a damaged interpreter: the run ends this process
            await self.rpc.call("broke", error_text(error))
            raise
