"""Packs the samples of an optimizer step into micro-batches and deals the micro-batches to the ranks.

Before a run trains on its first trees, the gradient of a few samples is computed both ways, as trees and as rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from verbatim.algorithms.losses import Loss
from verbatim.config.schema import TrainerConfig
from verbatim.core.types import MicroBatch, TrainingSample
from verbatim.models.head import CausalLM
from verbatim.models.positions import refuse_moving_positions
from verbatim.trainer.bfloat16 import in_float32, is_rounded
from verbatim.trainer.frozen import packing_beside
from verbatim.trainer.logprobs import TargetLogprobs
from verbatim.trainer.model_check import packing_for
from verbatim.trainer.packing import find_packer
from verbatim.trainer.packing.cost import model_cost
from verbatim.trainer.packing.ranks import deal_samples
from verbatim.trainer.parallel.micro_batches import hand_out
from verbatim.trainer.parallel.ranks import Ranks, together
from verbatim.trainer.parallel.sharding import Sharding
from verbatim.trainer.tree_check import pack_both_ways, trees_are_right

MICRO_BATCH_TOKENS = 16_384
"""Default of `trainer.micro_batch_tokens`: the maximum number of tokens in one forward pass."""
CPU_MICRO_BATCH_TOKENS = 8192
"""Default of `trainer.micro_batch_tokens` on a CPU. With more tokens, activations no longer fit into the CPU's caches;
with fewer, trees are cut more often."""
FLOAT32_ROUNDING = 1e-4
"""Tolerance of the tree check in float32."""

Dealt = list[list[MicroBatch]]
"""The micro-batches of an optimizer step, by rank, or by sequence-parallel group of ranks."""


class StepPacker:
    """Packs the samples of optimizer steps for a model.

    Args:
        targets: The model in training.
        config: The `[trainer]` table.
        loss: Decides whether trajectories stay whole, and what the loss is divided by.
        seq_len: Maximum number of tokens in a sample, 0 if unknown.
        ranks: The processes that train together; None for one process. Rank 0 packs for all ranks.
        sharding: How the model is sharded over the ranks; None for one process.

    Raises:
        ModelError: the model cannot be packed as configured, or its context is shorter than a sample may be.
    """

    def __init__(
        self,
        targets: TargetLogprobs,
        config: TrainerConfig,
        loss: Loss,
        *,
        seq_len: int = 0,
        ranks: Ranks | None = None,
        sharding: Sharding | None = None,
    ) -> None:
        self._targets, self._config, self._loss = targets, config, loss
        self._lm = targets.model
        self._ranks, self._sharding = ranks, sharding
        self.packing = config.packing
        """The packer in use. It falls back to "rows" if a model computes only rows correctly, or if this run's tree
        check failed."""
        self.trees_are_right: bool | None = None
        """The result of the tree check; None if it has not run yet."""
        if self._packs:
            refuse_moving_positions(self._lm, seq_len)
            self.packing = packing_for(self._lm, config.packing)

    @property
    def _packs(self) -> bool:
        return self._ranks is None or self._ranks.leads

    def suit(self, model: CausalLM, name: str, source: str | Path) -> None:
        """Choose a packing that a frozen model computes correctly too, for all following steps.

        Raises:
            ModelError: the frozen model cannot compute the configured packing.
        """
        if self._packs:
            self.packing = packing_beside(model, name, source, self.packing)

    def pack(self, samples: Sequence[TrainingSample]) -> list[MicroBatch]:
        """The micro-batches of one optimizer step for a single process.

        Raises:
            ModelError: a sample is so long that the model's position encoding would change for all samples packed
                with it.
        """
        refuse_moving_positions(self._lm, max(map(len, samples), default=0))
        return find_packer(self.packing)(samples, micro_batch_tokens=self._budget, keep_whole=self._keep_whole)

    def deal(self, samples: Sequence[TrainingSample]) -> Dealt:
        """The micro-batches of one optimizer step, dealt to the ranks. With sequence parallelism, a group of ranks is
        treated as one rank with the token budget of all its members.

        Raises:
            ModelError: as for `pack`.
        """
        if self._ranks is None:
            return [self.pack(samples)]
        refuse_moving_positions(self._lm, max(map(len, samples), default=0))
        step = deal_samples(
            samples,
            self.packing,
            num_ranks=self._num_groups,
            micro_batch_tokens=self._budget * self._share,
            keep_whole=self._keep_whole,
            cost=model_cost(self._lm.config),
        )
        return [step.lay(rank) for rank in range(self._num_groups)]

    def deal_checked(self, samples: Sequence[TrainingSample]) -> Dealt:
        """Same as `deal`, but run the tree check before the first trees of a run. If the check fails, deal rows
        instead."""
        dealt = self.deal(samples)
        rows_alone = all(micro_batch.is_rows for micro_batches in dealt for micro_batch in micro_batches)
        if self.trees_are_right is not None or rows_alone:
            return dealt
        both = pack_both_ways(samples)
        with together(self._ranks, "try_trees"):
            self.trees_are_right = self.try_trees(*map(self._to_first, both))
        if self.trees_are_right:
            return dealt
        self.packing = "rows"
        return self.deal(samples)

    def try_trees(self, rows: Sequence[MicroBatch], trees: Sequence[MicroBatch]) -> bool:
        """True if trees give the same gradient as rows. All ranks call this, with the micro-batches that rank 0 sent
        them in `deal_checked`."""
        in_full = replace(self._targets, autocast=partial(in_float32, self._lm.model))
        if is_rounded(self._lm.model):
            # Rounded products treat each row alone, and everything else is float32. So float32 compares all that
            # packing affects, without the rounding, which in a deep model may pass any limit by chance.
            with in_float32(self._lm.model):  # around the backward pass too, which recomputes with checkpointing
                return trees_are_right(in_full, rows, trees, tolerance=FLOAT32_ROUNDING)
        rounds = self._config.dtype == "bfloat16" and self._sharding is None
        exact = in_full if rounds else None
        return trees_are_right(
            self._targets, rows, trees, tolerance=self._rounding(), exact=exact, sharding=self._sharding
        )

    def _to_first(self, micro_batches: list[MicroBatch]) -> list[MicroBatch]:
        """Assign all micro-batches to the first rank (or group of ranks), and no micro-batches to the others."""
        if self._ranks is None:
            return micro_batches
        return hand_out(self._ranks, [micro_batches, *([] for _ in range(self._num_groups - 1))])

    def denominator(self, micro_batches: Sequence[MicroBatch]) -> int:
        """The divisor of an optimizer step's loss: the step's number of trained tokens or of trajectories, at least
        1."""
        if self._loss.normalizer == "tokens":
            count = sum(len(micro_batch.targets) for micro_batch in micro_batches)
        else:
            count = len({name for micro_batch in micro_batches for name in micro_batch.trajectory_ids})
        return max(1, count)

    @property
    def _share(self) -> int:
        """Number of ranks that share each micro-batch (sequence parallelism)."""
        return self._targets.sequence.size if self._targets.sequence is not None else 1

    @property
    def _num_groups(self) -> int:
        assert self._ranks is not None
        return self._ranks.size // self._share

    @property
    def _keep_whole(self) -> bool:
        return self._loss.level != "token"

    @property
    def _budget(self) -> int:
        """Maximum number of tokens in a micro-batch, per rank that shares the micro-batch."""
        on_cpu = self._lm.device.type == "cpu"
        default = CPU_MICRO_BATCH_TOKENS if on_cpu and not self._keep_whole else MICRO_BATCH_TOKENS
        return self._config.micro_batch_tokens or default

    def _rounding(self) -> float:
        """Tolerance of the tree check: the largest relative difference of gradients that rounding explains."""
        if self._config.dtype == "bfloat16":
            return 5e-2
        return 1e-10 if self._lm.output.weight.dtype == torch.float64 else FLOAT32_ROUNDING
