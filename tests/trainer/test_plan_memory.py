"""The masks of a micro-batch last as long as its pass: an optimizer step may have many micro-batches."""

import weakref

import pytest
from trainer_helpers import gradients, shared_prefixes

from verbatim.algorithms.losses import LOSSES
from verbatim.trainer.attention import tree


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("loss", ["default", "gspo"])
def test_the_masks_of_one_micro_batch_at_a_time_exist(sliding_qwen, monkeypatch, loss, checkpointing):
    """Counted as each block's mask is made: those of other passes are gone. A window has masks of its own."""
    passes, alive = [], []

    class Watched(tree.TreePlan):
        def _plan(self, window):
            blocks = super()._plan(window)
            if not passes or passes[-1][0] is not self._depths:
                passes.append((self._depths, []))
            passes[-1][1].extend(weakref.ref(block) for block in blocks)
            alive.append(sum(ref() is not None for _, refs in passes[:-1] for ref in refs))
            return blocks

    monkeypatch.setattr("verbatim.trainer.attention.forest.TreePlan", Watched)
    gradients(
        sliding_qwen,
        shared_prefixes(),
        loss=LOSSES[loss],
        packing="tree",
        micro_batch_tokens=20,
        checkpointing=checkpointing,
    )
    assert len(passes) > 2
    assert set(alive) == {0}
    assert all(ref() is None for _, refs in passes for ref in refs)
