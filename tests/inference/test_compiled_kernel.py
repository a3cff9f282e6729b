"""The compiled kernel: the numbers of the model, in the same bits whatever else is in a pass, or PyTorch instead."""

import ctypes
import logging
import weakref

import numpy as np
import pytest
import torch
from test_agreement import play
from test_determinism import requests_of, same
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from verbatim.core.errors import ModelError
from verbatim.inference import SampleRequest, SamplingParams
from verbatim.inference.embedded import fast_forward
from verbatim.inference.embedded import forward as forward_choice
from verbatim.inference.embedded.compiled import forward, library
from verbatim.inference.embedded.compiled.library import load_kernel
from verbatim.inference.embedded.compiled.structures import why_not
from verbatim.inference.embedded.decoder import Decoder
from verbatim.inference.embedded.fast_forward import known_backbone, probe
from verbatim.inference.embedded.model_check import refuse_other_decoding
from verbatim.inference.embedded.settings import TorchSettings
from verbatim.inference.embedded.torch_forward import TorchForward
from verbatim.models import native
from verbatim.models.head import CausalLM
from verbatim.models.loading import load_model, load_weights
from wrong_kernel import WrongKernel

SMALL = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.15,
}
CONFIGS = {
    "qwen3": Qwen3Config(**{**SMALL, "head_dim": 32}),
    "qwen2_biases": Qwen2Config(**SMALL),
    "llama_biases": LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True),
    "one_query_head_for_each": LlamaConfig(**{**SMALL, "num_key_value_heads": 4, "vocab_size": 101}),
    "seven_query_heads_for_one": Qwen3Config(
        **{**SMALL, "num_attention_heads": 7, "num_key_value_heads": 1, "head_dim": 48}
    ),
    "a_window": Qwen3Config(
        **{**SMALL, "head_dim": 16}, use_sliding_window=True, sliding_window=40, max_window_layers=1
    ),
}


@pytest.fixture(scope="module")
def built():
    if load_kernel() is None:
        pytest.skip("there is no C compiler here")


def make(folder, *, num_slots=6, context_length=1200, **settings):
    config = TorchSettings(max_batch_size=num_slots, device="cpu", **{"kernel": "compiled", **settings})
    return Decoder(CausalLM(load_model(folder).requires_grad_(False)), config, context_length=context_length, version=0)


def save(config, folder):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def hidden(compiled, ids, starts=(0,), slots=(0,)):
    """Hidden states of the tokens of some slots, each from a position to the end."""
    rows = [np.arange(start, len(ids)) for start in starts]
    positions = np.concatenate(rows)
    where = np.repeat(np.array(slots), [len(r) for r in rows])
    compiled.cache.extend(np.array(slots), np.full(len(slots), len(ids)))
    with torch.inference_mode():
        return compiled._run(ids[positions], positions, where, np.arange(len(positions)))


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("name", CONFIGS)
def test_hidden_states_are_those_of_the_model_also_of_sequences_whose_scores_do_not_fit_at_once(name, saved):
    decoder = make(saved(name))
    reference = AutoModelForCausalLM.from_pretrained(saved(name), attn_implementation="eager").eval()
    ids = np.random.default_rng(0).integers(0, 97, 1100)
    with torch.inference_mode():
        expected = reference.model(torch.from_numpy(ids)[None]).last_hidden_state[0]
    assert (hidden(decoder.forward, ids) - expected).abs().max() <= 5e-5


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("name", CONFIGS)
def test_parts_neighbours_shared_pages_and_threads_change_no_bit(name, saved, monkeypatch):
    compiled = make(saved(name)).forward
    ids = np.random.default_rng(1).integers(0, 97, 700)
    whole = hidden(compiled, ids)
    for start in (699, 698, 640, 509, 130, 7):  # from pages that slot 0 computed
        compiled.cache.truncate(0, start)
        assert torch.equal(hidden(compiled, ids, (start,)), whole[start:])
    for slot, start in ((1, 600), (2, 512), (3, 33)):
        compiled.cache.copy_prefix(0, slot, start)
    compiled.cache.truncate(0, 650)
    together = hidden(compiled, ids, (650, 600, 512, 33), (0, 1, 2, 3))
    for part, start in zip(together.split([50, 100, 188, 667]), (650, 600, 512, 33), strict=True):
        assert torch.equal(part, whole[start:])
    monkeypatch.setattr(forward, "_WORTH_A_TEAM", 0)
    torch.set_num_threads(3)
    try:
        compiled.cache.truncate(0, 0)
        assert torch.equal(hidden(compiled, ids), whole)
    finally:
        torch.set_num_threads(1)


