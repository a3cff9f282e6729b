"""Ranks that share a micro-batch compute what one computes: the attention seam, gradients, losses, memory, refusals."""

import copy
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sequence_threads import FakeDist, on_ranks
from test_offload import LAYERS
from torch.autograd.graph import saved_tensors_hooks
from trainer_helpers import (
    largest_difference,
    loaded,
    make_batch,
    make_sample,
    num_trained,
    shared_prefixes,
    write_llama,
)

from campaigns import sized
from pairs import all_rows, pairs
from verbatim.algorithms.losses import LOSSES
from verbatim.config.schema import ParallelConfig, TrainerConfig
from verbatim.core.errors import ModelError, UsageError
from verbatim.models.attention import AttentionCall
from verbatim.models.head import CausalLM
from verbatim.trainer.attention.rows import RowsPlan
from verbatim.trainer.attention.tree import TreePlan
from verbatim.trainer.logprobs import TargetLogprobs
from verbatim.trainer.metrics import MetricSums
from verbatim.trainer.packing import PACKERS
from verbatim.trainer.parallel.sequence import SequencePlan, refuse_slices, sequence_group
from verbatim.trainer.recompute import checkpoint_layers
from verbatim.trainer.step import GradientPass
from verbatim.trainer.trainer import Trainer

# ---- the seam

TOKENS = 12
DEPTHS = np.array([0, 1, 2, 3, 2, 3, 4, 1, 2, 0, 1, 2], dtype=np.int32)
ENDS = np.array([9, 7, 4, 4, 7, 7, 7, 9, 9, 12, 12, 12], dtype=np.int32)
"""Two trees: a path of two with branches of two and of three tokens, and another branch of the root; a row of three."""

CALLS = {
    "rows": (RowsPlan([5, 4, 3]), {}),
    "window": (RowsPlan([7, 5]), {"sliding_window": 3}),
    "tree": (TreePlan(DEPTHS, ENDS), {}),
    "tree, window, cap": (TreePlan(DEPTHS, ENDS), {"sliding_window": 2, "softcap": 2.0}),
}


SHAPES = {
    "each rank a key head": (2, 4, 2),
    "one key head for both": (2, 4, 1),
    "four ranks": (4, 4, 2),
    "key heads cut by ranks": (3, 6, 2),
    "no groups": (3, 3, 3),
}
"""Ranks, query heads, key/value heads."""
SLICES = (list(CALLS), list(SHAPES), ["", "sinks"])


@pytest.mark.campaign
@pytest.mark.parametrize(("name", "shape", "sinks"), sized(pairs(*SLICES), all_rows(*SLICES)))
def test_slices_of_tokens_attend_as_the_whole(monkeypatch, name, shape, sinks):
    (plan, settings), (size, heads, kv_heads) = CALLS[name], SHAPES[shape]
    torch.manual_seed(0)
    query, key, value = (
        torch.randn(1, n, TOKENS, d, dtype=torch.float64) for n, d in ((heads, 4), (kv_heads, 4), (kv_heads, 6))
    )
    weight = torch.randn(1, TOKENS, heads, 6, dtype=torch.float64)
    sink = torch.randn(heads, dtype=torch.float64) if sinks else None

    def attended(inputs, plan, weight):
        leaves = [None if x is None else x.clone().requires_grad_() for x in inputs]
        call = AttentionCall(scale=0.5, sinks_H=leaves[3], **settings)
        out = plan.attend(0, *leaves[:3], call)
        (out * weight).sum().backward()
        return out.detach(), [None if x is None else x.grad for x in leaves]

    expected, gradients = attended((query, key, value, sink), plan, weight)

    def on_rank(group):
        mine = group.slice(TOKENS)
        tokens = [x[:, :, mine] for x in (query, key, value)]
        return attended((*tokens, sink), SequencePlan(plan, group), weight[:, mine])

    found, _ = on_ranks(monkeypatch, size, on_rank)
    torch.testing.assert_close(torch.cat([out for out, _ in found], dim=1), expected, rtol=0, atol=1e-13)
    for i in range(3):
        whole = torch.cat([grads[i] for _, grads in found], dim=2)
        torch.testing.assert_close(whole, gradients[i], rtol=0, atol=1e-13)
    if sinks:
        of_all = torch.stack([grads[3] for _, grads in found]).sum(0)
        torch.testing.assert_close(of_all, gradients[3], rtol=0, atol=1e-13)


