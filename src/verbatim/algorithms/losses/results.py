"""Checks the return value of a loss, and tries a user's loss on a few tokens before a run begins."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from verbatim.algorithms.losses.loss import Loss, LossInputs
from verbatim.core.errors import ComponentError
from verbatim.core.machine_faults import is_out_of_memory
from verbatim.core.records.fields import TEACHER

if TYPE_CHECKING:
    from torch import Tensor

_ANSWER = "return LossOutputs(loss=...), with a scalar that depends on inputs.trainer_logprobs"
PROBE_TOKENS = 6


def checked_outputs(outputs: Any, name: str) -> tuple[Tensor, dict[str, Any]]:
    """Check the return value of a loss, and return the scalar to minimise and the metrics.

    Args:
        outputs: The loss function's return value.
        name: The loss's name in messages.

    Raises:
        ComponentError: the value is None, a bare tensor or anything other than `LossOutputs`, or its loss is not a
            scalar with a gradient.
    """
    from torch import Tensor

    if not (hasattr(outputs, "loss") and hasattr(outputs, "metrics")):
        found = (
            f"a bare tensor of shape {tuple(outputs.shape)}"
            if isinstance(outputs, Tensor)
            else ("None" if outputs is None else type(outputs).__name__)
        )
        raise ComponentError(f"the loss {name} returned {found}; {_ANSWER}")
    total = outputs.loss
    if not isinstance(total, Tensor) or total.numel() != 1 or not total.requires_grad:
        what = (
            f"shape {tuple(total.shape)}, requires_grad {total.requires_grad}"
            if isinstance(total, Tensor)
            else type(total).__name__
        )
        raise ComponentError(
            f"the loss {name} returned {what}; expected a scalar tensor that depends on inputs.trainer_logprobs (to "
            "leave a trajectory out, multiply by 0 instead of returning a constant)"
        )
    if not isinstance(outputs.metrics, dict):
        raise ComponentError(
            f"the loss {name} returned the metrics {outputs.metrics!r:.80}; expected {{name: scalar tensor}}"
        )
    return total, outputs.metrics


def as_scalar(name: str, value: Any) -> Tensor:
    """A metric of a loss as a tensor of shape [], without gradient.

    Out-of-memory errors are re-raised unchanged, because the loss is not at fault.

    Raises:
        ComponentError: the value is not a single number.
    """
    import torch

    try:
        tensor = torch.as_tensor(value).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        raise ComponentError(f"metric {name!r} of the loss is {value!r:.80}; expected a scalar tensor") from error
    if tensor.numel() != 1:
        raise ComponentError(
            f"metric {name!r} of the loss has shape {tuple(tensor.shape)}; expected a scalar: "
            "reduce it, for example with .mean()"
        )
    return tensor.reshape(())


def try_loss(loss: Loss, *, streams: Collection[str]) -> None:
    """Call a loss once as the trainer would, on six tokens of two turns, and compute its gradient.

    Args:
        loss: The loss with its parameters.
        streams: Names of the logprob streams that the run will have, such as "teacher".

    Raises:
        ComponentError: the loss raised, or returned something that cannot be minimised; the message gives the reason.
    """
    import torch

    leaf = torch.full((PROBE_TOKENS,), -1.0, requires_grad=True)
    mask = torch.tensor([False, True, True, False, True, True])
    if loss.level == "token":
        mask = torch.ones(PROBE_TOKENS, dtype=torch.bool)  # a token-level loss is given trained tokens only
    inside = mask.to(leaf.dtype)
    inputs = LossInputs(
        trainer_logprobs=leaf * inside,
        inference_logprobs=-1.125 * inside,
        advantages=torch.tensor([0.0, 0.5, 0.5, 0.0, -0.5, -0.5]) * inside,
        loss_mask=mask,
        chunk_ids=torch.where(mask, torch.tensor([0, 0, 0, 1, 1, 1]), torch.tensor(-1)),
        logprob_streams={name: -0.75 * inside for name in streams},
    )
    try:
        outputs = loss(inputs)
    except ComponentError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise ComponentError(
            f"the loss {loss.name}, tried on a trajectory of {PROBE_TOKENS} tokens "
            f"{'' if TEACHER in streams else 'without a teacher (teacher_logprobs = None) '}and with "
            f"logprob_streams {sorted(streams)}, raised {type(error).__name__}: {error}"
        ) from error
    total, metrics = checked_outputs(outputs, loss.name)
    for name, value in metrics.items():
        as_scalar(name, value)
    (gradient,) = torch.autograd.grad(total.reshape(()), leaf, allow_unused=True)
    if gradient is None:
        raise ComponentError(f"the loss {loss.name} does not depend on inputs.trainer_logprobs; {_ANSWER}")
