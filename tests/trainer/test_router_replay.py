"""Recorded experts are those that the sampler used, and the trainer computes with them, whatever the packing."""

import asyncio
import dataclasses
import json
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from parallel_jobs import noted_gradients
from torch import nn
from trainer_helpers import (
    VOCAB,
    largest_difference,
    num_trained,
    routed_samples,
    write_llama,
    write_qwen_moe,
)
from transformers import AutoModelForCausalLM, DeepseekV2Config, DeepseekV2ForCausalLM, Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import (
    Qwen3MoePreTrainedModel,
    Qwen3MoeSparseMoeBlock,
    Qwen3MoeTopKRouter,
)

from inference.step_gate import StepGate
from pinned import needs
from verbatim import Trajectory, Turn, build_samples
from verbatim.algorithms.losses import LOSSES
from verbatim.config.schema import OptimConfig, TrainerConfig
from verbatim.core.errors import ModelError, UsageError
from verbatim.core.records.experts import Routing
from verbatim.core.sampling import SamplingParams
from verbatim.core.trajectory_json import plain, trajectory_from_json, trajectory_to_json
from verbatim.inference.embedded.engine import TorchSampler
from verbatim.inference.embedded.settings import TorchSettings
from verbatim.inference.sampler import SampleRequest
from verbatim.models.experts import check_replay, find_routers
from verbatim.models.float64 import keep_float64
from verbatim.rollouts.recorder import Recorder
from verbatim.trainer.packing import pack_rows, pack_tree
from verbatim.trainer.router_loss import check_router_loss
from verbatim.trainer.router_replay import check_experts
from verbatim.trainer.trainer import Trainer
from verbatim.trainer.transport.trainer_messages import TrainerMessage, message_to_bytes, read_message
from waiting import until

LAYERS, EACH = 3, 2
ROUTED = (0, 2)
"""The layers with experts."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_qwen_moe(tmp_path_factory.mktemp("qwen_moe"), norm_topk_prob=True)


def plain_loss_gradient(folder, samples):
    """The default loss by `transformers`' own layers in float64, whose routers are told what to choose: the weights
    from the softmax of their logits."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float64)
    keep_float64(model)
    now = {}

    def told(layer):
        router = model.model.layers[layer].mlp.gate

        def forward(hidden):
            logits = hidden.reshape(-1, hidden.shape[-1]) @ router.weight.T
            probabilities = logits.softmax(-1)
            own = probabilities.topk(EACH).indices
            experts = torch.from_numpy(now["routed"].experts[:, layer].astype(np.int64))
            chosen = torch.where(torch.from_numpy(now["routed"].known)[:, None], experts, own)
            weights = probabilities.gather(1, chosen)
            return logits, weights / weights.sum(1, keepdim=True), chosen

        router.forward = forward

    for layer in ROUTED:
        told(layer)
    total = 0.0
    for sample in samples:
        now["routed"] = sample.routed_experts
        with mock.patch.object(nn.functional, "softmax", lambda x, dim, dtype=None: x.softmax(dim)):  # not in float32
            logits = model(input_ids=torch.tensor(sample.token_ids)[None].long(), use_cache=False).logits[0, :-1]
        ids = torch.tensor(sample.token_ids[1:]).long()
        mask = torch.tensor(sample.loss_mask[1:])
        t, mu, a = (torch.tensor(x[1:]) for x in (sample.temperatures, sample.logprobs, sample.advantages))
        pi = (logits / t[:, None]).log_softmax(-1).gather(1, ids[:, None])[mask][:, 0]
        total = total + LOSSES["default"](loss_inputs(pi, mu[mask], a[mask])).loss
    (total / num_trained(samples)).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def loss_inputs(pi, mu, a):
    from verbatim.algorithms.losses import LossInputs

    return LossInputs(
        trainer_logprobs=pi,
        inference_logprobs=mu.double(),
        advantages=a.double(),
        loss_mask=torch.ones_like(pi, dtype=torch.bool),
    )


