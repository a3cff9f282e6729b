"""A batch on its way to the trainer gets its teacher's logprobs."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence

import numpy as np

from verbatim.inference.teacher import Teacher
from verbatim.orchestrator.assemble import AssembledGroup
from verbatim.records.fields import TEACHER
from verbatim.types import TrainingSample

MOST_REQUESTS = 32
"""Samples that a teacher is asked about at one time."""


async def add_teacher_logprobs(batch: Sequence[AssembledGroup], teacher: Teacher) -> list[AssembledGroup]:
    """The batch with the stream "teacher" on its samples: logprobs of the trained tokens, each at its own temperature.

    Raises:
        RunStopped: the teacher failed for good.
    """
    slots = asyncio.Semaphore(MOST_REQUESTS)

    async def with_teacher_logprobs(sample: TrainingSample) -> TrainingSample:
        scored = np.full(len(sample), np.nan, dtype=np.float32)
        for temperature in np.unique(sample.temperatures[sample.loss_mask]).tolist():
            here = sample.loss_mask & (sample.temperatures == np.float32(temperature))
            async with slots:
                scored[here] = (await teacher.logprobs(sample.token_ids, temperature))[here]
        return dataclasses.replace(sample, logprob_streams={**sample.logprob_streams, TEACHER: scored})

    async def scored(group: AssembledGroup) -> AssembledGroup:
        samples = await asyncio.gather(*map(with_teacher_logprobs, group.samples))
        return dataclasses.replace(group, samples=tuple(samples))

    return list(await asyncio.gather(*map(scored, batch)))
