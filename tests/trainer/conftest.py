import pytest
from trainer_helpers import write_llama, write_model


@pytest.fixture(scope="session")
def qwen(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("qwen"))


@pytest.fixture(scope="session")
def sliding_qwen(tmp_path_factory):
    """Sliding window of 7 in one layer, grouped heads, untied head."""
    return write_model(tmp_path_factory.mktemp("sliding"), sliding_window=7, tied=False)


@pytest.fixture(scope="session")
def llama(tmp_path_factory):
    """Four query heads over one key/value head, untied head."""
    return write_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def tied_llama(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("tied_llama"), tied=True)
