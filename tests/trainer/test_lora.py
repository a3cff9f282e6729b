"""Low-rank adapters in the trainer: their gradient, what is trained and saved, and what is refused."""

import json
import re
import shutil
from unittest import mock

import numpy as np
import pytest
import torch
from test_trainer_steps import make_trainer
from trainer_helpers import VOCAB, gradients, make_batch, num_trained, shared_prefixes
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig

from verbatim.algorithms.losses import LOSSES
from verbatim.config.schema import LoraConfig
from verbatim.core.errors import CheckpointError, ModelError
from verbatim.models.adapters import save_merged
from verbatim.models.tiny import NoTinyCopy
from verbatim.trainer import lora
from verbatim.trainer.logprobs import TargetLogprobs, whole_sample
from verbatim.trainer.lora import check_adapters
from verbatim.trainer.metrics import MetricSums
from verbatim.trainer.packing import PACKERS
from verbatim.trainer.step import GradientPass

LORA = LoraConfig(r=4, alpha=8)
SCALE = 2.0  # alpha / r

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:peft")


def scatter(trainer, seed=0):
    """Give B values: it is 0 at the start, where A has no gradient."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))


def adapted_layers(trainer):
    """A and B by the name of the layer."""
    own = dict(trainer.model.named_parameters())
    return {
        name.removesuffix(".lora_A.default.weight"): (a, own[name.replace("lora_A", "lora_B")])
        for name, a in own.items()
        if name.endswith(".lora_A.default.weight")
    }


def saved(trainer, folder):
    folder.mkdir()
    trainer.save_weights(folder)
    return folder


def ids_of(seed, length=40):
    return np.random.default_rng(seed).integers(0, VOCAB, length).astype(np.int32)


def logprobs_of(model, ids):
    tokens = torch.from_numpy(ids).long()
    with torch.no_grad():
        logits = model(input_ids=tokens[None]).logits[0, :-1].double()
    return logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0].numpy()


# ---- the gradient


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["default", "gspo"])
@pytest.mark.parametrize("packing", ["rows", "tree"])
@pytest.mark.parametrize("model", ["qwen", "sliding_qwen", "llama"])
def test_the_gradient_is_that_of_the_dense_weights_by_the_chain_rule(model, packing, loss, request, tmp_path):
    """With W' = W + s B A: dL/dB = s dL/dW' A^T and dL/dA = s B^T dL/dW'. The dense gradient is taken without peft."""
    folder = request.getfixturevalue(model)
    samples = shared_prefixes()
    trainer = make_trainer(folder, dtype="float64", lora=LORA, loss=LOSSES[loss])
    scatter(trainer)
    layers = adapted_layers(trainer)
    assert len(layers) == 14

    dense = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    with torch.no_grad():
        for name, (a, b) in layers.items():
            dense.get_submodule(name).weight += SCALE * b @ a
    dense.save_pretrained(tmp_path / "dense")
    expected, total, _ = gradients(tmp_path / "dense", samples, loss=LOSSES[loss], packing=packing)

    denominator = num_trained(samples)
    step = GradientPass(
        lm=TargetLogprobs(trainer.lm, 1000), loss=LOSSES[loss], denominator=denominator, metrics=MetricSums()
    )
    keep_whole = LOSSES[loss].level != "token"
    step.run(PACKERS[packing](samples, micro_batch_tokens=10_000, keep_whole=keep_whole))

    assert step.loss_sum() == pytest.approx(total, rel=1e-12)
    for name, (a, b) in layers.items():
        dense_grad = expected[f"{name}.weight"]
        for half, grad, own in (("A", a.grad, SCALE * b.T @ dense_grad), ("B", b.grad, SCALE * dense_grad @ a.T)):
            assert float((grad - own).detach().norm() / own.detach().norm()) < 1e-12, (name, half)
    assert {name for name, p in trainer.model.named_parameters() if p.grad is not None} == {
        f"{name}.lora_{half}.default.weight" for name in layers for half in "AB"
    }


def test_the_first_version_is_the_base_model_to_the_bit(qwen):
    ids = whole_sample(ids_of(0))
    ours, base = make_trainer(qwen, lora=LORA), make_trainer(qwen)
    assert np.array_equal(ours.logprobs([ids])[0], base.logprobs([ids])[0], equal_nan=True)


