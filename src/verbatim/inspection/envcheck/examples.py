"""Checks an environment's examples and demonstrations before any episode is played."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence

from verbatim.core.errors import NoDemonstrations, UsageError
from verbatim.core.texts import shown
from verbatim.core.types import Example
from verbatim.environments.environment import Demonstrates, Demonstration, Environment
from verbatim.environments.resolve import demonstrations_of, examples_of
from verbatim.inspection.envcheck.findings import CheckFinding
from verbatim.models.renderers.renderer import Renderer
from verbatim.run.environments import as_conversations, imitated

_DEMONSTRATIONS = 200
"""Number of demonstrations to request from the environment."""
_COMPARED = 20_000
"""Maximum number of examples per split to compare with each other."""


def read_examples(environment: Environment, name: str, split: str) -> tuple[Sequence[Example], list[CheckFinding]]:
    """Return (1) the examples of a split, or no examples if they are unusable, and (2) the findings about them."""
    try:
        examples = examples_of(environment, name, split)
        again = examples_of(environment, name, split)
    except UsageError as error:
        change = f'return at least one verbatim.Example for "{split}", each with a unique id' + (
            "; if none are held out, return the training examples" if split == "eval" else ""
        )
        expected = f'`examples("{split}")` returns a list of examples with different ids'
        return (), [CheckFinding(kind="examples", found=str(error), expected=expected, change=change)]
    findings = []
    contents = [_content(example) for example in examples[:_COMPARED]]
    if contents != [_content(example) for example in again[:_COMPARED]]:
        findings.append(
            CheckFinding(
                kind="nondeterministic",
                found=f'two calls of `examples("{split}")` gave different examples',
                expected="the same examples from every call, because each process of a run reads them itself",
                change="generate them inside the method with a fixed seed: random.Random(0)",
            )
        )
    repeated = [(content, count) for content, count in Counter(contents).most_common(1) if count > 1]
    if repeated and len(examples) > 1 and any(e.payload or e.messages for e in examples[:1]):
        content, count = repeated[0]
        ids = [example.id for example, other in zip(examples, contents, strict=False) if other == content]
        total = len(contents) - len(set(contents))
        findings.append(
            CheckFinding(
                kind="examples",
                expected="examples that differ in their messages or payload",
                found=f'`examples("{split}")` has duplicates: {count} examples are the same except for their ids '
                f"({', '.join(map(repr, ids[:3]))}); {total} of {len(contents)} are duplicates",
                change="return each task once; to see tasks more often, train for more steps",
            )
        )
    return examples, findings


def read_demonstrations(
    environment: Environment, name: str, renderer: Renderer | None
) -> tuple[Sequence[Demonstration], list[CheckFinding]]:
    """Return (1) the environment's demonstrations, which may be none, and (2) the findings about them.

    If a renderer is given, also check that it can render the demonstrations, as a warm start does.
    """
    if not isinstance(environment, Demonstrates):
        return (), []
    try:
        given = demonstrations_of(environment, name, _DEMONSTRATIONS, 0)
        again = demonstrations_of(environment, name, _DEMONSTRATIONS, 0)
        if renderer is not None:
            for conversation in as_conversations(given, name, f"demonstrations({_DEMONSTRATIONS}, 0)"):
                imitated(renderer, conversation)
    except NoDemonstrations:
        return (), []
    except UsageError as error:
        return (), [
            CheckFinding(
                kind="demonstrations",
                found=str(error),
                expected="conversations that a model can imitate",
                change="fix `demonstrations`, or remove it: only [model.build] and [warm_start] need it",
            )
        ]
    if list(map(_shown, given)) != list(map(_shown, again)):
        return given, [
            CheckFinding(
                kind="nondeterministic",
                found="two calls of `demonstrations` with the same seed gave different conversations",
                expected="the same conversations",
                change="take all randomness from random.Random(seed)",
            )
        ]
    return given, []


def compare_splits(train: Sequence[Example], held_out: Sequence[Example]) -> list[str]:
    """Return a note if some evaluation examples are also training examples; else nothing."""
    seen = set(map(_content, train[:_COMPARED]))
    same = sum(_content(example) in seen for example in held_out[:_COMPARED])
    if not same:
        return []
    return [
        f"{same} of {len(held_out)} eval examples are also training examples, so evaluations test on trained examples"
    ]


def _content(example: Example) -> str:
    return json.dumps([example.messages, example.payload], default=shown)


def _shown(demonstration: Demonstration) -> str:
    return json.dumps([list(demonstration.messages), list(demonstration.tools)], default=shown)
