"""Fifty hostile trajectories: every text comes back as it was written, and in a browser none of it does anything."""

from __future__ import annotations

import json
from pathlib import Path
from urllib.parse import quote

import pytest
from chromium import Chromium, Page
from hostile import ELSEWHERE, LONG, TEXTS, make_hostile_run
from serving_page import serving_to
from viewer_runs import read, serving

from verbatim.inspection.viewer.assets import load_assets
from verbatim.inspection.viewer.export import export
from verbatim.inspection.viewer.query import Filters
from waiting import wait_until

pytestmark = pytest.mark.realtime


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hostile_run(tmp_path_factory.mktemp("hostile") / "run")


def escaped(text: str) -> str:
    """As Arrow's columns keep it: UTF-8 has no lone surrogates."""
    return text.encode("utf-8", "backslashreplace").decode()


@pytest.mark.slow
async def test_every_text_comes_back_as_it_was_written(folder: Path):
    async with serving(folder) as client:
        found = await client.get("trajectories", limit=200, sort="sample_index")
        assert found["total"] == 100 and (await client.get("facets"))["kind"] == {"train": 50, "eval": 50}
        for row in found["rows"]:
            text = TEXTS[row["sample_index"]]
            assert row["error"] == escaped(text[:2_000])[:300] and row["env"] == escaped(text[:2_000])
            one = await client.get(f"trajectories/{row['key']}")
            content = one["messages"][0]["content"]
            assert content == text[:200_000]
            assert one["tools"][0]["function"]["name"] == text[:2_000]
            assert one["turns"][0]["tool_calls"][0]["raw"] == text[:100_000]
            assert list(one["info"]) == [text[:2_000], "task"]
            cuts = [cut for cut in one["cut"] if cut["path"] == "messages/0/content"]
            assert [cut["length"] for cut in cuts] == ([len(text)] if len(text) > 200_000 else [])
            raw = await client.get(f"trajectories/{row['key']}/raw")
            assert raw["trajectory"]["messages"][0]["content"] == text
            if row["kind"] == "train":
                group = await client.get(f"groups/{row['group_key']}")
                assert row["key"] in [each["key"] for each in group["rows"]]
        whole = await client.get(f"trajectories/t{TEXTS.index('x' * LONG)}/text", path="messages/0/content")
        assert len(whole["text"]) == LONG


async def test_hostile_filters_find_what_they_say(folder: Path):
    async with serving(folder) as client:
        for index in (0, 28, 33, 40):
            names = await client.names(env=escaped(TEXTS[index]), kind="train")
            assert names == [f"t{index}"]
        assert await client.names(group="' OR 1=1 --") == []
        found = await client.get("trajectories/..%2f..%2fetc%2fpasswd", status=404)
        assert found["error"].startswith("no trajectory")
        assert (await client.get("trajectories/~99999999999999999999.1", status=404))["error"]
        assert (await client.get("groups/~" + "A" * 5000, status=404))["error"]


async def test_no_answer_can_be_taken_for_a_page(folder: Path):
    async with serving(folder) as client:
        names = ("trajectories", "trajectories/t0", "trajectories/t0/raw", f"trajectories/{quote(TEXTS[0], safe='')}")
        for path in ("", *(f"/0/{name}" for name in ("config", "summary", "metrics", *names))):
            async with client.session.get(f"{client.url}/api/runs{path}") as answer:
                assert answer.content_type == "application/json"
                assert answer.headers["X-Content-Type-Options"] == "nosniff"
                assert json.loads(await answer.text()) is not None


# ---- in a browser


def nothing_happened(page: Page, address: str) -> None:
    """No program of theirs ran, nothing was asked for elsewhere, and the page is still there."""
    assert page.evaluate("window.hacked") is None
    assert page.problems == []
    assert [url for url in page.requests if not url.startswith((address, "about:", "data:", "blob:"))] == []
    assert page.evaluate("location.href").startswith(address)
    tags = "script, iframe, object, embed, form, base, math, video, audio, marquee, foreignObject"
    theirs = f"[...document.querySelectorAll('{tags}')].filter(e => !e.src && !e.dataset.url && e.type !== 'module')"
    assert page.evaluate(f"{theirs}.filter(e => e.textContent.includes('hacked')).length") == 0
    assert page.evaluate(f'document.querySelectorAll(\'[src*="{ELSEWHERE}"], [href*="{ELSEWHERE}"]\').length') == 0


def visit_all(page: Page, opening: str, address: str, keys: list[str]) -> None:
    page.open(opening)
    page.wait("document.querySelector('[data-testid=view-overview]')")
    nothing_happened(page, address)
    page.evaluate("location.hash = '#/trajectories/0'")
    page.wait("document.querySelectorAll('[data-testid=row]').length > 5")
    nothing_happened(page, address)
    for key in keys:
        page.evaluate(f"location.hash = '#/trajectory/0/{key}'")
        marks = "performance.getEntriesByName('verbatim:trajectory')"
        page.wait(f"document.querySelector('[data-testid=view-trajectory]') && {marks}.length")
        page.evaluate("performance.clearMarks('verbatim:trajectory')")
        nothing_happened(page, address)
    page.settle()
    nothing_happened(page, address)


@pytest.mark.slow
def test_nothing_executes_on_the_served_page(page: Page, folder: Path):
    keys = [f"~1.{index}" for index in range(50)]
    with serving_to(page, folder) as url:
        visit_all(page, url, url, keys)
        page.evaluate("location.hash = '#/group/0/' + encodeURIComponent('__proto__')")
        page.wait("document.querySelector('[data-testid=view-group]')")
        nothing_happened(page, url)


@pytest.mark.slow
def test_nothing_executes_on_the_exported_page(page: Page, folder: Path, tmp_path: Path):
    out = tmp_path / "run.html"
    written = export([read(folder)], load_assets(), out, filters={"kind": ["train"]}, most=100)
    assert written.trajectories == 50
    rows = read(folder).rows(Filters(kind=("train",)), limit=100)["rows"]
    visit_all(page, out.as_uri(), out.as_uri(), [row["key"] for row in rows])


@pytest.mark.slow
def test_a_page_that_takes_such_a_text_for_markup_is_noticed(chromium: Chromium):
    """The check above can fail."""
    for text in (text for text in TEXTS if text.startswith(("<img", "<details", "<iframe", "<link"))):
        with chromium.page() as page:
            nothing_happened(page, "about:blank")
            page.evaluate(f"document.body.innerHTML = {json.dumps(text)}")
            wait_until(lambda page=page: is_noticed(page))


def is_noticed(page: Page) -> bool:
    try:
        nothing_happened(page, "about:blank")
    except AssertionError:
        return True
    return False
