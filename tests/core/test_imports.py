"""A package is imported without another one that it names in annotations only."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from verbatim.core.imports import import_without, imports_that_stay

NAMES = ("wants_a_client", "costly_client")


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "costly_client.py").write_text("class Client: pass\n")
    (tmp_path / "wants_a_client.py").write_text(
        "from __future__ import annotations\nfrom costly_client import Client\n"
        "def ask(client: Client) -> int: return 5\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(threading, "active_count", lambda: 1)  # a test before may have left a thread
    yield
    for name in NAMES:
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("packages")
def test_what_a_package_imports_for_its_annotations_is_left_out():
    import_without("wants_a_client", "costly_client")
    assert sys.modules["wants_a_client"].ask(None) == 5
    assert "costly_client" not in sys.modules
    import costly_client  # type: ignore[import-not-found]

    assert costly_client.Client.__module__ == "costly_client"  # whoever asks for it gets it


@pytest.mark.usefixtures("packages")
def test_beside_other_threads_which_could_ask_for_it_nothing_is_left_out(monkeypatch):
    monkeypatch.setattr(threading, "active_count", lambda: 2)
    import_without("wants_a_client", "costly_client")
    assert "wants_a_client" not in sys.modules


@pytest.mark.usefixtures("packages")
def test_what_is_imported_already_stays_the_one_that_it_is():
    import costly_client

    import_without("wants_a_client", "costly_client")
    import wants_a_client  # type: ignore[import-not-found]

    assert wants_a_client.Client is costly_client.Client is sys.modules["costly_client"].Client


def test_no_garbage_is_looked_for_while_a_command_imports(real_freeze):
    frozen = gc.get_freeze_count()
    with imports_that_stay():
        assert not gc.isenabled()
        made = [[] for _ in range(1000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() - frozen >= len(made)
