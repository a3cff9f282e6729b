"""A sampler that delegates to another sampler, but cannot update or close it."""

from __future__ import annotations

from pathlib import Path

from verbatim.core.errors import SamplerFault
from verbatim.core.types import Float32, Int32
from verbatim.inference.sampler import Sampler, failure_of


class SamplerProxy:
    """A sampler for callers that must neither update its weights nor close it.

    Args:
        sampler: The wrapped sampler.
    """

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    @property
    def context_length(self) -> int:
        """Maximum number of tokens in prompt and completion together."""
        return self._sampler.context_length

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary; all ids are below it."""
        return self._sampler.vocab_size

    @property
    def failure(self) -> str | None:
        """The reason why the engine is dead; None if it is alive."""
        return failure_of(self._sampler)

    @property
    def policy_version(self) -> int:
        """Policy version of the weights in use."""
        return self._sampler.policy_version

    async def update_weights(self, path: Path, version: int) -> None:
        """Refuse, because only the run loads weights.

        Raises:
            SamplerFault: on every call.
        """
        raise SamplerFault("only the run updates weights")

    async def prompt_logprobs(self, token_ids: Int32, temperature: float = 1.0) -> Float32:
        """Prompt logprobs from the wrapped sampler: float32 [L]; the first is NaN."""
        return await self._sampler.prompt_logprobs(token_ids, temperature)

    async def close(self) -> None:
        """Do nothing, so that the wrapped sampler stays open."""
