"""The import direction of the packages, read off their syntax trees, and what importing the light ones loads."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

import verbatim

ROOT = Path(verbatim.__file__).parent
TESTS = Path(__file__).parents[1]

ORDER = (
    "core",
    "config",
    "models",
    "environments",
    "inference",
    "rollouts",
    "algorithms",
    "trainer",
    "logs",
    "run",
    "inspection",
    "cli",
)
"""A package imports from those before it, never from those behind. The command starts everything, so it is last."""

RANK = {package: rank for rank, package in enumerate(ORDER)}


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


def test_modules_of_tests_have_names_of_their_own():
    """They are imported by these names, whatever their folder."""
    names = Counter(path.name for path in TESTS.rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


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
        "core/types.py": "from verbatim.config.a import f",
        "config/__init__.py": "from verbatim.config import a, b",
        "config/a.py": "def f():\n    from . import b",
        "config/b.py": "import verbatim.models.c",
        "models/c.py": "if TYPE_CHECKING:\n    from verbatim.config.a import f",
        "models/d.py": "from .c import x",
    }
    assert circles(files) == [["config.a", "config.b", "models.c"]]
    assert circles({**files, "models/c.py": ""}) == []


def test_every_package_has_a_place_in_the_order():
    packages = {p.name.removesuffix(".py") for p in ROOT.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()}
    assert packages - {"__init__"} == set(ORDER)


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("core/trajectories/a.py", "def f():\n    from verbatim.config.schema import RunConfig"),
        ("config/load.py", "def f():\n    import verbatim.algorithms.losses.loss"),
        ("trainer/a.py", "from verbatim import run"),
        ("run/orchestrator/a.py", "if TYPE_CHECKING:\n    from verbatim.inspection.plan import predict"),
        ("environments/a.py", "from ..inference import base"),
        ("algorithms/losses/a.py", "from ... import trainer"),
        ("core/errors.py", "from verbatim.models import loading"),
    ],
)
def test_a_wrong_import_is_seen_in_every_notation(file: str, source: str):
    assert [wrong(i) for i in imports_in(file, source)] == [True]


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("algorithms/losses/a.py", "from .base import Loss"),
        ("algorithms/losses/a.py", "from verbatim.algorithms.credit.advantage import Advantage"),
        ("cli/a.py", "from verbatim.inspection.doctor import explain"),
        ("environments/a.py", "from verbatim.core.types import Turn"),
    ],
)
def test_a_right_import_is_let_through(file: str, source: str):
    assert [wrong(i) for i in imports_in(file, source)] == [False]


@pytest.mark.parametrize("page", ["README.md", "docs/overview.md"])
def test_the_maps_have_every_package_in_the_order_of_imports(page: str):
    text = (TESTS.parent / page).read_text(encoding="utf-8")
    block = text[text.index("## What is where") :].split("```")[1]
    assert [
        name for name in re.findall(r"^(?:  )?(\w+)/ ", block, re.M) if name not in ("recipes", "examples", "tests")
    ] == list(ORDER)


def test_the_docstring_of_each_package_says_where_to_begin_and_what_it_imports():
    for package in ORDER:
        said = ast.get_docstring(ast.parse((ROOT / package / "__init__.py").read_text(encoding="utf-8"))) or ""
        read_first, _, imported = said[said.index("Read first") :].partition("Imports ")
        files = re.findall(r"`([\w/]+\.py)`", read_first)
        assert files and [f for f in files if not (ROOT / package / f).is_file()] == [], package
        names = re.findall(r"`(\w+)`", imported.partition(".")[0])
        named = set(ORDER) - {package, *names} if imported.startswith("all ") else set(names)
        sources = sorted((ROOT / package).rglob("*.py"))
        found = [i for path in sources for i in imports_in(path.relative_to(ROOT).as_posix(), path.read_text())]
        assert {i.package for i in found} - {package} == named, package


VLLM = "inference.vllm"
DOORS = {
    "inference/elsewhere.py",
    "inference/weight_group.py",
}
"""Modules that hand on what lies with vLLM's plugin because vLLM's processes run it, and that has nothing of vLLM."""
TABLES = {"inference/backends.py"}
"""Tables of backends: they name functions of vLLM's package, and import none."""


