"""Reads the configuration stored in a run folder, finds its copies in checkpoints, and compares configurations."""

from __future__ import annotations

import shlex
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from verbatim.config import dump_config
from verbatim.config.key_locations import leaves
from verbatim.config.schema import RunConfig
from verbatim.core.errors import ConfigError, UsageError
from verbatim.core.machine_faults import is_machine_fault
from verbatim.core.redaction import redacted_at
from verbatim.logs.checkpoints.manifest import was_changed

CONFIG = "config.toml"


def load_stored_config(file: Path, load: Callable[[Path], RunConfig]) -> RunConfig:
    """Load a configuration. If it is the damaged file of a run folder, the error has the command that restores the
    file.

    Args:
        file: The configuration file.
        load: Loads a file with `load_config`.

    Raises:
        ConfigError: as for `load_config`, or the file of a run folder is truncated.
    """
    try:
        loaded = load(file)
        if file.name != CONFIG or (cut := _missing_end(file)) is None:
            return loaded
        raise ConfigError(f"{file} is damaged: {cut}")
    except ConfigError as error:
        copy = newest_copy(file.parent) if file.name == CONFIG else None
        if copy is None:
            raise
        try:
            load(copy)
        except ConfigError:
            raise error from None
        cp = shlex.join(["cp", str(copy), str(file)])
        raise ConfigError(f"{error}\nThe newest checkpoint has a copy of this file; to restore it:  {cp}") from None


def newest_copy(path: Path) -> Path | None:
    """The undamaged copy of the configuration in the newest checkpoint that has one; None if there is none."""
    copies = sorted((path / "checkpoints").glob(f"step_*/{CONFIG}"), reverse=True)
    return next((copy for copy in copies if damage_of_config(copy) is None and not was_changed(copy)), None)


def damage_of_config(path: Path) -> str | None:
    """Describe the damage of a stored configuration; None if it is intact. Keys of other Verbatim versions are not
    damage."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        if is_machine_fault(error):  # file descriptors or memory ran out, so the file may be intact
            raise
        return f"it cannot be read: {error.strerror or error}"
    except RecursionError:
        return "it is nested too deeply"
    except ValueError as error:
        return f"it is not valid TOML: {error}"
    return None if isinstance(document.get("model"), dict) else "it has no [model] table"


def damage_of_stored(path: Path) -> str | None:
    """Describe the damage of a run folder's configuration; None if it is intact. A file that is truncated between two
    keys is still valid TOML, so the file is also compared with its copy."""
    return damage_of_config(path) or _missing_end(path)


def _missing_end(path: Path) -> str | None:
    """Describe the damage if a run folder's configuration is only the beginning of its copy in the newest checkpoint;
    None otherwise."""
    copy = newest_copy(path.parent)
    if copy is None:
        return None
    own, whole = (file.read_text(encoding="utf-8").rstrip() for file in (path, copy))
    if own == whole or not whole.startswith(own):
        return None
    return f"it is cut off, after {len(own.encode()):,} of the {len(whole.encode()):,} bytes that {copy} has"


def stored_tables(path: Path) -> Mapping[str, Any] | None:
    """Return the configuration in a run folder as TOML tables. If the configuration is damaged, return its copy in the
    newest checkpoint; if there is no copy either, return None."""
    file: Path | None = path / CONFIG
    if file is not None and damage_of_stored(file) is not None:
        file = newest_copy(path)
    return None if file is None else tomllib.loads(file.read_text(encoding="utf-8"))


def changed_keys(config: RunConfig, toml: str) -> list[str]:
    """The keys whose values differ from a stored configuration, as "key: stored -> given", without secrets.

    Raises:
        UsageError: the stored configuration is not valid TOML.
    """
    try:
        return _differences(toml, dump_config(config))
    except ValueError as error:
        raise UsageError(
            f"the configuration of the run's other process is damaged ({error}); start both processes again"
        ) from None


def changed_since(copy: Path, toml: str) -> list[str]:
    """The keys whose values differ between a stored configuration and its copy, as "key: copy -> stored", without
    secrets."""
    return _differences(copy.read_text(encoding="utf-8"), toml)


def _differences(before: str, now: str) -> list[str]:
    stored, current = (dict(leaves(tomllib.loads(toml))) for toml in (before, now))
    return [
        f"{key}: {_shown(key, stored)} -> {_shown(key, current)}"
        for key in sorted({*stored, *current} - {"run_dir"})  # a moved run folder is not a change
        if stored.get(key) != current.get(key)
    ]


def _shown(key: str, values: Mapping[str, Any]) -> str:
    """The text that messages and logs show for the value of a key, without secrets."""
    return repr(redacted_at(key, values[key]) if key in values else "not set")
