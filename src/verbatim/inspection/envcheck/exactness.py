"""Compares what a sampler returned with what training samples hold: every token once, in its context, with its logprob
and its version."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from verbatim.core.records.samples import TrainingSample
from verbatim.inference.sampler import Completion, SampleRequest, Watch
from verbatim.inference.scripted import ScriptedSampler


@dataclass(kw_only=True)
class TellingSampler(ScriptedSampler):
    """Plays a script, and keeps what it returned. No two tokens have the same logprob, so that each is known by it, and
    the version grows with each request."""

    returned: list[tuple[SampleRequest, Completion]] = field(default_factory=list, init=False)
    """The requests that were answered, with their completions."""

    def __post_init__(self) -> None:
        self.logprob = self._next_logprob
        self._num_told = 0

    async def generate(self, request: SampleRequest, watch: Watch | None = None) -> Completion:
        """As `ScriptedSampler.generate`."""
        self.policy_version += 1
        completion = await super().generate(request, watch)
        self.returned.append((request, completion))
        return completion

    generate_watched = generate

    def _next_logprob(self, token_id: int) -> float:
        """-k / 2^20 for the k-th token: exact in float32 up to 16 million tokens."""
        self._num_told += 1
        return -self._num_told / 2**20


def num_differences(
    returned: Sequence[tuple[SampleRequest, Completion]], samples: Sequence[TrainingSample], *, num_cut: int = 0
) -> int:
    """Tokens that are not trained exactly once as they were returned: behind the same ids, with the same logprob and
    version; and trained tokens that were never returned.

    Args:
        returned: By a sampler no two of whose tokens have the same logprob.
        samples: Built from the record of all these requests.
        num_cut: Tokens known to be left out: those behind a stop string.
    """
    places = {
        float(logprob): (request, completion, place)
        for request, completion in returned
        if completion.logprobs is not None
        for place, logprob in enumerate(np.asarray(completion.logprobs, dtype=np.float32).tolist())
    }
    num_wrong, trained = 0, set[float]()
    for sample in samples:
        for at in np.flatnonzero(sample.loss_mask).tolist():
            logprob = float(sample.logprobs[at])
            found = places.get(logprob)
            if found is None or logprob in trained or not _is_as_returned(sample, at, *found):
                num_wrong += 1
            trained.add(logprob)
    return num_wrong + max(0, len(places.keys() - trained) - num_cut)


def _is_as_returned(
    sample: TrainingSample, at: int, request: SampleRequest, completion: Completion, place: int
) -> bool:
    """Whether the token at this position of a sample is the completion's token at `place`, in its context."""
    versions, prompt = completion.policy_versions, request.prompt_ids
    return (
        at == len(prompt) + place
        and int(sample.token_ids[at]) == int(completion.ids[place])
        and versions is not None
        and int(sample.policy_versions[at]) == int(versions[place])
        and (place > 0 or np.array_equal(sample.token_ids[:at], prompt))
        and (place == 0 or bool(sample.loss_mask[at - 1]))
    )