def make_trainer(folder, *, dtype="float64", **settings):
    config = TrainerConfig(**{"optim": OptimConfig(lr=1e-30), "device": "cpu", "packing": "rows", **settings})
    return Trainer(folder, config, loss=LOSSES["default"], total_optimizer_steps=9, dtype=dtype)


def trained(folder, samples, **settings):
    trainer = make_trainer(folder, **settings)
    steps = noted_gradients(trainer)
    metrics = trainer.train_batch(samples)
    return steps[0], metrics


PACKINGS = [
    {"packing": "rows"},
    {"packing": "rows", "micro_batch_tokens": 16},
    {"packing": "tree"},
    {"packing": "tree", "micro_batch_tokens": 20, "gradient_checkpointing": True},
]


@pytest.mark.slow
@pytest.mark.parametrize("settings", PACKINGS, ids=str)
@pytest.mark.parametrize("known", [1.0, 0.6], ids=["all", "some"])
def test_the_trainer_computes_with_recorded_experts(model, settings, known):
    samples = routed_samples(known)
    expected = plain_loss_gradient(model, samples)
    found, metrics = trained(model, samples, **settings)
    assert largest_difference(found, expected) < 1e-12
    sources = [s.routed_experts.known[np.flatnonzero(s.loss_mask) - 1] for s in samples]
    assert metrics["router/replayed"] == pytest.approx(np.concatenate(sources).mean(), rel=1e-12)
    without, metrics = trained(model, [dataclasses.replace(s, routed_experts=None) for s in samples], **settings)
    assert largest_difference(without, expected) > 0.1
    assert "router/replayed" not in metrics


def test_trees_share_what_was_computed_alike():
    samples = routed_samples()
    (tree,) = pack_tree(samples, micro_batch_tokens=10_000, keep_whole=False)
    (rows,) = pack_rows(samples, micro_batch_tokens=10_000, keep_whole=False)
    alike = [dataclasses.replace(s, routed_experts=None) for s in samples]
    (whole,) = pack_tree(alike, micro_batch_tokens=10_000, keep_whole=False)
    assert whole.routed_experts is None and whole.num_tokens < tree.num_tokens < rows.num_tokens
    assert whole.num_tokens + 6 == tree.num_tokens, "the opening of the trajectory b, which has other experts"
    for micro_batch in (tree, rows):
        for target, source in zip(micro_batch.targets.trajectories, micro_batch.targets.source_positions, strict=True):
            assert micro_batch.routed_experts.known[source], target


# ---- the sampler


def make_sampler(folder, **settings):
    config = TorchSettings(device="cpu", **{"max_batch_size": 4, **settings})
    return TorchSampler(folder, config=config, context_length=96, num_threads=1, return_routed_experts=True)


def request(prompt, *, seed=0, session="", start=0, max_tokens=9):
    return SampleRequest(
        prompt_ids=np.array(prompt, dtype=np.int32),
        params=SamplingParams(max_tokens=max_tokens),
        seed=seed,
        session=session,
        routed_experts_start=start,
    )


