"""Measures `verbatim view` on a large run folder: how long its user waits, and the server's memory.

For a run folder of 2 GB with 100,000 trajectories, the requirements are: first paint under 1.5 s, a filter under 0.5 s,
any trajectory under 0.5 s, and server memory under 400 MB. An exported page of 1,000 trajectories is required to open
from disk in under 2 s.

The result has three parts. `server` has the seconds that the API takes to answer requests, which are sent one after the
other over HTTP. `browser` has the milliseconds that the page itself measures in headless Chromium, from the user's
action to the painted result; `cold` is for a page that is opened as soon as the server prints its address, while the
index is still being built. `export` has the figures of the exported file of 1,000 trajectories. Each value is [median,
maximum]. If Chromium is not installed, the parts that need it are null.

Prints one JSON line. Run it on a quiet machine: python benchmarks/viewer.py [FOLDER]. If no folder is given,
`benchmarks/big_run.py` makes one, which takes minutes.
"""

from __future__ import annotations

import argparse
import base64
import gzip
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "inspection" / "viewer"))

from chromium import Chromium, Page, find_chromium

from big_run import ENVIRONMENTS, write_run

FILTERS: Sequence[dict[str, str]] = (
    {"env": ENVIRONMENTS[1]},
    {"reward": "0.5-1", "kind": "train"},
    {"step": "100-200", "env": ENVIRONMENTS[0]},
    {"stop_reason": "length"},
    {"reason": "filter:repetition"},
    {"flag": "repetition"},
    {"errors": "1"},
    {"breaks": "1"},
)
SORTS = ("-reward", "reward", "-num_sampled_tokens", "trajectory_id", "example_id", "error", "-advantage", "env")
TRAJECTORIES, EXPORTED = 40, 1000


