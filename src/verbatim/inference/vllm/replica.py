"""One vLLM server as a `Sampler`: exact ids, a version for each token, and weight updates that prove themselves."""

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
from verbatim.inference.http.uploads import path_there
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
"""Seconds that the client waits longer than a phase lasts, so that the phase ends it and names itself."""


@dataclass(eq=False)
class _Route:
    """Where requests go: a model, or an adapter of it."""

    http: HttpSampler
    adapter: str | None = None
    """Its name on the server; None: the base model."""
    num_in_flight: int = 0
    """Completions that it has not answered."""


class VllmReplica(ServedReplica):
    """A `Sampler` over one vLLM server.

    A server that sleeps is woken up by its next update: its weights first, which are loaded and proven, then its cache.

    An update ends only after every worker of the server has shown the digests of the tensors that its kernels were
    built from, and they are those of the published files. Until then the server computes nothing; if it fails, the
    server stays paused, and another `update_weights` may mend it.

    No new request reads a prefix that older weights computed: each update gives the requests a cache salt of its own.

    An adapter is loaded beside those before it, under a name that was never used, while the server samples. New
    requests name it once it is proven; those in flight end with the adapter, and the version, that they began with,
    whatever `on_weight_update` is, because vLLM cannot change it under a request.

    Args:
        url: The server's root.
        name: For messages.
        model: The model's name in requests.
        context_length: Most tokens of prompt and completion together.
        vocab_size: Ids are below this.
        policy_version: Of the weights that the server has now.
        api_key: Sent as a bearer token.
        on_weight_update: What happens to the cache of requests in flight: "recompute" computes it with the new weights,
            "keep" goes on with it.
        weight_transfer: "files" (or "auto"), "http", "nccl" or "gloo".
        broadcast: What the replicas of a run share that receive weights at the same time; None: this one reads
            folders.
        phase_timeout: Seconds for each phase of an update.
        request_timeout: Seconds for one completion.
        max_retries: Further attempts of a completion.
        adapter_rank: Rank of the low-rank adapters that updates bring; None: they bring whole weights.
        return_routed_experts: Whether its completions have to have the experts of a mixture.
        return_kept_sets: Whether they have to have the ids among which each token was drawn.

    Raises:
        UsageError: no plain http(s) address, or a limit or key that cannot be used.
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
    ) -> None:
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
            headers={"Connection": "close"},  # vLLM closes a connection after an error, maybe under the next request
        )
        self._on_weight_update = on_weight_update
        self._control = VllmControl(self._client, name=name, phase_timeout=phase_timeout)
        self._weight_transfer, self._broadcast = weight_transfer, broadcast
        self._nccl = broadcast.sender.store.nccl if broadcast is not None and broadcast.kind == "nccl" else None
        self._pieces: Sequence[TensorPiece] = ()
        self._shapes: Mapping[str, tuple[int, ...]] | None = None
        self._num_asked_cache = 2
        """Calls of `cached_logprob` since the last update; what more than two find says nothing."""
        self._has_said_cache_is_unread = False
        self._unverified: tuple[str, ...] = ()
        self._asleep: set[Memory] = set()
        self.seconds_waking: float | None = None
        """Seconds that its last waking took, without loading; None if it never slept."""

    @property
    def num_unverified(self) -> int:
        """Tensors that no digest tells of, as of the last update: only logprobs show whether they are stale."""
        return len(self._unverified)

    # ---- the Sampler protocol

    async def generate(self, request: SampleRequest) -> Completion:
        """Sample one completion. Cancelling the call cancels it on the server.

        Raises:
            RecordError: an empty or too long prompt, or an id outside the vocabulary.
            SamplerFault: the engine failed, the server cannot be reached, or a token came without logprob or version.
        """
        check_prompt(request, vocab_size=self.vocab_size, context_length=self.context_length)
        route = self._route
        route.num_in_flight += 1
        try:
            found = await route.http.generate(request)
        finally:
            route.num_in_flight -= 1
        if len(found.ids) and found.logprobs is None:
            raise SamplerFault(f"{self.name}: a completion without logprobs", num_tokens=len(found.ids))
        return found

    async def update_weights(self, path: Path, version: int) -> None:
        """Load a Hugging Face folder while the server is paused, or an adapter's folder while it samples, and prove
        that its kernels are built from it.

        Raises:
            ModelError: the folder is damaged, has other tensors than the one before, or holds numbers that are not
                finite; the server goes on as it was.
            UsageError: an invalid version.
            SamplerFault: a phase failed or took too long, or the server's weights are not those of the folder: names
                the replica, the phase and the tensors. The server stays paused.
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
        self._go_to(None, version)  # the base model, which the server was started with; the canary compares it
        return None

    async def _load_adapter(self, path: Path, version: int) -> str | None:
        """Load an adapter beside the others, and send requests to it if it is proven; otherwise returns what is wrong,
        and requests go where they went."""
        folder = await asyncio.to_thread(self._open, path)
        control, name = self._control, f"v{version}-{uuid.uuid4().hex[:8]}"
        await control.load_adapter(name, await self._there(path, version))
        reports = await control.reports("adapter")
        proof = await asyncio.to_thread(folder.compare, reports)
        if proof.fault is not None:
            await control.forget_adapter(name)
            return proof.fault
        self._note(folder, reports, proof)
        self._go_to(name, version)
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
        """Load, and resume if the weights are proven; otherwise returns what is wrong, and the server stays paused."""
        folder = await asyncio.to_thread(self._open, path)
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
        await control.set_version(version)
        self._http.cache_salt = f"{version}-{uuid.uuid4().hex}"
        emptied = await control.forget_prefixes(running_too=self._on_weight_update == "recompute")
        if not emptied and self._on_weight_update == "recompute":
            raise SamplerFault(f"{self.name}: empty prefix cache: the server could not, so old prefixes would be used")
        self._num_asked_cache = 0
        await self._wake_up("kv_cache")  # last: vLLM goes on computing by itself as soon as nothing sleeps
        await control.resume()
        self.policy_version = version
        return None

    async def _there(self, path: Path, version: int) -> str:
        """The path of a published folder on the server's host."""
        shares_folders = self._weight_transfer != "http"
        return await path_there(self._client, path, version, shares_folders=shares_folders)

    async def sleep(self) -> None:
        """Release the device's memory: weights and cache. The next `update_weights` takes it again, and loads.

        Raises:
            SamplerFault: the server failed or took too long: names the replica and the phase.
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
        """Remember what the next update will be asked about."""
        self._shapes = folder.shapes
        self._pieces = [piece for report in reports for piece, _, _ in report.digests]
        if proof.unmapped and proof.unmapped != self._unverified:
            logger.warning(
                "%s: no digest tells whether these tensors were loaded, only logprobs do: %s",
                self.name,
                first_of(proof.unmapped, MOST_NAMED),
            )
        self._unverified = proof.unmapped

    def _open(self, path: Path) -> PublishedFolder:
        """Read the folder once, before the server is paused: its digests, and that all its numbers are finite."""
        folder = open_folder(path)
        if self._shapes is not None:
            folder.refuse_other_shapes(self._shapes)
        folder.prepare([piece for piece in self._pieces if piece.name in folder.shapes])
        return folder

    async def close(self) -> None:
        """Let go of the connections; what is in flight in this event loop ends as cancelled. The server goes on."""
        for route in (*self._former, self._route):
            await route.http.close()
        await self._client.close()

    # ---- what the server is, and how it is

    async def check_server(self) -> None:
        """Ask the server how it was started.

        Raises:
            UsageError: names everything that is wrong, and the flags to add.
            SamplerFault: it cannot be reached.
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
        await self._control.resume()  # a server that was given up in the middle of an update would never answer
        missing = await self._control.missing_flag(self._model)
        if missing is not None:
            raise UsageError(f"{named(self.name, self.url)} cannot be used: {missing}")

    async def prove_path(self, folder: Path) -> None:
        """Send every tensor of the weights that the server already has, once, and see that each one arrives.

        Raises:
            UsageError: names the tensors that stay stale.
            SamplerFault: as `update_weights`.
        """
        stale = await self._take(folder, self.policy_version)
        if stale is not None:
            raise UsageError(
                f"{named(self.name, self.url)}: weight updates do not reach every tensor: {stale}. If it "
                "serves another model than this run's, start it with --model and the folder in "
                "model.name; else this model cannot be trained through this server"
            )

    async def cached_logprob(self, token_ids: Int32) -> float:
        """Logprob of the last id given those before it, at temperature 1, by a new and ordinary request: it reads the
        prefix cache, and writes it.

        The first such request after an update must find nothing there, whatever was asked before it: that shows an old
        cache where learning rates are too small for logprobs to show it. So its ids must be in no other request. The
        second one, for the same ids or more, must find the first one's: otherwise neither says anything, which is
        logged once.

        Raises:
            RecordError: fewer than two ids, or an id outside the vocabulary.
            SamplerFault: the server failed, cannot be reached, or read prefixes that older weights computed.
        """
        ids = check_ids(token_ids, self.vocab_size, "token_ids")
        asked, self._num_asked_cache = self._num_asked_cache, self._num_asked_cache + 1
        found, num_cached = await self._http.cached_logprob(ids)
        if asked == 1 and not num_cached and not self._has_said_cache_is_unread:
            self._has_said_cache_is_unread = True
            logger.warning(
                "%s: the check for old prefixes is off: the prefix cache keeps nothing of a probe of %d "
                "tokens. Its blocks (--block-size) have to be shorter than that, and a probe is shorter "
                "than orchestrator.seq_len",
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
        """How busy the server is.

        Raises:
            SamplerFault: it does not say.
        """
        return await self._control.load_metrics()

    async def health(self) -> None:
        """Return if the server answers and its engine lives.

        Raises:
            SamplerFault: it does not within 10 seconds, or its engine is dead.
        """
        await self._control.health(CONNECT)