def test_an_exchange_gives_each_rank_its_heads_of_all_tokens(monkeypatch):
    """Two ranks, two heads, two tokens each; entries are 10 x token + head."""
    x = torch.tensor([[10.0 * t + h for t in range(4)] for h in range(2)]).reshape(1, 2, 4, 1)
    found, meeting = on_ranks(monkeypatch, 2, lambda g: g.to_heads([x[:, :, g.slice(4)]])[0])
    assert [tensor.flatten().tolist() for tensor in found] == [[0, 10, 20, 30], [1, 11, 21, 31]]
    assert meeting.exchanges == [2 * 4]  # two tokens of the other rank's head
    heads = [tensor.transpose(1, 2) for tensor in found]
    back, _ = on_ranks(monkeypatch, 2, lambda g: g.to_tokens(heads[g.rank]))
    assert [tensor.flatten().tolist() for tensor in back] == [[0, 1, 10, 11], [20, 21, 30, 31]]


def test_values_of_another_dtype_keep_it(monkeypatch):
    """Under autocast queries and keys may be float32 where values are bfloat16."""
    x = torch.randn(1, 2, 4, 1)
    found, _ = on_ranks(monkeypatch, 2, lambda g: g.to_heads([x[:, :, g.slice(4)], x.bfloat16()[:, :, g.slice(4)]]))
    for rank, (wide, narrow) in enumerate(found):
        assert torch.equal(wide, x[:, rank : rank + 1])
        assert torch.equal(narrow, x[:, rank : rank + 1].bfloat16())


# ---- optimizer steps


def one_step(lm, micro_batches, loss, sequence, *, streams=None):
    step = GradientPass(
        lm=TargetLogprobs(lm, 7, sequence=sequence),
        loss=loss,
        denominator=31,
        metrics=MetricSums(),
        frozen=streams or {},
    )
    step.run(micro_batches)
    return {name: p.grad for name, p in lm.model.named_parameters()}, step.loss_sum(), step


def as_ranks(monkeypatch, lm, micro_batches, loss, size):
    """The sum of the gradients, and of all that is counted, over ranks."""
    models = [copy.deepcopy(lm.model) for _ in range(size)]
    found, meeting = on_ranks(monkeypatch, size, lambda g: one_step(CausalLM(models[g.rank]), micro_batches, loss, g))
    metrics = MetricSums()
    for _, _, step in found:
        metrics.add_partial(step.metrics.partial())
    grads = {
        name: torch.stack([torch.zeros_like(p) if mine[name] is None else mine[name] for mine, _, _ in found]).sum(0)
        for name, p in lm.model.named_parameters()
    }
    return grads, sum(t for _, t, _ in found), sum(s.num_trained for _, _, s in found), metrics.result(), meeting


STEPS = (["default", "ipa", "gspo", "sft"], ["rows", "tree"], [10_000, 30], [2, 4])
"""The second budget cuts samples over micro-batches."""


@pytest.mark.campaign
@pytest.mark.parametrize(("loss", "packing", "budget", "size"), sized(pairs(*STEPS), all_rows(*STEPS)))
def test_ranks_that_share_micro_batches_have_the_gradient_of_one(monkeypatch, qwen, loss, packing, budget, size):
    samples = make_batch() if packing == "rows" else shared_prefixes()
    packed = PACKERS[packing](samples, micro_batch_tokens=budget, keep_whole=LOSSES[loss].level != "token")
    lm = loaded(qwen, "float64")
    expected, total, alone = one_step(lm, packed, LOSSES[loss], None)
    lm.model.zero_grad(set_to_none=True)
    found, together, num, metrics, _ = as_ranks(monkeypatch, lm, packed, LOSSES[loss], size)
    assert largest_difference(found, expected) < 1e-12
    assert together == pytest.approx(total, rel=1e-12)
    assert num == alone.num_trained == num_trained(samples)
    assert metrics == pytest.approx(alone.metrics.result(), rel=1e-12)


def test_sums_over_ranks_that_are_left_out_are_found(monkeypatch, qwen):
    """gspo weighs each trajectory as a whole, of which each rank has a part."""
    packed = PACKERS["rows"](make_batch(), micro_batch_tokens=10_000, keep_whole=True)
    lm = loaded(qwen, "float64")
    expected, *_ = one_step(lm, packed, LOSSES["gspo"], None)
    lm.model.zero_grad(set_to_none=True)
    monkeypatch.setattr(FakeDist, "all_reduce", staticmethod(lambda values, group: None))
    found, *_ = as_ranks(monkeypatch, lm, packed, LOSSES["gspo"], 2)
    assert largest_difference(found, expected) > 1e-3


