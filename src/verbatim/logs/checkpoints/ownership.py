"""Proves that a folder is a run's, so that nothing of anybody else is ever removed or replaced.

A run begins in an empty folder, and first writes `verbatim_run.json` into it:

```
{"format": 1, "id": "5f0c...", "names": ["alarms.jsonl", "best", "checkpoints", "config.toml", ...]}
```

`names` are the files and folders that a run makes there; no other is ever removed. A folder that has something in it
and no such file is not touched.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from verbatim.core.disk import make_folder, open_regular, sync
from verbatim.core.errors import FormatError, UsageError
from verbatim.core.formats import content_of, stamped
from verbatim.core.texts import first_of
from verbatim.logs.checkpoints.lock import ANOTHER_FOLDER
from verbatim.logs.checkpoints.origin import FORKING

MARKER = "verbatim_run.json"
NAMES = frozenset({
    ".alarms.jsonl.tmp", ".best.tmp", ".config.toml.orchestrator.tmp", ".config.toml.trainer.tmp",
    ".final.partial", ".forking", ".learning_curve.png.tmp", ".metrics.jsonl.tmp",
    ".model.partial", ".summary.json.tmp", ".trainer_state", ".warm_start.partial",
    "alarms.jsonl", "best", "checkpoints", "config.toml", "evaluations", "exchange", "final",
    "forked_from.json", "learning_curve.png", "logs", "metrics.jsonl", "model", "module_folders.json",
    "orchestrator.lock", "precision.json", "states", "summary.json", "summary.txt", "trainer.lock", "trajectories",
    "warm_start", "weights",
})  # fmt: skip
"""What a run makes in its folder."""
_OF_THE_DISK = frozenset({"lost+found"})
"""What a file system puts into its root."""
OF_A_BEGINNING = frozenset({MARKER, "orchestrator.lock", "trainer.lock", "logs", *_OF_THE_DISK})
"""What stands in the folder of a run before its configuration does."""
_HALF_WRITTEN = re.compile(rf"\.{re.escape(MARKER)}\.[0-9a-f]{{16}}")
"""The name of a marker while it is written."""
_MOST_NAMED = 3
_MOST_BYTES = 1 << 16


def claim(path: Path, but: Iterable[str] = ()) -> None:
    """Make a folder a run's: it is created, or is empty, or is a run's already.

    Args:
        path: The folder.
        but: Names that an empty folder may have: the caller's lock.

    Raises:
        UsageError: it holds something and is no run's, or it cannot be written to.
    """
    passed = {*_OF_THE_DISK, *but}
    with _naming(path):
        make_folder(path)
        problem = _problem(path)
        if problem is not None:
            there = sorted(
                name for name in os.listdir(path) if name not in passed and not _HALF_WRITTEN.fullmatch(name)
            )
            if not there:
                _write(path)
            elif (problem := _problem(path)) is not None:  # another process of this run may have begun meanwhile
                raise UsageError(
                    f"{path} is not empty, and nothing proves that a run made what is there ({problem}); "
                    f"found {first_of(there, _MOST_NAMED)}. A new run takes an empty folder; {ANOTHER_FOLDER}"
                )
        _probe(path)


def is_claimed(path: Path) -> bool:
    """Whether a folder is proven to be a run's."""
    return _problem(path) is None


def refuse_what_is_not_of_a_beginning(path: Path) -> None:
    """Refuse a folder with a run's marker and no stored configuration that holds more than a run writes before that:
    the run was killed at its start, or the marker was copied, and somebody else has put the rest there.

    Raises:
        UsageError: names what is there.
    """
    if not is_claimed(path) or (path / FORKING).exists():  # a fork lists what it writes
        return
    there = sorted(
        name
        for name in os.listdir(path)
        if not (name in OF_A_BEGINNING or (name in NAMES and name[0] == ".") or _HALF_WRITTEN.fullmatch(name))
    )
    if there:
        raise UsageError(
            f"{path} belongs to a run that never began, and holds {first_of(there, _MOST_NAMED)}, which "
            f"that run has not written; move it to another place, or {ANOTHER_FOLDER}"
        )


def unclaim(path: Path) -> None:
    """Take back `claim`: nothing else was written into the folder."""
    (path / MARKER).unlink(missing_ok=True)


def require_ours(path: Path) -> None:
    """Refuse a folder that no run has made.

    Raises:
        UsageError: says what is missing.
    """
    problem = _problem(path)
    if problem is not None:
        raise UsageError(
            f"nothing proves that a run made {path}: {problem}. Nothing was changed; to begin a new run "
            f"at one of its checkpoints: --fork {path} --run-dir FOLDER"
        )
    with _naming(path):
        _probe(path)


def require_writable(path: Path) -> None:
    """Create a folder for runs, and check early that it can be written to.

    Raises:
        UsageError: it cannot.
    """
    with _naming(path):
        make_folder(path)
        _probe(path)


def remove_from(folder: Path, names: Iterable[str]) -> None:
    """Remove these files and folders of a run's folder, as far as they are there."""
    for name in names:
        assert name in NAMES, name
        path = folder / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def remove_run(folder: Path) -> None:
    """Remove what the run has made, and the folder, if nothing else is in it."""
    remove_from(folder, sorted(NAMES))
    (folder / MARKER).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.rmdir()


def _problem(path: Path) -> str | None:
    """Why this folder is not proven to be a run's."""
    marker = path / MARKER
    try:
        with open_regular(marker) as file:
            text = file.read(_MOST_BYTES)
    except FileNotFoundError:
        return f"there is no {MARKER}"
    except OSError as error:
        return f"{marker} cannot be read: {error.strerror}"
    try:
        found = content_of(MARKER, json.loads(text), marker)
        is_ours = len(bytes.fromhex(found["id"])) == 16 and {*map(str, found["names"])} <= NAMES
    except FormatError as error:
        return str(error)
    except (ValueError, TypeError, KeyError, RecursionError):
        is_ours = False
    return None if is_ours else f"{marker} is damaged"


def _write(path: Path) -> None:
    """Two processes of one run may do so at once: both write the same, but for the id."""
    content = stamped(MARKER, {"id": secrets.token_hex(16), "names": sorted(NAMES)})
    temporary = path / f".{MARKER}.{secrets.token_hex(8)}"
    try:
        with temporary.open("x", encoding="ascii") as file:
            json.dump(content, file, indent=2)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path / MARKER)
    finally:
        temporary.unlink(missing_ok=True)
    sync(path)


def _probe(path: Path) -> None:
    """Write to a file without a name: an empty one can be written to a full disk."""
    with tempfile.TemporaryFile(dir=path) as probe:
        probe.write(bytes(1 << 16))


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"the run folder {path} cannot be written to: {error.strerror} ({error.filename or path}); {ANOTHER_FOLDER}"
        ) from None
