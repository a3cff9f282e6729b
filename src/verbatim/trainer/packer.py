"""Packs the samples of an optimizer step, and deals them to the processes that train.

Before the first trees of a run are trained on, a few of their samples are computed both ways, as a tree and as rows.
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
from verbatim.trainer.bfloat16 import in_float32
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
"""Most tokens of one forward pass, where the configuration does not say."""
CPU_MICRO_BATCH_TOKENS = 8192
"""On a CPU: activations of more tokens leave its caches, and with fewer a tree is cut more often."""

Dealt = list[list[MicroBatch]]
"""The micro-batches of an optimizer step, by rank, or by group of ranks that share each of them."""


class StepPacker:
    """Lays out the samples of optimizer steps for a model.

    Args:
        targets: The model in training.
        config: The `[trainer]` table.
        loss: Whether it needs trajectories whole, and what it is divided by.
        seq_len: Most tokens of a sample, if that is known.
        ranks: The processes that train together; None: this one alone. Rank 0 packs for all of them.
        sharding: Of their model.

    Raises:
        ModelError: the model cannot be packed as asked, or takes fewer tokens than a sample may have.
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
        """The packer: "rows" where a model can take no other, or where this process found trees to be wrong."""
        self.trees_are_right: bool | None = None
        """None: not tried yet."""
        if self._packs:
            refuse_moving_positions(self._lm, seq_len)
            self.packing = packing_for(self._lm, config.packing)

    @property
    def _packs(self) -> bool:
        return self._ranks is None or self._ranks.leads

    def suit(self, model: CausalLM, name: str, source: str | Path) -> None:
        """Pack from now on so that a frozen model scores the micro-batches too.

        Raises:
            ModelError: it cannot be packed as asked.
        """
        if self._packs:
            self.packing = packing_beside(model, name, source, self.packing)

    def pack(self, samples: Sequence[TrainingSample]) -> list[MicroBatch]:
        """The micro-batches of one optimizer step, as one process computes them.

        Raises:
            ModelError: a sample is so long that it would change the positions of the others.
        """
        refuse_moving_positions(self._lm, max(map(len, samples), default=0))
        return find_packer(self.packing)(samples, micro_batch_tokens=self._budget, keep_whole=self._keep_whole)

    def deal(self, samples: Sequence[TrainingSample]) -> Dealt:
        """The micro-batches of one optimizer step, dealt to the ranks. Where several share a micro-batch, a group of
        them is dealt to as one rank that takes as many tokens as all of them.

        Raises:
            ModelError: as `pack`.
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
        """`deal`; before the first trees of this run are trained on, a few of their samples are tried both ways."""
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
        """Whether trees have the gradient of rows. All ranks call it, with what `deal_checked` hands them."""
        rounds = self._config.dtype == "bfloat16" and self._sharding is None
        exact = replace(self._targets, autocast=partial(in_float32, self._lm.model)) if rounds else None
        return trees_are_right(
            self._targets, rows, trees, tolerance=self._rounding(), exact=exact, sharding=self._sharding
        )

    def _to_first(self, micro_batches: list[MicroBatch]) -> list[MicroBatch]:
        """Hand micro-batches to the first rank, or group of ranks, and none to the others."""
        if self._ranks is None:
            return micro_batches
        return hand_out(self._ranks, [micro_batches, *([] for _ in range(self._num_groups - 1))])

    def denominator(self, micro_batches: Sequence[MicroBatch]) -> int:
        """What the loss of an optimizer step is divided by: its trained tokens or its trajectories, at least 1."""
        if self._loss.normalizer == "tokens":
            count = sum(len(micro_batch.targets) for micro_batch in micro_batches)
        else:
            count = len({name for micro_batch in micro_batches for name in micro_batch.trajectory_ids})
        return max(1, count)

    @property
    def _share(self) -> int:
        """Ranks that share each micro-batch."""
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
        """Most tokens of a micro-batch, for each rank that computes it."""
        on_cpu = self._lm.device.type == "cpu"
        default = CPU_MICRO_BATCH_TOKENS if on_cpu and not self._keep_whole else MICRO_BATCH_TOKENS
        return self._config.micro_batch_tokens or default

    def _rounding(self) -> float:
        """The largest relative difference between two ways to compute one gradient."""
        if self._config.dtype == "bfloat16":
            return 5e-2
        return 1e-10 if self._lm.output.weight.dtype == torch.float64 else 1e-4
