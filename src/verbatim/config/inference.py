"""Defines [inference]: the keys that all backends share. A backend's own keys are in [inference.NAME]."""

from __future__ import annotations

from typing import ClassVar, Literal

from verbatim.config.sections import BackendSection, PositiveFloat

OnWeightUpdate = Literal["recompute", "keep"]


class InferenceConfig(BackendSection):
    """The sampler. A backend's own settings are in the table with the backend's name, such as [inference.torch]."""

    what: ClassVar[str] = "inference backend"

    backend: str = "torch"
    """A name from `SAMPLERS`, or the import path of a sampler of your own: "my_module.MySampler", whose settings are
    in [inference.MySampler]."""
    on_weight_update: OnWeightUpdate = "recompute"
    """What happens to the key/value cache of sequences in flight when new weights arrive: "recompute" it with the new
    weights, or "keep" it."""
    return_routed_experts: bool = False
    """Record which experts of a mixture of experts process each token, and route each token through the same experts in
    training."""
    canary_tolerance: PositiveFloat | None = None
    """Maximum mean difference between the sampler's and the trainer's logprobs after a weight update. Default: 1e-4
    (bfloat16: 0.1), or four times the difference that rounding was measured to cause in this model, whichever is
    larger."""
