"""The modules whose tests take longest begin first, each in another worker.

At the end they would leave cores idle: they wait for processes, one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
SECONDS = {
    "run/cluster/test_cluster_runs.py": 985,
    "faults/test_failing_calls.py": 868,
    "faults/test_kills.py": 728,
    "trainer/test_parallel.py": 457,
    "planted/test_planted_faults.py": 441,
    "faults/test_power_loss.py": 383,
    "run/orchestrator/test_ray_runs.py": 328,
    "cli/test_init_command.py": 293,
    "e2e/test_processes.py": 275,
    "run/orchestrator/test_process_runs.py": 273,
    "test_examples.py": 266,
    "rollouts/test_ray_pool.py": 251,
    "inspection/envcheck/test_env_check.py": 231,
    "rollouts/test_ray.py": 225,
    "e2e/test_parallel_modes.py": 222,
    "e2e/test_parallel_runs.py": 221,
    "inference/vllm/test_server_pool.py": 200,
    "run/test_first_minute.py": 150,
    "test_distribution.py": 148,
    "e2e/test_alarm_faults.py": 148,
}
"""As measured by `make stress` with eight workers on two cores. Only their proportions matter."""


def longest_first(items: Sequence[pytest.Item], num_workers: int) -> list[pytest.Item]:
    """The tests in an order of which each worker gets an equal part, as `--dist worksteal` divides it: the tests of its
    long modules, then others. Whoever is done takes over from the ends of the others' parts."""
    names = {TESTS / name: name for name in SECONDS}
    modules: dict[str, list[pytest.Item]] = {}
    rest = []
    for item in items:
        name = names.get(item.path)
        (rest if name is None else modules.setdefault(name, [])).append(item)
    parts: list[list[pytest.Item]] = [[] for _ in range(num_workers)]
    seconds = [0] * num_workers
    for name in sorted(modules, key=SECONDS.__getitem__, reverse=True):
        least = seconds.index(min(seconds))
        parts[least] += modules[name]
        seconds[least] += SECONDS[name]
    ordered: list[pytest.Item] = []
    taken = 0
    for number, part in enumerate(parts):
        size = (len(items) - len(ordered)) // (num_workers - number)
        until = taken + max(0, size - len(part))
        ordered += [*part, *rest[taken:until]]
        taken = until
    return [*ordered, *rest[taken:]]
