"""Tests speak to public doors: lines that read or set a private attribute of something else are bounded."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
OF_NAMED_TUPLES = {"_replace", "_asdict", "_fields", "_make", "_field_defaults"}

BOUNDS = {
    "it stops an engine, or a worker, between two of its steps, which no user may": {
        "inference/step_gate.py": 5, "rollouts/test_process_pool.py": 3, "run/orchestrator/faulty_runs.py": 1,
    },
    "it plants a fault in one of two peers that are told the same limit": {
        "inference/vllm/test_broadcast.py": 1, "trainer/faulty_rank.py": 1, "trainer/parallel_jobs.py": 1,
    },
    "it waits for a moment that nothing public tells": {
        "environments/tools/test_mcp.py": 1, "logs/monitors/test_mlflow.py": 1,
        "rollouts/gateway/test_gateway_limits.py": 1, "rollouts/gateway/test_program.py": 1,
         "run/test_outcome_log.py": 1,
    },
    "it watches what all episodes, or all checkpoints, pass through": {"faults/recorder.py": 2, "token_identity.py": 2},
    "a process remembers it for good, and the next test begins as another process would": {
        "conftest.py": 2, "inference/test_compiled_kernel.py": 2, "models/test_source.py": 4,
    },
    "its claim is that nothing is kept, or that a choice was right among all that is kept": {
        "inference/vllm/test_real_adapters.py": 1, "rollouts/gateway/test_gateway_limits.py": 1,
        "rollouts/gateway/test_matching.py": 1, "rollouts/test_process_pool.py": 1,
        "run/orchestrator/test_dispatcher_search.py": 1,
    },
    "it compares more than a user is given: each row of a pass, each message as a template gets it": {
        "inference/test_compiled_kernel.py": 1, "models/renderers/random_dialogues.py": 4,
    },
    "it plants a wrong number in what the kernel computes": {
        "inference/test_compiled_kernel.py": 2,
    },
    "the public way is a signal to this process, or the death of a machine": {
        "rollouts/test_ray_pool.py": 1, "run/test_ask_to_end.py": 1,
    },
    "the attribute is another library's": {
        "conftest.py": 1, "cuda/fake_cuda.py": 10, "faults/strikes.py": 2, "house/test_docs_snippets.py": 1,
        "inference/test_torch_engine.py": 1, "inference/vllm/faulty_plugin/verbatim_faulty.py": 1,
        "rollouts/gateway/test_verifiers_serving.py": 1,
        "inference/vllm/test_answers.py": 2, "inference/vllm/vllm_double.py": 2, "models/test_mixing.py": 2,
        "models/test_own_attention.py": 1, "models/test_weights.py": 1, "trainer/test_router_loss.py": 1,
        "trainer/test_router_replay.py": 1, "trainer/test_trainer_resume.py": 1, "warm.py": 3,
    },
}  # fmt: skip
"""By reason: the files, and the most lines that each may have."""
MAY_HAVE = re.compile(r"(?<!self)(?<!cls)(?<!super\(\))\._[a-zA-Z]")
"""Found in each file that has such a line: most files need not be parsed."""


def private_lines(source: str) -> set[int]:
    """Lines with an attribute that begins with one underscore, of anything but self, cls, super() and modules that are
    no part of this project.
    """
    tree = ast.parse(source)
    imported = [alias for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    own = {"self", "cls"}
    foreign = {a.asname or a.name.partition(".")[0] for a in imported if a.name.partition(".")[0] != "verbatim"}
    return {
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and node.attr not in OF_NAMED_TUPLES
        and not (isinstance(node.value, ast.Name) and node.value.id in own)
        and not (isinstance(node.value, ast.Call) and getattr(node.value.func, "id", "") == "super")
        and _root(node.value) not in foreign
    }


def _root(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def test_no_file_has_more_lines_with_a_private_attribute_than_it_has_a_reason_for():
    most = sum(map(Counter, BOUNDS.values()), Counter())
    sources = ((path.relative_to(TESTS).as_posix(), path.read_text(encoding="utf-8")) for path in TESTS.rglob("*.py"))
    found = {file: len(private_lines(source)) for file, source in sources if MAY_HAVE.search(source)}
    assert {file: number for file, number in found.items() if number > most[file]} == {}
    assert most.keys() <= found.keys(), "a file that has none any more needs no reason"


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("sampler._engine\nsampler.engine", {1}),
        ("import os\nos._exit(1)", set()),
        ("import verbatim\nverbatim.run._x = 1", {2}),
        ("made()[0]._x", {1}),
        ("self._x\ncls._y\nself.part._z\nsuper()._w", {3}),
        ("row._replace(a=1)\nrow.__dict__", set()),
    ],
)
def test_what_counts_as_private(source: str, lines: set[int]):
    assert private_lines(source) == lines
