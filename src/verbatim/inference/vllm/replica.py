"""One vLLM server as a `Sampler`: exact ids, a policy version for each token, and verified weight updates."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from verbatim.config.inference import OnWeightUpdate
from verbatim.core.errors import SamplerFault, UsageError
from verbatim.core.texts import first_of
from verbatim.core.types import Int32
from verbatim.inference.http.client import CONNECT
from verbatim.inference.http.replica import ServedReplica
from verbatim.inference.http.sampler import HttpSampler
from verbatim.inference.http.uploads import Deliver, path_there
from verbatim.inference.pool.replica import ReplicaLoad
from verbatim.inference.sampler import Completion, SampleRequest
from verbatim.inference.validation import check_ids, check_prompt, check_version
from verbatim.inference.vllm.broadcast import WeightBroadcast
from verbatim.inference.vllm.command import TRANSFER_ENGINES
from verbatim.inference.vllm.control import Memory, VllmControl, named
from verbatim.inference.vllm.digests import MOST_NAMED, Proof, PublishedFolder, TensorPiece, WorkerReport, open_folder
from verbatim.inference.vllm.facts import refuse_inexact
from verbatim.inference.vllm.settings import WeightTransfer
from verbatim.models.source import is_adapter

logger = logging.getLogger(__name__)
_BEYOND_A_PHASE = 30.0
"""Seconds by which the client's timeout exceeds a phase's timeout, so that the phase times out first and its error
names the phase."""


@dataclass(eq=False)
class _Route:
    """Where requests go: the base model, or one adapter."""

    http: HttpSampler
    adapter: str | None = None
    """The adapter's name on the server; None for the base model."""
    num_in_flight: int = 0
    """Number of completions that the server has not answered yet."""