@pytest.mark.usefixtures("built")
def test_threads_give_the_bits_of_one(models, monkeypatch):
    requests = requests_of(np.random.default_rng(4), 6)
    alone = play(make(models["tied"]), requests)
    monkeypatch.setattr(forward, "_WORTH_A_TEAM", 0)
    torch.set_num_threads(3)
    try:
        assert same(play(make(models["tied"]), requests), alone)
    finally:
        torch.set_num_threads(1)


@pytest.mark.slow
@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("deterministic", [False, True])
def test_both_modes_draw_the_same_bits(models, deterministic):
    requests = requests_of(np.random.default_rng(4), 6)
    alone = [play(make(models["half_sliding"], deterministic=deterministic), [r])[0] for r in requests]
    assert same(play(make(models["half_sliding"]), requests), alone)


@pytest.mark.usefixtures("built")
def test_new_weights_are_taken_over(models):
    decoder = make(models["tied"])
    ids = np.arange(90) % 97
    before = hidden(decoder.forward, ids)
    load_weights(decoder.model.model, models["tied_later"])
    decoder.set_version(1)
    reference = AutoModelForCausalLM.from_pretrained(models["tied_later"]).eval()
    with torch.inference_mode():
        expected = reference.model(torch.from_numpy(ids)[None]).last_hidden_state[0]
    now = hidden(decoder.forward, ids)
    assert (now - expected).abs().max() <= 5e-5 < (now - before).abs().max()


@pytest.mark.usefixtures("built")
def test_a_group_keeps_its_common_tokens_once(models):
    decoder = make(models["tied"], num_slots=16)
    prompt = np.random.default_rng(0).integers(0, 97, 200).astype(np.int32)
    requests = [SampleRequest(prompt_ids=prompt, params=SamplingParams(max_tokens=20), seed=i) for i in range(16)]
    play(decoder, requests)
    # 12 full pages of 16 tokens once; tokens 193 to 219 of each of 16 in two pages of its own.
    assert decoder.cache.used == 12 + 16 * 2


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("name", CONFIGS)
def test_a_whole_sequence_is_scored_past_the_cache(name, saved):
    decoder = make(saved(name))
    reference = AutoModelForCausalLM.from_pretrained(saved(name), attn_implementation="eager").eval()
    hidden(decoder.forward, np.zeros(1100, dtype=np.int64))  # what slot 0 holds is not read
    used = decoder.cache.used
    for length in (2, 65, 1100):
        ids = np.random.default_rng(2).integers(0, CONFIGS[name].vocab_size, length)
        found = decoder.prompt_logprobs(ids, 0.7)
        with torch.inference_mode():
            logits = reference(torch.from_numpy(ids)[None]).logits[0, :-1] / 0.7
        expected = logits.log_softmax(-1).gather(-1, torch.from_numpy(ids[1:, None]))[:, 0].numpy()
        assert np.isnan(found[0]) and found.dtype == np.float32
        assert np.abs(found[1:] - expected).max() <= 5e-5
        assert decoder.cache.used == used
        assert np.isnan(decoder.prompt_logprobs(ids[:1], 0.7)).tolist() == [True]


