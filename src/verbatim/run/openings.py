"""Looks at the opening prompts of a run's examples, for `verbatim config`."""

from __future__ import annotations

from collections.abc import Iterator

from verbatim.config.schema import RunConfig
from verbatim.core.errors import ConfigError
from verbatim.environments.resolve import examples_of
from verbatim.models.renderers.base import Renderer
from verbatim.rollouts.main_loop import run_main
from verbatim.rollouts.openings import measure_openings
from verbatim.run.environments import Environments


def look_at_openings(config: RunConfig, environments: Environments, renderer: Renderer | None) -> Iterator[str]:
    """A sentence for each split of an environment with opening prompts that leave no room, or that were not measured.

    Args:
        config: The run's configuration.
        environments: Made.
        renderer: Of the run's model; None = a model that is built with the run has none yet, and tokens are estimated.

    Raises:
        ConfigError: no example of a split leaves any room.
        ModelError: the model's chat format cannot show an episode's tools.
    """
    seq_len = config.orchestrator.seq_len
    for split, made in (("train", environments.train), ("eval", environments.eval)):
        for label, (_, environment) in made.items():
            examples = examples_of(environment, label, split)
            openings = run_main(measure_openings(environment, examples, seq_len=seq_len, renderer=renderer))
            where = f'environment {label!r}, split "{split}"'
            if openings.none_fits:
                raise ConfigError(f"{where}: {openings.found}; raise orchestrator.seq_len, or shorten the prompts")
            if openings.found is not None:
                yield (
                    f"{where}: {openings.found}; nothing is sampled of them, and their rollouts fail as no_turns: "
                    "raise orchestrator.seq_len, shorten the prompts, or leave the examples out"
                )
            if openings.left_out is not None:
                yield f"{where}: {openings.left_out}"
