"""`make test` installs no extras but QUICK_EXTRAS, and still imports every test module, to read its markers."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
MODULES = {"mlflow_skinny": "mlflow"}
"""Modules of packages that do not have the package's name."""


def lacking() -> set[str]:
    """The modules that only other extras install."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (quick,) = re.findall(r"^QUICK_EXTRAS := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)

    def modules(names: set[str]) -> set[str]:
        packages = {re.split(r"[^\w.-]", line)[0].lower().replace("-", "_") for name in names for line in extras[name]}
        return {MODULES.get(package, package) for package in packages}

    others = modules(set(extras) - set(quick.split(",")))
    # Installed with packages that everybody has: torch and huggingface-hub need fsspec, for example.
    return others - modules(set(quick.split(",")))


def imported(source: str) -> Iterator[str]:
    """The names of the modules that importing this source imports."""
    for node in _at_import(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _at_import(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes outside of functions."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield child
            yield from _at_import(child)


def reached(path: Path, seen: set[Path]) -> Iterator[tuple[Path, str]]:
    """(file, module) of all imports of a test module and of the modules of tests/ that it imports."""
    if path in seen:
        return
    seen.add(path)
    for name in imported(path.read_text(encoding="utf-8")):
        yield path, name.partition(".")[0]
        own = TESTS / f"{name.replace('.', '/')}.py"
        if own.exists():
            yield from reached(own, seen)


def test_no_test_module_imports_what_only_other_extras_install():
    missing, seen = lacking(), set()
    assert {"ray", "mcp", "wandb", "gguf"} <= missing
    assert not missing & {"torch", "peft", "httpx", "starlette", "pytest"}
    tests = sorted([*TESTS.rglob("test_*.py"), *TESTS.rglob("conftest.py")])
    assert len(tests) > 300
    found = {f"{file.relative_to(ROOT)}: {name}" for test in tests for file, name in reached(test, seen)}
    wrong = sorted(line for line in found if line.partition(": ")[2] in missing)
    assert not wrong, "import these inside of functions, or in programs that tests start"


def test_no_test_of_the_house_needs_an_extra():
    """`make test` runs all of them."""
    marked = [path.name for path in (TESTS / "house").glob("*.py") if "mark." + "extras" in path.read_text("utf-8")]
    assert marked == []


def test_imports_at_import_are_seen():
    assert list(imported("import a.b\nif x:\n    from c import d\ndef f():\n    import e\n")) == ["a.b", "c", "c.d"]
