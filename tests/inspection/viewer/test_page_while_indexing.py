"""Links that are opened while the index is still being read, and before what they name is written."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from chromium import Page
from serving_page import serving_page
from viewer_runs import make_run, trained, trajectory

from verbatim.inspection.viewer.index import RunIndex

pytestmark = [pytest.mark.realtime, pytest.mark.slow]
MISSING = "document.querySelector('.empty h2')?.textContent.includes('could not be read')"
HEAD = "document.querySelector('.crumbs b')?.textContent"


@pytest.mark.parametrize(("link", "what"), [("trajectory/0/a", "trajectory"), ("group/0/g", "group")])
def test_a_link_that_is_opened_while_the_index_is_read_is_asked_again(
    page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, link: str, what: str
):
    make_run(tmp_path, {1: [trained(trajectory("a", group_id="g"))]})
    read, refresh = threading.Event(), RunIndex.refresh
    monkeypatch.setattr(RunIndex, "refresh", lambda index, stop=None: read.wait() and refresh(index, stop))
    with serving_page(tmp_path, indexed=False) as url:
        try:
            page.open(f"{url}/#/{link}")
            page.wait(f"document.querySelector('.loading')?.textContent.includes('this {what} has not come yet')")
            assert all("404" in problem for problem in page.wait_for_problem())
        finally:
            read.set()
        page.wait(f"({HEAD} ?? '').includes('{link[-1]}')")
        page.problems.clear()  # that it was not there yet
        page.open("about:blank")


def test_a_trajectory_that_is_written_later_is_shown_then(page: Page, tmp_path: Path):
    make_run(tmp_path, {1: [trained(trajectory("a"))]})
    with serving_page(tmp_path) as url:
        page.open(f"{url}/#/trajectory/0/b")
        page.wait(MISSING)
        make_run(tmp_path, {2: [trained(trajectory("b"))]})
        page.wait(f"{HEAD} === 'b'")
        page.problems.clear()
        page.open("about:blank")
