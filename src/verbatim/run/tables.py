"""The built-in components that the names in a configuration are looked up in."""

from __future__ import annotations

from verbatim.config import ComponentTables


def component_tables() -> ComponentTables:
    """Every table of a run. Imports no torch: components load it when they are called."""
    from verbatim.credit import ADVANTAGES
    from verbatim.environments import ENVIRONMENTS
    from verbatim.filters import FILTERS
    from verbatim.losses import LOSSES
    from verbatim.monitors import MONITORS
    from verbatim.renderers import ALIASES, RENDERERS
    from verbatim.trajectories import STRATEGIES

    return ComponentTables(
        losses=LOSSES, advantages=ADVANTAGES, filters=FILTERS, strategies=STRATEGIES, environments=ENVIRONMENTS,
        monitors=MONITORS, renderers=("auto", *RENDERERS, *ALIASES),
    )  # fmt: skip
