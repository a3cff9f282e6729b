"""Records, in parallel to the KV cache, which experts of a mixture computed each token of each slot.

Legend: S slots, D decoder layers, K experts per token, T rows of a pass.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from verbatim.core.errors import ModelError
from verbatim.core.types import Experts
from verbatim.inference.embedded.pass_layout import PassLayout
from verbatim.models.attention import WholeSequencePlan
from verbatim.models.experts import RouterPass, why_no_routers
from verbatim.models.head import CausalLM


class ExpertRecord:
    """The experts of every token in the KV cache. Records are copied and reused exactly like keys and values.

    Args:
        model: A model with its routers.
        num_slots: S.
        context_length: Maximum tokens of a slot.

    Raises:
        ModelError: the model has no routers, or routers whose recorded experts cannot be replayed in the trainer.
    """

    def __init__(self, model: CausalLM, num_slots: int, context_length: int) -> None:
        routers = model.routers
        if routers is None:
            raise ModelError(
                f"inference.return_routed_experts = true, but {why_no_routers(model.model)}; remove this setting"
            )
        if routers.limits_groups:
            raise ModelError(
                f"inference.return_routed_experts = true, but {type(model.model).__name__} has topk_method = "
                '"group_limited_greedy": experts outside of the groups that its routers choose themselves have the '
                "weight 0, so recorded ones cannot be replayed; leave it out"
            )
        self._layers, self._num_layers = routers.layers, routers.num_layers
        self._num_each, self._device = 0, model.device
        # A pass over one token shows the value of K.
        one = torch.zeros(1, dtype=torch.int64, device=model.device)
        model.hidden(one, one, WholeSequencePlan(), RouterPass(observe=self._count))
        shape = (num_slots, context_length, self._num_layers, self._num_each)
        few = routers.num_experts <= 256
        self._experts: Experts = np.zeros(shape, dtype=np.uint8) if few else np.zeros(shape, dtype=np.uint16)
        self._pass_TDK = torch.zeros(0, device=self._device)

    def _count(self, router: int, tokens: slice, logits: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> Tensor:
        self._num_each = experts_TK.shape[1]
        return weights_TK

    def during_pass(self, num_rows: int) -> RouterPass:
        """Observe a pass of this many rows; `keep` then stores its experts."""
        self._pass_TDK = torch.zeros(num_rows, self._num_layers, self._num_each, dtype=torch.int64, device=self._device)
        return RouterPass(observe=self._observe)

    def _observe(self, router: int, tokens: slice, logits: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> Tensor:
        self._pass_TDK[:, self._layers[router]] = experts_TK
        return weights_TK

    def keep(self, layout: PassLayout, known_until: NDArray[np.int64]) -> None:
        """Store the experts of the pass. Tokens that are recomputed after a weight update keep their old record, which
        has the experts that computed them when the next token was sampled.

        Args:
            layout: The place of each token of the pass.
            known_until: For each token, the position from which on its sequence is computed for the first time: int64
                [W].
        """
        found = self._pass_TDK.cpu().numpy()[layout.rows].astype(self._experts.dtype)
        new = layout.positions >= known_until
        self._experts[layout.slots[new], layout.positions[new]] = found[new]

    def copy(self, source: int, slot: int, num_tokens: int) -> None:
        """Copy the records of a prefix from one slot to another."""
        if source != slot:
            self._experts[slot, :num_tokens] = self._experts[source, :num_tokens]

    def read(self, slot: int, start: int, stop: int) -> Experts:
        """The experts of the tokens from `start` to `stop` - 1: [stop - start, D, K]."""
        experts: Experts = self._experts[slot, start:stop].copy()
        return experts
