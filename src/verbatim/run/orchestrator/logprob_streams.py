"""Adds the logprobs that other models give to the sampled tokens, before a batch goes to the trainer."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from verbatim.core.types import Float32, TrainingSample
from verbatim.inference.teacher import Teacher
from verbatim.run.orchestrator.assemble import AssembledGroup

MOST_REQUESTS = 32
"""Samples that one model is asked about at one time."""


async def add_logprob_streams(batch: Sequence[AssembledGroup], models: Mapping[str, Teacher]) -> list[AssembledGroup]:
    """The batch with one logprob stream per model on its samples: the trained tokens, each at its own temperature and
    over its kept set. Models are given by the name of their stream ("teacher").

    Raises:
        RunStopped: a model failed for good.
    """
    slots = {name: asyncio.Semaphore(MOST_REQUESTS) for name in models}

    async def stream(sample: TrainingSample, name: str) -> Float32:
        scored = np.full(len(sample), np.nan, dtype=np.float32)
        for temperature in np.unique(sample.temperatures[sample.loss_mask]).tolist():
            here = sample.loss_mask & (sample.temperatures == np.float32(temperature))
            async with slots[name]:
                found = await models[name].logprobs(sample.token_ids, temperature, sample.kept_sets)
            scored[here] = found[here]
        return scored

    async def with_streams(sample: TrainingSample) -> TrainingSample:
        found = await asyncio.gather(*(stream(sample, name) for name in models))
        return sample.with_streams(dict(zip(models, found, strict=True)))

    async def scored(group: AssembledGroup) -> AssembledGroup:
        samples = await asyncio.gather(*map(with_streams, group.samples))
        return dataclasses.replace(group, samples=tuple(samples))

    return list(await asyncio.gather(*map(scored, batch)))
