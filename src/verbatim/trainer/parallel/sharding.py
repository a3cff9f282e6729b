"""Shards a model over ranks (FSDP2): one group per decoder layer, and one for embedding, final norm and head.

The logprobs of targets are computed in chunks, each with a backward pass of its own through the head. The head is in
the root's group, which stays gathered from the forward pass of the layers to the end of their backward pass. So the
chunks find its whole weight, their gradients add up on it, and it is gathered and reduced once per micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from verbatim.core.errors import ModelError
from verbatim.models.head import CausalLM
from verbatim.models.refusal import refusing
from verbatim.models.tiny import decoder_layers
from verbatim.trainer.parallel.ranks import Ranks


class _Root(nn.Module):
    """Calls functions of the model between the hooks that gather and release the root's parameters."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[..., Any], *args: Any, **inputs: Any) -> Any:
        return function(*args, **inputs)


class AddedModules(Protocol):
    """What a model gets before it is sharded, and its folder knows nothing of: low-rank adapters."""

    def inject(self, model: Any) -> None:
        """Add them to a model whose parameters are on the meta device."""

    def hide(self) -> None:
        """Take them out of the model, whose names, weights and logits are then those of its folder."""


class Sharding:
    """The `ModelCalls` of a sharded model.

    Gradients are sums over ranks, not means: the loss is divided by the optimizer step's own denominator. After a
    backward pass each parameter's `grad` is this rank's shard of the sum over all passes so far.

    Args:
        ranks: Who holds the shards.
        dtype: "bfloat16" computes with bfloat16 copies of the layers' parameters, and still reduces in float32. The
            root's group is gathered in float32, because the chunks add up its gradient on the gathered copy.
        trained: Whether it is trained; else none of its parameters has a gradient.
        added: What it gets before it is sharded. It is hidden when `apply` returns.
    """

    def __init__(self, ranks: Ranks, dtype: str, *, trained: bool = True, added: AddedModules | None = None) -> None:
        self._ranks = ranks
        self._dtype = dtype
        self._trained = trained
        self._added = added
        self._root: Any = None
        self._used: Tensor = torch.zeros(0, device="cpu")
        self._model: Any = None

    def apply(self, model: Any, fill: Callable[[], None]) -> None:
        """Shard a model's parameters, which are on the meta device, and have `fill` copy this rank's rows into them.

        Raises:
            ModelError: a model that cannot be sharded, or too many ranks for it.
            UsageError: what `fill` raised on any rank.
        """
        model.requires_grad_(self._trained)
        if self._added is not None:
            self._added.inject(model)
        layers = decoder_layers(model)
        self._refuse_too_many_ranks(layers)
        policy = MixedPrecisionPolicy()
        if self._dtype == "bfloat16":
            policy = MixedPrecisionPolicy(
                param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
            )
        self._model, self._root = model, _Root(model)
        with refusing(f"{type(model).__name__} cannot be sharded over {self._ranks.size} processes"):
            for layer in layers:
                fully_shard(layer, mesh=self._ranks.mesh, mp_policy=policy)
            fully_shard(self._root, mesh=self._ranks.mesh)
            for module in self._root.modules():
                if isinstance(module, FSDPModule):
                    module.set_gradient_divide_factor(1.0)
                    module.set_force_sum_reduction_for_comms(True)
            # A layer's experts may be used on one rank and not on another, which have to reduce the same tensors.
            self._root.set_reduce_scatter_unused_params(True)
            self._make_room()
        if self._trained:
            self._notice_use()
        if self._added is not None:
            self._added.hide()
        self._ranks.agree(fill)

    def _refuse_too_many_ranks(self, layers: list[nn.Module]) -> None:
        rows = max((p.shape[0] for layer in layers for p in layer.parameters() if p.ndim), default=0)
        if self._ranks.size > rows:
            raise ModelError(
                f"{self._ranks.size} processes (trainer.parallel.processes), but the largest parameter of "
                f"a layer has {rows} rows to share out; use at most {rows}"
            )

    def _make_room(self) -> None:
        """Give this rank's rows memory on its device. What is tied stays tied."""
        made: dict[nn.Parameter, nn.Parameter] = {}
        for module in self._model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter not in made:
                    sharded: Tensor = parameter
                    assert isinstance(sharded, DTensor)
                    rows = torch.empty_like(sharded.to_local(), device=self._ranks.device)
                    whole = DTensor.from_local(
                        rows,
                        sharded.device_mesh,
                        sharded.placements,
                        run_check=False,
                        shape=sharded.shape,
                        stride=sharded.stride(),
                    )
                    made[parameter] = nn.Parameter(whole, requires_grad=parameter.requires_grad)
                if parameter is not None:
                    module._parameters[name] = made[parameter]
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(self._ranks.device)

    def _notice_use(self) -> None:
        """Have each gathered parameter note that a backward pass reached it: one that none reaches has no gradient."""
        numbers = {name: i for i, (name, _) in enumerate(self._model.named_parameters())}
        self._used = torch.zeros(len(numbers), dtype=torch.uint8, device="cpu")

        def noting(number: int) -> Callable[[Tensor], None]:
            def note(_: Tensor) -> None:
                self._used[number] = 1

            return note

        for module in [self._root, *decoder_layers(self._model)]:
            module.unshard()
            for name, parameter in self._model.named_parameters():
                if not isinstance(parameter, DTensor) and parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(noting(numbers[name]))
            module.reshard()

    def run(self, function: Callable[..., Any], **inputs: Any) -> Any:
        """Call a function of the model with its parameters gathered, layer by layer."""
        bfloat16 = self._dtype == "bfloat16"  # then the layers' parameters are, and the others are not
        with torch.autocast(self._ranks.device.type, dtype=torch.bfloat16) if bfloat16 else nullcontext():
            return self._root(function, **inputs)

    def release(self) -> None:
        """Free the root's gathered parameters after passes without a backward pass; those would outlive an update."""
        self._root.reshard()

    def most(self, number: int) -> int:
        """The largest number of all ranks."""
        return self._ranks.most(number)[0]

    def total(self, values: Tensor) -> Tensor:
        """The sum over ranks, in place."""
        return self._ranks.total(values)

    def drop_unused(self) -> None:
        """Remove the gradients of parameters that no rank's passes reached: they are zeros that one process would not
        have, and an update would let their weights decay."""
        used = self._ranks.anywhere(self._used)
        for number, parameter in enumerate(self._model.parameters()):
            if not used[number]:
                parameter.grad = None
        self._used.zero_()


def refuse_rows_alone(lm: CausalLM, ranks: Ranks | None) -> None:
    """Refuse a model each of whose rows is a pass of its own: ranks make the same passes.

    Raises:
        ModelError: such a model, and several processes.
    """
    if ranks is not None and lm.rows_alone:
        raise ModelError(
            f"{type(lm.model).__name__} is computed row by row, because more than attention mixes its "
            "tokens, which only one process does; set trainer.parallel.processes = 1"
        )
