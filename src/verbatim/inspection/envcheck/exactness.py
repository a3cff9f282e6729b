"""Checks that training samples contain exactly what a sampler returned.

Every returned token must be trained exactly once, after the same context, with the same logprob and policy version.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from verbatim.core.records.samples import TrainingSample
from verbatim.inference.sampler import Completion, SampleRequest, Watch
from verbatim.inference.scripted import ScriptedSampler


@dataclass(kw_only=True)
class TellingSampler(ScriptedSampler):
    """A sampler that follows a script and keeps the completions that it returned.

    Every token has a unique logprob, which identifies the token. The policy version increases with each request.
    """

    returned: list[tuple[SampleRequest, Completion]] = field(default_factory=list, init=False)
    """The requests that were answered, each with its completion."""

    def __post_init__(self) -> None:
        self.logprob = self._next_logprob
        self._num_told = 0

    async def generate(self, request: SampleRequest, watch: Watch | None = None) -> Completion:
        """Generate as `ScriptedSampler` does, and keep the completion."""
        self.policy_version += 1
        completion = await super().generate(request, watch)
        self.returned.append((request, completion))
        return completion

    generate_watched = generate

    def _next_logprob(self, token_id: int) -> float:
        """Return -k / 2^20 for the k-th token. Up to 16 million tokens, float32 represents this value exactly."""
        self._num_told += 1
        return -self._num_told / 2**20


def num_differences(
    returned: Sequence[tuple[SampleRequest, Completion]], samples: Sequence[TrainingSample], *, num_cut: int = 0
) -> int:
    """Count the differences between the tokens that a sampler returned and the tokens that are trained.

    A returned token is correct if it is trained exactly once, after the same ids and with the same logprob and version.
    A trained token that was never returned also counts as a difference.

    Args:
        returned: The requests and completions of a sampler that gives every token a unique logprob.
        samples: The training samples built from the record of these requests.
        num_cut: Number of returned tokens that are deliberately not trained, because they follow a stop string.
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
    """True if the sample's token at position `at` is the completion's token at `place`, in the same context."""
    versions, prompt = completion.policy_versions, request.prompt_ids
    return (
        at == len(prompt) + place
        and int(sample.token_ids[at]) == int(completion.ids[place])
        and versions is not None
        and int(sample.policy_versions[at]) == int(versions[place])
        and (place > 0 or np.array_equal(sample.token_ids[:at], prompt))
        and (place == 0 or bool(sample.loss_mask[at - 1]))
    )
