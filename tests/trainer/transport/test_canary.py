"""A sampler that does not hold the weights that were published is found out."""

import functools

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from trainer.trainer_helpers import VOCAB, make_batch, write_model
from verbatim.algorithms.losses import LOSSES
from verbatim.config.schema import OptimConfig, TrainerConfig
from verbatim.inference.embedded import engine as torch_engine
from verbatim.inference.embedded.engine import TorchSampler
from verbatim.inference.embedded.settings import TorchSettings
from verbatim.trainer.trainer import Trainer
from verbatim.trainer.transport import WeightFolders
from verbatim.trainer.transport.canary import (
    Probes,
    allowed_difference,
    cached_prefixes,
    find_mismatch,
    find_stale_prefix,
    probe_sequences,
    tolerance_of,
)
from verbatim.trainer.worker import TrainerWorker


def probes(*rows):
    """Probes with these logprobs; nobody looks at their ids here."""
    logprobs = tuple(np.array(row, dtype=np.float32) for row in rows)
    return Probes(token_ids=tuple(np.zeros(len(row) + 1, np.int32) for row in rows), logprobs=logprobs)


def found(*rows):
    return [np.array(row, dtype=np.float32) for row in rows]


# ---- by hand


def test_the_mean_is_over_all_tokens_of_all_probes():
    """|0| + |0.5| + |1| + |0.5| over four tokens: 0.5."""
    fault = find_mismatch(probes([-1, -2, -3], [-4]), found([-1, -2.5, -2], [-4.5]), before=None, tolerance=0.49)
    assert fault == "its logprobs differ by 0.5 on average, more than 0.49"


def test_a_difference_up_to_the_tolerance_is_none_and_beyond_it_is_one():
    published, seen = probes([-1.0, -2.0]), found([-1.0, -2.5])
    assert find_mismatch(published, seen, before=None, tolerance=0.25) is None
    assert "differ by 0.25" in find_mismatch(published, seen, before=None, tolerance=0.2499)


@pytest.mark.parametrize("odd", [np.nan, -np.inf])
def test_a_logprob_that_is_no_number_is_a_mismatch(odd):
    assert find_mismatch(probes([-1, -2]), found([-1, odd]), before=None, tolerance=1e6) is not None
    assert find_mismatch(probes([odd, -2]), found([-1, -2]), before=None, tolerance=1e6) is not None


def test_logprobs_twice_as_near_to_the_old_weights_pass_and_nearer_ones_do_not():
    """New -1, old -4. At -3 the differences are 2 and 1: twice. At -3.5 they are 2.5 and 0.5: five times."""
    new, old = probes([-1.0]), probes([-4.0])
    assert find_mismatch(new, found([-3.0]), before=old, tolerance=10) is None
    assert find_mismatch(new, found([-3.5]), before=old, tolerance=10) == (
        "its logprobs differ by 2.5 on average from those of the new weights, and by only 0.5 from those of the "
        "previous weights"
    )


def test_weights_that_did_not_change_are_no_mismatch():
    """A step at learning rate 0: rounding is as far from the old as from the new."""
    same = probes([-1.0, -2.0])
    assert find_mismatch(same, found([-1.00001, -2.0]), before=same, tolerance=1e-4) is None
    assert find_mismatch(same, found([-1.0, -2.0]), before=same, tolerance=1e-4) is None


def test_the_less_precise_side_sets_the_tolerance():
    assert tolerance_of("float32", "float32") == 1e-4
    assert tolerance_of("float32", "bfloat16") == tolerance_of("bfloat16", "float32") == 0.1


@pytest.mark.parametrize(
    ("tolerance", "rounding", "allowed"),
    [(0.1, None, 0.1), (0.1, 0.02, 0.1), (0.1, 0.05, 0.2), (1e-4, None, 1e-4)],
)
def test_a_model_whose_rounding_is_larger_than_usual_may_differ_by_four_times_of_it(tolerance, rounding, allowed):
    published = Probes(token_ids=(), logprobs=(), rounding=rounding)
    assert allowed_difference(tolerance, published) == pytest.approx(allowed)
    assert allowed_difference(tolerance, None) == tolerance


