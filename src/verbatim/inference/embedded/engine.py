"""Connects event loops to the engine's thread: sends requests to it and returns its replies."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from verbatim.config.inference import OnWeightUpdate
from verbatim.core.errors import ModelError, RecordError, SamplerFault, VerbatimError
from verbatim.core.machine_faults import is_out_of_memory
from verbatim.core.texts import cut
from verbatim.core.types import Float32, Int32
from verbatim.inference.cancelled import cancelled, num_tokens_drawn, settle
from verbatim.inference.embedded.decoder import Decoder
from verbatim.inference.embedded.engine_thread import EngineStats, EngineThread, torch_threads
from verbatim.inference.embedded.messages import Command, EngineReply, GenerateJob, deliver, failure_text
from verbatim.inference.embedded.model_check import refuse_other_decoding
from verbatim.inference.embedded.settings import TorchSettings
from verbatim.inference.pool.replica import ReplicaLoad
from verbatim.inference.sampler import Completion, SampleRequest, Watch
from verbatim.inference.validation import check_ids, check_prompt, check_temperature, check_version
from verbatim.models.adapters import BaseWeights, is_adapter, load_base_of, read_adapter
from verbatim.models.experts import find_routers
from verbatim.models.head import CausalLM
from verbatim.models.loading import load_model, read_weights, replace_weights
from verbatim.models.native.cores import CoreShare
from verbatim.models.positions import refuse_moving_positions

_LOOK_EVERY = 1.0
"""While a call waits: seconds between two checks that the engine's thread is alive."""


