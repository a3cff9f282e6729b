"""Tiny models of the kinds whose attention and layers take different code, and a CUDA device without a GPU."""

import pytest
from fake_cuda import fake_cuda, has_cuda_build

from models.architectures import Architecture, tiny_model
from trainer.trainer_helpers import write_llama, write_model, write_qwen_moe

FAMILIES = {
    "window": Architecture("mistral", "", {"sliding_window": 64}),
    "sinks": Architecture("gpt_oss"),
    "softcap": Architecture("gemma2"),
    "two windows": Architecture("gemma3_text"),
}


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent.name == "cuda":
            item.add_marker(pytest.mark.fake_cuda)


@pytest.fixture
def cuda():
    """While the test runs, "cuda" is a device of this machine."""
    if not has_cuda_build():
        pytest.skip("NOT TESTED: this torch is a build without CUDA; type: make test-cuda-fake")
    with fake_cuda():
        yield


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """The folder of each model, made when it is asked for first."""
    made = {}

    def folder(name):
        if name not in made:
            made[name] = tmp_path_factory.mktemp("model")
            if name in FAMILIES:
                tiny_model(FAMILIES[name]).save_pretrained(made[name])
            else:
                {"dense": write_model, "experts": write_qwen_moe, "other": write_llama}[name](made[name])
        return made[name]

    return folder
