"""Shards a model over ranks with FSDP2: a group per decoder layer, and a root group of embedding, final norm and head.

Logprobs of targets are computed in chunks, each with its own backward pass through the head. The head is in the root
group, which stays gathered from the layers' forward pass to the end of their backward pass. So every chunk sees the
head's whole weight, the chunks' gradients accumulate on that weight, and the weight is gathered and reduced only once
per micro-batch.
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
from verbatim.trainer.parallel.unused import reduce_unused


class _Root(nn.Module):
    """Wraps the model so that any function of the model can run as a forward pass of this module, between the FSDP
    hooks that gather and release the root group's parameters."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[..., Any], *args: Any, **inputs: Any) -> Any:
        return function(*args, **inputs)


class AddedModules(Protocol):
    """Modules that a model's folder does not contain and that are added before sharding: low-rank adapters."""

    def inject(self, model: Any) -> None:
        """Add the modules to a model whose parameters are on the meta device."""

    def hide(self) -> None:
        """Remove the modules, so that the model has the same parameter names and logits as the model in its folder."""


class Sharding:
    """The `ModelCalls` of a sharded model.

    Gradients are sums over ranks, not means, because the loss is already divided by the optimizer step's denominator.
    After a backward pass each parameter's `grad` is this rank's shard of the sum over all passes so far.

    Args:
        ranks: The ranks that hold the shards.
        dtype: "bfloat16" computes with bfloat16 copies of the layers' parameters, and still reduces in float32. The
            root group is gathered in float32, because the chunks accumulate its gradient on the gathered copy.
        trained: True if the model is trained; otherwise its parameters have no gradients.
        added: Modules to add before sharding, which are hidden when `apply` returns; None to add no modules.
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
        """Shard a model whose parameters are on the meta device, then call `fill`, which copies this rank's rows into
        them.

        Raises:
            ModelError: the model cannot be sharded, or there are too many ranks for this model.
            UsageError: `fill` raised it on any rank.
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
            reduce_unused(self._root)
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
                f"a layer has only {rows} rows to share out; use at most {rows}"
            )

    def _make_room(self) -> None:
        """Allocate this rank's rows on its device, for parameters on the meta device. Tied parameters stay tied."""
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
        """Record which parameters a backward pass reaches: `drop_unused` removes the gradients of the other
        parameters."""
        numbers = {name: i for i, (name, _) in enumerate(self._model.named_parameters())}
        self._used = torch.zeros(len(numbers), dtype=torch.uint8, device="cpu")

        def noting(number: int) -> Callable[[Tensor], None]:
            def note(_: Tensor) -> None:
                self._used[number] = 1

            return note

        # Gradients accumulate on the gathered parameters, which exist only while a group is unsharded.
        for module in [self._root, *decoder_layers(self._model)]:
            module.unshard()
            for name, parameter in self._model.named_parameters():
                if not isinstance(parameter, DTensor) and parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(noting(numbers[name]))
            module.reshard()

    def run(self, function: Callable[..., Any], **inputs: Any) -> Any:
        """Call a function of the model with its parameters gathered, layer by layer."""
        # In bfloat16 the layers' parameters are bfloat16 and the root's float32; autocast lets them be mixed.
        bfloat16 = self._dtype == "bfloat16"
        with torch.autocast(self._ranks.device.type, dtype=torch.bfloat16) if bfloat16 else nullcontext():
            return self._root(function, **inputs)

    def release(self) -> None:
        """Free the root group's gathered parameters after forward-only passes. FSDP frees these parameters in a
        backward pass. Without a backward pass, they would survive an update and hold old weights."""
        self._root.reshard()

    def most(self, number: int) -> int:
        """The maximum over all ranks."""
        return self._ranks.most(number)[0]

    def total(self, values: Tensor) -> Tensor:
        """The sum over ranks, in place."""
        return self._ranks.total(values)

    def drop_unused(self) -> None:
        """Remove the gradients of parameters that no rank's backward pass reached. FSDP fills such gradients with
        zeros, and an update would apply weight decay to the parameters. In a single process, such parameters have no
        gradient."""
        used = self._ranks.anywhere(self._used)
        for number, parameter in enumerate(self._model.parameters()):
            if not used[number]:
                parameter.grad = None
        self._used.zero_()


def refuse_rows_alone(lm: CausalLM, ranks: Ranks | None) -> None:
    """Refuse a model that computes each row in a separate pass if there are several ranks: all ranks must make the same
    number of passes.

    Raises:
        ModelError: the model computes each row in a separate pass, and there are several processes.
    """
    if ranks is not None and lm.rows_alone:
        raise ModelError(
            f"{type(lm.model).__name__} is computed row by row, because not only attention mixes its "
            "tokens, and this works with one process only; set trainer.parallel.processes = 1"
        )
