"""Tiny models with random weights, saved once per session."""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, MistralConfig, PreTrainedConfig, Qwen3Config

from verbatim.inference.embedded import decoder
from verbatim.inference.embedded.compiled.library import load_kernel
from verbatim.inference.embedded.forward import open_forward

VOCAB = 97
_SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
}


def save(config: PreTrainedConfig, seed: int, folder: Path) -> Path:
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def pytest_collection_finish(session: pytest.Session) -> None:
    """The kernel is compiled before the first test: no test of an engine starts a compiler."""
    if not session.config.option.collectonly:
        load_kernel()


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tiny matrix products are slower on several threads, and much slower beside other processes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """`tied` and `tied_later` are one architecture with two sets of weights."""
    root = tmp_path_factory.mktemp("models")
    tied = Qwen3Config(**_SMALL, tie_word_embeddings=True)
    window = Qwen3Config(
        **_SMALL, tie_word_embeddings=False, use_sliding_window=True, sliding_window=24, max_window_layers=1
    )
    return {
        "tied": save(tied, 0, root / "tied"),
        "tied_later": save(tied, 1, root / "tied_later"),
        "untied": save(Qwen3Config(**_SMALL, tie_word_embeddings=False), 2, root / "untied"),
        "half_sliding": save(window, 3, root / "half_sliding"),
        "sliding": save(MistralConfig(**_SMALL, sliding_window=24, tie_word_embeddings=True), 4, root / "sliding"),
    }


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`saved(name)` is the folder of a model of the compiled kernel's tests, made once."""
    from test_compiled_kernel import CONFIGS

    root = tmp_path_factory.mktemp("compiled")
    return functools.cache(lambda name: save(CONFIGS[name], 0, root / name))


@pytest.fixture(scope="session")
def references(models: dict[str, Path]) -> dict[str, torch.nn.Module]:
    """The same models as `transformers` itself runs them, with its own masks."""
    loaded = {}
    for name, folder in models.items():
        loaded[name] = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    return loaded


@pytest.fixture(scope="module", params=["torch", "compiled"])
def kernel(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every engine of the test computes with PyTorch, then with the compiled kernel where it fits the model."""
    if request.param == "compiled" and load_kernel() is None:
        pytest.skip("there is no C compiler here")
    update = {"kernel": "torch" if request.param == "torch" else "auto"}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            decoder,
            "open_forward",
            lambda model, settings, **how: open_forward(model, settings.model_copy(update=update), **how),
        )
        yield request.param
