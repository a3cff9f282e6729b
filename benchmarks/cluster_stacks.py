"""Samples the stack of a thread a hundred times per second, and computes the share of each of our functions (the
innermost on the stack)."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def sampled_stacks(interval: float = 0.01) -> Iterator[Any]:
    """Sample this thread's stack while the block runs. Yields a function that returns the shares of the functions seen
    most often, without those of simulated parts."""
    found: Counter[str] = Counter()
    ended, thread = threading.Event(), threading.get_ident()

    def look() -> None:
        while not ended.wait(interval):
            frame = sys._current_frames().get(thread)
            while (
                frame is not None
                and "/verbatim/" not in frame.f_code.co_filename
                and ("/benchmarks/cluster_" not in frame.f_code.co_filename)
            ):
                frame = frame.f_back
            if frame is not None:
                path = frame.f_code.co_filename
                part = path.partition("/verbatim/")[2] or Path(path).name
                found[f"{part.removesuffix('.py')}:{frame.f_code.co_name}"] += 1

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()

    def top(count: int = 8) -> dict[str, float]:
        ours = {name: number for name, number in found.items() if not name.startswith("cluster_")}
        total = sum(ours.values()) or 1
        return {name: round(number / total, 3) for name, number in Counter(ours).most_common(count)}

    try:
        yield top
    finally:
        ended.set()
        watcher.join()