@pytest.mark.parametrize(
    ("vocab", "context", "length", "last"),
    [(61, 2048, 32, 288), (61, 100, 32, 99), (151_936, 20, 19, 19), (2, 1, 2, 2)],
)
def test_probes_are_the_same_for_both_sides_fit_the_context_and_the_vocabulary(vocab, context, length, last):
    ours, theirs = probe_sequences(vocab, context), probe_sequences(vocab, context)
    assert [p.tobytes() for p in ours] == [p.tobytes() for p in theirs]
    assert [len(p) for p in ours] == [*[length] * 4, last]
    assert all(0 <= p.min() <= p.max() < vocab for p in ours)


def test_the_last_probe_is_asked_for_through_the_prefix_cache_up_to_each_of_its_last_tokens():
    ids = np.arange(160, dtype=np.int32)
    asked = cached_prefixes(Probes(token_ids=(ids[:32], ids), logprobs=()))
    assert [prefix.tolist() for prefix in asked] == [list(range(length)) for length in (157, 158, 159, 160)]
    short = Probes(token_ids=(np.array([3, 1], np.int32),), logprobs=())
    assert [prefix.tolist() for prefix in cached_prefixes(short)] == [[3, 1]]


SAID = "logprobs of a new request through the prefix cache differ by {} on average from those past it, "


@pytest.mark.parametrize(
    ("over_the_cache", "fault"),
    [
        ([-1.0, -2.0], None),
        ([-1.0, -2.0004], SAID.format("0.0002") + "more than 0.0001"),
        ([-1.0, -2.000008], None),  # 4e-6, less than a tenth of what the weights changed: 5e-5
        (
            [-1.0, -2.000012],
            SAID.format("6e-06") + "and the step changed them by 5e-05: the cache was filled by the previous weights",
        ),
        ([np.nan, -2.0], SAID.format("nan") + "more than 0.0001"),
    ],
)
def test_a_prefix_cache_that_outlived_its_weights_is_found(over_the_cache, fault):
    """The last two of the last probe's tokens: past the cache 0 and -1. New weights moved them by 5e-5 each."""
    new, old = probes([-9], [-7.0, 0, -1.0]), probes([-9], [-7.0, -5e-5, -0.99995])
    over_the_cache = [value + 1 for value in over_the_cache]
    whole = np.array([-7, 0, -1], np.float32)
    assert find_stale_prefix(new, over_the_cache, whole, before=old, tolerance=1e-4) == fault


@pytest.mark.parametrize(
    ("tolerance", "rounding", "allowed"), [(1e-4, 0.0, 2e-6), (1e-4, 1e-6, 4e-6), (0.1, 0.01, 0.04)]
)
def test_a_difference_that_rounding_explains_is_no_stale_cache(tolerance, rounding, allowed):
    """The weights did not move. Allowed are a fiftieth of the tolerance, and four times the distance to the trainer."""
    same, whole = probes([-1.0, 0.0]), np.array([-1 - 2 * rounding, 0], np.float32)
    for times, is_stale in ((0.95, False), (1.05, True)):
        over_the_cache = [float(whole[0]), 2 * times * allowed]
        found = find_stale_prefix(same, over_the_cache, whole, before=same, tolerance=tolerance)
        assert (found is not None) == is_stale
    assert find_stale_prefix(same, [float(whole[0]), 2.1 * allowed], whole, before=None, tolerance=tolerance) is None


# ---- with a real trainer and a real sampler


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Two layers and a tied head."""
    return write_model(tmp_path_factory.mktemp("canary"))


ORDINARY, TINY = 1e-3, 1e-6
"""Learning rates: after a step of the first one any stale tensor shows; after one of the second, none by itself."""


@functools.cache
def trained(model, tmp_path, lr):
    """What the trainer published before its first step, and after it."""
    trainer = Trainer(model, TrainerConfig(optim=OptimConfig(lr=lr)), loss=LOSSES["default"], total_optimizer_steps=1)
    worker = TrainerWorker(
        trainer, version=0, weights=WeightFolders(tmp_path / f"weights-{lr}"), states=tmp_path, context_length=33
    )
    return worker.probe(), worker.train(make_batch(), 1)


async def verdict(model, tmp_path, lr):
    """What the canary says of a sampler that was told to load the step's weights."""
    before, report = trained(model, tmp_path.parent, lr)
    sampler = TorchSampler(model, config=TorchSettings(max_batch_size=2), context_length=64, num_threads=1)
    try:
        at_first = [(await sampler.prompt_logprobs(ids))[1:] for ids in before.token_ids]
        assert find_mismatch(before, at_first, before=None, tolerance=tolerance_of("float32")) is None
        await sampler.update_weights(report.weights, 1)
        assert sampler.policy_version == 1  # whatever it holds, this is what it says
        now = [(await sampler.prompt_logprobs(ids))[1:] for ids in report.probes.token_ids]
    finally:
        await sampler.close()
    return find_mismatch(report.probes, now, before=before, tolerance=tolerance_of("float32"))