def test_a_rank_without_a_target_takes_part(monkeypatch, qwen):
    """One trained token, at the end: it is predicted on the last rank that has more than padding."""
    sample = make_sample(100, "a", seed=1, trained=0.0)
    packed = PACKERS["rows"]([sample], micro_batch_tokens=1000, keep_whole=True)
    lm = loaded(qwen, "float64")
    for loss in (LOSSES["default"], LOSSES["gspo"]):
        expected, total, alone = one_step(lm, packed, loss, None)
        lm.model.zero_grad(set_to_none=True)
        found, together, num, metrics, _ = as_ranks(monkeypatch, lm, packed, loss, 2)
        assert num == 1 and together == pytest.approx(total, rel=1e-12)
        assert largest_difference(found, expected) < 1e-12
        assert metrics == pytest.approx(alone.metrics.result(), rel=1e-12)


# ---- what it costs


def test_a_layer_exchanges_twice_in_each_pass_and_twice_more_where_it_is_recomputed(monkeypatch, tmp_path):
    """Four query heads that share one key/value head, 64 tokens on each of two ranks, float64."""
    lm = loaded(write_llama(tmp_path), "float64")
    packed = PACKERS["rows"]([make_sample(128, "a", seed=1)], micro_batch_tokens=1000, keep_whole=False)
    *_, meeting = as_ranks(monkeypatch, lm, packed, LOSSES["default"], 2)
    token_of_head = 64 * 8 * 8
    there = (2 + 1 + 1) * token_of_head  # half of the query heads; the key/value head is wanted by both
    back = 2 * token_of_head
    assert meeting.exchanges == [there, back] * LAYERS + [back, there] * LAYERS
    recomputed = CausalLM(copy.deepcopy(lm.model))
    checkpoint_layers(recomputed.model)
    *_, meeting = as_ranks(monkeypatch, recomputed, packed, LOSSES["default"], 2)
    assert meeting.exchanges == [there, back] * LAYERS + [there, back, back, there] * LAYERS


class Saved:
    """Bytes of all that autograd saves under its hooks and that is no parameter, each storage once."""

    def __init__(self, model):
        self.parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.storages = {}

    def hooks(self):
        return saved_tensors_hooks(self.note, lambda tensor: tensor)

    def note(self, tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.parameters:
            self.storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    @property
    def bytes(self):
        return sum(self.storages.values())


@pytest.mark.parametrize("packing", ["rows", "tree"])
def test_two_ranks_save_half_of_the_activations_each(monkeypatch, qwen, packing):
    """Four query and two key/value heads: nothing is repeated. Beside the half there are index tensors of the plan,
    8 bytes for each token (and as much for each place of padding)."""
    one, other = make_sample(640, "a", seed=1), make_sample(640, "b", seed=2)
    other = replace(other, token_ids=np.concatenate([one.token_ids[:256], other.token_ids[256:]]))
    packed = PACKERS[packing]([one, other], micro_batch_tokens=10_000, keep_whole=False)
    assert packed[0].num_tokens == (1280 if packing == "rows" else 1024)
    lm = loaded(qwen, "float32")

    def saved(group, model):
        targets = TargetLogprobs(CausalLM(model), 1000, sequence=group)
        batch, noted = targets.batch(packed[0]), Saved(model)
        with noted.hooks():
            targets.hidden(batch)
        return noted.bytes

    whole = saved(None, copy.deepcopy(lm.model))
    models = [copy.deepcopy(lm.model) for _ in range(2)]
    found, _ = on_ranks(monkeypatch, 2, lambda g: saved(g, models[g.rank]))
    assert whole > 1024 * 4 * 32 * LAYERS  # at least the inputs of the layers
    for mine in found:
        assert mine <= whole / 2 + 16 * packed[0].num_tokens


# ---- refusals


def test_ranks_that_are_no_multiple_are_refused():
    with pytest.raises(ValueError, match="sequence = 2 does not divide processes = 3; take one of 1, 3"):
        ParallelConfig(processes=3, sequence=2)
    with pytest.raises(UsageError, match=r"trainer\.parallel\.sequence = 2 does not divide the 3 processes"):
        sequence_group(SimpleNamespace(size=3, rank=0), 2)


def test_one_process_has_none_to_share_with(qwen):
    config = TrainerConfig(parallel={"sequence": 2}, device="cpu")
    with pytest.raises(UsageError, match="does not divide the 1 process of the trainer"):
        Trainer(qwen, config, loss=LOSSES["default"], total_optimizer_steps=1)


def test_heads_that_cannot_be_shared_out_are_refused(qwen):
    with pytest.raises(
        ModelError, match="sequence = 3 does not divide the 4 attention heads of the model; take one of 1, 2, 4"
    ):
        refuse_slices(loaded(qwen, "float32"), 3)


def test_rows_that_are_computed_alone_cannot_be_split(qwen):
    lm = copy.copy(loaded(qwen, "float32"))
    lm.rows_alone = True
    with pytest.raises(ModelError, match=r"a row cannot be split over processes; set trainer\.parallel\.sequence = 1"):
        refuse_slices(lm, 2)
