"""Typed, frozen records of a run's configuration file.

Input: TOML and command-line options. Output: frozen records, or a `UsageError` that says what to type instead.
Read first: `schema.py`. Imports `core`, and no torch.
"""

from verbatim.config.backends import Backend, find_backend, settings_for
from verbatim.config.components import ComponentTables, resolve
from verbatim.config.load import dump_config, load_config, make_config
from verbatim.config.schema import RunConfig
from verbatim.config.sections import BackendSettings
from verbatim.core.imports import import_object

__all__ = [
    "Backend",
    "BackendSettings",
    "ComponentTables",
    "RunConfig",
    "dump_config",
    "find_backend",
    "import_object",
    "load_config",
    "make_config",
    "resolve",
    "settings_for",
]
