"""Lets sampler and trainer take turns on one device: the sampler sleeps from the hand-over of a batch to the weight
update.

```
sampler    samples batch n | sleeps                          | loads version n+1, samples, is evaluated | sleeps
trainer    (in host memory)| trains batch n, publishes, leaves | (in host memory)                       | ...
```

If each side has its own device, nothing here waits.
"""

from __future__ import annotations

import asyncio
import time
from typing import cast

from verbatim.inference.sampler import Sampler, SleepingSampler


class DeviceHandoff:
    """Passes the device back and forth.

    Args:
        sampler: Must have `sleep` if the device is shared.
        is_shared: True if both sides use one device.
    """

    def __init__(self, sampler: Sampler, *, is_shared: bool) -> None:
        self._sleeper = cast(SleepingSampler, sampler) if is_shared else None
        self._step_is_over = asyncio.Event()
        self._step_is_over.set()
        self._falling_asleep = 0.0
        self._asleep_since = 0.0

    async def until_step_is_over(self) -> None:
        """Wait until the previous step is finished, including its evaluation, which needs the sampler."""
        await self._step_is_over.wait()

    async def to_trainer(self) -> None:
        """Put the sampler to sleep, so that the trainer can use the device.

        Raises:
            SamplerFault: the sampler failed permanently.
        """
        if self._sleeper is None:
            return
        self._step_is_over.clear()
        began = time.perf_counter()
        await self._sleeper.sleep()
        self._asleep_since = time.perf_counter()
        self._falling_asleep = self._asleep_since - began

    def to_sampler(self) -> dict[str, float]:
        """Note that the trainer has left the device. Returns the time the sampler slept, in seconds, as metrics."""
        if self._sleeper is None:
            return {}
        asleep = time.perf_counter() - self._asleep_since
        return {"time/sampler_falling_asleep": self._falling_asleep, "time/sampler_asleep": asleep}

    def step_is_over(self) -> None:
        """Note that the step is finished: the next batch may be handed over."""
        self._step_is_over.set()
