"""Real servers for all tests of `make test-vllm`; each is started when a test first asks for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from inference.vllm.real_servers import Served, served
from inference.vllm.tiny_model import TinyModel

Started = Iterator[Served[TinyModel]]


@pytest.fixture(scope="session")
def tied_server(tmp_path_factory: pytest.TempPathFactory) -> Started:
    """One whose head shares the embedding's weights."""
    folder = tmp_path_factory.mktemp("tied")
    with served(folder, TinyModel(folder / "weights", tied=True)) as found:
        yield found


@pytest.fixture(scope="session")
def untied_server(tmp_path_factory: pytest.TempPathFactory) -> Started:
    """One whose head has weights of its own."""
    folder = tmp_path_factory.mktemp("untied")
    with served(folder, TinyModel(folder / "weights", tied=False)) as found:
        yield found


@pytest.fixture(scope="session")
def halves_server(tmp_path_factory: pytest.TempPathFactory) -> Started:
    """One with two workers, each with half of every weight."""
    folder = tmp_path_factory.mktemp("halves")
    trainer = TinyModel(folder / "weights", tied=True)
    with served(folder, trainer, settings={"tensor_parallel_size": 2}, env={}) as found:
        yield found
