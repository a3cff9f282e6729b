"""Tokens that were drawn from a cut distribution are trained under that distribution."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
from trainer_helpers import cut_samples, gradients, largest_difference, loaded, write_llama, write_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from verbatim.algorithms.losses import LOSSES, Loss, LossInputs, LossOutputs
from verbatim.core.types import KeptSets, TrainingSample
from verbatim.models.float64 import keep_float64
from verbatim.trainer.packing import pack_tree

VOCAB, PROMPT, LENGTH = 7, 3, 2


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """A policy over seven ids, of which some are much more likely than others."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=16, tie_word_embeddings=False, initializer_range=0.25,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("toy")
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def by_definition(logits, *, top_k=0, top_p=1.0, min_p=0.0):
    """Ids by rank, the first k; of them the fewest with mass p; of them those with a share of the first one's."""
    order = sorted(range(len(logits)), key=lambda v: -logits[v])[: top_k or None]
    weights = {v: math.exp(logits[v] - logits[order[0]]) for v in order}
    nucleus, mass, total = [], 0.0, math.fsum(weights.values())
    for v in order:
        if top_p == 1 or mass < top_p * total:
            nucleus.append(v)
        mass += weights[v]
    return sorted(v for v in nucleus if weights[v] >= min_p)


def plain_model(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa", dtype=torch.float64)
    keep_float64(model)
    return model


def logits_of(model, ids):
    return model(input_ids=torch.tensor(np.array(ids))[None].long(), use_cache=False).logits[0]


def over(kept, logits_V):
    """Log-softmax over some ids alone."""
    outside = torch.ones(len(logits_V), dtype=torch.bool)
    outside[kept] = False
    return logits_V.masked_fill(outside, -torch.inf).log_softmax(-1)


def every_sequence(model, cut, temperature):
    """All completions that can be drawn: their ids, kept sets, and log probability, which has a graph."""
    for ids in itertools.product(range(VOCAB), repeat=LENGTH):
        rows = logits_of(model, [PROMPT, *ids]) / temperature
        sets = [by_definition(row.tolist(), **cut) for row in rows[:LENGTH]]
        if all(token in kept for token, kept in zip(ids, sets, strict=True)):
            yield ids, sets, torch.stack([over(s, r)[t] for s, r, t in zip(sets, rows, ids, strict=False)]).sum()


def on_policy(loss: Loss) -> Loss:
    """The loss where the inference logprobs are the trainer's to the last bit: in samples they are float32."""

    def function(inputs, **parameters):
        return loss.function(
            dataclasses.replace(inputs, inference_logprobs=inputs.trainer_logprobs.detach()), **parameters
        )

    return dataclasses.replace(loss, function=function)


def mine(inputs):
    """A loss as a user writes it: REINFORCE."""
    return LossOutputs(loss=-(inputs.advantages * inputs.trainer_logprobs)[inputs.loss_mask].sum(), metrics={})


POLICY_GRADIENTS = {
    **{name: LOSSES[name] for name in ("default", "ppo", "gspo", "cispo", "tis", "ipa")},
    **{f"mine, {level}": Loss(mine, level=level) for level in ("token", "chunk", "sequence")},
}
"""Their gradient on the policy's own samples is that of the expected reward."""


CUTS = [
    {"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.2}, {"top_k": 4, "top_p": 0.9}, {"top_k": 5, "min_p": 0.1},
    {"top_p": 0.95, "min_p": 0.1}, {"top_k": 5, "top_p": 0.9, "min_p": 0.15}, {},
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_the_expected_gradient_is_that_of_the_expected_reward_of_the_cut_policy(toy, cut, temperature):
    model = plain_model(toy)
    drawn = list(every_sequence(model, cut, temperature))
    chances = [math.exp(log_q.item()) for _, _, log_q in drawn]
    assert math.fsum(chances) == pytest.approx(1, abs=1e-12) and len(drawn) > 1
    # A sample stands for all of its kind: its share is in its advantage, n q R. That is float32, so R is what it says.
    rewards = np.random.default_rng(0).choice([-1.5, -0.5, 0.75, 1.0], len(drawn))
    advantages = np.float32(len(drawn) * np.array(chances) * rewards)
    exact = advantages.astype(np.float64) / (len(drawn) * np.array(chances))
    expected_reward = sum(log_q.exp() * reward for (_, _, log_q), reward in zip(drawn, exact, strict=True))
    (-expected_reward / LENGTH).backward()
    closed_form = {name: p.grad for name, p in model.named_parameters()}
    samples = samples_of(drawn, advantages, temperature, is_cut=bool(cut))
    for name, given in POLICY_GRADIENTS.items():
        loss = on_policy(given)
        count = len(samples) * (LENGTH if loss.normalizer == "tokens" else 1)
        for packing in ("rows", "tree"):
            found, _, _ = gradients(toy, samples, loss=loss, packing=packing, denominator=count)
            assert largest_difference(found, closed_form) < 1e-9, (name, packing)
    whole = [dataclasses.replace(sample, kept_sets=None) for sample in samples]
    biased, _, _ = gradients(toy, whole, loss=on_policy(LOSSES["default"]), denominator=LENGTH * len(samples))
    is_cut = any(len(kept) < VOCAB for _, sets, _ in drawn for kept in sets)
    assert (largest_difference(biased, closed_form) > 0.01) == is_cut, "what logprobs of the whole vocabulary do"


def samples_of(drawn, advantages, temperature, *, is_cut, teacher=None):
    """A training sample of each sequence of `every_sequence`; `teacher` gives the logprobs of its tokens."""
    return [
        TrainingSample(
            token_ids=np.array([PROMPT, *ids], np.int32),
            loss_mask=np.array([False, True, True]),
            logprobs=np.full(1 + LENGTH, -1, np.float32),
            advantages=np.full(1 + LENGTH, advantage, np.float32),
            chunk_ids=np.array([-1, 0, 0], np.int32),
            policy_versions=np.zeros(1 + LENGTH, np.int32),
            temperatures=np.full(1 + LENGTH, temperature, np.float32),
            kept_sets=KeptSets.of([[], *sets]) if is_cut else None,
            trajectory_id=str(ids),
            teacher_logprobs=None if teacher is None else np.float32([0, *teacher(ids)]),
        )
        for (ids, sets, _), advantage in zip(drawn, advantages, strict=True)
    ]


def weighed(loss: Loss, weight) -> Loss:
    """The loss of each trajectory times `weight(inputs)`, where a loss reads no advantages that could hold a share."""

    def function(inputs, **parameters):
        found = on_policy(loss).function(inputs, **parameters)
        return dataclasses.replace(found, loss=weight(inputs) * found.loss)

    return dataclasses.replace(loss, function=function, level="sequence")


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_distillation_and_imitation_have_the_gradients_of_the_cut_policy(toy, cut, temperature):
    """On the policy's own samples that of each token's reverse KL to the teacher; on given texts that of their negative
    log-likelihood, whatever their weights are."""
    model, rng = plain_model(toy), np.random.default_rng(2)
    drawn = list(every_sequence(model, cut, temperature))
    first, second = np.float32(-3 * rng.random(VOCAB)), np.float32(-3 * rng.random((VOCAB, VOCAB)))
    log_first = {ids[0]: over(sets[0], logits_of(model, [PROMPT])[0] / temperature) for ids, sets, _ in drawn}
    divergence = sum(q[v].exp() * (q[v] - first[v].item()) for v, q in log_first.items())
    for ids, _, log_q in drawn:
        start = log_first[ids[0]][ids[0]]
        after = log_q - start
        divergence = divergence + start.exp().detach() * after.exp() * (after - second[ids].item())
    weights = np.float32(rng.random(len(drawn)))
    likelihood = -sum(weight.item() * log_q for weight, (_, _, log_q) in zip(weights, drawn, strict=True))

    def teacher(ids):
        return first[ids[0]], second[ids]

    samples = samples_of(drawn, weights, temperature, is_cut=bool(cut), teacher=teacher)
    for loss, expected in (
        (
            weighed(LOSSES["opd"], lambda inputs: inputs.trainer_logprobs.detach()[inputs.loss_mask].sum().exp()),
            divergence,
        ),
        (weighed(LOSSES["sft"], lambda inputs: inputs.advantages[inputs.loss_mask][0]), likelihood),
    ):
        model.zero_grad()
        expected.backward(retain_graph=True)
        closed_form = {name: p.grad for name, p in model.named_parameters()}
        for packing in ("rows", "tree"):
            found, _, _ = gradients(toy, samples, loss=loss, packing=packing, denominator=1)
            assert largest_difference(found, closed_form) < 1e-9, packing


def off_policy(folder):
    """`cut_samples`, whose inference logprobs are off the policy by about 0.2, with a teacher's."""
    rng = np.random.default_rng(1)
    model, samples = plain_model(folder), []
    for sample in cut_samples():
        with torch.no_grad():
            own = dense_logprobs(model, sample).numpy()
        noise = 0.2 * rng.standard_normal(len(own))
        logprobs = np.where(sample.loss_mask, np.minimum(own + noise, 0), np.nan).astype(np.float32)
        teacher = np.float32(own - rng.random(len(own)))
        samples.append(dataclasses.replace(sample, logprobs=logprobs, logprob_streams={"teacher": teacher}))
    return samples


def dense_logprobs(model, sample):
    """Of each token given those before it, over its kept set; 0 for the first."""
    logits = logits_of(model, sample.token_ids)[:-1] / torch.tensor(sample.temperatures[1:])[:, None].double()
    rows = [
        over(sample.kept_sets[place].tolist(), row) if len(sample.kept_sets[place]) else row.log_softmax(-1)
        for place, row in enumerate(logits, start=1)
    ]
    ids = torch.tensor(sample.token_ids[1:]).long()
    return torch.cat([logits.new_zeros(1), torch.stack(rows).gather(1, ids[:, None])[:, 0]])


def dense_gradient(folder, samples, loss):
    """The gradient of a loss, on each trajectory as a whole, by `transformers` and a dense log-softmax."""
    model, by_trajectory = plain_model(folder), {}
    for sample in samples:
        by_trajectory.setdefault(sample.trajectory_id, []).append(sample)
    total = 0.0
    for own in by_trajectory.values():

        def whole(name, own=own):
            return torch.tensor(np.concatenate([getattr(sample, name) for sample in own]))

        mask = whole("loss_mask")
        inputs = LossInputs(
            trainer_logprobs=torch.cat([dense_logprobs(model, sample) for sample in own]).masked_fill(~mask, 0.0),
            inference_logprobs=whole("logprobs").double().masked_fill(~mask, 0.0),
            advantages=whole("advantages").double(),
            loss_mask=mask,
            chunk_ids=whole("chunk_ids").long(),
            logprob_streams={"teacher": whole("teacher_logprobs").double()},
        )
        total = total + loss(inputs).loss
    total.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*LOSSES, *(name for name in POLICY_GRADIENTS if name not in LOSSES)])
def test_every_loss_has_the_gradient_over_kept_sets_in_rows_and_trees(tmp_path, name):
    folder, loss = write_llama(tmp_path), {**LOSSES, **POLICY_GRADIENTS}[name]
    samples = off_policy(folder)
    expected = dense_gradient(folder, samples, loss)
    for settings in ({}, {"packing": "tree"}, {"packing": "tree", "micro_batch_tokens": 24, "chunk": 5}, {"chunk": 3}):
        found, _, _ = gradients(folder, samples, loss=loss, denominator=1, **settings)
        assert largest_difference(found, expected) < 1e-9, settings
    without = [dataclasses.replace(sample, kept_sets=None) for sample in samples]
    found, _, _ = gradients(folder, without, loss=loss, denominator=1)
    assert largest_difference(found, expected) > 0.05


def test_trees_share_prefixes_whatever_the_kept_sets_are(tmp_path):
    folder = write_model(tmp_path)
    samples = cut_samples()
    (cut,) = pack_tree(samples, micro_batch_tokens=10_000, keep_whole=False)
    (whole,) = pack_tree(
        [dataclasses.replace(sample, kept_sets=None) for sample in samples], micro_batch_tokens=10_000, keep_whole=False
    )
    assert cut.num_tokens == whole.num_tokens < sum(map(len, samples))
    assert loaded(folder, "float64").vocab_size > int(cut.targets.kept_sets.ids.max())
