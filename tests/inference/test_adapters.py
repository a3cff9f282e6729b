"""The embedded sampler with low-rank adapters: merged into the base weights at each update, from the base each time."""

import asyncio
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from step_gate import StepGate
from test_torch_engine import VOCAB, make, reference, request
from transformers import AutoModelForCausalLM

from verbatim.core.errors import ModelError
from verbatim.models.adapters import BaseWeights, fingerprint, read_adapter
from verbatim.models.loading import load_model, replace_weights
from waiting import until

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:peft")


def write_adapter(folder: Path, base: Path, seed: int, *, r: int = 8, alpha: float = 4.0) -> Path:
    """An adapter that `peft` wrote, with values that change every logprob."""
    import peft

    model = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(base),
        peft.LoraConfig(r=r, lora_alpha=alpha, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder)
    return folder


def adapted(base: Path, folder: Path) -> torch.nn.Module:
    """The model as `peft` runs it, without merging."""
    import peft

    return peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder).eval()


@pytest.fixture(scope="module")
def adapters(models, tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {
        "tied": write_adapter(root / "tied", models["tied"], 0),
        "later": write_adapter(root / "later", models["tied"], 1),
        "half_sliding": write_adapter(root / "half_sliding", models["half_sliding"], 2),
    }


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", ["tied", "half_sliding"])
async def test_logprobs_are_those_of_base_and_adapter_in_peft(models, adapters, name, deterministic):
    sampler = make(models[name], deterministic=deterministic)
    model = adapted(models[name], adapters[name])
    base = AutoModelForCausalLM.from_pretrained(models[name])
    try:
        await sampler.update_weights(adapters[name], 1)
        prompts = [np.random.default_rng(seed).integers(0, VOCAB, 10 + 7 * seed) for seed in range(4)]
        found = await asyncio.gather(*(sampler.generate(request(p, i, max_tokens=60)) for i, p in enumerate(prompts)))
        deltas, changes = [], []
        for prompt, completion in zip(prompts, found, strict=True):
            whole = np.concatenate([prompt, completion.ids])
            expected = reference(model, whole)[len(prompt) - 1 :]
            deltas.append(np.abs(completion.logprobs - expected))
            changes.append(np.abs(reference(base, whole)[len(prompt) - 1 :] - expected))
            assert (completion.policy_versions == 1).all()
        delta = np.concatenate(deltas)
        assert np.median(delta) <= 1e-6
        assert delta.max() <= 5e-5
        assert np.concatenate(changes).mean() > 0.1
    finally:
        await sampler.close()


@pytest.mark.slow
async def test_every_version_is_merged_from_the_base_whatever_was_loaded_before(models, adapters):
    ids = np.arange(40, dtype=np.int32)

    async def after(*folders):
        sampler = make(models["tied"])
        try:
            for version, folder in enumerate(folders, start=1):
                await sampler.update_weights(folder, version)
            return await sampler.prompt_logprobs(ids)
        finally:
            await sampler.close()

    direct = await after(adapters["later"])
    assert np.array_equal(await after(adapters["tied"], adapters["later"]), direct, equal_nan=True)
    assert not np.array_equal(await after(adapters["tied"]), direct, equal_nan=True)
    whole = await after(adapters["tied"], models["tied_later"])
    assert np.array_equal(whole, await after(models["tied_later"]), equal_nan=True)
    with_another_base = await after(models["tied_later"], adapters["later"])
    assert np.array_equal(
        await after(adapters["tied"], models["tied_later"], adapters["later"]), with_another_base, equal_nan=True
    )


async def test_an_engine_that_begins_with_an_adapter_is_one_that_loaded_it(models, adapters):
    ids = np.arange(40, dtype=np.int32)
    updated, begun = make(models["tied"]), make(adapters["tied"])
    try:
        await updated.update_weights(adapters["tied"], 1)
        a, b = await updated.prompt_logprobs(ids), await begun.prompt_logprobs(ids)
        assert np.array_equal(a, b, equal_nan=True)
        await updated.update_weights(adapters["later"], 2)
        await begun.update_weights(adapters["later"], 2)
        a, b = await updated.prompt_logprobs(ids), await begun.prompt_logprobs(ids)
        assert np.array_equal(a, b, equal_nan=True)
    finally:
        await updated.close()
        await begun.close()


@pytest.mark.realtime
async def test_requests_in_flight_go_on_with_the_new_adapter(models, adapters, monkeypatch):
    sampler = make(models["tied"])
    gate = StepGate(sampler, monkeypatch, tokens=6)
    try:
        running = asyncio.ensure_future(sampler.generate(request(max_tokens=120)))
        await until(lambda: sampler.stats().sampled_tokens == 6)
        await sampler.update_weights(adapters["tied"], 1)
        gate.open()
        completion = await running
        new = int((completion.policy_versions == 1).sum())
        assert 0 < new < 120
        whole = np.concatenate([[1, 2, 3], completion.ids])
        expected = reference(adapted(models["tied"], adapters["tied"]), whole)[2:]
        assert np.abs(completion.logprobs[-new:] - expected[-new:]).max() <= 5e-5
    finally:
        await sampler.close()


def damaged(kind: str, adapter: Path, folder: Path) -> Path:
    shutil.copytree(adapter, folder)
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    name = "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"
    if kind == "not finite":
        tensors[name][2, 3] = torch.inf
    elif kind == "another shape":
        tensors[name] = tensors[name][:-1].contiguous()
    elif kind == "one half":
        del tensors[name]
    elif kind == "no such layer":
        for half in "AB":
            moved = name.replace("lora_B", f"lora_{half}")
            tensors[moved.replace("layers.1", "layers.7")] = tensors.pop(moved)
    save_file(tensors, file)
    if kind == "rank-stabilised":
        config = json.loads((folder / "adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(json.dumps({**config, "use_rslora": True}))
    return folder


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("not finite", "not finite"),
        ("another shape", r"up_proj \[95, 64\], and the model has a layer of \[96, 64\]"),
        ("one half", "only one of A and B"),
        ("no such layer", r"layers\.7.* no such layer"),
        ("rank-stabilised", "use_rslora = True cannot be merged"),
    ],
)
async def test_an_adapter_that_does_not_fit_is_refused_and_the_engine_goes_on(models, adapters, tmp_path, kind, said):
    sampler = make(models["tied"])
    ids = np.arange(30, dtype=np.int32)
    try:
        before = await sampler.prompt_logprobs(ids)
        with pytest.raises(ModelError, match=said):
            await sampler.update_weights(damaged(kind, adapters["tied"], tmp_path / "damaged"), 1)
        assert sampler.policy_version == 0
        assert np.array_equal(await sampler.prompt_logprobs(ids), before, equal_nan=True)
    finally:
        await sampler.close()


def test_a_base_model_that_is_gone_is_named(adapters, tmp_path):
    folder = shutil.copytree(adapters["tied"], tmp_path / "adapter")
    config = json.loads((folder / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = str(tmp_path / "gone")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"gone.*change base_model_name_or_path"):
        make(folder)


def test_merging_rounds_once(models, adapters):
    """In bfloat16: W + scale B A in float32, then rounded; not W + round(scale B A)."""
    model = load_model(models["tied"], dtype="bfloat16")
    adapter = read_adapter(adapters["tied"])
    merged = BaseWeights(model).merged(adapter)
    name = "model.layers.0.self_attn.q_proj"
    a, b = (tensor.double().numpy() for tensor in adapter.pairs[name])
    base = model.get_submodule(name).weight.detach().double().numpy()
    exact = torch.from_numpy(base + 0.5 * b @ a)
    assert len(merged) == 14
    assert merged[f"{name}.weight"].dtype == torch.bfloat16
    error = (merged[f"{name}.weight"].double() - exact).abs()
    half_a_unit = 2.0 ** (exact.abs().log2().floor() - 8)  # bfloat16 keeps 8 bits
    assert (error <= half_a_unit + 1e-6).all()  # float32's rounding comes before it


def test_the_fingerprint_changes_with_names_shapes_and_values():
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}
    changed = tensors["a"].clone()
    changed[1, 1] += 1e-6
    others = [
        {"a": changed, "b": tensors["b"]},
        {"a": tensors["a"].T, "b": tensors["b"]},
        {"c": tensors["a"], "b": tensors["b"]},
        {"a": tensors["a"], "b": tensors["b"].float()},
        {"a": tensors["a"]},
    ]
    found = {fingerprint(t.items()) for t in [tensors, *others]}
    assert len(found) == 6
    assert fingerprint(reversed(tensors.items())) == fingerprint(tensors.items())


def test_a_base_in_bfloat16_is_known_where_some_of_its_parameters_stay_in_float32(models, adapters, tmp_path):
    """As the routers of Ernie 4.5 MoE do, by `_keep_in_fp32_modules_strict`."""
    folder = shutil.copytree(adapters["tied"], tmp_path / "adapter")
    own = load_model(models["tied"])
    digests = {
        "format": 1,
        "fingerprint": fingerprint(own.named_parameters()),
        "fingerprint_bfloat16": fingerprint(own.named_parameters(), dtype=torch.bfloat16),
    }
    (folder / "base_model.json").write_text(json.dumps(digests))
    model = load_model(models["tied"], dtype="bfloat16")
    model.model.layers[0].mlp.up_proj.weight = own.model.layers[0].mlp.up_proj.weight
    assert model.dtype == torch.bfloat16
    BaseWeights(model).merged(read_adapter(folder))
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[3, 5] += 0.5
    with pytest.raises(ModelError, match="was not trained on this model's weights"):
        BaseWeights(model).merged(read_adapter(folder))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_adapter_of_other_base_weights_is_refused(models, adapters, tmp_path, dtype):
    """One weight is another; names and shapes are the same. In bfloat16 the base is known by its rounded values."""
    folder = shutil.copytree(adapters["tied"], tmp_path / "adapter")
    own = load_model(models["tied"])
    digests = {
        "format": 1,
        "fingerprint": fingerprint(own.named_parameters()),
        "fingerprint_bfloat16": fingerprint(own.named_parameters(), dtype=torch.bfloat16),
    }
    (folder / "base_model.json").write_text(json.dumps(digests))
    model = load_model(models["tied"], dtype=dtype)
    base = BaseWeights(model)
    weights = base.merged(read_adapter(folder))
    replace_weights(model, weights)
    base.merged(read_adapter(folder))  # its layers are merged now: what counts is what they were
    other = load_model(models["tied"], dtype=dtype)
    with torch.no_grad():
        next(iter(other.parameters()))[3, 5] += 0.5
    with pytest.raises(ModelError, match=r"was not trained on this model's weights but on those of"):
        BaseWeights(other).merged(read_adapter(folder))
