"""Masks the ids outside each token's kept set: the ids that top-p, top-k or min-p cut when the token was sampled."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from verbatim.core.types import KeptSets


class DeviceKeptSets:
    """Kept sets of tokens on a device. The offsets stay on the host, so that slicing by them needs no device sync."""

    def __init__(self, kept: KeptSets, device: torch.device) -> None:
        self._offsets = kept.offsets
        self._ids_K = torch.tensor(kept.ids, dtype=torch.int64, device=device)

    def outside(self, at: slice, vocab_size: int) -> Tensor:
        """True for the ids outside each token's kept set: bool [tokens, V]. An empty kept set means nothing was cut."""
        offsets = self._offsets[at.start : at.stop + 1]
        counts = torch.from_numpy(np.diff(offsets)).to(self._ids_K.device)
        rows = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
        outside = (counts > 0)[:, None].repeat(1, vocab_size)
        outside[rows, self._ids_K[offsets[0] : offsets[-1]]] = False
        return outside
