"""[inference]: the keys that all backends share. Keys of one backend are in [inference.NAME]."""

from __future__ import annotations

from typing import ClassVar, Literal

from verbatim.config.sections import BackendSection, PositiveFloat

OnWeightUpdate = Literal["recompute", "keep"]


class InferenceConfig(BackendSection):
    """The rollout engine. A backend's own settings are in the table of its name: [inference.torch]."""

    what: ClassVar[str] = "inference backend"

    backend: str = "torch"
    """A name of `SAMPLERS`, or the import path of one of your own: "my_module.MySampler", whose settings are in
    [inference.MySampler]."""
    on_weight_update: OnWeightUpdate = "recompute"
    """What happens to the key/value cache of sequences in flight when new weights arrive."""
    return_routed_experts: bool = False
    """Record which experts of a mixture compute each token, and train each token with the experts that sampled it."""
    canary_tolerance: PositiveFloat | None = None
    """Largest mean difference from the trainer's logprobs after a weight update; by default 1e-4, with bfloat16 0.1, or
    four times what rounding was measured to change in this model, if that is more."""
