"""Prints the progress of a simulation to stderr, so that the figures so far are known even if the benchmark is
killed."""

from __future__ import annotations

import json
import sys
import time

from cluster_figures import memory, of_stretch
from cluster_simulation import Mark, Simulation


class Progress:
    """Prints a JSON line every `interval` seconds, with the figures since the previous such line, and a JSON line after
    each step, with the figures of this step. `share_of_ideal` is low in the first lines, because all episodes have
    begun at the same time."""

    def __init__(self, interval: float = 20.0) -> None:
        self._interval = interval
        self._due = time.perf_counter() + interval
        self._last: Mark | None = None
        self._began = time.thread_time()

    def __call__(self, simulation: Simulation, what: str) -> None:
        now = time.perf_counter()
        if not what and now < self._due:
            return
        mark = simulation.mark()
        if what:
            earlier = simulation.notes.marks[-2:-1]
            before = earlier[0] if earlier else None
        else:
            self._due, before, self._last = now + self._interval, self._last, mark
        line: dict[str, object] = {
            "progress": what or "running",
            "servers": simulation.setting.servers,
            "core": simulation.setting.core,
            "virtual_seconds": round(mark.at, 1),
            "processor_seconds": round(time.thread_time() - self._began),
            "simulating": round(simulation.loop.simulated_seconds),
            "steps_done": len(simulation.notes.marks),
            "turns": mark.turns,
            "episodes_ended": mark.episodes,
            "episodes_under_way": len(simulation.world.scripts),
            "memory_mb": memory() >> 20,
        }
        if before is not None:
            line |= {name: round(value, 3) for name, value in of_stretch(simulation, before, mark).items()}
        if what:
            line["staleness_mean"] = round(simulation.notes.metrics[-1].get("staleness/mean", float("nan")), 2)
        print(json.dumps(line), file=sys.stderr, flush=True)