class Server:
    """A separate process that runs `verbatim view`."""

    def __init__(self, folder: Path) -> None:
        self._began = time.perf_counter()
        command = [sys.executable, "-m", "verbatim.cli", "view", str(folder), "--no-open", "--port", "0"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().split()[0]
        self.seconds_to_address = time.perf_counter() - self._began

    def get(self, path: str, **query: Any) -> Any:
        with urllib.request.urlopen(f"{self.url}/api/{path}?{urllib.parse.urlencode(query)}") as answer:
            return json.load(answer)

    def wait_for_index(self) -> float:
        """Wait until the whole folder is indexed; returns the seconds since the start."""
        while self.get("runs")[0]["indexed"] < 1:
            time.sleep(0.05)
        return time.perf_counter() - self._began

    def megabytes(self, name: str) -> float:
        """The server's resident memory in mebibytes: now (`VmRSS`), or its highest value so far (`VmHWM`)."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        kilobytes = next(line.split()[1] for line in status.splitlines() if line.startswith(name))
        return int(kilobytes) / 1024

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(20)


def timed(*work: Callable[[], Any]) -> list[float]:
    """Call each function; returns the median and the maximum of their durations in seconds."""
    found = []
    for each in work:
        began = time.perf_counter()
        each()
        found.append(time.perf_counter() - began)
    return [round(statistics.median(found), 4), round(max(found), 4)]


def ask_server(server: Server) -> dict[str, Any]:
    """Measure the seconds that the API takes for each kind of request."""
    draw = random.Random(0)
    total = server.get("runs/0/trajectories", limit=0)["total"]
    rows = [
        server.get("runs/0/trajectories", offset=draw.randrange(total), limit=1)["rows"][0] for _ in range(TRAJECTORIES)
    ]

    def get(path: str, **query: Any) -> Callable[[], Any]:
        return lambda: server.get(f"runs/0/{path}", **query)

    def search(text: str) -> Callable[[], Any]:
        def until_over() -> None:
            while server.get("runs/0/trajectories", text=text)["pending"]:
                time.sleep(0.05)

        return until_over

    return {
        "filter": timed(*(get("trajectories", **each) for each in FILTERS)),
        "sort": timed(*(get("trajectories", sort=each) for each in SORTS)),
        "page": timed(*(get("trajectories", sort="-reward", offset=offset) for offset in range(0, total, total // 20))),
        "text_first_answer": timed(*(get("trajectories", text=text) for text in ("TimeoutError after 7", "nowhere"))),
        "text_all_messages": timed(search("no such words in any message"))[1],
        "facets": timed(get("facets")),
        "runs": timed(*(lambda: server.get("runs") for _ in range(10))),
        "metrics": timed(get("metrics"), get("metrics"), get("metrics", after=10**6)),
        "trajectory": timed(*(get(f"trajectories/{row['key']}") for row in rows)),
        "trajectory_by_id": timed(*(get(f"trajectories/{row['trajectory_id']}") for row in rows)),
        "raw": timed(*(get(f"trajectories/{row['key']}/raw") for row in rows[:10])),
        "group": timed(*(get(f"groups/{row['group_key']}") for row in rows[:10])),
    }


_LAST_MARK = """(name => {
    const all = performance.getEntriesByName('verbatim:' + name), last = all.at(-1);
    return last ? {count: all.length, at: last.startTime, asked: last.detail.milliseconds} : {count: 0};
})"""
_PAINT = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"


def next_mark(browser: Page, name: str, act: Callable[[], Any]) -> float:
    """Perform an action; returns the milliseconds from the action to its painted result."""
    before = browser.evaluate(f"{_LAST_MARK}('{name}').count")
    act()
    browser.wait(f"{_LAST_MARK}('{name}').count > {before}")
    return float(browser.evaluate(f"{_LAST_MARK}('{name}').asked"))


def opened(browser: Page, url: str) -> dict[str, float]:
    """Open a page; returns the milliseconds from the navigation to the first paint and to the drawn curves."""
    browser.open("about:blank")
    browser.open(url)
    browser.wait(f"{_LAST_MARK}('overview').count")
    found = {"first_paint": browser.evaluate(_PAINT), "overview": browser.evaluate(f"{_LAST_MARK}('overview').at")}
    return {name: round(value) for name, value in found.items()}


def milliseconds(values: Sequence[float]) -> list[int]:
    return [round(statistics.median(values)), round(max(values))]


def go_to(browser: Page, link: str) -> Callable[[], Any]:
    return lambda: browser.evaluate(f"location.hash = {json.dumps(link)}")


def look(browser: Page, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Perform a user's actions; returns the milliseconds of each kind of action."""
    table = [
        next_mark(browser, "table", go_to(browser, f"#/trajectories/0?{urllib.parse.urlencode(each)}"))
        for each in ({}, *FILTERS)
    ]
    sorts = [next_mark(browser, "table", go_to(browser, f"#/trajectories/0?sort={each}")) for each in SORTS]
    trajectories = [next_mark(browser, "trajectory", go_to(browser, f"#/trajectory/0/{row['key']}")) for row in rows]
    groups = [next_mark(browser, "group", go_to(browser, f"#/group/0/{row['group_key']}")) for row in rows[:5]]
    return {
        "table_first": round(table[0]),
        "filter": milliseconds(table[1:]),
        "sort": milliseconds(sorts),
        "trajectory": milliseconds(trajectories),
        "group": milliseconds(groups),
    }


def measure_export(folder: Path, out: Path) -> dict[str, Any]:
    """Export `EXPORTED` trajectories, and measure the export and its file."""
    command = [sys.executable, "-m", "verbatim.cli", "view", str(folder), "--export", str(out)]
    began = time.perf_counter()
    subprocess.run([*command, "--trajectories", str(EXPORTED)], check=True, stdout=subprocess.DEVNULL)
    found: dict[str, Any] = {"seconds": round(time.perf_counter() - began, 1), "megabytes": out.stat().st_size / 1e6}
    if find_chromium():
        with Chromium() as chromium, chromium.page() as browser:
            times = [opened(browser, out.as_uri()) for _ in range(3)]
            found |= {name: milliseconds([each[name] for each in times]) for name in times[0]}
            found |= look(browser, _rows_of(out))
    return found


def _rows_of(out: Path) -> list[dict[str, Any]]:
    """Select some rows of an exported file."""
    block = re.search(rb'data-url="/api/runs/0/trajectories" data-encoding="gzip-base64">([^<]*)<', out.read_bytes())
    assert block is not None
    rows: list[dict[str, Any]] = json.loads(gzip.decompress(base64.b64decode(block[1])))["rows"]
    return random.Random(0).sample(rows, min(len(rows), 20))


def main() -> None:
    """Run the benchmark and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--trajectories", type=int, default=100_000, help="of the run that is made without a folder")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or write_run(Path(temporary) / "run", trajectories=args.trajectories).folder
        files = list((folder / "trajectories").glob("*.parquet"))
        found: dict[str, Any] = {
            "benchmark": "viewer",
            "gigabytes": round(sum(file.stat().st_size for file in files) / 1e9, 2),
            "processors": os.cpu_count(),
            "browser": None,
        }
        server = Server(folder)
        try:
            cold = None
            if find_chromium():
                with Chromium() as chromium, chromium.page() as browser:
                    cold = opened(browser, server.url)
            found["seconds_to_address"] = round(server.seconds_to_address, 2)
            found["seconds_to_index"] = round(server.wait_for_index(), 2)
            found["trajectories"] = server.get("runs")[0]["num_trajectories"]
            found["server"] = ask_server(server)
            if cold is not None:
                with Chromium() as chromium, chromium.page() as browser:
                    times = [opened(browser, server.url) for _ in range(5)]
                    found["browser"] = {name: milliseconds([each[name] for each in times]) for name in cold}
                    found["browser"]["cold"] = cold
                    rows = [server.get("runs/0/trajectories", offset=i * 997, limit=1)["rows"][0] for i in range(20)]
                    found["browser"] |= look(browser, rows)
            found["megabytes"] = {name: round(server.megabytes(name), 1) for name in ("VmRSS", "VmHWM")}
        finally:
            server.close()
        found["export"] = measure_export(folder, Path(temporary) / "run.html")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
