"""Names: one word per idea. docs/glossary.md has the words."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import verbatim

ROOT = Path(verbatim.__file__).parent
GLOSSARY = Path(__file__).parents[2] / "docs" / "glossary.md"

LEFT = {
    "chat_desk": "render_pool",
    "collector": "gc_policy",
    "cut_off": "cancelled",
    "fate": "outcome",
    "HungUp": "ClientClosed",
    "insist": "request_with_retry",
    "keeper": "subreaper",
    "knob": "parameter",
    "let_go": "what it does",
    "Life": "ReplicaIncarnation",
    "mirror": "remote_run_folder",
    "Peer": "RpcConnection",
    "Places": "AdmissionQueue",
    "recognise": "detect_family",
    "Remembered": "BoundedCache",
    "roster": "replica_supervisor",
    "SaysHow": "DescribesEngine",
    "seal": "manifest",
    "tally": "episode_stats",
    "Turns": "DeviceHandoff",
    "turnstile": "turn_limiter",
}
"""Names that were, and what they are called now. Of modules, classes and functions; those without a capital also in
the plural, with an underscore before, and in capitals."""
LEFT_MODULES = {"base", "guard", "origins", "parts", "places", "peer", "remembered", "turns"}
"""Names of modules only: as names of functions and variables they are plain English."""
EXAMPLES = ("cli/templates/", "cli/examples/", "cli/recipes/")
"""Code that users copy: each file stands alone, and has the names that one of theirs would have."""


def modules() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(ROOT.rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if not name.startswith(EXAMPLES):
            yield name, ast.parse(path.read_text(encoding="utf-8"))


def definitions(tree: ast.Module) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.lineno


def is_left(name: str) -> bool:
    """Whether a name is one of the old ones.

    >>> [is_left(name) for name in ("Places", "_let_go", "knobs", "KNOBS", "places", "knobs_of")]
    [True, True, True, True, False, False]
    """
    bare = name.strip("_")
    return bare in LEFT or bare.lower().removesuffix("s") in {old.removesuffix("s") for old in LEFT if old.islower()}


def test_no_old_name_is_left():
    assert is_left("Places") and is_left("_let_go") and is_left("KNOBS") and not is_left("places")
    left = []
    for file, tree in modules():
        left += [file for part in Path(file).with_suffix("").parts if is_left(part) or part in LEFT_MODULES]
        left += [f"{file}:{line}: {name}" for name, line in definitions(tree) if is_left(name)]
    assert left == []


def test_a_class_name_is_one_idea():
    named = defaultdict(list)
    for file, tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                named[node.name.strip("_")].append(f"{file}:{node.lineno}")
    assert len(named) > 500
    assert {name: places for name, places in named.items() if len(places) > 1} == {}


def test_the_glossary_is_short_and_says_each_word_once():
    terms = re.findall(r"^\| (?!term |\*\*|-)(.+?) \|", GLOSSARY.read_text(encoding="utf-8"), re.MULTILINE)
    assert 40 <= len(terms) <= 60
    assert len({term.lower() for term in terms}) == len(terms)
