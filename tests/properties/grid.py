"""What every batch is tried with: each strategy with each packer, and a loss of each level with its formula."""

from itertools import product

from hypothesis import strategies as st

from campaigns import sized
from properties import reference
from verbatim.algorithms.losses import LOSSES, Loss, LossOutputs
from verbatim.core.trajectories import STRATEGIES, build
from verbatim.trainer.packing import PACKERS

LAYOUTS = list(product(sorted(STRATEGIES), sorted(PACKERS)))
some_layouts = st.permutations(LAYOUTS).map(lambda layouts: layouts[: sized(2, len(layouts))])
"""Where each layout needs a trainer of its own: two of them, all in a whole campaign."""


def chunk_loss(inputs):
    """A ratio for each chunk: the geometric mean of its tokens'."""
    log_ratio, loss = inputs.trainer_logprobs - inputs.inference_logprobs, 0.0
    for chunk in inputs.chunk_ids[inputs.loss_mask].unique():
        mine = inputs.chunk_ids == chunk
        loss = loss - (inputs.advantages[mine] * log_ratio[mine].mean().exp()).sum()
    return LossOutputs(loss)


def sequence_loss(inputs):
    """One ratio for the trajectory; outside the mask its logarithm is 0."""
    log_ratio = (inputs.trainer_logprobs - inputs.inference_logprobs).sum() / inputs.loss_mask.sum()
    return LossOutputs(-inputs.advantages[inputs.loss_mask].mean() * log_ratio.exp())


LEVELS = {
    "token": (LOSSES["default"], reference.default_formula),
    "chunk": (Loss(chunk_loss, level="chunk"), reference.chunk_formula),
    "sequence": (Loss(sequence_loss, level="sequence", normalizer="trajectories"), reference.sequence_formula),
}
"""The loss, and what the oracle makes of the turns themselves."""

levels = st.sampled_from(sorted(LEVELS))


def samples_of(batch, strategy, **options):
    """The samples of all trajectories."""
    return [sample for trajectory in batch for sample in build(trajectory, strategy=strategy, **options).samples]