def chosen_by(folder, ids):
    """What the routers of plain `transformers` choose for each token but the last: sets, by token and layer."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    found = []
    for layer in ROUTED:
        model.model.layers[layer].mlp.gate.register_forward_hook(lambda _, __, out: found.append(out[2]))
    with torch.no_grad():
        model(input_ids=torch.tensor(np.array(ids))[None].long(), use_cache=False)
    return [[set(row.tolist()) for row in layer[:-1]] for layer in found]


def sets_of(experts):
    assert experts.shape[1:] == (LAYERS, EACH) and experts.dtype == np.uint8
    return [[set(row.tolist()) for row in experts[:, layer]] for layer in ROUTED]


@pytest.mark.parametrize(
    "settings", [{}, {"deterministic": True}, {"prefill_chunk": 5}, {"max_batch_size": 1}], ids=str
)
async def test_the_sampler_returns_the_experts_of_every_token(model, settings):
    """Also of those that come from the cache: of the same conversation, of another one, and of one that was parked."""
    sampler = make_sampler(model, **settings)
    rng = np.random.default_rng(0)
    opening = rng.integers(0, VOCAB, 21).tolist()
    try:
        first = await sampler.generate(request(opening, session="a"))
        branch = opening + rng.integers(0, VOCAB, 4).tolist()
        second = await sampler.generate(request(branch, session="b", seed=1))
        both = opening + first.ids.tolist() + rng.integers(0, VOCAB, 3).tolist()
        start = len(opening) + len(first.ids) - 1
        third = await sampler.generate(request(both, session="a", seed=2, start=start))
        assert sampler.stats().prefix_hit_tokens > 40
    finally:
        await sampler.close()
    for prompt, completion, start_of in ((opening, first, 0), (branch, second, 0), (both, third, start)):
        expected = chosen_by(model, prompt + completion.ids.tolist())
        assert sets_of(completion.routed_experts) == [layer[start_of:] for layer in expected]


async def test_each_sequence_reads_the_keys_that_its_own_experts_computed(model, monkeypatch):
    """Two slots with equal ids may have different experts, where two are almost tied: none reads the other's keys."""
    asked = []
    monkeypatch.setattr("verbatim.inference.embedded.pass_layout.shared_prefix", lambda *args: asked.append(args) or 0)
    opening = np.random.default_rng(0).integers(0, VOCAB, 70).tolist()
    config = TorchSettings(device="cpu", max_batch_size=16)
    for records in (False, True):
        asked.clear()
        sampler = TorchSampler(model, config=config, context_length=96, return_routed_experts=records)
        try:
            await asyncio.gather(*(sampler.generate(request([*opening, i], seed=i)) for i in range(16)))
        finally:
            await sampler.close()
        largest = max((len(slots) for _, slots, _ in asked), default=0)  # the check of a new model has two rows
        assert (largest > 2) == (not records)


def write_changed(folder):
    """A model whose routers choose other experts."""
    other = write_qwen_moe(folder / "other", norm_topk_prob=True)
    changed = AutoModelForCausalLM.from_pretrained(other)
    with torch.no_grad():
        for layer in ROUTED:
            changed.model.layers[layer].mlp.gate.weight.mul_(-1)
    changed.save_pretrained(folder / "changed")
    return folder / "changed"


@pytest.mark.realtime
async def test_another_session_takes_no_records_of_weights_before_its_own(model, tmp_path, monkeypatch):
    """What is in flight keeps the records with which it was sampled; its keys are those of the new weights."""
    changed = write_changed(tmp_path)
    opening = [5, 6, 7, *range(10, 40)]
    sampler = make_sampler(model)
    gate = StepGate(sampler, monkeypatch, 5)
    try:
        asked = asyncio.create_task(sampler.generate(request(opening, max_tokens=60, session="a")))
        await until(lambda: sampler.stats().sampled_tokens == 5)
        await sampler.update_weights(changed, 1)
        gate.open()
        before = sampler.stats().prefix_hit_tokens
        other = await sampler.generate(request([*opening, 50], session="b", max_tokens=3))
        assert sampler.stats().prefix_hit_tokens == before
        third = await sampler.generate(request([*opening, 51], session="c", max_tokens=3))
        assert sampler.stats().prefix_hit_tokens == before + len(opening)  # of session b
        await asked
    finally:
        await sampler.close()
    for last, completion in ((50, other), (51, third)):
        assert sets_of(completion.routed_experts)[0] == chosen_by(changed, [*opening, last, *completion.ids])[0]


@pytest.mark.realtime
async def test_after_new_weights_the_experts_with_which_a_token_was_sampled_stay(model, tmp_path, monkeypatch):
    write_changed(tmp_path)
    sampler = make_sampler(model)
    gate = StepGate(sampler, monkeypatch, 5)
    try:
        asked = asyncio.create_task(sampler.generate(request([5, 6, 7], max_tokens=80)))
        await until(lambda: sampler.stats().sampled_tokens == 5)
        await sampler.update_weights(tmp_path / "changed", 1)
        gate.open()
        completion = await asked
    finally:
        await sampler.close()
    versions = completion.policy_versions
    assert (versions == 0).sum() == 6  # it takes one more step before it takes the weights
    before, after = (chosen_by(folder, [5, 6, 7, *completion.ids]) for folder in (model, tmp_path / "changed"))
    found = sets_of(completion.routed_experts)
    old = 2 + int((versions == 0).sum())  # the inputs of the tokens of version 0
    assert [layer[:old] for layer in found[:1]] == [layer[:old] for layer in before[:1]]
    assert found[0][old:] == after[0][old:]
    assert before[0] != after[0]


