"""A command that a test starts is forked from a warm process, so each test that starts a new one says why."""

from __future__ import annotations

import ast
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_at_most_ten_tests_start_cold_and_each_says_why():
    asking = []
    for path in TESTS.rglob("test_*.py"):
        if "warm.cold(" in (text := path.read_text(encoding="utf-8")):
            calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
            asking += [call.args for call in calls if ast.unparse(call.func) == "warm.cold"]
    assert 0 < len(asking) <= 10
    assert all(isinstance(reason, ast.Constant) and " " in str(reason.value) for (reason,) in asking)
