"""Loads new weights into the sampler, and checks that the sampler uses them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from verbatim.core.errors import RunStopped
from verbatim.core.sampling import SamplingParams
from verbatim.core.types import Int32
from verbatim.inference.sampler import AsksPrefixCache, Sampler, SampleRequest, as_replicated
from verbatim.trainer.transport import StepReport
from verbatim.trainer.transport.canary import (
    Probes,
    allowed_difference,
    cached_prefixes,
    find_mismatch,
    find_stale_prefix,
    mean_difference,
)

CUT = SamplingParams(max_tokens=1, top_k=4, top_p=0.95, return_kept_sets=True)
"""Sampling parameters for the comparison of kept sets. The kept sets are small, because each id in them costs a
request."""


class WeightSync:
    """Loads published weights into the sampler, and compares the sampler's logprobs of the probes with the trainer's.

    With several replicas, each replica is checked.

    Args:
        sampler: The sampler to update.
        probes: The trainer's logprobs of the probes under the initial weights; None if these are not compared.
        tolerance: Largest allowed mean difference of logprobs, unless the probes measured a larger rounding error.
        cuts: True to compare kept sets too: top-p, top-k or min-p truncate the distribution that is trained on.
    """

    def __init__(self, sampler: Sampler, probes: Probes | None, tolerance: float, *, cuts: bool = False) -> None:
        self._sampler = sampler
        self._replicated = as_replicated(sampler)
        self._probes = probes
        self._tolerance = tolerance
        self._cuts = cuts
        self._difference = self._allowed = math.nan

    async def check_first(self) -> None:
        """Check the initial weights of the sampler.

        Raises:
            RunStopped: the initial weights differ from the trainer's weights.
        """
        allowed = allowed_difference(self._tolerance, self._probes)
        canary = Canary(self._probes, before=None, tolerance=allowed, cuts=self._cuts)
        if self._replicated is not None:
            await self._replicated.check_replicas(canary)
        else:
            await self._check(canary)

    async def load(self, report: StepReport) -> None:
        """Load the version that this report publishes. From then on, the sampler samples with this version.

        Raises:
            RunStopped: the sampler's logprobs of the probes differ from the trainer's.
        """
        self._allowed = allowed_difference(self._tolerance, report.probes)
        canary = Canary(report.probes, before=self._probes, tolerance=self._allowed, cuts=self._cuts)
        self._probes = report.probes
        if self._replicated is not None:
            await self._replicated.update_replicas(report.weights, report.version, canary)
            self._difference = canary.difference
            assert report.version == self._sampler.policy_version
            return
        await canary.prepare(self._sampler)  # before the update, to detect a prefix cache that survives it
        await self._sampler.update_weights(report.weights, report.version)
        assert report.version == self._sampler.policy_version
        await self._check(canary)
        self._difference = canary.difference

    def metrics(self) -> dict[str, float]:
        """The mean difference of logprobs at the last update, for the replica furthest from the trainer, and the
        largest difference allowed; empty if nothing was compared."""
        if math.isnan(self._difference):
            return {}
        return {"weights/canary": self._difference, "weights/canary_allowed": self._allowed}

    async def _check(self, canary: Canary) -> None:
        fault = await canary(self._sampler)
        if fault is not None:
            raise RunStopped(
                f"the sampler does not hold policy version {self._sampler.policy_version}, which it was told to load: "
                f"{fault}. Sampling has stopped. If the sampler computes in a different precision from the trainer, "
                "raise inference.canary_tolerance"
            )


class Canary:
    """A `WeightCheck`: compares a sampler's logprobs of the probes with the trainer's.

    To detect a prefix cache that outlives its weights, the last probe is put into the cache before the update, and
    requested again afterwards.

    Args:
        published: The trainer's logprobs under the version to check; None to compare nothing.
        before: The trainer's logprobs under the previous version; None at the start.
        tolerance: Largest allowed mean difference of logprobs.
        cuts: True to also sample tokens from a truncated distribution, and compare their logprobs with the logprobs
            computed from the sampler's logprobs of all ids in their kept sets.
    """

    def __init__(
        self, published: Probes | None, *, before: Probes | None, tolerance: float, cuts: bool = False
    ) -> None:
        self._published = published
        self._before = before
        self._tolerance = tolerance
        self._cuts = cuts
        self.difference = math.nan
        """The largest mean difference found, over samplers; NaN if nothing was compared."""

    async def prepare(self, sampler: Sampler) -> None:
        """Put the last probe into the prefix cache, if the sampler has a prefix cache that can be queried."""
        if self._published is not None and isinstance(sampler, AsksPrefixCache):
            await sampler.cached_logprob(cached_prefixes(self._published)[-1])

    async def __call__(self, sampler: Sampler) -> str | None:
        """The first difference found, or None. Prefix-cache requests come first, because the other requests may fill
        the cache."""
        published = self._published
        if published is None:
            return None
        cached = []
        if isinstance(sampler, AsksPrefixCache):
            cached = [await sampler.cached_logprob(ids) for ids in cached_prefixes(published)]
        found = [(await sampler.prompt_logprobs(ids))[1:] for ids in published.token_ids]
        difference = mean_difference(published, found)
        self.difference = difference if math.isnan(self.difference) else max(self.difference, difference)
        fault = find_mismatch(published, found, before=self._before, tolerance=self._tolerance)
        if fault is None and cached:
            fault = find_stale_prefix(published, cached, found[-1], before=self._before, tolerance=self._tolerance)
        if fault is None and self._cuts:
            fault = await self._find_wrong_cut(sampler, published.token_ids[:-1])
        return fault

    async def _find_wrong_cut(self, sampler: Sampler, prompts: Sequence[Int32]) -> str | None:
        """Sample a token after each prompt, and compare the token's logprob with the logprob that is computed over its
        kept set."""
        differences = []
        for prompt in prompts:
            drawn = await sampler.generate(SampleRequest(prompt_ids=prompt, params=CUT, seed=0))
            if drawn.kept_sets is None or drawn.logprobs is None or not len(drawn.ids):
                return f"it returns no kept set for a token sampled with top_k = {CUT.top_k}"
            kept, token = drawn.kept_sets[0], drawn.ids[0]
            asked = kept.tolist() or range(sampler.vocab_size)  # an empty set means that nothing was cut off
            scores = [(await sampler.prompt_logprobs(np.append(prompt, i).astype(np.int32)))[-1] for i in asked]
            # Logprob of the token, renormalized over its kept set.
            over_kept = float(scores[list(asked).index(int(token))]) - math.log(math.fsum(map(math.exp, scores)))
            differences.append(abs(over_kept - float(drawn.logprobs[0])))
        if not (difference := sum(differences) / len(differences)) <= self._tolerance:
            return (
                f"logprobs of tokens sampled with top_k = {CUT.top_k} differ by {difference:.2g} on average from "
                f"those computed over the returned kept set, more than {self._tolerance:g}"
            )
        return None
