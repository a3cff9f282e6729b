"""The embedded sampler: a thread that admits requests as places free up and decodes them together."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from verbatim.config.inference import OnWeightUpdate
from verbatim.errors import ModelError, RecordError, SamplerFault, VerbatimError
from verbatim.inference.base import Completion, SampleRequest, nothing_sampled
from verbatim.inference.cut_off import cut_off, num_tokens_drawn, settle
from verbatim.inference.embedded.decoder import Decoder, DecoderConfig
from verbatim.inference.embedded.model_check import refuse_other_decoding
from verbatim.inference.embedded.settings import TorchSettings
from verbatim.inference.embedded.whole_sequence import sequence_logprobs
from verbatim.inference.validation import check_ids, check_prompt, check_temperature, check_version
from verbatim.machine_faults import describe, is_out_of_memory
from verbatim.models.head import CausalLM
from verbatim.models.loading import load_model, read_weights, replace_weights
from verbatim.models.positions import refuse_moving_positions
from verbatim.texts import cut, error_text
from verbatim.types import Float32, Int32, StopReason

logger = logging.getLogger(__name__)

_MOST_DEFERRED = 16
"""Requests that may wait for another's prefix before the rest of the queue is left for the next step."""


_THREAD_ENDED = "the sampler's thread has ended; what it wrote on the standard error says why"
_LOOK_EVERY = 1.0
"""Seconds between two looks of a waiting call at whether the engine's thread is there."""
_STEPS_PER_QUESTION = 3.0
"""While sequences are in flight, the logprobs of prompts take one second for so many of decoding."""


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """What the engine has done since it started."""

    sampled_tokens: int
    """Tokens drawn."""
    prefill_tokens: int
    """Prompt tokens computed."""
    prefix_hit_tokens: int
    """Prompt tokens whose keys and values were already cached."""
    recomputed_tokens: int
    """Tokens of sequences in flight computed again after new weights."""
    forward_passes: int
    """Forward passes of the model."""
    completions: int
    """Requests that ended by themselves."""
    busy_seconds: float
    """Time spent with at least one sequence in flight."""
    num_running: int
    """Sequences in flight now."""
    num_waiting: int
    """Requests waiting for a place now."""

    @property
    def tokens_per_second(self) -> float:
        """Sampled tokens per busy second."""
        return self.sampled_tokens / self.busy_seconds if self.busy_seconds else 0.0


@dataclass(eq=False, kw_only=True)
class _Reply:
    """Somebody in an event loop who waits for an answer from the engine's thread."""

    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]
    answer: tuple[Any] | None = None
    """What the future is about to hold; None = not answered yet."""


@dataclass(eq=False, kw_only=True)
class _Job(_Reply):
    """One `generate` call."""

    request: SampleRequest
    submitted: float
    started: float = 0.0
    slot: int | None = None


@dataclass(eq=False, kw_only=True)
class _Command(_Reply):
    """Something to run between two steps."""

    run: Callable[[], Any]
    vital: bool
    """Whether the engine cannot go on where this fails: the model may be half changed."""


@dataclass(eq=False)
class _Cancel:
    """Whoever waited for this job does so no longer."""

    job: _Job


@dataclass(eq=False)
class _Outbox:
    """Answers of one step, handed to each event loop in one call."""

    answers: dict[asyncio.AbstractEventLoop, list[tuple[_Reply, Any]]] = field(default_factory=dict)

    def put(self, reply: _Reply, answer: Any) -> None:
        self.answers.setdefault(reply.loop, []).append((reply, answer))

    def send(self) -> None:
        for loop, answers in self.answers.items():
            for reply, answer in answers:
                reply.answer = (answer,)
            try:
                loop.call_soon_threadsafe(_settle, [reply for reply, _ in answers])
            except RuntimeError:
                if not loop.is_closed():  # nothing waits on a closed loop
                    raise
        self.answers = {}


def _settle(replies: list[_Reply]) -> None:
    for reply in replies:
        if reply.future.done():
            continue
        assert reply.answer is not None
        (answer,) = reply.answer
        if isinstance(answer, BaseException):
            reply.future.set_exception(answer)
        else:
            reply.future.set_result(answer)


