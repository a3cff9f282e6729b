"""Engines that decode no further than a test lets them: what a test does next comes while sequences are in flight."""

from __future__ import annotations

import pytest

from verbatim.inference.embedded.engine import TorchSampler
from waiting import HANGS


class StepGate:
    """The engine stands still once it has drawn so many tokens. Each message (a request, new weights, a cancelled call,
    the end) lets it take one step, after which it takes the message; `open` lets it go.

    Args:
        sampler: The engine.
        monkeypatch: Of the test.
        tokens: Drawn before it stands still.
    """

    def __init__(self, sampler: TorchSampler, monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
        self._engine, self._is_open = sampler._engine, False
        step = sampler._decoder.step

        def wait_and_step():
            if sampler._decoder.counts.sampled_tokens >= tokens:
                with self._engine._wake:
                    assert self._engine._wake.wait_for(
                        lambda: self._is_open or self._engine._inbox or self._engine._closing, HANGS
                    )
            return step()

        monkeypatch.setattr(sampler._decoder, "step", wait_and_step)

    def open(self) -> None:
        """Let it decode on."""
        with self._engine._wake:
            self._is_open = True
            self._engine._wake.notify_all()
