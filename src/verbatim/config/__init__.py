"""TOML files and command-line overrides to frozen, typed configurations. Importing this imports no torch."""

from verbatim.config.components import ComponentTables, import_object, resolve
from verbatim.config.load import dump_config, load_config, make_config
from verbatim.config.schema import RunConfig

__all__ = ["ComponentTables", "RunConfig", "dump_config", "import_object", "load_config", "make_config", "resolve"]
