"""A service has as long as it needs: on a busy machine the import of its package alone takes a minute."""

from __future__ import annotations

import pytest

from verbatim.logs.monitors import background
from waiting import HANGS


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "OPEN_SECONDS", HANGS)
    monkeypatch.setattr(background, "FINISH_SECONDS", HANGS)