def test_optimizer_steps_change_the_adapters_and_nothing_else(qwen):
    trainer = make_trainer(qwen, lora=LORA)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    for seed in range(2):  # in the first A has no gradient, because B is 0
        trainer.train_batch(make_batch(seed))
    changed = {name for name, p in trainer.model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {name for name in before if ".lora_" in name}
    assert len(trainer.optimizer.state) == len(changed) == 28


def test_checkpointed_layers_have_the_same_gradient(qwen):
    steps = []
    for checkpointing in (False, True):
        trainer = make_trainer(qwen, lora=LORA, gradient_checkpointing=checkpointing)
        scatter(trainer)
        steps.append(trainer.train_batch(make_batch())["grad_norm"])
    assert steps[0] == pytest.approx(steps[1], rel=1e-5)


def test_what_is_trained_is_counted(qwen):
    """Rank 4 on each layer's q [32, 32], k and v [16, 32], o [32, 32], gate and up [48, 32], down [32, 48], twice."""
    trainer = make_trainer(qwen, lora=LORA)
    a_and_b = 4 * ((32 + 32) * 2 + (16 + 32) * 2 + (48 + 32) * 3)
    assert trainer.adapters.num_parameters == 2 * a_and_b == 3712
    said = str(trainer.adapters)
    assert said == f"3,712 parameters are trained ({3712 / 17504:.2%} of 17,504): rank 4 on 14 layers"


@pytest.mark.slow
def test_the_seed_decides_the_first_values(qwen):
    def first(seed):
        from verbatim.trainer.trainer import Trainer

        made = make_trainer(qwen, lora=LORA)
        trainer = Trainer(qwen, made.config, loss=made.loss, total_optimizer_steps=1, seed=seed)
        return next(p for name, p in trainer.model.named_parameters() if "lora_A" in name)

    state = torch.random.get_rng_state()
    assert torch.equal(first(3), first(3))
    assert not torch.equal(first(3), first(4))
    assert torch.equal(torch.random.get_rng_state(), state)


# ---- saved and loaded


@pytest.fixture
def trained(qwen):
    trainer = make_trainer(qwen, lora=LORA)
    for seed in range(3):
        trainer.train_batch(make_batch(seed))
    return trainer


def test_what_is_saved_has_the_same_logprobs_in_plain_peft_and_transformers(trained, qwen, tmp_path):
    import peft

    folder = saved(trained, tmp_path / "adapter")
    assert sorted(path.name for path in folder.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "base_model.json",
    ]
    ids = ids_of(1)
    expected = trained.logprobs([whole_sample(ids)])[0][1:]
    plain = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(qwen), folder)
    assert np.abs(logprobs_of(plain, ids) - expected).max() < 1e-5
    found_by_its_name = peft.AutoPeftModelForCausalLM.from_pretrained(folder)
    assert np.abs(logprobs_of(found_by_its_name, ids) - expected).max() < 1e-5
    assert np.abs(logprobs_of(AutoModelForCausalLM.from_pretrained(qwen), ids) - expected).max() > 1e-2


def test_the_merged_model_has_the_same_logprobs_in_transformers_alone(trained, tmp_path):
    with mock.patch("verbatim.models.adapters.load_tokenizer", return_value=None):
        save_merged(saved(trained, tmp_path / "adapter"), tmp_path / "merged")
    ids = ids_of(2)
    found = logprobs_of(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"), ids)
    assert np.abs(found - trained.logprobs([whole_sample(ids)])[0][1:]).max() < 1e-5


def test_equal_adapters_are_saved_as_equal_bytes(trained, tmp_path):
    one, two = saved(trained, tmp_path / "one"), saved(trained, tmp_path / "two")
    files = sorted(file.name for file in one.iterdir())
    assert "adapter_model.safetensors" in files
    for name in files:
        assert (one / name).read_bytes() == (two / name).read_bytes()


@pytest.mark.slow
def test_a_resumed_run_is_bit_for_bit_the_run_that_never_stopped(qwen, tmp_path):
    straight = make_trainer(qwen, lora=LORA)
    for seed in range(4):
        straight.train_batch(make_batch(seed))
    first = make_trainer(qwen, lora=LORA)
    for seed in range(2):
        first.train_batch(make_batch(seed))
    saved(first, tmp_path / "adapter")
    first.save_state(tmp_path / "state")
    second = make_trainer(qwen, lora=LORA)
    second.adapters.load(tmp_path / "adapter")
    second.load_state(tmp_path / "state")
    for seed in (2, 3):
        second.train_batch(make_batch(seed))
    compared = set()
    for (name, a), (_, b) in zip(second.model.named_parameters(), straight.model.named_parameters(), strict=True):
        assert torch.equal(a, b), name
        assert straight.optimizer.state.get(b, {}).keys() == second.optimizer.state.get(a, {}).keys()
        for key, value in straight.optimizer.state.get(b, {}).items():
            assert torch.equal(second.optimizer.state[a][key], value), (name, key)
            compared.add(key)
    assert compared == {"step", "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"r": 8, "alpha": 8}, "r = 4, alpha = 8; expected r = 8, alpha = 8: resume with trainer.lora.r = 4"),
        ({"r": 4, "alpha": 4}, "trainer.lora.alpha = 8"),
        ({"r": 4, "alpha": 8, "target_modules": ("q_proj",)}, 'trainer.lora.target_modules = ["down_proj", "gate'),
    ],
)
def test_an_adapter_of_another_shape_is_refused_with_what_to_set(trained, qwen, tmp_path, other, said):
    folder = saved(trained, tmp_path / "adapter")
    trainer = make_trainer(qwen, lora=LoraConfig(**other))
    before = [p.detach().clone() for p in trainer.model.parameters()]
    with pytest.raises(CheckpointError, match=re.escape(said)):
        trainer.adapters.load(folder)
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))


