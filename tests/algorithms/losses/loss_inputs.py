"""Loss inputs from probabilities, so that ratios can be read off."""

import torch

from verbatim.algorithms.losses import LossInputs


def inputs(trainer, inference, advantages, mask=None, chunks=None, teacher=None, dtype=torch.float64):
    """Lists of probabilities, one entry for each token."""

    def logs(probabilities):
        return torch.tensor(probabilities, dtype=torch.float64).log().to(dtype)

    return LossInputs(
        trainer_logprobs=logs(trainer).requires_grad_(),
        inference_logprobs=logs(inference),
        teacher_logprobs=None if teacher is None else logs(teacher),
        advantages=torch.tensor(advantages, dtype=dtype),
        loss_mask=torch.tensor(mask if mask is not None else [True] * len(trainer)),
        chunk_ids=None if chunks is None else torch.tensor(chunks),
    )


def log_inputs(trainer, inference, advantages, **fields):
    """Lists of logprobs, for ratios that have to be exact."""
    data = inputs([1.0] * len(trainer), [1.0] * len(trainer), advantages, **fields)
    return LossInputs(
        torch.tensor(trainer, dtype=torch.float64, requires_grad=True),
        torch.tensor(inference, dtype=torch.float64),
        data.teacher_logprobs,
        data.advantages,
        data.loss_mask,
        data.chunk_ids,
    )


def loss_and_gradient(function, data, **parameters):
    """The loss, and its gradient for each token's logprob."""
    loss = function(data, **parameters).loss
    (gradient,) = torch.autograd.grad(loss, data.trainer_logprobs)
    return loss.item(), gradient.tolist()


def metrics_of(function, data, **parameters):
    """As numbers."""
    return {name: value.item() for name, value in function(data, **parameters).metrics.items()}
