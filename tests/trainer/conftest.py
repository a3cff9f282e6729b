import pytest
from trainer_helpers import write_llama, write_model

from verbatim.models import native


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


@pytest.fixture
def compiled_calls(monkeypatch):
    """The names of the compiled functions that are called, in order."""
    calls, library = [], native.library

    class Noted:
        def __init__(self, functions):
            self.functions = functions

        def __getattr__(self, name):
            calls.append(name)
            return getattr(self.functions, name)

    def noted(source):
        functions = library(source)
        return None if functions is None else Noted(functions)

    monkeypatch.setattr(native, "library", noted)
    return calls
