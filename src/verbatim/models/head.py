"""From ids to hidden states to logits, so that vocabulary-sized logits exist only where they are asked for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from verbatim.errors import ModelError
from verbatim.models.attention import AttentionPlan, WholeSequencePlan


class CausalLM:
    """A `transformers` causal language model, taken apart at its last hidden state.

    Legend: U tokens of one flat forward pass, M positions that are asked about, D width, V vocabulary.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.config = model.config.get_text_config()
        self.backbone = model.base_model
        self.output = model.get_output_embeddings()
        self.softcap: float | None = getattr(self.config, "final_logit_softcapping", None)
        self.scale = 1.0
        if getattr(self.config, "logits_scaling", None):  # Granite divides
            self.scale = 1.0 / self.config.logits_scaling
        elif getattr(self.config, "logit_scale", None):  # Cohere multiplies
            self.scale = self.config.logit_scale
        self._check_head()

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        device: torch.device = self.output.weight.device
        return device

    @property
    def vocab_size(self) -> int:
        """Rows of the output head: ids are below this."""
        return int(self.output.weight.shape[0])

    def hidden(self, input_ids_U: Tensor, position_ids_U: Tensor, plan: AttentionPlan) -> Tensor:
        """Last hidden states, [U, D], after the final norm."""
        out = self.backbone(
            input_ids=input_ids_U[None], position_ids=position_ids_U[None], use_cache=False, attention_plan=plan
        )
        hidden: Tensor = out.last_hidden_state[0]
        return hidden

    def logits(self, hidden_MD: Tensor) -> Tensor:
        """Logits as the model itself would give them, [M, V]."""
        logits: Tensor = self.output(hidden_MD)
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits

    @torch.no_grad()
    def _check_head(self) -> None:
        """Some models do more after the last hidden state than the head: refuse what is not known to be the same."""
        probe = torch.arange(4, device=self.device) % self.vocab_size
        plan = WholeSequencePlan()
        positions = torch.arange(4, device=self.device)
        ours = self.logits(self.hidden(probe, positions, plan))
        theirs = self.model(input_ids=probe[None], position_ids=positions[None], use_cache=False,
                            attention_plan=plan).logits[0]  # fmt: skip
        if not torch.allclose(ours.float(), theirs.float(), atol=1e-2 if ours.dtype == torch.bfloat16 else 1e-4):
            raise ModelError(
                f"{type(self.model).__name__} computes its logits by more than its output head; Verbatim would train "
                "another distribution than the one that is sampled, so it refuses this architecture"
            )
