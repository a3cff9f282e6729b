"""Loads new weights into the sampler and checks them."""

from __future__ import annotations

from verbatim.errors import RunStopped
from verbatim.inference.base import Sampler
from verbatim.transport import StepReport
from verbatim.transport.canary import Probes, find_mismatch


class WeightSync:
    """Loads published weights into the sampler and compares its logprobs of the probes with the trainer's.

    Args:
        sampler: Whose weights are updated.
        probes: Logprobs of the weights that it begins with; None = nothing is compared then.
        tolerance: Largest mean difference of logprobs.
    """

    def __init__(self, sampler: Sampler, probes: Probes | None, tolerance: float) -> None:
        self._sampler = sampler
        self._probes = probes
        self._tolerance = tolerance

    async def check_first(self) -> None:
        """Compare the weights that the sampler begins with.

        Raises:
            RunStopped: they are not the trainer's.
        """
        if self._probes is not None:
            await self._check(self._probes, before=None)

    async def load(self, report: StepReport) -> None:
        """Load the published version of this report; the sampler samples with it from here on.

        Raises:
            RunStopped: the sampler's logprobs of the probes are not the trainer's.
        """
        before, self._probes = self._probes, report.probes
        await self._sampler.update_weights(report.weights, report.version)
        assert report.version == self._sampler.policy_version
        if report.probes is not None:
            await self._check(report.probes, before=before)

    async def _check(self, published: Probes, *, before: Probes | None) -> None:
        found = [(await self._sampler.prompt_logprobs(ids))[1:] for ids in published.token_ids]
        fault = find_mismatch(published, found, before=before, tolerance=self._tolerance)
        if fault is not None:
            raise RunStopped(
                f"the sampler does not hold policy version {self._sampler.policy_version}, which it was told to load: "
                f"{fault}. It samples nothing more. If it computes in another precision than the trainer, raise "
                "inference.canary_tolerance"
            )