def test_an_adapter_of_other_base_weights_is_refused(trained, qwen, tmp_path):
    """One weight of the base is another: names and shapes are the same."""
    model = AutoModelForCausalLM.from_pretrained(qwen)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] += 1e-3
    model.save_pretrained(tmp_path / "base")
    folder = saved(trained, tmp_path / "adapter")
    with pytest.raises(CheckpointError, match=r"was trained on weights that differ from those in .*base"):
        make_trainer(tmp_path / "base", lora=LORA).adapters.load(folder)


def test_whole_weights_and_damaged_adapters_are_refused(trained, qwen, tmp_path):
    trainer = make_trainer(qwen, lora=LORA)
    with pytest.raises(CheckpointError, match=r"full weights.*without \[trainer.lora\]"):
        trainer.adapters.load(qwen)
    folder = saved(trained, tmp_path / "adapter")
    cut = (folder / "adapter_model.safetensors").read_bytes()[:-20]
    (folder / "adapter_model.safetensors").write_bytes(cut)
    with pytest.raises(ModelError, match="cannot be read as safetensors"):
        trainer.adapters.load(folder)
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="does not describe an adapter"):
        trainer.adapters.load(folder)


def test_adapters_that_change_more_than_a_product_are_refused(trained, qwen, tmp_path):
    folder = saved(trained, tmp_path / "adapter")
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "use_dora": True}))
    with pytest.raises(ModelError, match="use_dora = True cannot be merged"):
        make_trainer(qwen, lora=LORA).adapters.load(folder)


def test_a_whole_model_is_expected_where_a_folder_with_an_adapter_is_named(trained, tmp_path):
    folder = saved(trained, tmp_path / "adapter")
    with pytest.raises(ModelError, match=r"holds an adapter .* trainer\.lora\.merge_final = true"):
        make_trainer(folder)


# ---- what can be adapted


@pytest.mark.parametrize("targets", ["q", ("up", "q_proj_"), ("lm_head",), ("embed_tokens",), ("input_layernorm",)])
def test_targets_that_are_no_linear_layers_are_refused_with_those_there_are(qwen, targets):
    with pytest.raises(ModelError) as caught:
        make_trainer(qwen, lora=LoraConfig(target_modules=targets))
    assert "its linear layers are down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj" in str(caught.value)
    assert "Qwen3ForCausalLM" in str(caught.value)


@pytest.mark.parametrize(
    ("targets", "layers"), [(("q_proj", "v_proj"), 4), (r".*layers\.1\.mlp\..*_proj", 3), ("all-linear", 14)]
)
def test_layers_are_named_by_their_ends_or_by_an_expression(qwen, targets, layers):
    assert make_trainer(qwen, lora=LoraConfig(r=2, target_modules=targets)).adapters.num_layers == layers


def test_the_same_is_refused_before_any_weights_are_loaded(qwen):
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(qwen)
    check_adapters(config, LORA)
    with pytest.raises(ModelError, match="its linear layers are down_proj"):
        check_adapters(config, LoraConfig(target_modules=("nothing",)))


def test_dropout_is_refused():
    with pytest.raises(ValueError, match=r"dropout = 0.05: .* use dropout = 0"):
        LoraConfig(dropout=0.05)
    with pytest.raises(ValueError, match="names no layer"):
        LoraConfig(target_modules=())


def test_layers_whose_weights_are_used_by_others_are_refused(qwen):
    """As if a layer's forward were never called: merged weights would then change what adapters do not."""
    from peft.tuners.lora import Linear

    with (
        mock.patch.object(Linear, "forward", lambda self, x: self.base_layer(x)),
        pytest.raises(ModelError, match=r"logprobs with adapters differ by .* from those with merged weights"),
    ):
        make_trainer(qwen, lora=LORA)


def test_weights_that_are_kept_transposed_are_merged_so(tmp_path):
    """GPT-2 computes x W: its weights are [I, O]."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCAB,
        n_positions=128,
        n_embd=32,
        n_layer=2,
        n_head=4,
        initializer_range=0.15,
        attn_pdrop=0.0,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
    )
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    trainer = make_trainer(tmp_path / "gpt2", lora=LoraConfig(r=4, target_modules=("c_attn", "c_fc")))
    scatter(trainer)
    with mock.patch("verbatim.models.adapters.load_tokenizer", return_value=None):
        save_merged(saved(trainer, tmp_path / "adapter"), tmp_path / "merged")
    ids = ids_of(3)
    found = logprobs_of(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"), ids)
    assert np.abs(found - trainer.logprobs([whole_sample(ids)])[0][1:]).max() < 1e-5
    assert np.abs(found - logprobs_of(AutoModelForCausalLM.from_pretrained(tmp_path / "gpt2"), ids)).max() > 1e-2


def test_what_could_not_be_tried_on_a_small_copy_is_said(monkeypatch, caplog):
    def none(model):
        raise NoTinyCopy("no small copy of it can be made")

    monkeypatch.setattr(lora, "tiny_copy", none)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 61}
    check_adapters(LlamaConfig(**sizes, num_attention_heads=2), LORA)
    assert "adapted layers of LlamaForCausalLM" in caplog.text
    assert "compute the same as the sampler's merged weights: no small copy of it can be made" in caplog.text