class TorchSampler:
    """A `Sampler` that owns a copy of the model and decodes many sequences together on its own thread.

    Requests join as places free up; no request waits for a batch to end. A finished sequence's keys and values stay
    until its place is needed, then in memory beside the batch, so that the next turn computes only what is new.

    Args:
        model_path: a folder in Hugging Face format (or a hub id).
        config: batch size, precision, determinism.
        context_length: most tokens of prompt and completion together.
        policy_version: of the weights in `model_path`.
        num_threads: threads of the engine's matrix products; None takes torch's setting. Other threads keep theirs.
        on_weight_update: what happens to the key/value cache of sequences in flight when new weights arrive.

    Raises:
        ModelError: no such model, one that cannot be cached exactly, or whose weights are not finite numbers.
    """

    def __init__(
        self,
        model_path: str | Path,
        *,
        config: TorchSettings,
        context_length: int,
        policy_version: int = 0,
        num_threads: int | None = None,
        on_weight_update: OnWeightUpdate = "recompute",
    ) -> None:
        model = CausalLM(load_model(model_path, dtype=config.dtype, device=config.device))
        model.model.requires_grad_(False)
        longest = getattr(model.config, "max_position_embeddings", None)
        if longest is not None and context_length > longest:
            raise ModelError(f"context_length = {context_length}, but the positions of {str(model_path)!r} end at "
                             f"{longest}; use at most that (orchestrator.seq_len)")  # fmt: skip
        self._context_length = context_length
        self._vocab_size = min(model.vocab_size, int(model.backbone.get_input_embeddings().weight.shape[0]))
        self._num_threads = num_threads
        self._model = model
        decoder_config = DecoderConfig(
            num_slots=config.max_batch_size,
            context_length=context_length,
            prefill_chunk=config.prefill_chunk,
            deterministic=config.deterministic,
            keep_cache=on_weight_update == "keep",
        )
        refuse_moving_positions(model, context_length)
        refuse_other_decoding(model, decoder_config)
        with _threads(num_threads):
            self._decoder = Decoder(model, decoder_config, version=policy_version)
        self._wake = threading.Condition()
        self._inbox: deque[_Job | _Command | _Cancel] = deque()
        self._closing = False
        self._fault: BaseException | None = None
        self._reading_weights = threading.Lock()
        # Of the engine's thread alone:
        self._waiting: deque[_Job] = deque()
        self._commands: deque[_Command] = deque()
        self._owed = 0.0
        self._running: dict[int, _Job] = {}
        self._outbox = _Outbox()
        self._completions = 0
        self._busy_seconds = 0.0
        self._thread = threading.Thread(target=self._main, name="verbatim-sampler", daemon=True)
        self._thread.start()

    # ---- the Sampler protocol, called from event loops

    @property
    def context_length(self) -> int:
        """Most tokens of prompt and completion together."""
        return self._context_length

    @property
    def vocab_size(self) -> int:
        """Ids are below this."""
        return self._vocab_size

    @property
    def policy_version(self) -> int:
        """The version of the weights in use."""
        return self._decoder.version

    @property
    def failure(self) -> str | None:
        """Why the engine is dead and can answer nothing any more; None while it lives."""
        if self._fault is not None:
            return str(_engine_failed(self._fault))
        if not self._closing and not self._thread.is_alive():
            return _THREAD_ENDED
        return None

    async def generate(self, request: SampleRequest) -> Completion:
        """Sample one completion. Cancelling the call frees its place in the batch, between two steps.

        Raises:
            RecordError: an empty or too long prompt, or an id outside the vocabulary.
            SamplerFault: the engine failed or is closed, memory is not enough for it, or the model's logits are not
                finite numbers.
            asyncio.CancelledError: it was cancelled; holds how many tokens had been drawn (`num_tokens_drawn`).
        """
        check_prompt(request, vocab_size=self._vocab_size, context_length=self._context_length)
        loop = asyncio.get_running_loop()
        job = _Job(loop=loop, future=loop.create_future(), request=request, submitted=time.perf_counter())
        self._send(job)
        try:
            await self._answered(job)
        except asyncio.CancelledError:
            with self._wake:
                self._inbox.append(_Cancel(job))
                self._wake.notify()
            raise cut_off(await self._num_drawn(job)) from None
        completion: Completion = job.future.result()
        return completion

    async def update_weights(self, path: Path, version: int) -> None:
        """Load a Hugging Face folder: read it beside the decoding, and take it between two steps; nothing is lost.

        Raises:
            ModelError: the folder cannot be read, does not fit, or holds a weight that is not a finite number; the
                engine goes on with the weights and the version it has.
            UsageError: a version that none can be.
            SamplerFault: the engine is dead or closed; or memory is not enough to read them, and it goes on as before.
        """
        check_version(version)
        weights = await asyncio.to_thread(self._read_weights, Path(path))

        def take() -> None:
            replace_weights(self._model.model, weights)
            self._decoder.set_version(version)

        await self._run_between_steps(take, vital=True)

    def _read_weights(self, folder: Path) -> dict[str, torch.Tensor]:
        with self._reading_weights, _threads(self._num_threads):
            try:
                return read_weights(self._model.model, folder)
            except VerbatimError:
                raise
            except Exception as error:  # several libraries read the folder, and raise anything
                message = f"{cut(repr(str(folder)), 200)} cannot be loaded as weights: {_said(error, 200)}"
                if is_out_of_memory(error):
                    raise SamplerFault(message) from error
                raise ModelError(message) from error

    async def prompt_logprobs(self, token_ids: Int32, temperature: float = 1.0) -> Float32:
        """Logprob of each token given those before it, past any cache: float32 [L]; the first is NaN.

        Raises:
            RecordError: no ids, too many, an id outside the vocabulary, or a temperature that is not above 0.
        """
        ids = check_ids(token_ids, self._vocab_size, "token_ids")
        if len(ids) > self._context_length:
            raise RecordError(f"token_ids: {len(ids)} ids, but the context holds {self._context_length}")
        check_temperature(temperature)

        def score() -> Float32:
            tokens = torch.from_numpy(ids.astype(np.int64)).to(self._model.device)
            logprobs: Float32 = sequence_logprobs(self._model, tokens, temperature).cpu().numpy()
            return logprobs

        scored: Float32 = await self._run_between_steps(score, vital=False)
        return scored

    async def close(self) -> None:
        """Stop; whatever is in flight ends as cancelled, with the tokens it has. May be called again."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join)

    def stats(self) -> EngineStats:
        """Counts so far. May be called from any thread."""
        counts = self._decoder.counts
        return EngineStats(
            sampled_tokens=counts.sampled_tokens,
            prefill_tokens=counts.prefill_tokens,
            prefix_hit_tokens=counts.prefix_hit_tokens,
            recomputed_tokens=counts.recomputed_tokens,
            forward_passes=counts.forward_passes,
            completions=self._completions,
            busy_seconds=self._busy_seconds,
            num_running=len(self._running),
            num_waiting=len(self._waiting) + len(self._commands) + len(self._inbox),
        )

    def _send(self, message: _Job | _Command) -> None:
        with self._wake:
            if self._fault is not None:
                raise _engine_failed(self._fault)
            if self._closing:
                raise SamplerFault("the sampler is closed; make a new one")
            self._inbox.append(message)
            self._wake.notify()

    async def _run_between_steps(self, run: Callable[[], Any], *, vital: bool) -> Any:
        loop = asyncio.get_running_loop()
        command = _Command(loop=loop, future=loop.create_future(), run=run, vital=vital)
        self._send(command)
        try:
            await self._answered(command)
        finally:
            command.future.cancel()  # unless it is answered: whoever asked is gone
        return command.future.result()

    async def _answered(self, reply: _Reply) -> None:
        """Wait until the engine has answered. A call that is cancelled meanwhile leaves the future to it, unlike
        `await future`.

        Without memory an answer may not get through, and a thread that fails may fail again before it has answered:
        that is looked for every now and then.
        """
        while not reply.future.done():
            await asyncio.wait([reply.future], timeout=_LOOK_EVERY)
            if not self._thread.is_alive() and not reply.future.done():
                self._outbox.send()
                reply.answer = reply.answer or (self._thread_ended(reply),)
            if reply.answer is not None:
                _settle([reply])

    def _thread_ended(self, reply: _Reply) -> SamplerFault:
        drawn = 0
        if isinstance(reply, _Job) and reply.slot is not None and self._running.get(reply.slot) is reply:
            drawn = self._decoder.table.num_new(reply.slot)
        return SamplerFault(self.failure or _THREAD_ENDED, num_tokens=drawn)

    async def _num_drawn(self, job: _Job) -> int:
        """Tokens that were drawn for a job that is being cancelled. The engine answers every job, and soon."""
        answered = asyncio.ensure_future(self._answered(job))
        with contextlib.suppress(asyncio.CancelledError):  # it is cancelled once more: so it is, in the end
            await settle([answered])
        fault = job.future.exception()
        return num_tokens_drawn(fault) if fault is not None else len(job.future.result().ids)

    # ---- the engine's thread

    def _main(self) -> None:
        try:
            with _threads(self._num_threads):
                while self._receive():
                    began = time.perf_counter()
                    self._admit()
                    self._step()
                    self._outbox.send()
                    seconds = time.perf_counter() - began
                    self._busy_seconds += seconds
                    self._owed -= seconds
        except BaseException as error:  # noqa: BLE001 - whatever it is, those who wait must hear of it
            self._shut_down(error)
        else:
            self._shut_down(None)

    def _receive(self) -> bool:
        """Take what arrived, sleeping while there is nothing to do; False when it is time to stop."""
        with self._wake:
            while not (self._inbox or self._closing or self._waiting or self._running or self._commands):
                self._wake.wait()
            if self._closing:
                return False
            arrived = len(self._inbox)
        for _ in range(arrived):
            self._take(self._inbox[0])  # where it is found, should this fail
            self._inbox.popleft()
        if self._commands and (self._owed <= 0 or self._commands[0].vital or not self._running):
            self._run(self._commands[0])
            self._commands.popleft()
        self._outbox.send()
        return True

    def _take(self, message: _Job | _Command | _Cancel) -> None:
        match message:
            case _Job():
                self._waiting.append(message)
            case _Command():
                self._commands.append(message)
            case _Cancel():
                self._drop(message.job)

    def _run(self, command: _Command) -> None:
        began = time.perf_counter()
        try:
            answer = command.run()
            if not command.vital:
                self._owed = _STEPS_PER_QUESTION * (time.perf_counter() - began)
        except Exception as error:
            if command.vital:
                raise
            answer = error if isinstance(error, VerbatimError) else _request_failed(error)
        self._outbox.put(command, answer)

    def _admit(self) -> None:
        deferred: list[_Job] = []
        try:
            while self._waiting and self._decoder.has_idle_slot and len(deferred) < _MOST_DEFERRED:
                job = self._waiting[0]  # where it is found, should this fail
                try:
                    job.slot = self._decoder.add(job.request)
                except Exception as error:  # noqa: BLE001 - whatever it is about this request, the others go on
                    self._outbox.put(job, _request_failed(error))
                    del self._waiting[0]
                    continue
                del self._waiting[0]
                if job.slot is None:
                    deferred.append(job)
                else:
                    job.started = time.perf_counter()
                    self._running[job.slot] = job
        finally:
            self._waiting.extendleft(reversed(deferred))

    def _step(self) -> None:
        if not self._running:  # nothing to pass, and nothing that could be given up where memory is not enough
            return
        no_room = None
        try:
            ended, faulty = self._decoder.step()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            no_room = _said(error, 200)
        if no_room is not None:  # outside of the handler: what the pass took is free by now
            self._make_room(no_room)
            return
        for slot in ended.tolist():
            self._finish(slot)
        for slot in faulty.tolist():
            self._fail(slot)

    def _make_room(self, why: str) -> None:
        """Memory was not enough for a pass: its longest sequence fails, and the others are passed again without it."""
        slot = self._decoder.largest
        assert slot is not None, "a pass without sequences takes no memory"
        table = self._decoder.table
        length, others = int(table.length[slot]), len(self._running) - 1
        fault = SamplerFault(f"memory was not enough for a sequence of {length} tokens beside {others} others ({why}); "
                             "it was the longest, so it was given up", num_tokens=table.num_new(slot))  # fmt: skip
        logger.warning("%s", fault)
        self._outbox.put(self._running.pop(slot), fault)
        self._decoder.drop(slot)
        self._decoder.give_back_memory()

    def _drop(self, job: _Job) -> None:
        """Answer with what there is, unless the job has its answer already."""
        if job.slot is not None and self._running.get(job.slot) is job:
            del self._running[job.slot]
            self._outbox.put(job, self._completion(job, job.slot, cancelled=True))
            self._decoder.release(job.slot)
        elif job in self._waiting:
            self._waiting.remove(job)
            self._outbox.put(job, nothing_sampled(time.perf_counter() - job.submitted))

    def _finish(self, slot: int) -> None:
        job = self._running[slot]  # where it is found, should this fail
        self._outbox.put(job, self._completion(job, slot, cancelled=False))
        del self._running[slot]
        self._decoder.release(slot)
        self._completions += 1

    def _fail(self, slot: int) -> None:
        job = self._running.pop(slot)
        self._outbox.put(job, SamplerFault(
            f"the logits for position {int(self._decoder.table.length[slot])} are not finite numbers under policy "
            f"version {self.policy_version}: the weights have diverged", num_tokens=self._decoder.table.num_new(slot)
        ))  # fmt: skip
        self._decoder.discard(slot)

    def _completion(self, job: _Job, slot: int, *, cancelled: bool) -> Completion:
        table = self._decoder.table
        new = slice(int(table.prompt_length[slot]), int(table.length[slot]))
        stopped = bool(table.stopped(np.array([slot]))[0])
        reason = StopReason.CANCELLED if cancelled else StopReason.STOP if stopped else StopReason.LENGTH
        return Completion(
            ids=table.ids[slot, new].copy(),
            logprobs=table.logprobs[slot, new].copy(),
            policy_versions=table.versions[slot, new].copy(),
            stop_reason=reason,
            queued_seconds=job.started - job.submitted,
            generated_seconds=time.perf_counter() - job.started,
        )

    def _shut_down(self, fault: BaseException | None) -> None:
        """Answer everyone who still waits: cancelled completions, or the fault that stopped the engine."""
        with self._wake:
            self._closing, self._fault = True, fault
            left = [m for m in self._inbox if not isinstance(m, _Cancel)]
            self._inbox.clear()
        for slot, job in self._running.items():
            drawn = self._decoder.table.num_new(slot)
            answer = _engine_failed(fault, drawn) if fault else self._completion(job, slot, cancelled=True)
            self._outbox.put(job, answer)
        for message in (*self._waiting, *self._commands, *left):
            if fault:
                self._outbox.put(message, _engine_failed(fault))
            elif isinstance(message, _Job):
                self._outbox.put(message, nothing_sampled(time.perf_counter() - message.submitted))
            else:
                self._outbox.put(message, SamplerFault("the sampler was closed before it got to this"))
        self._running, self._waiting, self._commands = {}, deque(), deque()
        self._outbox.send()


@contextlib.contextmanager
def _threads(num_threads: int | None) -> Iterator[None]:
    """Run with this many threads in the calling thread's matrix products; torch keeps the number per thread."""
    before = torch.get_num_threads()
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        if num_threads is not None:
            torch.set_num_threads(before)


def _request_failed(cause: Exception) -> SamplerFault:
    fault = SamplerFault(f"the sampler failed on this request: {_said(cause, 500)}")
    if not is_out_of_memory(cause):  # its frames would keep what they took
        fault.__cause__ = cause
    return fault


def _said(cause: Exception, limit: int) -> str:
    """For those who asked; memory that ran out is called that, whichever library ran out of it."""
    if not is_out_of_memory(cause):
        return error_text(cause, limit)
    said = str(cause).partition("\n")[0]
    return cut(f"out of memory: {said}" if said else "out of memory", limit)


def _engine_failed(cause: BaseException, num_tokens: int = 0) -> SamplerFault:
    if is_out_of_memory(cause):  # its frames would keep what they took
        return SamplerFault(f"the sampler's thread failed: {describe(cause)}", num_tokens=num_tokens)
    fault = SamplerFault(f"the sampler's thread failed: {type(cause).__name__}: {cause}", num_tokens=num_tokens)
    fault.__cause__ = cause
    return fault
