"""Trees that do not have the gradient of rows are never trained on; others are, as if nothing had been checked."""

import itertools
import logging
from dataclasses import replace

import numpy as np
import pytest
from test_trainer_steps import make_trainer, same, weights
from trainer_helpers import make_batch, make_sample, shared_prefixes

from verbatim.algorithms.losses import LOSSES
from verbatim.config.schema import TrainerConfig
from verbatim.core.errors import RunStopped
from verbatim.trainer.attention.tree import TreePlan
from verbatim.trainer.trainer import Trainer
from verbatim.trainer.tree_check import MOST_TOKENS, sharing_samples


class Wrong(TreePlan):
    """Every branch sees the ones before it."""

    def __init__(self, position_ids, ends, device):
        super().__init__(position_ids, np.full_like(ends, len(ends)), device)


@pytest.fixture
def make_trees_wrong(monkeypatch):
    """To be called once the trainer stands: the tiny copy that it is tried on would tell."""
    return lambda: monkeypatch.setattr("verbatim.trainer.attention.forest.TreePlan", Wrong)


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["auto", "tree"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_wrong_trees_are_named_and_rows_trained_instead(qwen, make_trees_wrong, caplog, packing, level):
    loss = replace(LOSSES["default"], level=level)
    checked, rows = (make_trainer(qwen, packing=name, loss=loss) for name in (packing, "rows"))
    make_trees_wrong()
    for seed in range(2):
        found, expected = checked.train_batch(shared_prefixes(seed)), rows.train_batch(shared_prefixes(seed))
        assert (found["packing/fallback"], found["packing/tree"]) == (1.0, 0.0)
        assert "packing/fallback" not in expected
        assert found["loss"] == expected["loss"]
    assert same(weights(checked), weights(rows))
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("verbatim.trainer.tree_check", logging.WARNING)
    assert "model.layers." in record.message and 'trainer.packing = "rows"' in record.message


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("model", ["qwen", "sliding_qwen", "llama"])
def test_right_trees_are_trained_on_as_if_nothing_had_been_tried(model, dtype, request, caplog, monkeypatch):
    folder = request.getfixturevalue(model)
    checked, unchecked = (make_trainer(folder, packing="tree", dtype=dtype) for _ in range(2))
    unchecked.packer.trees_are_right = True
    clocks = ("seconds", "tokens_per_second")
    for seed in range(2):
        a, b = checked.train_batch(shared_prefixes(seed)), unchecked.train_batch(shared_prefixes(seed))
        assert {k: v for k, v in a.items() if k not in clocks} == {k: v for k, v in b.items() if k not in clocks}
        assert a["packing/tree"] == 1
    assert same(weights(checked), weights(unchecked))
    assert not caplog.records


def test_bfloat16_is_given_room_for_its_rounding(qwen, caplog):
    config = TrainerConfig(packing="tree", dtype="bfloat16", device="cpu")
    trainer = Trainer(qwen, config, loss=LOSSES["default"], total_optimizer_steps=1)
    assert trainer.train_batch(shared_prefixes())["packing/tree"] == 1
    assert not caplog.records


@pytest.mark.parametrize("right", [True, False])
def test_where_products_are_rounded_trees_are_held_against_rows_in_float32(
    qwen, make_trees_wrong, caplog, monkeypatch, right
):
    """As in a deep model, whose rounding is beyond any fixed tolerance: here that of bfloat16 is 0."""
    monkeypatch.setattr("verbatim.trainer.packer.StepPacker._rounding", lambda self: 0.0)
    config = TrainerConfig(packing="tree", dtype="bfloat16", device="cpu")
    trainer = Trainer(qwen, config, loss=LOSSES["default"], total_optimizer_steps=1)
    if not right:
        make_trees_wrong()
    assert trainer.train_batch(shared_prefixes())["packing/tree"] == float(right)
    assert len(caplog.records) == (not right)


@pytest.mark.parametrize("right", [True, False])
def test_under_autocast_trees_are_held_against_rows_by_their_distance_from_float32(
    qwen, make_trees_wrong, caplog, monkeypatch, right
):
    """As on CUDA. The fixed tolerance is 0, so that any rounding is beyond it."""
    monkeypatch.setattr("verbatim.trainer.trainer.rounds_products", lambda *args, **kwargs: False)
    monkeypatch.setattr("verbatim.trainer.packer.StepPacker._rounding", lambda self: 0.0)
    config = TrainerConfig(packing="tree", dtype="bfloat16", device="cpu")
    trainer = Trainer(qwen, config, loss=LOSSES["default"], total_optimizer_steps=1)
    if not right:
        make_trees_wrong()
    assert trainer.train_batch(shared_prefixes())["packing/tree"] == float(right)
    assert len(caplog.records) == (not right)


def test_trees_are_tried_once_and_only_where_there_are_any(qwen, monkeypatch):
    tried = []
    monkeypatch.setattr("verbatim.trainer.packer.trees_are_right", lambda *args, **kwargs: tried.append(args) or True)
    trainer = make_trainer(qwen, packing="tree", optimizer_steps_per_batch=2)
    trainer.train_batch(make_batch())
    assert not tried
    trainer.train_batch(shared_prefixes())
    trainer.train_batch(shared_prefixes(1))
    assert len(tried) == 1


def test_a_gradient_that_is_not_finite_is_the_steps_to_report(qwen, make_trees_wrong, caplog):
    trainer = make_trainer(qwen, packing="tree")
    make_trees_wrong()
    trainer.model.model.norm.weight.data.fill_(np.nan)
    with pytest.raises(RunStopped, match="the loss is nan"):
        trainer.train_batch(shared_prefixes())
    assert not caplog.records


def starting(length, *start):
    """A sample of random tokens with these first."""
    made = make_sample(length, str(start), seed=length)
    return replace(made, token_ids=np.append(start, made.token_ids[len(start) :]).astype(np.int32))


def test_what_is_tried_are_the_samples_that_branch_before_those_that_continue():
    """The 8 alone shares with nobody; the 10 is there twice, which is shared but no branch."""
    branching = [starting(30, 1, 1), starting(31, 1, 2)]
    again = [starting(10, 2), starting(10, 2)]
    assert sharing_samples([*again, starting(8, 3), *branching]) == [*branching, *again]
    assert sharing_samples([again[0], starting(8, 3)]) == []


def test_what_is_tried_is_short():
    pairs = [[starting(length, i, 1), starting(length, i, 2)] for i, length in enumerate((450, 250, 200, 1500))]
    assert [len(s) for s in sharing_samples(list(itertools.chain(*pairs)))] == [250, 250, 200, 200]
    assert [len(s) for s in sharing_samples(pairs[3])] == [1500, 1500]
    assert MOST_TOKENS == 1024
