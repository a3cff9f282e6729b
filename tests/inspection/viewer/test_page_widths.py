"""Every view at the widths of a telephone, a tablet and two screens, light and dark: nothing lies over anything."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from chromium import Page
from page_runs import make_page_run
from serving_page import serving_page

pytestmark = [pytest.mark.slow, pytest.mark.realtime]

WIDTHS = (480, 768, 1024, 1440)
OVER = """(() => {
  const shown = '#main .message, #main .stream, .side-column > *, .card, .bar > *';
  const boxes = [...document.querySelectorAll(shown)].filter(e => e.className !== 'skip')
    .map(e => [e, e.getBoundingClientRect()]).filter(([e, b]) => b.width && b.height);
  const beside = (a, b) => a.right <= b.left + 1 || b.right <= a.left + 1;
  const apart = (a, b) => beside(a, b) || a.bottom <= b.top + 1 || b.bottom <= a.top + 1;
  return boxes.flatMap(([e, a], i) => boxes.slice(i + 1)
    .filter(([o, b]) => !e.contains(o) && !o.contains(e) && !apart(a, b))
    .map(([o]) => `${e.className} over ${o.className}`));
})()"""
"""Pairs of elements that lie over each other, as far as they are to be apart."""
OUTSIDE = """[...document.querySelectorAll('.bar > *, .bar nav a, .leaves li > *, .facts > *, .card')]
  .filter(e => e.className !== 'skip' && e.getBoundingClientRect().width)
  .filter(e => e.getBoundingClientRect().right > innerWidth || e.getBoundingClientRect().left < 0
    || (e.closest('.leaves') && e.getBoundingClientRect().right > e.closest('.tree').getBoundingClientRect().right))
  .map(e => `${e.className || e.tagName} ${e.textContent}`)"""
"""Elements that end beyond the window, or beside the box that they are in."""

HOLES = """[...document.querySelectorAll('.cards')].flatMap(box => {
  const rows = new Map();
  for (const card of box.querySelectorAll('.card')) {
    const { top, right } = card.getBoundingClientRect();
    rows.set(Math.round(top), Math.max(right, rows.get(Math.round(top)) ?? 0));
  }
  return [...rows.values()].filter(right => right < box.getBoundingClientRect().right - 2);
})"""
"""Rows of cards that end before their box does."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_page_run(tmp_path_factory.mktemp("widths") / "tries")


@pytest.fixture(scope="module")
def url(run: Path) -> Iterator[str]:
    with serving_page(run) as address:
        yield address


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a person can look at what was tested; pytest keeps the folders of its last three runs."""
    return tmp_path_factory.mktemp("pictures")


VIEWS = {
    "overview": ("#/overview/0", "document.querySelector('.u-over')"),
    "trajectories": ("#/trajectories/0", "document.querySelector('[data-testid=row]')"),
    "trajectory": ("#/trajectory/0/t5-2", "document.querySelector('[data-testid=token]')"),
    "group": ("#/group/0/g5", "document.querySelector('.leaves li')"),
}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_lies_over_anything_or_beyond_the_window(page: Page, url: str, pictures: Path, width: int, scheme: str):
    page.prefer(scheme)
    page.command("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
    for name, (link, is_drawn) in VIEWS.items():
        page.open(f"{url}/{link}")
        page.wait(is_drawn)
        page.settle()
        page.screenshot(pictures / f"{name}_{width}_{scheme}.png")
        assert page.evaluate(OVER) == [], name
        assert page.evaluate(OUTSIDE) == [], name
        assert page.evaluate(HOLES) == [], name
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), name