def knows_vllm(file: str, source: str) -> list[str]:
    """What a module outside of vLLM's package imports from it, names in it, or imports of vLLM itself."""
    if file.startswith("inference/vllm/") or file in DOORS:
        return []
    found = [str(i) for i in imports_in(file, source) if f"{i.module}.".startswith(f"{VLLM}.")]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and file not in TABLES:
            found += [f"{file}:{node.lineno}: names it"] if node.value.startswith(f"verbatim.{VLLM}") else []
        modules = [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
        modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        found += [f"{file}:{node.lineno}: imports {m}" for m in modules if m and m.split(".")[0] == "vllm"]
    return found


def test_only_its_package_knows_vllm():
    files = {path.relative_to(ROOT).as_posix(): path.read_text() for path in sources()}
    assert [found for file, source in files.items() for found in knows_vllm(file, source)] == []
    assert files.keys() >= DOORS | TABLES


@pytest.mark.parametrize(
    ("file", "source", "number"),
    [
        ("run/a.py", "def f():\n    from verbatim.inference.vllm.settings import VllmSettings", 1),
        ("inference/pool/a.py", "from ..vllm import settings", 1),
        ("cli/a.py", "import_object('verbatim.inference.vllm.install:install_vllm')", 1),
        ("models/a.py", "import vllm.config\nfrom vllm import LLM", 2),
        ("inference/backends.py", "A = 'verbatim.inference.vllm.backend:b'\nimport verbatim.inference.vllm.backend", 1),
        ("inference/vllm/a.py", "import vllm\nfrom verbatim.inference.vllm import settings", 0),
    ],
)
def test_whoever_knows_vllm_is_seen(file: str, source: str, number: int):
    assert len(knows_vllm(file, source)) == number


MAKES = {
    *("attrgetter", "bool", "dict", "dict.fromkeys", "enumerate", "field", "float", "frozenset", "int", "len", "list"),
    *("map", "max", "min", "object", "ord", "range", "set", "slice", "sorted", "str", "tuple", "type", "zip"),
    *("dataclasses.dataclass", "dataclasses.field", "dataclasses.fields", "dataclass", "dir", "fields", "getattr"),
    *("functools.cache", "functools.lru_cache", "functools.partial", "lru_cache", "partial", "operator.attrgetter"),
    *("AfterValidator", "BeforeValidator", "ConfigDict", "ContextVar", "Field", "MappingProxyType", "NormalDist"),
    *("ParamSpec", "Path", "TypeAdapter", "TypeVar", "field_validator", "get_args", "model_validator", "timedelta"),
    *("itertools.count", "json.JSONDecoder", "json.JSONEncoder", "json.dumps", "logging.getLogger", "marshal.dumps"),
    *("np.dtype", "np.finfo", "np.float32", "np.frombuffer", "np.iinfo", "np.uint64", "np.zeros", "re.compile"),
    *("re.escape", "reprlib.Repr", "struct.Struct", "threading.Lock", "threading.RLock", "weakref.WeakKeyDictionary"),
    *("torch.device", "torch.inference_mode", "torch.no_grad", "pa", "LlamaConfig"),
}
"""What of other packages a module may call while it is imported: it makes a value, and nothing outside changes."""
READS = {"CSource.read": "the text that fits the structures of this module, which an upgrade may change later"}
"""What reads files then, and why."""


def work_at_import(file: str, source: str) -> list[str]:
    """Calls that importing a module makes, of functions of other packages that are not known to make values, and what
    starts, opens or registers something by a method of our own."""
    tree = ast.parse(source)
    foreign = {"open", "print", "exec", "eval", "input", "__import__", "setattr", "delattr"}
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = node.module if isinstance(node, ast.ImportFrom) else None
            if module is None or not (node.level or module.split(".")[0] == "verbatim"):  # type: ignore[union-attr]
                foreign |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    found = []
    for name, line in _called_at_import(tree):
        root, method = name.split(".")[0], name.rpartition(".")[2]
        if method in ("register", "read", "read_text", "read_bytes", "start") or "environ" in name:
            does_work = name.removeprefix("native.") not in READS
        else:
            does_work = root in foreign and not {root, name, name.partition("(")[0]} & MAKES
        if does_work:
            found.append(f"{file}:{line}: calls {name}")
    return found


def _called_at_import(node: ast.AST) -> Iterator[tuple[str, int]]:
    """Names and lines of calls outside of functions, decorators and defaults included."""
    if isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'":
        return
    if isinstance(node, ast.Lambda):
        return
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        for outside in (*node.decorator_list, *node.args.defaults, *filter(None, node.args.kw_defaults)):
            yield from _called_at_import(outside)
        return
    if isinstance(node, ast.Call):
        yield ast.unparse(node.func), node.lineno
    if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "os.environ":
        yield "os.environ", node.lineno
    for child in ast.iter_child_nodes(node):
        yield from _called_at_import(child)


def test_importing_a_module_does_no_work():
    """vLLM's plugin, templates and the recipe of an agent's program are no modules of ours: others start them."""
    files = {path.relative_to(ROOT).as_posix(): path.read_text() for path in sources()}
    ours = {file: text for file, text in files.items() if not re.search("plugin/|templates/|program_agent", file)}
    assert [found for file, source in ours.items() for found in work_at_import(file, source)] == []


def test_work_at_import_is_seen():
    source = """
        import os, atexit, re, threading
        from pathlib import Path
        from verbatim.core.disk import Store
        WORD = re.compile("a" + os.environ["HOME"] + os.environ.get("A", ""))
        TEXT = Path(__file__).read_text()
        atexit.register(print)
        class A:
            thread = threading.Thread(target=print)
            def f(self, now=os.getpid()):
                return open("x")
        Store().start()
        later = lambda: os.getcwd()
        if __name__ == "__main__":
            os.getcwd()
    """
    assert [found.partition("calls ")[2] for found in work_at_import("a.py", textwrap.dedent(source))] == [
        "os.environ",
        "os.environ.get",
        "Path(__file__).read_text",
        "atexit.register",
        "threading.Thread",
        "os.getpid",
        "Store().start",
    ]


LIGHT = (
    "verbatim",
    "verbatim.config",
    "verbatim.cli.main",
    "verbatim.algorithms.losses",
    "verbatim.environments",
    "verbatim.logs.checkpoints",
    "verbatim.logs.monitors",
    "verbatim.core.trajectories",
    "verbatim.algorithms.credit",
    "verbatim.algorithms.filters",
    "verbatim.run.entry",
)


@pytest.mark.realtime
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


LONGEST_MODULE, LONGEST_FUNCTION = 480, 72
"""Lines as the formatter writes them: of a module with its docstrings, of a function behind its docstring."""


def too_long(name: str, source: str) -> list[str]:
    """What of a module is longer than the limits."""
    functions = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    long = [f"{name}:{f.lineno}: {f.name}" for f in functions if _length(f) > LONGEST_FUNCTION]
    return [*long, *([name] if len(source.splitlines()) > LONGEST_MODULE else [])]


def _length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    first = function.body[1:2] if ast.get_docstring(function) else function.body[:1]
    return (function.end_lineno or 0) - first[0].lineno + 1 if first else 0


def test_modules_and_functions_are_short():
    files = sorted(ROOT.rglob("*.py"))
    assert len(files) > 200
    assert [long for f in files for long in too_long(str(f.relative_to(ROOT)), f.read_text(encoding="utf-8"))] == []


def test_a_module_and_a_function_that_are_too_long_are_seen():
    body = "    x = 1\n" * LONGEST_FUNCTION
    assert too_long("a.py", f"def f(\n    a,\n):\n    'Says.'\n{body}") == []
    assert too_long("a.py", f"def f():\n    x = 1\n{body}") == ["a.py:1: f"]
    assert too_long("a.py", "x = 1\n" * (LONGEST_MODULE + 1)) == ["a.py"]
    assert too_long("a.py", "x = 1\n" * LONGEST_MODULE) == []
