"""Imports objects by import path, with errors that say what to type, and checks which packages are installed."""

from __future__ import annotations

import contextlib
import difflib
import gc
import importlib
import importlib.util
import json
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from verbatim.core.ctrl_c import users_errors
from verbatim.core.errors import ComponentError, FormatError, UsageError
from verbatim.core.formats import content_of
from verbatim.core.known_imports import ours_for
from verbatim.core.texts import error_text, nearest

MODULE_FOLDERS = "module_folders.json"
"""A file in the run folder that lists the folders from which the run imports modules, other than the current
directory."""
_BESIDE: list[str] = []
"""Folders of the files given to `search_beside`."""
_FILES_IN: set[str] = set()
"""The folders of `_BESIDE` in which `find_file` has found something."""


def is_installed(package: str) -> bool:
    """True if a package can be imported; checked without importing it.

    A folder of this name in the current directory is not a package: wandb, for example, leaves a folder `wandb`, and
    Python accepts any folder as a namespace package, which has no origin.

    >>> is_installed("json"), is_installed("no_such_package")
    (True, False)
    """
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def refuse_without(*packages: str, extra: str, what: str) -> None:
    """Refuse to continue if packages of an extra are missing.

    Raises:
        UsageError: packages are not installed; the message names all of them, the feature that needs them and what to
            type.
    """
    missing = [package for package in packages if not is_installed(package)]
    if missing:
        which, are = ("the packages", "are") if missing[1:] else ("the package", "is")
        raise UsageError(
            f"{what} needs {which} {' and '.join(missing)}, which {are} not installed; type: "
            f"pip install 'verbatim-rl[{extra}]'"
        )


def import_without(package: str, unused: str) -> None:
    """Import `package` without the package `unused`, which `package` imports only for type hints, or for functions not
    called here. A later import of `unused` gets the real package. If other threads are running, which could import
    `unused` in the meantime, `unused` is imported normally.

    Example: `renderers` imports `openai`, which takes half a second, only to annotate a client.
    """
    if package in sys.modules or unused in sys.modules or threading.active_count() > 1:
        return
    stand_in = ModuleType(unused)
    stand_in.__getattr__ = lambda name: Any  # type: ignore[method-assign]
    sys.modules[unused] = stand_in
    try:
        importlib.import_module(package)
    finally:
        del sys.modules[unused]


