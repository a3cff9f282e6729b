"""Splits a forward pass into hidden states and logits, so that vocabulary-sized logits exist only where needed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from verbatim.core.errors import ModelError
from verbatim.models.attention import ATTENTION, AttentionPlan, WholeSequencePlan
from verbatim.models.experts import RouterPass, Routers
from verbatim.models.refusal import refusing


class ModelCalls(Protocol):
    """Calls functions that use a model's parameters; a sharded model gathers the parameters around each call."""

    def run(self, function: Callable[..., Any], **inputs: Any) -> Any:
        """Call `function(**inputs)` while the parameters are available, and return the result."""

    def release(self) -> None:
        """Free the gathered parameters after passes without a backward pass (a backward pass frees them itself)."""


class DirectCalls:
    """The `ModelCalls` for a model that is not sharded. It calls each function directly."""

    def run(self, function: Callable[..., Any], **inputs: Any) -> Any:
        """The result of `function(**inputs)`."""
        return function(**inputs)

    def release(self) -> None:
        """Do nothing: no parameters were gathered."""


class CausalLM:
    """A `transformers` causal language model, split at its last hidden state.

    Legend: U tokens of one flat forward pass, M positions with logits, D width, V vocabulary.

    Raises:
        ModelError: the model's logits are not its output head applied to its last hidden state.
    """

    def __init__(self, model: Any, calls: ModelCalls | None = None, routers: Routers | None = None) -> None:
        self.model = model
        self.routers = routers
        """The routers of a mixture of experts; None if no pass observes or replays expert choices."""
        self.calls = calls or DirectCalls()
        self.config = model.config.get_text_config()
        self.backbone = model.base_model
        self.output = model.get_output_embeddings()
        self.softcap: float | None = getattr(self.config, "final_logit_softcapping", None)
        self.scale = 1.0
        if getattr(self.config, "logits_scaling", None):  # Granite divides
            self.scale = 1.0 / self.config.logits_scaling
        elif getattr(self.config, "logit_scale", None):  # Cohere multiplies
            self.scale = self.config.logit_scale
        self.rows_alone = self.config._attn_implementation != ATTENTION
        """True if each row needs a separate forward pass, because the model does not follow attention plans."""
        self.longest_checked = 0
        """The longest sequence, in tokens, that `refuse_moving_positions` has accepted so far."""
        with refusing(f"{type(model).__name__} cannot be taken apart into its layers and its output head"):
            self._check_head()

    @property
    def device(self) -> torch.device:
        device: torch.device = self.output.weight.device
        return device

    @property
    def vocab_size(self) -> int:
        """Number of rows of the output head. All ids are below this number."""
        return int(self.output.weight.shape[0])

    def hidden(
        self, input_ids_U: Tensor, position_ids_U: Tensor, plan: AttentionPlan, router_pass: RouterPass | None = None
    ) -> Tensor:
        """The last hidden states, after the final norm, [U, D]. With `rows_alone`, each position 0 starts a new row."""
        if not self.rows_alone:
            return self._forward(input_ids_U, router_pass, position_ids=position_ids_U[None], attention_plan=plan)
        starts = [*(position_ids_U == 0).nonzero()[:, 0].tolist(), len(input_ids_U)]
        return torch.cat(
            [
                self._forward(input_ids_U[start:stop], router_pass and router_pass.of(start, stop))
                for start, stop in pairwise(starts)
            ]
        )

    def _forward(self, input_ids_U: Tensor, router_pass: RouterPass | None, **inputs: Any) -> Tensor:
        with nullcontext() if self.routers is None else self.routers.during(router_pass):
            hidden: Tensor = self.calls.run(
                self.backbone, input_ids=input_ids_U[None], use_cache=False, **inputs
            ).last_hidden_state[0]
        return hidden

    def logits(self, hidden_MD: Tensor) -> Tensor:
        """The model's logits for these hidden states, [M, V]."""
        logits: Tensor = self.output(hidden_MD)
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits

    @torch.no_grad()
    def _check_head(self) -> None:
        """Refuse a model whose logits are not the output of its head (with scale and soft cap) for the last hidden
        states."""
        probe = torch.arange(4, device=self.device) % self.vocab_size
        plan = WholeSequencePlan()
        positions = torch.arange(4, device=self.device)
        ours = self.calls.run(self.logits, hidden_MD=self.hidden(probe, positions, plan))
        inputs = {} if self.rows_alone else {"position_ids": positions[None], "attention_plan": plan}
        theirs = self.calls.run(self.model, input_ids=probe[None], use_cache=False, **inputs).logits[0]
        self.calls.release()
        # The tolerance covers only rounding: both sides run the same operations, perhaps in bfloat16 with its 8 bits of
        # mantissa.
        if not torch.allclose(ours.float(), theirs.float(), atol=1e-2 if ours.dtype == torch.bfloat16 else 1e-4):
            raise ModelError(
                f"{type(self.model).__name__} computes its logits with more than its output head; Verbatim would train "
                "a different distribution from the one that is sampled, so it does not support this architecture"
            )