class VllmReplica(ServedReplica):
    """A `Sampler` over one vLLM server.

    The next update wakes a sleeping server: first its memory for weights, which are loaded and verified, then its
    memory for the KV cache.

    An update succeeds only after every worker has reported the digests of the tensors that its kernels were built from,
    and these digests match the published files. Until then, the server does not compute anything. If the update fails,
    the server stays paused, and another `update_weights` may repair it.

    No new request reads a prefix that older weights computed, because after each update requests carry a new cache
    salt.

    An adapter is loaded next to the earlier ones, under a new name, while the server samples. New requests name the new
    adapter once it is verified. Requests in flight finish with the adapter and version that they started with,
    regardless of `on_weight_update`, because vLLM cannot change the adapter of a running request.

    Args:
        url: The server's root URL.
        name: The replica's name, for messages.
        model: The model's name in requests; None to leave it out.
        context_length: Maximum tokens of prompt plus completion.
        vocab_size: Size of the vocabulary. All ids are below it.
        policy_version: Policy version of the weights that the server holds now.
        api_key: Sent as a bearer token; None to send no key.
        on_weight_update: What happens to the KV cache of requests in flight: "recompute" computes it again with the new
            weights, "keep" continues with the old cache.
        weight_transfer: "files" (or "auto"), "http", "nccl" or "gloo".
        broadcast: The broadcast that the replicas of a run share; None if this replica loads folders.
        phase_timeout: Timeout of each phase of an update, in seconds.
        request_timeout: Timeout of one completion, in seconds.
        max_retries: Maximum number of retries of a completion.
        adapter_rank: Rank of the LoRA adapters that updates bring; None if updates bring full weights.
        return_routed_experts: True if completions must report which experts computed each token.
        return_kept_sets: True if completions must report the kept set of each token.
        deliver: Brings folders to the server's host in place of `weight_transfer`.

    Raises:
        UsageError: the URL is not a plain http(s) address, or a timeout or the key is invalid.
    """

    def __init__(
        self,
        url: str,
        *,
        name: str,
        model: str | None,
        context_length: int,
        vocab_size: int,
        policy_version: int,
        api_key: str | None = None,
        on_weight_update: OnWeightUpdate = "recompute",
        weight_transfer: WeightTransfer = "files",
        broadcast: WeightBroadcast | None = None,
        phase_timeout: float = 120.0,
        request_timeout: float = 3600.0,
        max_retries: int = 2,
        adapter_rank: int | None = None,
        return_routed_experts: bool = False,
        return_kept_sets: bool = False,
        deliver: Deliver | None = None,
    ) -> None:
        self._deliver = deliver
        self._connect = partial(
            HttpSampler,
            url,
            api_key=api_key,
            context_length=context_length,
            vocab_size=vocab_size,
            processed_logprobs=True,
            returns_kept_sets=return_kept_sets,
            request_timeout=request_timeout,
            max_retries=max_retries,
            ours=False,
        )
        self._route = _Route(self._connect(model=model, policy_version=policy_version))
        self._http = self._route.http
        self._former: list[_Route] = []
        self._adapter_rank = adapter_rank
        self._return_routed_experts, self._return_kept_sets = return_routed_experts, return_kept_sets
        self._model = model
        super().__init__(
            self._http.url,
            name=name,
            context_length=context_length,
            vocab_size=vocab_size,
            policy_version=policy_version,
            api_key=api_key,
            seconds=phase_timeout + _BEYOND_A_PHASE,
            headers={"Connection": "close"},  # after an error vLLM closes the connection, maybe under the next request
        )
        self._on_weight_update = on_weight_update
        self._control = VllmControl(self._client, name=name, phase_timeout=phase_timeout)
        self._weight_transfer, self._broadcast = weight_transfer, broadcast
        self._nccl = broadcast.sender.store.nccl if broadcast is not None and broadcast.kind == "nccl" else None
        self._pieces: Sequence[TensorPiece] = ()
        self._shapes: Mapping[str, tuple[int, ...]] | None = None
        self._num_asked_cache = 2  # the prefix cache is not checked before the first update
        """Number of calls of `cached_logprob` since the last update. Only the first two calls check the prefix
        cache."""
        self._has_said_cache_is_unread = False
        self._unverified: tuple[str, ...] = ()
        self._asleep: set[Memory] = set()
        self.seconds_waking: float | None = None
        """Seconds that the last wake-up took, without the loading of weights; None if the server never slept."""

    @property
    def num_unverified(self) -> int:
        """Number of tensors that no digest covered in the last update. Only logprobs show whether these are stale."""
        return len(self._unverified)

    # ---- the Sampler protocol

    async def generate(self, request: SampleRequest) -> Completion:
        """Sample one completion. Cancelling the call cancels the request on the server.

        Raises:
            RecordError: the prompt is empty or too long, or an id is outside the vocabulary.
            SamplerFault: the engine failed, the server cannot be reached, or a token has no logprob or version.
        """
        check_prompt(request, vocab_size=self.vocab_size, context_length=self.context_length)
        route = self._route  # kept here, because an update may replace `self._route` while this request runs
        route.num_in_flight += 1
        try:
            found = await route.http.generate(request)
        finally:
            route.num_in_flight -= 1
        if len(found.ids) and found.logprobs is None:
            raise SamplerFault(f"{self.name}: a completion without logprobs", num_tokens=len(found.ids))
        return found

    async def update_weights(self, path: Path, version: int) -> None:
        """Load a Hugging Face folder while the server is paused, or an adapter's folder while it samples, and verify
        that the server's kernels were built from this folder.

        Raises:
            ModelError: the folder is damaged, has tensors that differ from those of the folder before, or holds numbers
                that are not finite. The server continues unchanged.
            UsageError: the version is invalid.
            SamplerFault: a phase failed or timed out, or the server's weights are not those of the folder. The message
                names the replica, the phase and the tensors. The server stays paused.
        """
        check_version(version)
        stale = await self._take(path, version)
        if stale is not None:
            raise SamplerFault(f"{self.name}: its weights are not those of {path}: {stale}")

    async def _take(self, path: Path, version: int) -> str | None:
        if self._adapter_rank is None:
            return await self._load(path, version)
        if is_adapter(path):
            return await self._load_adapter(path, version)
        self._go_to(None, version)  # the server was started with the base model, which the canary verifies
        return None

    async def _load_adapter(self, path: Path, version: int) -> str | None:
        """Load an adapter next to the earlier ones. If it is verified, send new requests to it.

        Returns:
            What is wrong with the adapter, in which case requests go where they went before; None if the adapter is in
            use.
        """
        folder = await asyncio.to_thread(self._open, path)
        # The name is unique, because vLLM refuses a name that is loaded, and requests in flight still use older
        # adapters.
        control, name = self._control, f"v{version}-{uuid.uuid4().hex[:8]}"
        await control.load_adapter(name, await self._there(path, version))
        reports = await control.reports("adapter")
        proof = await asyncio.to_thread(folder.compare, reports)
        if proof.fault is not None:
            await control.forget_adapter(name)
            return proof.fault
        self._note(folder, reports, proof)
        self._go_to(name, version)
        # Requests in flight finish with the adapter that they started with, so only idle adapters are unloaded.
        for route in [route for route in self._former if not route.num_in_flight]:
            self._former.remove(route)
            await route.http.close()
            if route.adapter is not None:
                await control.forget_adapter(route.adapter)
        return None

    def _go_to(self, adapter: str | None, version: int) -> None:
        """Send new requests to an adapter, or to the base model."""
        self._former.append(self._route)
        model = self._model if adapter is None else adapter
        self._route = _Route(self._connect(model=model, policy_version=version), adapter)
        self._http = self._route.http
        self._http.cache_salt = f"{version}-{uuid.uuid4().hex}"
        self._num_asked_cache = 0
        self.policy_version = version

    async def _load(self, path: Path, version: int) -> str | None:
        """Load full weights, and resume the server if they are verified.

        Returns:
            What is wrong with the weights, in which case the server stays paused; None if the server samples with the
            new weights.
        """
        folder = await asyncio.to_thread(self._open, path)  # done before the pause, which has to be short
        control = self._control
        there = await self._there(path, version)
        await control.pause()
        await self._wake_up("weights")
        await control.start_update()
        if self._broadcast is None or not await self._broadcast.load(self.name, control):
            await control.load({"path": there})
        await control.finish_update()
        reports = await control.reports()
        proof = await asyncio.to_thread(folder.compare, reports)
        if proof.fault is not None:
            return proof.fault
        self._note(folder, reports, proof)
        await control.set_version(version)  # before `resume`, because no new token may carry the old version
        # With "keep", blocks of requests in flight cannot be emptied. The salt keeps new requests from reading these
        # blocks.
        self._http.cache_salt = f"{version}-{uuid.uuid4().hex}"
        emptied = await control.forget_prefixes(running_too=self._on_weight_update == "recompute")
        if not emptied and self._on_weight_update == "recompute":
            raise SamplerFault(
                f"{self.name}: the server could not empty its prefix cache, so it would reuse stale prefixes"
            )
        self._num_asked_cache = 0
        await self._wake_up("kv_cache")  # done last, because vLLM resumes by itself as soon as nothing sleeps
        await control.resume()
        self.policy_version = version
        return None

    async def _there(self, path: Path, version: int) -> str:
        """Path of a published folder on the server's host. With "http", the folder is uploaded first."""
        shares_folders = self._weight_transfer != "http"
        return await path_there(self._client, path, version, shares_folders=shares_folders, deliver=self._deliver)

    async def sleep(self) -> None:
        """Release the device's memory: weights and KV cache. The next `update_weights` allocates the memory again and
        loads weights.

        Raises:
            SamplerFault: the server failed or took too long; the message names the replica and the phase.
        """
        await self._control.sleep()
        self._asleep = {"weights", "kv_cache"}
        self.seconds_waking = 0.0

    async def _wake_up(self, memory: Memory) -> None:
        if memory not in self._asleep:
            return
        began = time.monotonic()
        await self._control.wake_up(memory, is_last=self._asleep == {memory})
        self._asleep.discard(memory)
        self.seconds_waking = (self.seconds_waking or 0.0) + time.monotonic() - began

    def _note(self, folder: PublishedFolder, reports: Sequence[WorkerReport], proof: Proof) -> None:
        """Remember the tensors and slices of a verified update, with which the next folder is compared."""
        self._shapes = folder.shapes
        self._pieces = [piece for report in reports for piece, _, _ in report.digests]
        if proof.unmapped and proof.unmapped != self._unverified:
            logger.warning(
                "%s: no digest covers these tensors; only logprobs can show whether they were loaded: %s",
                self.name,
                first_of(proof.unmapped, MOST_NAMED),
            )
        self._unverified = proof.unmapped

    def _open(self, path: Path) -> PublishedFolder:
        """Read the folder once, before the server is paused, to compute its digests and check for finite values."""
        folder = open_folder(path)
        if self._shapes is not None:
            folder.refuse_other_shapes(self._shapes)
        # The workers' slices do not change between updates, so their digests can be computed before the reports arrive.
        folder.prepare([piece for piece in self._pieces if piece.name in folder.shapes])
        return folder

    async def close(self) -> None:
        """Close the connections. Requests in flight in this event loop are cancelled. The server keeps running."""
        for route in (*self._former, self._route):
            await route.http.close()
        await self._client.close()

    # ---- state of the server

    async def check_server(self) -> None:
        """Check how the server was started, and let it resume.

        Raises:
            UsageError: the server does not fit; the message lists everything that is wrong, and the flags to add.
            SamplerFault: the server cannot be reached.
        """
        facts = await self._control.facts()
        refuse_inexact(
            facts,
            name=f"{named(self.name, self.url)}",
            transfer=TRANSFER_ENGINES[self._weight_transfer],
            vocab_size=self.vocab_size,
            context_length=self.context_length,
            adapter_rank=self._adapter_rank,
            return_routed_experts=self._return_routed_experts,
            return_kept_sets=self._return_kept_sets,
            nccl=self._nccl,
        )
        await self._control.resume()  # a client may have died during an update and left the server paused
        missing = await self._control.missing_flag(self._model)
        if missing is not None:
            raise UsageError(f"{named(self.name, self.url)} cannot be used: {missing}")

    async def prove_path(self, folder: Path) -> None:
        """Load the weights that the server already holds, in the same way as an update, and verify that every tensor
        arrives.

        Raises:
            UsageError: tensors stay stale; the message names them.
            SamplerFault: as for `update_weights`.
        """
        stale = await self._take(folder, self.policy_version)
        if stale is not None:
            raise UsageError(
                f"{named(self.name, self.url)}: weight updates do not reach every tensor: {stale}. If the "
                "server's model is not this run's, start it with --model and the folder in "
                "model.name; otherwise this model cannot be trained through this server"
            )

    async def cached_logprob(self, token_ids: Int32) -> float:
        """Logprob of the last id given those before it, at temperature 1, by an ordinary new request, which reads and
        writes the prefix cache.

        The first call after an update must not hit the cache. This finds stale prefixes even if the learning rate is
        too small for logprobs to show them. The ids of this call must therefore not occur in any other request. The
        second call, for the same ids or more, must hit what the first call wrote. If it does not, the check proves
        nothing, which is logged once.

        Raises:
            RecordError: there are fewer than two ids, or an id is outside the vocabulary.
            SamplerFault: the server failed, cannot be reached, or read prefixes that older weights computed.
        """
        ids = check_ids(token_ids, self.vocab_size, "token_ids")
        asked, self._num_asked_cache = self._num_asked_cache, self._num_asked_cache + 1
        found, num_cached = await self._http.cached_logprob(ids)
        if asked == 1 and not num_cached and not self._has_said_cache_is_unread:
            self._has_said_cache_is_unread = True
            logger.warning(
                "%s: stale prefixes cannot be detected, because the prefix cache stores nothing of a probe of %d "
                "tokens. Its blocks (--block-size) must be shorter than a probe, and a probe is shorter than "
                "orchestrator.seq_len",
                self.name,
                len(ids),
            )
        if asked == 0 and num_cached:
            raise SamplerFault(
                f"{self.name}: a new request read {num_cached} tokens from the prefix cache of the "
                f"weights before version {self.policy_version}"
            )
        return found

    async def load_metrics(self) -> ReplicaLoad:
        """The server's load.

        Raises:
            SamplerFault: the server does not report its load.
        """
        return await self._control.load_metrics()

    async def health(self) -> None:
        """Check that the server answers and that its engine is alive.

        Raises:
            SamplerFault: the server does not answer within 10 seconds, or the engine is dead.
        """
        await self._control.health(CONNECT)