@contextlib.contextmanager
def imports_that_stay() -> Iterator[None]:
    """Switch off garbage collection while the block imports. When the block ends, everything that exists is excluded
    from later collections. For commands only. Importing PyTorch and transformers creates a million permanent objects;
    scanning them again and again takes a quarter of the import's time."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def is_import_path(name: str) -> bool:
    """True for a name such as "my_module.MyMonitor" or "my_module:MyMonitor"."""
    return "." in name or ":" in name


def import_object(import_path: str) -> Any:
    """The object with the import path `module.name` (or `module:name`). Modules are also found in the current
    directory, and in the folders of files given to `search_beside`.

    Raises:
        ComponentError: the module or name does not exist, or the module raises an error while it is imported.
    """
    module_name, _, attribute = import_path.replace(":", ".").rpartition(".")
    if not import_path:
        raise ComponentError("import_path is empty; expected module.name, for example my_module.MyClass")
    if not module_name:
        raise ComponentError(
            f"import_path {import_path!r} names a module only; expected module.name, for example "
            f"{import_path}.MyClass or {import_path}.my_function"
        )
    here = _here()
    try:
        with users_errors(
            lambda error: ComponentError(f"importing {module_name} failed: {told(error)}"), ModuleNotFoundError
        ):
            module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            # The module was found, but one of its own imports is missing.
            install = (
                f"; install the package that provides {error.name} with this Python's pip: {sys.executable} -m pip "
                "install PACKAGE (the package may have another name than the module)"
            )
            instead = install if ours_for(f"import {error.name}") is None else ""
            raise ComponentError(f"importing {module_name} failed: {told(error)}{instead}") from error
        if ours := ours_for(f"import {module_name}.{attribute}"):
            raise ComponentError(f"there is no module {error.name!r}; {ours}") from error
        raise ComponentError(
            f"there is no module {error.name!r}; looked in the current directory, {here}{_beside()}, and in the "
            f"installed packages{_where_else(module_name, attribute)}"
        ) from error
    try:
        return getattr(module, attribute)
    except AttributeError:
        names = [name for name in vars(module) if not name.startswith("_")]
        own = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module_name]
        hint = nearest(attribute, names) or (f"; it has {', '.join(own[:8])}" if own else "")
        if attribute == "py":
            hint = f"; an import_path is the module without .py, followed by the name: {module_name}.MyClass"
        raise ComponentError(
            f"{module_name} ({getattr(module, '__file__', 'built in')}) has no {attribute!r}{hint}"
        ) from None


def search_beside(file: Path) -> None:
    """Make the modules in the folder of a file importable, with lower priority than the current directory: a
    configuration names environments and plug-ins that are next to its file. Child processes find these modules too.

    Raises:
        UsageError: the run's stored list of folders cannot be read.
    """
    here = _here()
    for folder in (*_remembered(file.parent / MODULE_FOLDERS), str(file.resolve().parent)):
        if folder not in sys.path:
            sys.path.insert(sys.path.index(here) + 1, folder)
        if folder != here and folder not in _BESIDE:
            _BESIDE.append(folder)


def _remembered(stored: Path) -> list[str]:
    if not stored.is_file():
        return []
    try:
        folders = content_of(MODULE_FOLDERS, json.loads(stored.read_text(encoding="utf-8")), stored).get("folders")
    except FormatError:
        raise
    except (ValueError, RecursionError) as error:  # the file is not JSON, or not UTF-8
        folders, why = None, f" ({error})"
    else:
        why = ""
    if not isinstance(folders, list) or not all(isinstance(folder, str) for folder in folders):
        raise UsageError(
            f"{stored} is damaged{why}: expected the folders that hold the run's modules, "
            '{"format": 1, "folders": ["/home/me/tasks"]}; correct it, or remove it and run the command in '
            "the folder that holds the modules"
        )
    return folders


def folders_beside() -> tuple[str, ...]:
    """The folders of `search_beside` (except the current directory) from which a module was imported or `find_file`
    returned a file."""
    # Our own modules do not count: the folder of a bundled recipe may be in `_BESIDE` as well.
    theirs = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] != "verbatim"]
    files = [getattr(module, "__file__", None) for module in theirs]
    used = {os.path.dirname(file) for file in files if isinstance(file, str)} | _FILES_IN
    return tuple(folder for folder in _BESIDE if folder in used)


def find_file(path: str | Path) -> Path | None:
    """The path of a file or folder that a configuration names. It is searched for in the current directory, and then
    next to the files given to `search_beside`; None if it is in none of these places. The run remembers the folder in
    which the path is found, as it remembers the folders of imported modules."""
    given = Path(path)
    for folder in ("", *([] if given.is_absolute() else _BESIDE)):
        if (found := Path(folder) / given).exists():
            if folder:
                _FILES_IN.add(folder)
            return found
    return None


def _here() -> str:
    """The current directory, added to `sys.path` so that its modules can be imported, as with `python -m`."""
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    return here


def _beside() -> str:
    return "".join(f", next to the configuration, {folder}" for folder in _BESIDE[-1:])


def told(error: BaseException) -> str:
    """What a user's code raised, and where: `SyntaxError: invalid syntax (/tasks/mine.py:3: def f(:)`.

    Frames of Python's own import machinery are skipped, because they do not help to find the mistake. If the code
    failed to import another framework's name, the text also says what to import instead.
    """
    if isinstance(error, SyntaxError) and error.filename:
        line = f": {error.text.strip()}" if error.text else ""
        return f"{type(error).__name__}: {error.msg} ({error.filename}:{error.lineno}{line})"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith("<frozen")]
    message = error_text(error)
    if not frames:
        return message
    ours = ours_for(frames[-1].line or "") if isinstance(error, ModuleNotFoundError) else None
    return f"{message} ({frames[-1].filename}:{frames[-1].lineno}){f'; {ours}' if ours else ''}"


def _where_else(module_name: str, attribute: str) -> str:
    if module_name.endswith(".py"):
        return f"; write the module without .py: {module_name[:-3]}.{attribute}"
    top = module_name.split(".", maxsplit=1)[0]
    here = [path.stem for folder in (".", *_BESIDE) for path in sorted(Path(folder).glob("*.py"))]
    if near := difflib.get_close_matches(top, here, n=1):
        return f'; did you mean "{near[0]}.{attribute}"?'
    return f"; run the command in the folder that holds {top}, or install it"


def child_environment() -> dict[str, str]:
    """Environment variables for a Python process that can import the same modules as this process: `PYTHONPATH` keeps
    its entries, and the entries of `sys.path` are added after them."""
    own = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(filter(None, [*own, *sys.path])))}
