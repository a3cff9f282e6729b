"""Starts the embedded engine from its settings, as an inference backend. Importing this loads no torch."""

from __future__ import annotations

from verbatim.inference.backends import BackendInputs
from verbatim.inference.base import Sampler
from verbatim.inference.embedded.settings import TorchSettings


def torch_backend(inputs: BackendInputs, settings: TorchSettings) -> Sampler:
    """The embedded sampler with the weights in `inputs.model`."""
    from verbatim.inference.embedded.engine import TorchSampler

    return TorchSampler(
        inputs.model,
        config=settings,
        context_length=inputs.context_length,
        policy_version=inputs.policy_version,
        num_threads=settings.num_threads or inputs.num_threads,
        on_weight_update=inputs.on_weight_update,
    )