def test_a_dense_model_has_nothing_to_return(tmp_path):
    with pytest.raises(
        ModelError,
        match=r"return_routed_experts = true, but the decoder layers of LlamaForCausalLM have no routed experts",
    ):
        make_sampler(write_llama(tmp_path / "dense"))


LATER = r" \(5\.19 and later do\)"


@pytest.mark.parametrize(("version", "later"), [("5.17.0", LATER), ("5.18.3", LATER), ("5.23.0", "")])
@pytest.mark.parametrize("declared", [{}, {"router_logits": Qwen3MoeSparseMoeBlock}])
def test_a_release_that_does_not_name_the_routers_is_named_itself(model, monkeypatch, declared, version, later):
    """As transformers 5.17 is for DeepSeek's models, and for EXAONE-MoE, where it names the layer around the router."""
    monkeypatch.setattr(Qwen3MoePreTrainedModel, "_can_record_outputs", declared)
    monkeypatch.setattr("transformers.__version__", version)
    reason = rf"but transformers {version} does not say which modules of Qwen3MoeForCausalLM are its routers{later}; "
    with pytest.raises(ModelError, match=reason + "remove this setting"):
        check_replay(Qwen3MoeConfig(num_hidden_layers=1))
    with pytest.raises(ModelError, match=reason + "remove this setting"):
        make_sampler(model)
    with pytest.raises(ModelError, match=reason + "leave it out"):
        check_router_loss(Qwen3MoeConfig(num_hidden_layers=1))


# ---- from turns to samples


def turn_experts(first, count):
    """Experts that tell the turn and the position: the same number for all layers, in two halves."""
    return np.array([[[first, at]] * LAYERS for at in range(count)], dtype=np.uint8)


def test_a_sample_has_the_experts_of_its_own_context():
    """The third turn rewrites history: of the first two it has what stands before the change."""
    turns = (
        Turn(prompt_ids=[1, 2], completion_ids=[3, 4], logprobs=[-1, -1], routed_experts=turn_experts(1, 3)),
        Turn(prompt_ids=[1, 2, 3, 4, 5], completion_ids=[6], logprobs=[-1], routed_experts=turn_experts(2, 2)),
        Turn(prompt_ids=[1, 2, 9], completion_ids=[7], logprobs=[-1], routed_experts=turn_experts(3, 1)),
    )
    first, second = build_samples(Trajectory(example_id="x", turns=turns))
    assert first.token_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert first.routed_experts.known.tolist() == [True] * 5 + [False]
    assert first.routed_experts.experts[:, 0].tolist() == [[1, 0], [1, 1], [1, 2], [2, 0], [2, 1], [0, 0]]
    assert second.routed_experts.experts[:, 0].tolist() == [[1, 0], [1, 1], [3, 0], [0, 0]]
    alone = build_samples(Trajectory(example_id="x", turns=turns), strategy="branching")
    assert alone[1].routed_experts.experts[:, 0].tolist() == first.routed_experts.experts[:, 0].tolist()


def test_a_turn_s_own_record_comes_before_that_of_others():
    """Both turns recorded all of their tokens: each sample has those of the turn that it trains."""
    turns = (
        Turn(prompt_ids=[1, 2], completion_ids=[3], logprobs=[-1], routed_experts=turn_experts(1, 2)),
        Turn(prompt_ids=[1, 2, 3, 4], completion_ids=[5], logprobs=[-1], routed_experts=turn_experts(2, 4)),
        Turn(prompt_ids=[1, 2, 3, 4, 5, 6], completion_ids=[7], logprobs=[-1]),
    )
    (merged,) = build_samples(Trajectory(example_id="x", turns=turns))
    assert merged.routed_experts.experts[:, 0, 0].tolist() == [1, 1, 2, 2, 0, 0, 0]
    assert merged.routed_experts.known.tolist() == [True] * 4 + [False] * 3
    _, second, third = build_samples(Trajectory(example_id="x", turns=turns), strategy="branching")
    assert second.routed_experts.experts[:, 0, 0].tolist() == [2, 2, 2, 2, 0]
    assert third.routed_experts.experts[:, 0, 0].tolist() == [1, 1, 2, 2, 0, 0, 0]


