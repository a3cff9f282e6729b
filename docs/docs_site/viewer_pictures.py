"""Takes the pictures of docs/viewer.md in headless Chromium, from a finished run.

PYTHONPATH=src:docs python -m docs_site.viewer_pictures runs/guess_number/latest
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
OUT = ROOT / "docs" / "figures"
_SETTLE = 2000
"""Milliseconds for what is drawn after the first things: the siblings of a group."""
sys.path.insert(0, str(ROOT / "tests"))
sys.path.insert(0, str(ROOT / "tests" / "inspection" / "viewer"))

from chromium import Chromium  # noqa: E402  it stands with the tests that use it most


def main() -> None:
    """One picture of each view, light and dark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    command = [sys.executable, "-m", "verbatim.cli", "view", str(args.run), "--no-open", "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        url = server.stdout.readline().split()[0]
        views = find_views(url)
        for scheme in ("light", "dark"):
            with Chromium() as chromium, chromium.page() as browser:
                browser.prefer(scheme)
                for name, (link, drawn) in views.items():
                    browser.open(f"{url}/{link}")
                    browser.wait(drawn)
                    browser.evaluate(f"new Promise(then => setTimeout(then, {_SETTLE}))")
                    browser.screenshot(args.out / f"viewer_{name}_{scheme}.png")
                assert browser.problems == []
    finally:
        server.terminate()
        server.wait(30)


def find_views(url: str) -> dict[str, tuple[str, str]]:
    """Link of each view, and what is true once it is drawn."""

    def get(**query: Any) -> list[dict[str, Any]]:
        with urllib.request.urlopen(f"{url}/api/runs/0/trajectories?{urllib.parse.urlencode(query)}") as answer:
            found: list[dict[str, Any]] = json.load(answer)["rows"]
            return found

    while json.load(urllib.request.urlopen(f"{url}/api/runs"))[0]["indexed"] < 1:
        pass
    rows = get(kind="train", sort="-num_turns", reason="(none)", limit=200)
    shown = next((row for row in rows if 3 <= row["num_turns"] <= 6), rows[0])
    tokens = "document.querySelectorAll('[data-testid=token]').length > 20"
    links = "document.querySelectorAll('[data-testid=view-group] a').length > 2"
    return {
        "overview": ("#/overview/0", "document.querySelectorAll('.u-over').length > 3"),
        "trajectories": ("#/trajectories/0?sort=-reward", "document.querySelectorAll('[data-testid=row]').length > 5"),
        "trajectory": (f"#/trajectory/0/{shown['key']}", tokens),
        "logprobs": (f"#/trajectory/0/{shown['key']}?color=logprob", tokens),
        "group": (f"#/group/0/{shown['group_key']}", links),
    }


if __name__ == "__main__":
    main()
