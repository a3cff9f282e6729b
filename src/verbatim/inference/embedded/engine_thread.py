"""The engine's thread: admits requests as slots free up, decodes them together and replies to their callers."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import numpy as np
import torch

from verbatim.core.errors import SamplerFault, VerbatimError
from verbatim.core.machine_faults import is_out_of_memory
from verbatim.core.types import StopReason
from verbatim.inference.embedded.decoder import Decoder, DecoderCounts
from verbatim.inference.embedded.messages import (
    Cancel,
    Command,
    EngineReply,
    GenerateJob,
    Outbox,
    engine_failed,
    failure_text,
    request_failed,
)
from verbatim.inference.sampler import Completion, nothing_sampled
from verbatim.models.native.cores import CoreShare

logger = logging.getLogger(__name__)

THREAD_ENDED = "the sampler's thread has ended; standard error shows why"
_MOST_DEFERRED = 16
"""Maximum number of requests that may be passed over in one step because each waits for another request's prefix. After
that many, no later request is admitted in this step."""
_STEPS_PER_QUESTION = 3.0
"""While sequences are in flight, decoding gets this many seconds for each second that is spent on prompt logprobs."""


@dataclass(kw_only=True)
class EngineStats(DecoderCounts):
    """Counts of an engine since its start."""

    completions: int
    """Number of requests that ended at a stop token or a limit."""
    busy_seconds: float
    """Seconds with at least one sequence in flight."""
    num_running: int
    """Number of sequences in flight now."""
    num_waiting: int
    """Number of requests and commands that are waiting now."""


class EngineThread:
    """Runs a decoder on a separate thread; `send` and `cancel` are thread-safe.

    Args:
        decoder: The model and its cache; used only by this thread.
        num_threads: Number of threads for the decoder's matrix products; None means torch's setting.
        cores: Decides before each step how many threads the decoder may use; None means always `num_threads`.
    """

    def __init__(self, decoder: Decoder, num_threads: int | None, cores: CoreShare | None = None) -> None:
        self._decoder = decoder
        self._num_threads = num_threads
        self._cores = cores
        self._wake = threading.Condition()
        self._inbox: deque[GenerateJob | Command | Cancel] = deque()
        self._closing = False
        self._fault: BaseException | None = None
        # Used only by the engine's thread:
        self._waiting: deque[GenerateJob] = deque()
        self._commands: deque[Command] = deque()
        self._owed = 0.0
        self._running: dict[int, GenerateJob] = {}
        self._outbox = Outbox()
        self._completions = 0
        self._busy_seconds = 0.0
        self.thread = threading.Thread(target=self._main, name="verbatim-sampler", daemon=True)
        self.thread.start()

    # ---- called from event loops

    def send(self, message: GenerateJob | Command) -> None:
        """Queue a request or a command.

        Raises:
            SamplerFault: the engine failed or is closed.
        """
        with self._wake:
            if self._fault is not None:
                raise engine_failed(self._fault)
            if self._closing:
                raise SamplerFault("the sampler is closed; create a new one")
            self._inbox.append(message)
            self._wake.notify()

    def cancel(self, job: GenerateJob) -> None:
        """End a job after the current step. The job's reply has the tokens sampled so far."""
        with self._wake:
            self._inbox.append(Cancel(job))
            self._wake.notify()

    def stop(self) -> None:
        """Stop after the current step; requests in flight end as cancelled, with the tokens sampled so far."""
        with self._wake:
            self._closing = True
            self._wake.notify()

    @property
    def failure(self) -> str | None:
        """Why the engine is dead and answers no more requests; None while it is alive."""
        if self._fault is not None:
            return str(engine_failed(self._fault))
        if not self._closing and not self.thread.is_alive():
            return THREAD_ENDED
        return None

    def answer_for_dead(self, reply: EngineReply) -> None:
        """Reply in place of a thread that ended without a reply; does nothing while the thread is alive."""
        if self.thread.is_alive() or reply.future.done():
            return
        self._outbox.send()
        drawn = 0
        if isinstance(reply, GenerateJob) and reply.slot is not None and self._running.get(reply.slot) is reply:
            drawn = self._decoder.table.num_new(reply.slot)
        reply.answer = reply.answer or (SamplerFault(self.failure or THREAD_ENDED, num_tokens=drawn),)

    def stats(self) -> EngineStats:
        """Counts since the start."""
        return EngineStats(
            **asdict(self._decoder.counts),
            completions=self._completions,
            busy_seconds=self._busy_seconds,
            num_running=len(self._running),
            num_waiting=len(self._waiting) + len(self._commands) + len(self._inbox),
        )

    # ---- the thread

    def _main(self) -> None:
        try:
            with torch_threads(self._num_threads):
                while self._receive():
                    began = time.perf_counter()
                    self._share_cores(computes=True)
                    self._admit()
                    self._step()
                    self._outbox.send()
                    seconds = time.perf_counter() - began
                    self._busy_seconds += seconds
                    self._owed -= seconds
        except BaseException as error:  # noqa: BLE001 - raised in every waiting caller
            self._shut_down(error)
        else:
            self._shut_down(None)

    def _receive(self) -> bool:
        """Take new messages, sleeping while there is nothing to do; return False if the thread has to stop."""
        with self._wake:
            while not (self._inbox or self._closing or self._waiting or self._running or self._commands):
                self._share_cores(computes=False)
                self._wake.wait()
            if self._closing:
                return False
            arrived = len(self._inbox)  # messages that arrive from now on wait for the next step
        for _ in range(arrived):
            self._take(self._inbox[0])  # removed only after it is taken, so that it still gets a reply after a failure
            self._inbox.popleft()
        if self._commands and (self._owed <= 0 or self._commands[0].vital or not self._running):
            self._run(self._commands[0])
            self._commands.popleft()
        self._outbox.send()
        return True

    def _share_cores(self, *, computes: bool) -> None:
        """Tell the trainer whether this engine computes. If so, use as many threads as are free for the next step."""
        if self._cores is None:
            return
        self._cores.compute(computes)
        if computes and torch.get_num_threads() != (free := self._cores.threads_for_pass()):
            torch.set_num_threads(free)

    def _take(self, message: GenerateJob | Command | Cancel) -> None:
        match message:
            case GenerateJob():
                self._waiting.append(message)
            case Command():
                self._commands.append(message)
            case Cancel():
                self._drop(message.job)

    def _run(self, command: Command) -> None:
        began = time.perf_counter()
        try:
            answer = command.run()
            if not command.vital:
                self._owed = _STEPS_PER_QUESTION * (time.perf_counter() - began)
        except Exception as error:
            if command.vital:
                raise
            answer = error if isinstance(error, VerbatimError) else request_failed(error)
        self._outbox.put(command, answer)

    def _admit(self) -> None:
        deferred: list[GenerateJob] = []
        try:
            while self._waiting and self._decoder.has_idle_slot and len(deferred) < _MOST_DEFERRED:
                job = self._waiting[0]  # removed only after it has a slot, so that a failure still replies to it
                try:
                    job.slot = self._decoder.add(job.request)
                except Exception as error:  # noqa: BLE001 - an error of one request must not stop the others
                    self._outbox.put(job, request_failed(error))
                    del self._waiting[0]
                    continue
                del self._waiting[0]
                if job.slot is None:
                    deferred.append(job)
                else:
                    job.started = time.perf_counter()
                    self._running[job.slot] = job
        finally:
            self._waiting.extendleft(reversed(deferred))  # back to the front, in order of arrival

    def _step(self) -> None:
        if not self._running:  # there is nothing to compute, and no sequence that could be given up if memory runs out
            return
        no_room = None
        try:
            ended, faulty = self._decoder.step()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            no_room = failure_text(error, 200)
        if no_room is not None:  # not inside the handler, where the traceback still holds the pass's memory
            self._make_room(no_room)
            return
        for slot in ended.tolist():
            self._finish(slot)
        for slot in faulty.tolist():
            self._fail(slot)
        for slot, job in [(slot, job) for slot, job in self._running.items() if job.watch is not None]:
            self._show(slot, job)

    def _show(self, slot: int, job: GenerateJob) -> None:
        """Pass a job's new tokens to its `watch`, and end the completion if `watch` asks for it."""
        table = self._decoder.table
        start, end = int(table.prompt_length[slot]) + job.num_shown, int(table.length[slot])
        if start == end:
            return
        job.num_shown += end - start
        assert job.watch is not None
        try:
            is_enough = job.watch(table.ids[slot, start:end].tolist())
        except Exception as error:  # noqa: BLE001 - an error of one request must not stop the others
            self._answer(slot, request_failed(error, table.num_new(slot)))
            return
        if is_enough:
            self._finish(slot, StopReason.STOP)

    def _make_room(self, why: str) -> None:
        """After a pass that ran out of memory: fail the longest sequence, and free memory for the others."""
        slot = self._decoder.largest
        assert slot is not None, "a pass without sequences takes no memory"
        table = self._decoder.table
        length, others = int(table.length[slot]), len(self._running) - 1
        fault = SamplerFault(
            f"memory was not enough for a sequence of {length} tokens next to {others} others ({why}); "
            "it was the longest, so it was given up",
            num_tokens=table.num_new(slot),
        )
        logger.warning("%s", fault)
        self._outbox.put(self._running.pop(slot), fault)
        self._decoder.drop(slot)
        self._decoder.give_back_memory()

    def _drop(self, job: GenerateJob) -> None:
        """Reply to a cancelled job with the tokens sampled so far, unless it already has a reply."""
        if job.slot is not None and self._running.get(job.slot) is job:
            self._answer(job.slot, self._completion(job, job.slot, StopReason.CANCELLED))
        elif job in self._waiting:
            self._waiting.remove(job)
            self._outbox.put(job, nothing_sampled(time.perf_counter() - job.submitted))

    def _finish(self, slot: int, reason: StopReason | None = None) -> None:
        self._answer(slot, self._completion(self._running[slot], slot, reason))
        self._completions += 1

    def _answer(self, slot: int, answer: Completion | SamplerFault) -> None:
        self._outbox.put(self._running[slot], answer)
        del self._running[slot]  # only after its reply is queued, so that it still gets a reply after a failure
        self._decoder.release(slot)

    def _fail(self, slot: int) -> None:
        job = self._running.pop(slot)
        self._outbox.put(
            job,
            SamplerFault(
                f"the logits for position {int(self._decoder.table.length[slot])} are not finite numbers under policy "
                f"version {self._decoder.version}: the weights have diverged",
                num_tokens=self._decoder.table.num_new(slot),
            ),
        )
        self._decoder.discard(slot)

    def _completion(self, job: GenerateJob, slot: int, reason: StopReason | None) -> Completion:
        """A job's completion. If `reason` is None, the last token decides between STOP and LENGTH."""
        table = self._decoder.table
        new = slice(int(table.prompt_length[slot]), int(table.length[slot]))
        if reason is None:
            reason = StopReason.STOP if bool(table.stopped(np.array([slot]))[0]) else StopReason.LENGTH
        return Completion(
            ids=table.ids[slot, new].copy(),
            logprobs=table.logprobs[slot, new].copy(),
            policy_versions=table.versions[slot, new].copy(),
            stop_reason=reason,
            routed_experts=self._decoder.routed_experts(slot, job.request.routed_experts_start)
            if table.num_new(slot)
            else None,
            kept_sets=table.kept_sets(slot),
            queued_seconds=job.started - job.submitted,
            generated_seconds=time.perf_counter() - job.started,
        )

    def _shut_down(self, fault: BaseException | None) -> None:
        """Reply to all waiting callers: with cancelled completions, or with the fault that stopped the engine."""
        self._share_cores(computes=False)
        with self._wake:
            self._closing, self._fault = True, fault
            left = [m for m in self._inbox if not isinstance(m, Cancel)]
            self._inbox.clear()
        for slot, job in self._running.items():
            drawn = self._decoder.table.num_new(slot)
            answer = engine_failed(fault, drawn) if fault else self._completion(job, slot, StopReason.CANCELLED)
            self._outbox.put(job, answer)
        for message in (*self._waiting, *self._commands, *left):
            if fault:
                self._outbox.put(message, engine_failed(fault))
            elif isinstance(message, GenerateJob):
                self._outbox.put(message, nothing_sampled(time.perf_counter() - message.submitted))
            else:
                self._outbox.put(message, SamplerFault("the sampler was closed before it ran this"))
        self._running, self._waiting, self._commands = {}, deque(), deque()
        self._outbox.send()


@contextlib.contextmanager
def torch_threads(num_threads: int | None) -> Iterator[None]:
    """Use this many threads for the calling thread's matrix products; torch keeps the number per thread."""
    before = torch.get_num_threads()
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        if num_threads is not None:
            torch.set_num_threads(before)