class TorchSampler:
    """A `Sampler` that owns a copy of the model, and decodes many sequences together on a separate thread.

    It batches continuously: requests join as slots free up. A finished sequence's keys and values stay in its slot
    until the slot is needed, and are then parked outside the batch, so that the next turn computes only its new tokens.

    Args:
        model_path: A folder in Hugging Face format, a hub id, or an adapter's folder in the format of `peft`.
        config: The table [inference.torch]: batch size, precision, determinism.
        context_length: Maximum tokens of prompt plus completion.
        policy_version: Policy version of the weights in `model_path`.
        num_threads: Number of threads for the engine's matrix products only; None means torch's setting.
        cores: Decides before each step how many threads the engine may use; None means always `num_threads`.
        on_weight_update: What happens to the KV cache of sequences in flight when new weights arrive.
        return_routed_experts: Return the experts (of a mixture-of-experts model) that computed each token.

    Raises:
        ModelError: the model does not exist, cannot be cached exactly, or has weights that are not finite.
    """

    def __init__(
        self,
        model_path: str | Path,
        *,
        config: TorchSettings,
        context_length: int,
        policy_version: int = 0,
        num_threads: int | None = None,
        cores: CoreShare | None = None,
        on_weight_update: OnWeightUpdate = "recompute",
        return_routed_experts: bool = False,
    ) -> None:
        adapter = read_adapter(Path(model_path)) if is_adapter(model_path) else None
        how: dict[str, Any] = {"dtype": config.precision, "device": config.device}
        loaded = load_base_of(adapter, **how) if adapter is not None else load_model(model_path, **how)
        model = CausalLM(loaded, routers=find_routers(loaded) if return_routed_experts else None)
        model.model.requires_grad_(False)
        self._base = BaseWeights(model.model)
        if adapter is not None:
            replace_weights(model.model, self._base.merged(adapter))
        longest = getattr(model.config, "max_position_embeddings", None)
        if longest is not None and context_length > longest:
            raise ModelError(
                f"context_length = {context_length}, but the positions of {str(model_path)!r} end at "
                f"{longest}; use at most that (orchestrator.seq_len)"
            )
        self.context_length = context_length
        """Maximum tokens of prompt plus completion."""
        # Each id needs a row in the output head and in the embedding. Either matrix may be padded, and thus larger than
        # the other.
        self.vocab_size = min(model.vocab_size, int(model.backbone.get_input_embeddings().weight.shape[0]))
        """Size of the vocabulary. All ids are below it."""
        self.how: Mapping[str, str] = {
            "dtype": config.precision,
            "on_weight_update": on_weight_update,
            **({"return_routed_experts": "true"} if return_routed_experts else {}),
        }
        """How the engine was started, for comparison with what a run expects."""
        self._num_threads = num_threads
        self._model = model
        refuse_moving_positions(model, context_length)
        refuse_other_decoding(model, config)
        with torch_threads(num_threads):
            self._decoder = Decoder(
                model,
                config,
                context_length=context_length,
                version=policy_version,
                keep_cache=on_weight_update == "keep",
                record_experts=return_routed_experts,
            )
        self._reading_weights = threading.Lock()  # one folder at a time: each read holds a second copy of the weights
        self._engine = EngineThread(self._decoder, num_threads, cores)

    # ---- the Sampler protocol, called from event loops

    @property
    def policy_version(self) -> int:
        """Policy version of the weights in use."""
        return self._decoder.version

    @property
    def failure(self) -> str | None:
        """Why the engine is dead and does not answer requests any more; None while it is alive."""
        return self._engine.failure

    async def generate(self, request: SampleRequest, watch: Watch | None = None) -> Completion:
        """Sample one completion. Cancelling the call frees its slot after the current step.

        Args:
            request: The request.
            watch: Called with new tokens on the engine's thread after each step; it may end the completion with the
                last of these tokens, and nothing is sampled after that token.

        Raises:
            RecordError: the prompt is empty or too long, or an id is outside the vocabulary.
            SamplerFault: the engine failed or is closed, memory ran out, the model's logits are not finite, or `watch`
                failed.
            asyncio.CancelledError: the call was cancelled; the error carries the number of sampled tokens
                (`num_tokens_drawn`).
        """
        check_prompt(request, vocab_size=self.vocab_size, context_length=self.context_length)
        job = GenerateJob(
            future=asyncio.get_running_loop().create_future(),
            request=request,
            submitted=time.perf_counter(),
            watch=watch,
        )
        self._engine.send(job)
        try:
            await self._answered(job)
        except asyncio.CancelledError:
            self._engine.cancel(job)
            raise cancelled(await self._num_drawn(job)) from None
        completion: Completion = job.future.result()
        return completion

    generate_watched = generate

    async def update_weights(self, path: Path, version: int) -> None:
        """Load a Hugging Face folder, or an adapter's folder, which is merged into the initial base weights. The folder
        is read while decoding continues, and its weights are installed between two steps; no request is lost.

        Raises:
            ModelError: the folder cannot be read, does not fit, or holds a weight that is not finite; the engine keeps
                its weights and version.
            UsageError: the version is invalid.
            SamplerFault: the engine is dead or closed, or memory ran out while the folder was read. If memory ran out,
                the engine continues unchanged.
        """
        check_version(version)
        is_whole = not is_adapter(path)
        weights = await asyncio.to_thread(self._read_weights, Path(path))

        def take() -> None:
            replace_weights(self._model.model, weights)
            if is_whole:
                self._base.forget()
            self._decoder.set_version(version)

        await self._run_between_steps(take, vital=True)

    def _read_weights(self, folder: Path) -> dict[str, torch.Tensor]:
        with self._reading_weights, torch_threads(self._num_threads):
            try:
                if is_adapter(folder):
                    return self._base.merged(read_adapter(folder))
                return read_weights(self._model.model, folder)
            except VerbatimError:
                raise
            except Exception as error:  # several libraries read the folder, and they may raise anything
                message = f"{cut(repr(str(folder)), 200)} cannot be loaded as weights: {failure_text(error, 200)}"
                if is_out_of_memory(error):
                    raise SamplerFault(message) from error
                raise ModelError(message) from error

    async def prompt_logprobs(self, token_ids: Int32, temperature: float = 1.0) -> Float32:
        """Logprob of each token given the tokens before it: float32 [L]; the first is NaN. Computed without the KV
        cache, by the same code as the engine's passes.

        Raises:
            RecordError: there are no ids or too many, an id is outside the vocabulary, or the temperature is not above
                0.
        """
        ids = check_ids(token_ids, self.vocab_size, "token_ids")
        if len(ids) > self.context_length:
            raise RecordError(f"token_ids: {len(ids)} ids, but the context holds {self.context_length}")
        check_temperature(temperature)

        wide = ids.astype(np.int64)
        scored: Float32 = await self._run_between_steps(
            lambda: self._decoder.prompt_logprobs(wide, temperature), vital=False
        )
        return scored

    async def close(self) -> None:
        """Stop the engine; requests in flight end as cancelled, with the tokens sampled so far. Further calls do
        nothing."""
        self._engine.stop()
        await asyncio.to_thread(self._engine.thread.join)

    def stats(self) -> EngineStats:
        """The engine's counts since its start. Thread-safe."""
        return self._engine.stats()

    def load(self) -> ReplicaLoad:
        """The engine's load. Thread-safe."""
        counts = self.stats()
        return ReplicaLoad(
            running=counts.num_running,
            waiting=counts.num_waiting,
            kv_usage=self._decoder.table.usage,
            cache_queries=counts.prefix_hit_tokens + counts.prefill_tokens,
            cache_hits=counts.prefix_hit_tokens,
            generated_tokens=counts.sampled_tokens,
        )

    async def _run_between_steps(self, run: Callable[[], Any], *, vital: bool) -> Any:
        command = Command(future=asyncio.get_running_loop().create_future(), run=run, vital=vital)
        self._engine.send(command)
        try:
            await self._answered(command)
        finally:
            command.future.cancel()  # if the caller was cancelled, nobody will read the reply
        return command.future.result()

    async def _answered(self, reply: EngineReply) -> None:
        """Wait until the engine has replied. Unlike `await future`, cancelling the call does not cancel the future.

        A reply may be lost when memory runs out, and a failing thread may fail again before it has replied. Therefore
        the thread and the reply are checked every second.
        """
        while not reply.future.done():
            await asyncio.wait([reply.future], timeout=_LOOK_EVERY)
            self._engine.answer_for_dead(reply)
            if reply.answer is not None:
                deliver([reply])

    async def _num_drawn(self, job: GenerateJob) -> int:
        """Number of tokens sampled for a job that is being cancelled. The engine replies after its current step."""
        answered = asyncio.ensure_future(self._answered(job))
        with contextlib.suppress(asyncio.CancelledError):  # cancelled again: the caller raises it in any case
            await settle([answered])
        fault = job.future.exception()
        return num_tokens_drawn(fault) if fault is not None else len(job.future.result().ids)
