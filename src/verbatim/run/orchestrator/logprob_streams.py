"""Adds other models' logprobs of the sampled tokens to a batch before the trainer receives it."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from verbatim.core.types import Float32, TrainingSample
from verbatim.inference.teacher import Teacher
from verbatim.run.orchestrator.assemble import AssembledGroup

MOST_REQUESTS = 32
"""Maximum number of concurrent requests to one model, one per sample."""


async def add_logprob_streams(batch: Sequence[AssembledGroup], models: Mapping[str, Teacher]) -> list[AssembledGroup]:
    """Add one logprob stream per model to the batch's samples. The stream has the logprobs of the trained tokens, each
    scored at the token's own temperature and over its kept set. `models` is keyed by the name of the stream
    ("teacher").

    Raises:
        RunStopped: a model failed permanently.
    """
    slots = {name: asyncio.Semaphore(MOST_REQUESTS) for name in models}

    async def stream(sample: TrainingSample, name: str) -> Float32:
        scored = np.full(len(sample), np.nan, dtype=np.float32)
        # There is one request per temperature, because a request scores the whole sequence at a single temperature.
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
