"""Collects the tables of built-in components, which resolve the component names in a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verbatim.config import ComponentTables


def component_tables(environments: Mapping[str, Any] | None = None) -> ComponentTables:
    """All component tables of a run. `environments`, if given, replaces the table of bundled environments.

    Does not import torch: components import it when they are called.
    """
    from verbatim.algorithms.credit import ADVANTAGES
    from verbatim.algorithms.filters import FILTERS
    from verbatim.algorithms.losses import LOSSES
    from verbatim.core.trajectories import STRATEGIES
    from verbatim.environments import ENVIRONMENTS
    from verbatim.environments.shapes import check_arguments
    from verbatim.inference import SAMPLERS
    from verbatim.logs.monitors import MONITORS
    from verbatim.logs.monitors.alarms import ALARMS
    from verbatim.models.renderers import ALIASES, RENDERERS
    from verbatim.rollouts.backends import RUNNERS
    from verbatim.trainer.packing import PACKERS

    return ComponentTables(
        losses=LOSSES,
        advantages=ADVANTAGES,
        filters=FILTERS,
        strategies=STRATEGIES,
        environments=environments or ENVIRONMENTS,
        environment_arguments=check_arguments,
        monitors=MONITORS,
        alarms=ALARMS,
        packers=PACKERS,
        samplers=SAMPLERS,
        runners=RUNNERS,
        renderers=("auto", *RENDERERS, *ALIASES),
    )
