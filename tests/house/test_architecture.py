"""The import direction of the packages, read off their syntax trees, and what importing the light ones loads."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

import verbatim

ROOT = Path(verbatim.__file__).parent

ORDER = (
    ("errors", "machine_faults", "texts", "user_code"),
    ("disk", "imports"),
    ("token_tree", "plain_console", "native", "cores", "freed_memory"),
    ("records",),
    ("trajectories",),
    ("types",),
    ("trajectory_json",),
    ("config",),
    ("models",),
    ("renderers", "tools"),
    ("inference", "environments"),
    ("rollouts",),
    ("gateway",),
    ("credit", "filters", "curriculum"),
    ("losses", "packing"),
    ("transport", "checkpoints", "fates"),
    ("monitors",),
    ("evaluation",),
    ("trainer", "orchestrator"),
    ("doctor", "envcheck"),
    ("run",),
    ("plan", "viewer"),
    ("comparison",),
    ("cli", "recipes"),
)
"""Left to right: a package imports from rows above its own, never from below, and not from its neighbours in the
row. Errors stand before the records that raise them; the command line starts everything, so it stands last."""

RANK = {package: rank for rank, row in enumerate(ORDER) for package in row}


@dataclass(frozen=True)
class Import:
    """One import of one of our modules."""

    file: str
    line: int
    module: str
    """The name behind "verbatim.": of a module, or of something in one."""

    @property
    def package(self) -> str:
        return self.module.split(".")[0]

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: imports verbatim.{self.module}"


@functools.cache
def imports_in(file: str, source: str) -> list[Import]:
    """Every import of our own modules, wherever it stands: in functions and under TYPE_CHECKING too."""
    return [found for node in ast.walk(ast.parse(source)) for found in _imports(node, file) if found.package in RANK]


def _imports(node: ast.AST, file: str) -> Iterator[Import]:
    names: list[str] = []
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            parents = ("verbatim", *Path(file).parts[:-1])
            base = ".".join([*parents[: len(parents) + 1 - node.level], *base.split(".")]).rstrip(".")
        names = [f"{base}.{alias.name}" for alias in node.names]
    for name in names:
        if name.startswith("verbatim."):
            yield Import(file, getattr(node, "lineno", 0), name.removeprefix("verbatim."))


def wrong(found: Import) -> bool:
    own = Path(found.file).parts[0].removesuffix(".py")
    if own == found.package:
        return False
    return RANK[found.package] >= RANK[own]


def sources() -> list[Path]:
    return [path for path in sorted(ROOT.rglob("*.py")) if path != ROOT / "__init__.py"]


def test_no_package_imports_to_its_right():
    found = [i for path in sources() for i in imports_in(path.relative_to(ROOT).as_posix(), path.read_text())]
    assert len(found) > 50
    assert [str(i) for i in found if wrong(i)] == []


def circles(files: Mapping[str, str]) -> list[list[str]]:
    """Modules that import each other, in a round or over others. Loading a package's `__init__` on the way to one of
    its modules is no import of it.

    Args:
        files: Source by path below src/verbatim.
    """
    named = {path.removesuffix("/__init__.py").removesuffix(".py").replace("/", "."): path for path in files}

    def module(name: str) -> str:
        while name and name not in named:
            name = name.rpartition(".")[0]
        return name

    imported = {name: {module(i.module) for i in imports_in(path, files[path])} - {""} for name, path in named.items()}

    def reached(start: str) -> set[str]:
        found, waiting = set(), [start]
        while waiting:
            for name in imported[waiting.pop()] - found:
                found.add(name)
                waiting.append(name)
        return found

    reach = {name: reached(name) for name in named}
    rounds = {tuple(sorted(o for o in reach[name] if name in reach[o])) for name in named if name in reach[name]}
    return sorted(map(list, rounds))


def test_no_modules_import_each_other():
    files = {path.relative_to(ROOT).as_posix(): path.read_text() for path in sources()}
    assert len(files) > 200
    assert circles(files) == []


def test_a_circle_is_seen_over_other_modules_and_in_every_notation():
    files = {
        "types.py": "from verbatim.credit.a import f",
        "credit/__init__.py": "from verbatim.credit import a, b",
        "credit/a.py": "def f():\n    from . import b",
        "credit/b.py": "import verbatim.filters.c",
        "filters/c.py": "if TYPE_CHECKING:\n    from verbatim.credit.a import f",
        "filters/d.py": "from .c import x",
    }
    assert circles(files) == [["credit.a", "credit.b", "filters.c"]]
    assert circles({**files, "filters/c.py": ""}) == []


def test_every_package_has_a_place_in_the_order():
    packages = {p.name.removesuffix(".py") for p in ROOT.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()}
    assert packages - {"__init__"} - set(RANK) == set()


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("trajectories/a.py", "def f():\n    from verbatim.types import Trajectory"),
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
        ("losses/a.py", "from .base import Loss"),
        ("losses/a.py", "from verbatim.losses.base import Loss"),
        ("cli/a.py", "from verbatim.doctor import explain"),
        ("environments/a.py", "from verbatim.tools.base import Tool"),
    ],
)
def test_a_right_import_is_let_through(file: str, source: str):
    assert [wrong(i) for i in imports_in(file, source)] == [False]


LIGHT = (
    "verbatim",
    "verbatim.config",
    "verbatim.cli.main",
    "verbatim.losses",
    "verbatim.environments",
    "verbatim.checkpoints",
    "verbatim.monitors",
    "verbatim.trajectories",
    "verbatim.credit",
    "verbatim.filters",
    "verbatim.run.entry",
)


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


LONGEST_MODULE, LONGEST_FUNCTION = 450, 60
"""Lines, docstrings included."""


def too_long(name: str, source: str) -> list[str]:
    """What of a module is longer than the limits."""
    functions = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    lines = {f"{name}:{f.lineno}: {f.name}": (f.end_lineno or f.lineno) - f.lineno + 1 for f in functions}
    long = [function for function, length in lines.items() if length > LONGEST_FUNCTION]
    return [*long, *([name] if len(source.splitlines()) > LONGEST_MODULE else [])]


def test_modules_and_functions_are_short():
    files = sorted(ROOT.rglob("*.py"))
    assert len(files) > 200
    assert [long for f in files for long in too_long(str(f.relative_to(ROOT)), f.read_text(encoding="utf-8"))] == []


def test_a_module_and_a_function_that_are_too_long_are_seen():
    function = "def f():\n" + "    x = 1\n" * LONGEST_FUNCTION
    assert too_long("a.py", function) == ["a.py:1: f"]
    assert too_long("a.py", "x = 1\n" * (LONGEST_MODULE + 1)) == ["a.py"]
    assert too_long("a.py", "x = 1\n" * LONGEST_MODULE) == []
