"""Reads the configuration that is stored in a run's folder, finds its copies, and compares it with another one."""

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
from verbatim.core.redaction import redacted_at
from verbatim.logs.checkpoints.manifest import was_changed

CONFIG = "config.toml"


def load_stored_config(file: Path, load: Callable[[Path], RunConfig]) -> RunConfig:
    """What `load`, a call of `load_config`, reads from the file; where that is the damaged one of a run folder, the
    message says where a copy is.

    Raises:
        ConfigError: as `load_config`.
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
    """Path of the configuration in the newest checkpoint with a whole one; None if none has."""
    copies = sorted((path / "checkpoints").glob(f"step_*/{CONFIG}"), reverse=True)
    return next((copy for copy in copies if damage_of_config(copy) is None and not was_changed(copy)), None)


def damage_of_config(path: Path) -> str | None:
    """The damage of a stored configuration as a sentence, or None. Keys of other versions of Verbatim are no damage."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        return f"it cannot be read: {error.strerror or error}"
    except RecursionError:
        return "it is nested too deeply"
    except ValueError as error:
        return f"it is no TOML: {error}"
    return None if isinstance(document.get("model"), dict) else "it has no [model] table"


def damage_of_stored(path: Path) -> str | None:
    """The damage of a run's own configuration as a sentence, or None: also of one that was cut off between two keys,
    which is still TOML."""
    return damage_of_config(path) or _missing_end(path)


def _missing_end(path: Path) -> str | None:
    """Where a run's configuration, which is TOML, has only the beginning of its copy in the newest checkpoint."""
    copy = newest_copy(path.parent)
    if copy is None:
        return None
    own, whole = (file.read_text(encoding="utf-8").rstrip() for file in (path, copy))
    if own == whole or not whole.startswith(own):
        return None
    return f"it is cut off, after {len(own.encode()):,} of the {len(whole.encode()):,} bytes that {copy} has"


def stored_tables(path: Path) -> Mapping[str, Any] | None:
    """The tables of the configuration in a run's folder; of a damaged one those of its copy in the newest checkpoint.
    None where there is neither."""
    file: Path | None = path / CONFIG
    if file is not None and damage_of_stored(file) is not None:
        file = newest_copy(path)
    return None if file is None else tomllib.loads(file.read_text(encoding="utf-8"))


def changed_keys(config: RunConfig, toml: str) -> list[str]:
    """The keys whose values differ from those of a stored configuration, as "key: stored -> given", without secrets.

    Raises:
        UsageError: the stored one is no TOML.
    """
    try:
        return _differences(toml, dump_config(config))
    except ValueError as error:
        raise UsageError(
            f"the configuration of the run's other process is damaged ({error}); start both processes again"
        ) from None


def changed_since(copy: Path, toml: str) -> list[str]:
    """The keys whose values in a stored configuration differ from those of its copy, as "key: copy -> stored", without
    secrets."""
    return _differences(copy.read_text(encoding="utf-8"), toml)


def _differences(before: str, now: str) -> list[str]:
    stored, current = (dict(leaves(tomllib.loads(toml))) for toml in (before, now))
    return [
        f"{key}: {_shown(key, stored)} -> {_shown(key, current)}"
        for key in sorted({*stored, *current} - {"run_dir"})  # the folder is not part of the configuration
        if stored.get(key) != current.get(key)
    ]


def _shown(key: str, values: Mapping[str, Any]) -> str:
    """A value for messages and logs, without secrets."""
    return repr(redacted_at(key, values[key]) if key in values else "not set")