def test_the_recorder_asks_for_what_it_does_not_know():
    recorder = Recorder(100)
    recorder.record(prompt_ids=[1, 2], completion_ids=[3, 4], routed_experts=turn_experts(1, 3))
    assert recorder.num_routed(np.array([1, 2, 3, 4, 5], dtype=np.int32)) == 3
    assert recorder.num_routed(np.array([1, 2, 3, 9, 5], dtype=np.int32)) == 0
    assert recorder.num_routed(np.array([1, 2, 3, 4, 5], dtype=np.int32), "sub") == 0
    recorder.record(prompt_ids=[1, 2, 3, 4, 5], completion_ids=[6])
    assert recorder.num_routed(np.array([1, 2, 3, 4, 5, 6, 7], dtype=np.int32)) == 0


def test_records_come_back_from_json_and_messages(tmp_path):
    turns = (
        Turn(prompt_ids=[1, 2], completion_ids=[3, 4], logprobs=[-1, -1], routed_experts=turn_experts(1, 3)),
        Turn(prompt_ids=[1, 2, 3, 4, 5], completion_ids=[6], logprobs=[-1]),
    )
    trajectory = Trajectory(example_id="x", turns=turns)
    record = json.loads(json.dumps(plain(trajectory_to_json(trajectory))))
    again = trajectory_from_json(record)
    assert np.array_equal(again.turns[0].routed_experts, turns[0].routed_experts)
    assert again.turns[0].routed_experts.dtype == np.uint8 and "routed_experts" not in record["turns"][1]
    samples = (*routed_samples(0.5)[:2], dataclasses.replace(routed_samples()[2], routed_experts=None))
    (tmp_path / "m").write_bytes(message_to_bytes(TrainerMessage(kind="train", version=1, samples=samples)))
    read = read_message(tmp_path / "m").samples
    for one, other in zip(read[:2], samples[:2], strict=True):
        assert np.array_equal(one.routed_experts.experts, other.routed_experts.experts)
        assert np.array_equal(one.routed_experts.known, other.routed_experts.known)
    assert read[2].routed_experts is None


def test_experts_of_another_model_are_refused(model, tmp_path):
    samples = routed_samples()
    with pytest.raises(UsageError, match="no routers are found in LlamaForCausalLM that can replay"):
        make_trainer(write_llama(tmp_path / "dense")).train_batch(samples)
    small = write_qwen_moe(tmp_path / "small", experts=4)
    with pytest.raises(UsageError, match=r"2 of at least 5 experts per token; the model has .* 2 of 4 \(Qwen3Moe"):
        make_trainer(small).train_batch(samples)
    one = write_qwen_moe(tmp_path / "one", each=1)
    with pytest.raises(UsageError, match="2 of at least 5 experts per token; the model has 3 layers and 1 of 5"):
        make_trainer(one).train_batch(samples)


DECLARED = "router_logits" in DeepseekV2ForCausalLM._can_record_outputs


@needs(DECLARED, "transformers", "routers declared by DeepSeek's")
def test_routers_that_give_other_groups_no_weight_are_refused():
    samples = routed_samples()

    def routers(**settings):
        config = DeepseekV2Config(
            num_hidden_layers=LAYERS,
            first_k_dense_replace=1,
            n_routed_experts=6,
            num_experts_per_tok=EACH,
            topk_method="group_limited_greedy",
            hidden_size=32,
            moe_intermediate_size=16,
            vocab_size=VOCAB,
            **settings,
        )
        with torch.device("meta"):
            return find_routers(AutoModelForCausalLM.from_config(config))

    with pytest.raises(UsageError, match='in DeepseekV2ForCausalLM with topk_method = "group_limited_greedy"'):
        check_experts(samples, routers(n_group=3, topk_group=2), "DeepSeek")
    check_experts(samples, routers(n_group=3, topk_group=3), "DeepSeek")


