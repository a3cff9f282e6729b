"""The import direction of the packages, read off their syntax trees, and what importing the light ones loads."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import verbatim

ROOT = Path(verbatim.__file__).parent

ORDER = (
    ("errors", "machine_faults", "texts", "user_code"),
    ("disk",),
    ("token_tree", "plain_console"),
    ("types",),
    ("trajectory_json",),
    ("config",),
    ("models",),
    ("renderers", "tools"),
    ("inference", "environments"),
    ("rollouts",),
    ("trajectories", "credit", "filters", "curriculum"),
    ("losses", "packing"),
    ("transport", "checkpoints", "monitors"),
    ("trainer", "orchestrator"),
    ("doctor", "viewer"),
    ("run",),
    ("cli",),
)
"""Left to right: a package imports from rows above its own, never from below, and not from its neighbours in the
row. Errors stand before the records that raise them; the command line starts everything, so it stands last."""

RANK = {package: rank for rank, row in enumerate(ORDER) for package in row}

EXCEPTIONS = {("types.py", "Trajectory.__getitem__", "trajectories")}
"""File, function, imported package: the documented look to the right, for the mapping view's `samples`."""


@dataclass(frozen=True)
class Import:
    """One import of one of our packages."""

    file: str
    line: int
    function: str
    package: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: imports verbatim.{self.package}"


def imports_in(file: str, source: str) -> list[Import]:
    """Every import of our own packages, wherever it stands: in functions and under TYPE_CHECKING too."""
    return list(_walk(ast.parse(source), file, ()))


def _walk(node: ast.AST, file: str, scope: tuple[str, ...]) -> Iterator[Import]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        scope = (*scope, node.name)
    names: list[str] = []
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            parents = ("verbatim", *Path(file).parts[:-1])
            base = ".".join([*parents[: len(parents) + 1 - node.level], *base.split(".")]).rstrip(".")
        names = [f"verbatim.{alias.name}" for alias in node.names] if base == "verbatim" else [base]
    for name in names:
        parts = name.split(".")
        if parts[0] == "verbatim" and len(parts) > 1 and parts[1] in RANK:
            yield Import(file, getattr(node, "lineno", 0), ".".join(scope), parts[1])
    for child in ast.iter_child_nodes(node):
        yield from _walk(child, file, scope)


def wrong(found: Import) -> bool:
    own = Path(found.file).parts[0].removesuffix(".py")
    if own == found.package or (found.file, found.function, found.package) in EXCEPTIONS:
        return False
    return RANK[found.package] >= RANK[own]


def sources() -> list[Path]:
    return [path for path in sorted(ROOT.rglob("*.py")) if path != ROOT / "__init__.py"]


def test_no_package_imports_to_its_right():
    found = [i for path in sources() for i in imports_in(path.relative_to(ROOT).as_posix(), path.read_text())]
    assert len(found) > 50
    assert [str(i) for i in found if wrong(i)] == []


def test_every_package_has_a_place_in_the_order():
    packages = {p.name.removesuffix(".py") for p in ROOT.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()}
    assert packages - {"__init__"} - set(RANK) == set()


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("types.py", "from verbatim.trajectories import build_samples"),
        ("config/load.py", "def f():\n    import verbatim.losses.base"),
        ("trainer/a.py", "from verbatim import orchestrator"),
        ("orchestrator/a.py", "if TYPE_CHECKING:\n    from verbatim.trainer.b import B"),
        ("credit/a.py", "from ..filters import base"),
        ("losses/a.py", "from .. import packing"),
        ("errors.py", "from verbatim.types import Turn"),
    ],
)
def test_a_wrong_import_is_seen_in_every_notation(file: str, source: str):
    assert [wrong(i) for i in imports_in(file, source)] == [True]


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("types.py", "class Trajectory:\n    def __getitem__(self):\n        from verbatim.trajectories import b"),
        ("losses/a.py", "from .base import Loss"),
        ("losses/a.py", "from verbatim.losses.base import Loss"),
        ("cli/a.py", "from verbatim.doctor import explain"),
        ("environments/a.py", "from verbatim.tools.base import Tool"),
    ],
)
def test_a_right_import_is_let_through(file: str, source: str):
    assert [wrong(i) for i in imports_in(file, source)] == [False]


LIGHT = (
    "verbatim", "verbatim.config", "verbatim.cli.main", "verbatim.losses", "verbatim.environments",
    "verbatim.checkpoints", "verbatim.monitors", "verbatim.trajectories", "verbatim.credit", "verbatim.filters",
)  # fmt: skip


def test_the_light_packages_import_neither_torch_nor_transformers():
    script = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    heavy = [m for m in ('torch', 'transformers', 'matplotlib') if m in sys.modules]\n"
        "    assert not heavy, f'{name} imports {heavy}'\n"
    )
    done = subprocess.run([sys.executable, "-c", script, *LIGHT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
