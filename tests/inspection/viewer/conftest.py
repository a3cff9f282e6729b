"""The browser of a worker, and a page of it for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from chromium import NAMES, Chromium, Page, find_chromium


@pytest.fixture(scope="session")
def chromium() -> Iterator[Chromium]:
    """One browser: it takes a second to start."""
    if find_chromium() is None:
        pytest.skip(f"no browser: none of {', '.join(NAMES)} is installed")
    with Chromium() as browser:
        yield browser


@pytest.fixture
def page(chromium: Chromium) -> Iterator[Page]:
    """A page of its own; at the end its console must have said nothing as an error."""
    with chromium.page() as page:
        yield page
        page.evaluate("0")  # what it has said until now is heard
        assert page.problems == []
