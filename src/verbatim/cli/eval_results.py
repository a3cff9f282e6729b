"""Collects the results of `verbatim eval`: tables for the terminal, JSON, lines per example, and a report."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rich.console import Console
from rich.text import Text

from verbatim import __version__
from verbatim.config import RunConfig
from verbatim.core.disk import write_file
from verbatim.core.texts import cut
from verbatim.rollouts.episode_stats import failure_kind
from verbatim.run.build import max_failed
from verbatim.run.evaluation.as_json import difference_to_json, example_to_json, finite, result_to_json
from verbatim.run.evaluation.evaluated_episode import EvaluatedEpisode
from verbatim.run.evaluation.markdown import ReportedModel, markdown
from verbatim.run.evaluation.pairs import difference
from verbatim.run.evaluation.play import EvalSettings, ModelResult
from verbatim.run.evaluation.results import EnvResult
from verbatim.run.evaluation.rows import Compared, spent_line
from verbatim.run.evaluation.show import show_differences, show_examples, show_results
from verbatim.run.evaluation.texts import letter

_MOST_KINDS = 5
"""Maximum number of kinds of failures that a report lists per model."""


class Results:
    """The results of the models that one command evaluates, in the order in which they were typed.

    Args:
        config: The configuration that was played.
        settings: The settings that say how much was played.
        source: The file or folder that the configuration came from.
        prices: Prices of a million prompt and completion tokens, by the model's name on its server; the name "" stands
            for all other models.
    """

    def __init__(
        self,
        config: RunConfig,
        settings: EvalSettings,
        *,
        source: Path,
        prices: Mapping[str, tuple[float, float]] = MappingProxyType({}),
    ) -> None:
        self._config, self._settings, self._source, self._prices = config, settings, source, prices
        self._found: list[ModelResult] = []

    def add(self, result: ModelResult) -> None:
        """Add the results of one model."""
        environments = {env: self._priced(found, result) for env, found in result.environments.items()}
        self._found.append(dataclasses.replace(result, environments=environments))

    def _priced(self, found: EnvResult, result: ModelResult) -> EnvResult:
        price = None if result.model.api is None else self._prices.get(result.model.api.model, self._prices.get(""))
        if price is None:
            return found
        tokens = [found.spent.get(f"{kind}_tokens", 0.0) for kind in ("prompt", "completion")]
        cost = sum(count * each for count, each in zip(tokens, price, strict=True)) / 1e6
        return dataclasses.replace(found, spent={**found.spent, "cost": cost})

    @property
    def environments(self) -> list[str]:
        """The labels of the environments that were played."""
        return list(dict.fromkeys(env for found in self._found for env in found.environments))

    def compared(self) -> list[Compared]:
        """The comparisons of all pairs of models: the later model minus the earlier model."""
        places = range(len(self._found))
        return [
            Compared(
                before=letter(one),
                after=letter(two),
                environments={
                    env: difference(
                        env, self._found[one].outcomes[env], self._found[two].outcomes[env], max_failed(self._config)
                    )
                    for env in self.environments
                },
            )
            for one, two in itertools.combinations(places, 2)
        ]

    def nothing_measured(self) -> list[str]:
        """The environments in which every episode of a model failed."""
        return list(
            dict.fromkeys(
                env
                for found in self._found
                for env, result in found.environments.items()
                if result.num_failed == result.num_episodes
            )
        )

    def show(self, console: Console, *, where: str) -> None:
        """Print the tables by environment. `where` is the place where all examples can be found."""
        compared = self.compared()
        for place, found in enumerate(self._found):
            console.print(
                Text.assemble((letter(place), "bold"), f"  {found.model.label}{_resolved(found)}"), soft_wrap=True
            )
        for env in self.environments:
            console.print()
            console.print(
                Text.assemble((env, "bold"), f": seed {self._settings.seed}; 95% intervals over examples"),
                soft_wrap=True,
            )
            results = [(letter(place), found.environments.get(env)) for place, found in enumerate(self._found)]
            show_results(results, console)
            show_differences(compared, env, console)
            show_examples(results, console, where=where)
            for name, result in results:
                if result is not None:
                    console.print(Text(f"{name}  {spent_line(result)}{_failures(result)}", style="dim"))

    def as_json(self) -> dict[str, Any]:
        """The results as plain JSON values, without the individual examples and episodes."""
        models = [
            {
                "letter": letter(place),
                "model": found.model.label,
                "where": found.model.where,
                "steps": found.model.step or None,
                "environments": {env: result_to_json(result) for env, result in found.environments.items()},
            }
            for place, found in enumerate(self._found)
        ]
        pairs = [
            {
                "before": pair.before,
                "after": pair.after,
                "environments": {env: difference_to_json(found) for env, found in pair.environments.items()},
            }
            for pair in self.compared()
        ]
        found = {"verbatim": __version__, **self._conditions(), "models": models, "pairs": pairs}
        value: dict[str, Any] = finite(found)
        return value

    def write_examples(self, path: Path) -> None:
        """Write one line per example, model and environment."""
        lines = [
            {"model": found.model.label, "env": env, **finite(example_to_json(example))}
            for found in self._found
            for env, result in found.environments.items()
            for example in result.examples
        ]
        write_file(path, "".join(json.dumps(line) + "\n" for line in lines).encode())

    def write_report(self, path: Path) -> None:
        """Write the Markdown report."""
        subjects = [
            ReportedModel(
                letter=letter(place),
                label=found.model.label,
                where=f"{found.model.where}{_steps(found)}",
                results=found.environments,
            )
            for place, found in enumerate(self._found)
        ]
        text = markdown(
            title=f"Evaluation on {', '.join(self.environments)}",
            subjects=subjects,
            compared=self.compared(),
            conditions={
                **self._conditions(),
                "verbatim": __version__,
                "written": datetime.now().astimezone().isoformat(timespec="seconds"),
            },
            errors={letter(place): _errors(found.outcomes) for place, found in enumerate(self._found)},
        )
        write_file(path, text.encode())

    def _conditions(self) -> dict[str, object]:
        """The settings under which all models were evaluated."""
        sampling = self._config.orchestrator.sampling
        return {
            "file": str(self._source),
            "seed": self._settings.seed,
            "temperature": sampling.temperature,
            "max_tokens": sampling.max_tokens,
            "seq_len": self._config.orchestrator.seq_len,
            "history": self._config.orchestrator.renderer.history,
        }


def _resolved(found: ModelResult) -> str:
    """The model to which a name refers, if this is not obvious, and the model's step."""
    where = "" if found.model.api is not None or found.model.where == found.model.label else f" = {found.model.where}"
    return f"{where}{_steps(found)}"


def _steps(found: ModelResult) -> str:
    return f" (step {found.model.step})" if found.model.step else ""


def _failures(result: EnvResult) -> str:
    """A sentence on how many episodes failed and how they are counted."""
    if not result.num_failed:
        return "; no episode failed"
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in result.failures.items())
    return (
        f"; {result.num_failed:,} of {result.num_episodes:,} episodes failed ({kinds}): they count as not successful, "
        "and are left out of all other means"
    )


def _errors(outcomes: Mapping[str, Sequence[EvaluatedEpisode]]) -> dict[str, tuple[int, str]]:
    """The most common kinds of failures: the number of episodes, and the first error."""
    counts: Counter[str] = Counter()
    first: dict[str, str] = {}
    for outcome in (outcome for each in outcomes.values() for outcome in each):
        if outcome.error is not None:
            kind = failure_kind(outcome.error)
            counts[kind] += 1
            first.setdefault(kind, cut(outcome.error, 400))
    return {kind: (count, first[kind]) for kind, count in counts.most_common(_MOST_KINDS)}
