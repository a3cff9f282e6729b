"""[inference]: what all backends share."""

from __future__ import annotations

from typing import Literal

from verbatim.config.sections import PositiveFloat, PositiveInt, Section


class InferenceConfig(Section):
    """The rollout engine."""

    backend: Literal["torch"] = "torch"
    """The embedded sampler."""
    max_batch_size: PositiveInt = 64
    """Sequences decoded together."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of weights and key/value cache."""
    device: str = "auto"
    """"auto" takes CUDA where there is one."""
    deterministic: bool = False
    """Same request, seed and weights: same ids and logprobs, bit for bit, whatever else is in the batch."""
    on_weight_update: Literal["recompute", "keep"] = "recompute"
    """What happens to the key/value cache of sequences in flight when new weights arrive."""
    prefill_chunk: PositiveInt = 2048
    """Most prompt tokens processed between two decode steps."""
    num_threads: PositiveInt | None = None
    """Threads of its matrix products on a CPU; by default half of the cores where both sides work at once."""
    canary_tolerance: PositiveFloat | None = None
    """Largest mean difference from the trainer's logprobs after a weight update; by default 1e-4, with bfloat16 0.1."""
