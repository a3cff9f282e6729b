"""Engines that decode no further than a test lets them: what a test does next comes while sequences are in flight.

The only tests that know what an engine is made of: faults are planted in its parts, and nothing public stops it."""

from __future__ import annotations

import threading

import pytest

from verbatim.inference.embedded.decoder import Decoder
from verbatim.inference.embedded.engine import TorchSampler
from verbatim.inference.embedded.engine_thread import EngineThread
from waiting import HANGS


def engine_of(sampler: TorchSampler) -> EngineThread:
    """The thread behind a sampler, to plant faults in."""
    return sampler._engine


def decoder_of(sampler: TorchSampler) -> Decoder:
    """The batch that it decodes, to plant faults in."""
    return sampler._decoder


def held(sampler: TorchSampler) -> threading.Condition:
    """While it is held, an engine takes no message: all that are sent meanwhile are there when it takes the first."""
    return engine_of(sampler)._wake


class StepGate:
    """The engine stands still once it has drawn so many tokens. Each message (a request, new weights, a cancelled call,
    the end) lets it take one step, after which it takes the message; `open` lets it go. A test with several calls waits
    for at least so many tokens, since a call that comes late lets it take another step.

    Args:
        sampler: The engine.
        monkeypatch: Of the test.
        tokens: Drawn before it stands still.
        calls: It takes no step before so many have come.
    """

    def __init__(self, sampler: TorchSampler, monkeypatch: pytest.MonkeyPatch, tokens: int, calls: int = 1) -> None:
        self._engine, self._is_open = engine_of(sampler), False
        self._wake = wake = held(sampler)
        decoder = decoder_of(sampler)
        have_come = False
        step = decoder.step

        def wait_and_step():
            nonlocal have_come
            if not have_come:
                with wake:
                    have_come = wake.wait_for(lambda: num_known(self._engine) >= calls, HANGS)
                    assert have_come
            if decoder.counts.sampled_tokens >= tokens:
                with wake:
                    assert wake.wait_for(lambda: self._is_open or self._engine._inbox or self._engine._closing, HANGS)
            return step()

        monkeypatch.setattr(decoder, "step", wait_and_step)

    def open(self) -> None:
        """Let it decode on."""
        with self._wake:
            self._is_open = True
            self._wake.notify_all()


def num_known(engine: EngineThread) -> int:
    """Calls that are running, wait for a place, or were sent and not yet taken."""
    return len(engine._running) + len(engine._waiting) + len(engine._inbox)