def test_a_model_is_tried_before_a_run_that_would_replay_its_experts(monkeypatch):
    usual = {"hidden_size": 32, "num_hidden_layers": LAYERS, "vocab_size": VOCAB, "moe_intermediate_size": 16}
    moe = Qwen3MoeConfig(**usual, num_experts=6, num_experts_per_tok=3)
    assert check_replay(moe) == Routing(num_layers=LAYERS, num_experts=6, experts_per_token=3)

    def sorts(self, hidden_states):
        logits = (hidden_states.reshape(-1, self.hidden_dim) @ self.weight.T).softmax(-1)
        values, experts = logits.sort(dim=-1, descending=True)
        return logits, values[..., : self.top_k], experts[..., : self.top_k]

    monkeypatch.setattr(Qwen3MoeTopKRouter, "forward", sorts)
    with pytest.raises(ModelError, match="does not choose 2 of 4 experts by topk"):  # those of the small copy
        check_replay(moe)


@needs(DECLARED, "transformers", "routers declared by DeepSeek's")
def test_a_model_of_limited_groups_is_refused_before_a_run():
    limited = DeepseekV2Config(
        hidden_size=32,
        num_hidden_layers=LAYERS,
        vocab_size=VOCAB,
        moe_intermediate_size=16,
        n_routed_experts=6,
        num_experts_per_tok=EACH,
        topk_method="group_limited_greedy",
        n_group=3,
        topk_group=2,
    )
    with pytest.raises(ModelError, match="group_limited_greedy"):
        check_replay(limited)


# ---- the mismatch that it is for


async def sample_all(sampler, prompts):
    try:
        return await asyncio.gather(
            *(
                sampler.generate(request(prompt, seed=i, session=str(i), max_tokens=48))
                for i, prompt in enumerate(prompts)
            )
        )
    finally:
        await sampler.close()


def mismatch(folder: Path, prompts: int = 24):
    """Sampler and trainer in bfloat16: |difference of logprobs| of each sampled token, with and without replay, and
    the share of (token, layer) pairs whose experts differ where the trainer chooses itself."""
    rng = np.random.default_rng(0)
    openings = [rng.integers(0, VOCAB, 24).tolist() for _ in range(prompts)]
    done = asyncio.run(sample_all(make_sampler(folder, dtype="bfloat16", max_batch_size=8), openings))
    turns = [
        Turn(prompt_ids=prompt, completion_ids=c.ids, logprobs=c.logprobs, routed_experts=c.routed_experts)
        for prompt, c in zip(openings, done, strict=True)
    ]
    samples = [
        build_samples(Trajectory(example_id=str(i), trajectory_id=str(i), turns=(turn,)))[0]
        for i, turn in enumerate(turns)
    ]
    trainer = Trainer(
        folder,
        TrainerConfig(device="cpu", dtype="bfloat16", packing="rows"),
        loss=LOSSES["default"],
        total_optimizer_steps=1,
    )
    gaps = {}
    for name, batch in (("with", samples), ("without", [dataclasses.replace(s, routed_experts=None) for s in samples])):
        found = trainer.logprobs(batch)
        gaps[name] = np.concatenate([(x - s.logprobs)[s.loss_mask] for x, s in zip(found, samples, strict=True)])
    return gaps


@pytest.mark.slow
def test_replay_removes_the_mismatch_of_flipped_experts(tmp_path):
    model = write_qwen_moe(tmp_path / "model", layers=4, dense=(), experts=16, scale=0.3)
    gaps = mismatch(model)
    assert np.abs(gaps["with"]).mean() < 0.7 * np.abs(gaps["without"]).mean()
    assert np.abs(gaps["with"]).max() < np.abs(gaps["without"]).max()