def keeps(monkeypatch, name):
    """Samplers of which the tensors whose names begin so are not refreshed."""
    load = torch_engine.replace_weights

    def stale(model, weights):
        kept = {key: value.clone() for key, value in model.state_dict().items() if key.startswith(name)}
        assert kept
        load(model, weights)
        with torch.no_grad():
            for key, value in kept.items():
                model.get_parameter(key).copy_(value)

    monkeypatch.setattr(torch_engine, "replace_weights", stale)


@pytest.mark.parametrize("lr", [ORDINARY, TINY])
async def test_a_sampler_that_loaded_the_weights_passes(model, tmp_path, lr):
    assert await verdict(model, tmp_path, lr) is None


@pytest.mark.parametrize("layer", ["model.layers.0.", "model.layers.1."])
async def test_a_sampler_that_keeps_one_stale_layer_is_refused(model, tmp_path, monkeypatch, layer):
    keeps(monkeypatch, layer)
    assert "differ by" in await verdict(model, tmp_path, ORDINARY)


async def test_a_sampler_that_keeps_a_stale_tied_head_is_refused(model, tmp_path, monkeypatch):
    """An engine with its own copy of the embeddings as output head, which a reload forgets."""
    load = torch_engine.replace_weights

    def stale(lm, weights):
        head = lm.lm_head.weight.detach().clone()
        load(lm, weights)
        assert not torch.equal(lm.lm_head.weight, head)  # tied: the file's embeddings are the head
        lm.lm_head.weight = torch.nn.Parameter(head)

    monkeypatch.setattr(torch_engine, "replace_weights", stale)
    assert "differ by" in await verdict(model, tmp_path, ORDINARY)


async def test_a_sampler_that_keeps_all_old_weights_is_refused_also_after_a_tiny_step(model, tmp_path, monkeypatch):
    """The step changes logprobs by less than the tolerance: only what they are nearer to gives it away."""
    monkeypatch.setattr(torch_engine, "replace_weights", lambda model, weights: None)
    before, report = trained(model, tmp_path.parent, TINY)
    assert find_mismatch(report.probes, before.logprobs, before=None, tolerance=tolerance_of("float32")) is None
    assert "from those of the previous weights" in await verdict(model, tmp_path, TINY)


def test_the_vocabulary_of_the_probes_is_the_models(model, tmp_path):
    before, _ = trained(model, tmp_path.parent, ORDINARY)
    assert {int(ids.max()) < VOCAB for ids in before.token_ids} == {True}
    assert all(len(ids) == len(logprobs) + 1 for ids, logprobs in zip(before.token_ids, before.logprobs, strict=True))


@pytest.mark.parametrize("lr", [ORDINARY, TINY])
def test_a_new_request_over_the_cache_of_the_old_weights_is_found_and_one_over_their_own_is_not(model, tmp_path, lr):
    """As transformers computes it: a block of 16 tokens of the last probe comes from a cache."""
    before, report = trained(model, tmp_path.parent, lr)
    old, new = (AutoModelForCausalLM.from_pretrained(f, attn_implementation="eager") for f in (model, report.weights))

    def last_logprob(ids, logits):
        return float(logits[0, -1].log_softmax(-1)[ids[-1]])

    @torch.no_grad()
    def over_the_cache_of(writer):
        rows = []
        for ids in cached_prefixes(report.probes):
            tokens = torch.from_numpy(ids.astype(np.int64))[None]
            cache = writer(tokens[:, :16], use_cache=True).past_key_values
            rows.append(last_logprob(ids, new(tokens[:, 16:-1], past_key_values=cache, use_cache=True).logits))
        return rows

    ids = report.probes.token_ids[-1].astype(np.int64)
    with torch.no_grad():
        logits = new(torch.from_numpy(ids)[None]).logits[0, :-1].log_softmax(-1)
    whole = logits[torch.arange(len(ids) - 1), torch.from_numpy(ids[1:])].numpy()
    for writer, is_stale in ((new, False), (old, True)):
        fault = find_stale_prefix(
            report.probes, over_the_cache_of(writer), whole, before=before, tolerance=tolerance_of("float32")
        )
        assert (fault is not None) == is_stale, fault
