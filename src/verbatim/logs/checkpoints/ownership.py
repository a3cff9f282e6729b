"""Proves that a folder belongs to a run, so that other people's files are never removed or replaced.

A run begins in an empty folder, and first of all writes a marker, `verbatim_run.json`, into it:

```
{"format": 1, "id": "5f0c...", "names": ["alarms.jsonl", "best", "checkpoints", "config.toml", ...]}
```

`names` are the files and folders that a run creates there; nothing else is ever removed. A folder that is not empty and
has no marker is not touched.
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
    ".model.partial", ".module_folders.json.tmp", ".precision.json.tmp", ".summary.json.tmp", ".trainer_state",
    ".warm_start.partial",
    "alarms.jsonl", "best", "checkpoints", "config.toml", "evaluations", "exchange", "final",
    "forked_from.json", "learning_curve.png", "logs", "metrics.jsonl", "model", "module_folders.json",
    "orchestrator.lock", "precision.json", "states", "summary.json", "summary.txt", "trainer.lock", "trajectories",
    "warm_start", "weights",
})  # fmt: skip
"""Files and folders that a run creates in its folder."""
_OF_THE_DISK = frozenset({"lost+found"})
"""Entries that a file system creates in its root. They are ignored, so that a newly mounted disk counts as empty."""
OF_A_BEGINNING = frozenset({MARKER, "orchestrator.lock", "trainer.lock", "logs", *_OF_THE_DISK})
"""Entries of a run folder that may exist before its configuration is stored."""
_HALF_WRITTEN = re.compile(rf"\.{re.escape(MARKER)}\.[0-9a-f]{{16}}")
"""Matches the name of a marker while it is being written."""
_MOST_NAMED = 3
"""Maximum number of unexpected files that an error names."""
_MOST_BYTES = 1 << 16
"""Maximum bytes to read of a marker; a longer file is not valid."""


def claim(path: Path, but: Iterable[str] = ()) -> None:
    """Mark a folder as belonging to a run. The folder is created if missing; otherwise it must be empty or already
    marked.

    Args:
        path: The folder.
        but: Names to ignore when checking that the folder is empty, such as the caller's lock.

    Raises:
        UsageError: the folder is neither empty nor marked, or cannot be written to.
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
            elif (problem := _problem(path)) is not None:  # check again: another process may have marked it meanwhile
                raise UsageError(
                    f"{path} is not empty, and nothing proves that a run made what is there ({problem}); "
                    f"found {first_of(there, _MOST_NAMED)}. A new run takes an empty folder; {ANOTHER_FOLDER}"
                )
        _probe(path)


def is_claimed(path: Path) -> bool:
    """True if a folder has a valid marker."""
    return _problem(path) is None


def refuse_what_is_not_of_a_beginning(path: Path) -> None:
    """Refuse a folder that has a marker and no stored configuration, but more files than a run writes before its
    configuration. Someone else has added these files, after a run was killed at its start or the marker was copied.

    Raises:
        UsageError: the folder has such files; the message names them.
    """
    if not is_claimed(path) or (path / FORKING).exists():  # a fork lists the files that it writes
        return
    there = sorted(
        name
        for name in os.listdir(path)
        if not (name in OF_A_BEGINNING or (name in NAMES and name[0] == ".") or _HALF_WRITTEN.fullmatch(name))
    )
    if there:
        raise UsageError(
            f"{path} belongs to a run that never began, and contains {first_of(there, _MOST_NAMED)}, which "
            f"that run did not write; move it elsewhere, or {ANOTHER_FOLDER}"
        )


def unclaim(path: Path) -> None:
    """Undo `claim` for a folder into which nothing else was written."""
    (path / MARKER).unlink(missing_ok=True)


def require_ours(path: Path) -> None:
    """Refuse a folder without a valid marker.

    Raises:
        UsageError: there is no valid marker; the message has the reason.
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
        UsageError: the folder cannot be created or written to.
    """
    with _naming(path):
        make_folder(path)
        _probe(path)


def remove_from(folder: Path, names: Iterable[str]) -> None:
    """Remove these files and folders from a run folder. Missing files and folders are ignored."""
    for name in names:
        assert name in NAMES, name
        path = folder / name
        if path.is_dir() and not path.is_symlink():  # never follow a link out of the folder
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def remove_run(folder: Path) -> None:
    """Remove all files of a run, and its folder if that is then empty."""
    remove_from(folder, sorted(NAMES))
    (folder / MARKER).unlink(missing_ok=True)  # last, so that if this is interrupted, the rest still belongs to a run
    with contextlib.suppress(OSError):
        folder.rmdir()


def _problem(path: Path) -> str | None:
    """The reason why a folder has no valid marker; None if it has a valid marker."""
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
    """Write the marker. If both processes of a run write it at the same time, the first marker stays, because a hard
    link, unlike a rename, does not replace an existing file."""
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
    """Check that the folder can be written to. Some bytes are written, because an empty file can be created even on a
    full disk."""
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