@pytest.mark.usefixtures("built")
def test_scores_tell_of_the_matrices_that_sample(models):
    """The kernel's own copy of the weights, which PyTorch would not look at."""
    decoder = make(models["tied"])
    ids = np.arange(60) % 97
    before = decoder.prompt_logprobs(ids, 1.0)
    with torch.inference_mode():  # and nothing packs them
        decoder.model.backbone.layers[0].mlp.down_proj.weight.neg_()
    assert np.array_equal(decoder.prompt_logprobs(ids, 1.0), before, equal_nan=True)
    decoder.set_version(1)
    assert np.nanmax(np.abs(decoder.prompt_logprobs(ids, 1.0) - before)) > 0.1


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("position", [0, 17, 530, 1039])
def test_a_key_that_is_no_number_is_not_hidden_by_the_others(position, saved):
    decoder = make(saved("qwen3"))
    prompt = np.random.default_rng(3).integers(0, 97, 1040).astype(np.int32)
    for payload in (0x7FC00000, 0x7F800001, 0xFFC001FF):
        slot = decoder.add(SampleRequest(prompt_ids=prompt, params=SamplingParams(max_tokens=4), seed=0))
        ended, failed = decoder.step()
        assert not len(failed)
        cache = decoder.cache
        page = int(cache.tables[slot, position // 16])
        chunk, at = divmod(page, cache.chunk_pages)
        keys = (ctypes.c_uint32 * 512).from_address(int(cache.addresses[chunk]) + 4 * 512 * at)  # of layer 0, head 0
        keys[3 * 16 + position % 16] = payload
        ended, failed = decoder.step()
        assert failed.tolist() == [slot] and not len(ended), hex(payload)
        decoder.discard(slot)


@pytest.mark.usefixtures("built")
def test_working_memory_is_given_back_and_taken_anew(models, monkeypatch):
    decoder, requests = make(models["tied"]), requests_of(np.random.default_rng(4), 6)
    made, empty = [], torch.empty

    def noted(*size, **how):
        tensor = empty(*size, **how)
        made.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(torch, "empty", noted)
    drawn = play(decoder, requests)

    def held():
        return [tensor.numel() for ref in made if (tensor := ref()) is not None and tensor.numel()]

    assert len(held()) == 2, "that of passes, and that of logits"
    decoder.give_back_memory()
    assert held() == []
    assert same(play(decoder, requests), drawn)


# ---- where it cannot be used


@pytest.fixture
def said(caplog):
    """Warnings of the sampler's kernel."""
    forward_choice._warn_once.cache_clear()

    def read():
        return [
            record.getMessage()
            for record in caplog.records
            if record.levelno == logging.WARNING and record.name == forward_choice.__name__
        ]

    with caplog.at_level(logging.INFO):
        yield read
    forward_choice._warn_once.cache_clear()


def test_without_a_compiler_the_sampler_computes_with_torch_and_one_warning_says_what_to_do(
    models, monkeypatch, tmp_path, said
):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv(native.SWITCH, raising=False)
    monkeypatch.setattr(library, "build", native.build.__wrapped__)
    for _ in range(2):
        assert isinstance(make(models["tied"], kernel="auto").forward, TorchForward)
    (warning,) = said()
    assert "2 to 3 times slower than with its compiled kernel: no C compiler was found (cc, gcc, clang" in warning
    assert "apt install gcc" in warning and "verbatim doctor --machine" in warning
    with pytest.raises(ModelError, match=r'kernel = "compiled", but .* no C compiler was found .*; use "auto"'):
        make(models["tied"])


def test_a_kernel_that_is_not_wanted_or_does_not_fit_is_no_warning(models, monkeypatch, tmp_path, said, caplog):
    make(models["tied"], kernel="torch")
    other = save(LlamaConfig(**{**SMALL, "intermediate_size": 100}), tmp_path)
    assert isinstance(make(other, kernel="auto").forward, TorchForward)
    monkeypatch.setenv(native.SWITCH, "0")
    monkeypatch.setattr(library, "build", native.build.__wrapped__)
    assert isinstance(make(models["tied"], kernel="auto").forward, TorchForward)
    assert said() == []
    assert "without its compiled kernel: the inner width is 100" in caplog.text
    assert "without its compiled kernel: VERBATIM_NATIVE = 0" in caplog.text


def test_a_fast_form_whose_numbers_differ_is_told_and_the_model_computes_its_passes_itself(models, monkeypatch, said):
    rotated = fast_forward._rotated
    monkeypatch.setattr(fast_forward, "_rotated", lambda x, cos, sin: rotated(x, cos, -sin))
    decoder = make(models["tied"], kernel="torch")
    (warning,) = said()
    assert "transformers' Qwen3ForCausalLM, slower than with its own form of the layers" in warning
    assert "whose results differ: layer 0 (of 0 to 1) is " in warning and "the model's own form is " in warning
    monkeypatch.undo()
    requests = requests_of(np.random.default_rng(4), 2)
    for (ids, logprobs, _), (others, expected, _) in zip(
        play(decoder, requests), play(make(models["tied"], kernel="torch"), requests), strict=True
    ):
        assert (ids == others).all() and np.abs(logprobs - expected).max() <= 5e-5


def test_a_model_of_a_known_class_is_not_told_as_one_of_an_unknown_one(models, tmp_path, said, caplog):
    other = save(LlamaConfig(**{**SMALL, "hidden_act": "gelu"}), tmp_path)
    assert isinstance(make(other, kernel="auto").forward, TorchForward)
    assert "without its compiled kernel: the activation is gelu, not silu" in caplog.text
    model = CausalLM(load_model(models["tied"]).requires_grad_(False))
    model.backbone.layers[1].mlp.register_forward_hook(lambda *_: None)
    calls = probe(model)[1]
    assert why_not(model, None, calls) == "the module layers.1.mlp has hooks, or a forward of its own"


def test_the_small_copy_that_a_model_is_checked_with_does_not_warn(models, monkeypatch, tmp_path, said):
    """The model itself may be one that the kernel does not know."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(library, "build", native.build.__wrapped__)
    model = CausalLM(load_model(models["tied"]).requires_grad_(False))
    refuse_other_decoding(model, TorchSettings(max_batch_size=2, device="cpu"))
    assert said() == []


@pytest.mark.parametrize(
    ("config", "dtype", "why"),
    [
        (
            LlamaConfig(**{**SMALL, "intermediate_size": 100}),
            "float32",
            "the inner width is 100, not a multiple of 16",
        ),
        (LlamaConfig(**SMALL, head_dim=24), "float32", "the head size is 24"),
        (LlamaConfig(**SMALL), "float64", "the model is in float64"),
    ],
    ids=["inner", "head", "dtype"],
)
def test_models_that_it_does_not_compute_are_named_with_the_reason(config, dtype, why, tmp_path):
    model = CausalLM(load_model(save(config, tmp_path), dtype=dtype))
    with pytest.raises(ModelError, match=f'kernel = "compiled", but .*{why}'):
        Decoder(model, TorchSettings(kernel="compiled"), context_length=64, version=0)
    assert isinstance(Decoder(model, TorchSettings(), context_length=64, version=0).forward, TorchForward)


def test_a_head_with_more_ids_than_the_embedding_is_not_computed(tmp_path):
    """The kernel would read behind the embedding where such an id was drawn."""
    model = CausalLM(load_model(save(LlamaConfig(**SMALL), tmp_path)))
    with torch.inference_mode():
        calls = probe(model)[1]
        fast = known_backbone(model, calls, 64)
    assert why_not(model, fast, calls) is None
    embedding = model.backbone.embed_tokens
    embedding.weight = torch.nn.Parameter(embedding.weight[:-1].clone())
    assert why_not(model, fast, calls) == "the output head has ids without an embedding"


def test_after_memory_ran_out_caches_are_those_of_the_present_weights(models, monkeypatch):
    """Weights are numbered by loads here, and not by versions: a run that was resumed begins with load 0, version 7."""
    model = CausalLM(load_model(models["tied"]).requires_grad_(False))
    decoder = Decoder(model, TorchSettings(max_batch_size=3, device="cpu"), context_length=64, version=7)

    def fail(num_tokens):
        raise MemoryError

    monkeypatch.setattr(decoder.cache, "shrink", fail)
    monkeypatch.setattr(decoder.cache, "drop", decoder.cache.clear)
    prompt, params = np.arange(40, dtype=np.int32), SamplingParams(max_tokens=4)
    decoder.add(SampleRequest(prompt_ids=prompt, params=params, seed=0, session=""))
    decoder.step()
    decoder.give_back_memory()
    decoder.step()
    decoder.add(SampleRequest(prompt_ids=prompt, params=params, seed=1, session=""))
    assert decoder.counts.prefix_hit_tokens == 39


@pytest.mark.usefixtures("built")
def test_a_kernel_that_computes_something_else_is_not_used(models, monkeypatch, said):
    monkeypatch.setattr(forward_choice, "load_kernel", WrongKernel)
    assert isinstance(make(models["tied"], kernel="auto").forward, TorchForward)
    (warning,) = said()
    assert "slower than with its compiled kernel: its results differ from those of Qwen3ForCausalLM" in warning
    assert "layer 0 (of 0 to 1) is " in warning and "verbatim doctor --machine MODEL" in warning
    with pytest.raises(ModelError, match=r"differ from those of Qwen3ForCausalLM: layer 0 .* away"):
        make(models["tied"])
