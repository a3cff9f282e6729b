"""Measures the opening prompts of an environment's examples: the policy samples nothing of one that leaves no room."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verbatim.core.episode_limits import EpisodeLimits
from verbatim.core.tasks import run_together
from verbatim.core.texts import first_of
from verbatim.core.types import Example, RolloutIdentity, StopReason
from verbatim.environments.environment import Environment, Episode
from verbatim.environments.resolve import wrong_episode
from verbatim.models.renderers.conversation import Conversation
from verbatim.models.renderers.renderer import Renderer
from verbatim.rollouts.episode import EpisodeRun
from verbatim.rollouts.loop import EpisodeLoop, Prompt, SampledAnswer
from verbatim.rollouts.recorder import Recorder
from verbatim.rollouts.seeds import derive_seed

CHARACTERS_PER_TOKEN = 4
"""English text has about so many; other languages and numbers have fewer, so a prompt may be longer than estimated."""
_AT_ONCE = 16
"""Episodes that are started at a time."""
_HOPELESS = 8
"""An environment of which the first examples cannot be measured is given up after so many."""
_MOST_NAMED = 10


@dataclass(frozen=True, kw_only=True)
class Openings:
    """What was measured of one split."""

    num_examples: int
    """All there are."""
    num_measured: int
    """Those that were measured."""
    too_long: Mapping[str, int]
    """Tokens of the opening prompts that leave no room in the context, by the example's id."""
    seq_len: int
    """Tokens of the context."""
    is_exact: bool
    """Whether a renderer counted the tokens; else they are estimated from the characters."""
    first_fault: str | None = None
    """Why the first example that could not be measured was not; None: there is none."""
    cannot_begin: bool = False
    """Whether none of those that were tried can begin, whatever the policy says: the environment raises, or gives what
    is no episode."""
    seconds: float | None = None
    """After how long it was given up; None: it was not."""

    @property
    def none_fits(self) -> bool:
        """Whether it is known that nothing can be sampled of any example."""
        return self.is_exact and len(self.too_long) == self.num_examples > 0

    @property
    def found(self) -> str | None:
        """Which opening prompts are too long; None: no such one was found."""
        if not self.too_long:
            return None
        about = "" if self.is_exact else "about "
        named = [f"{name!r} ({about}{tokens:,} tokens)" for name, tokens in self.too_long.items()]
        return (
            f"the opening prompts of {len(named):,} of {self.num_measured:,} examples leave no room in seq_len = "
            f"{self.seq_len:,}, tools included: {first_of(named, _MOST_NAMED)}"
        )

    @property
    def left_out(self) -> str | None:
        """What was not looked at, and why; None: everything was."""
        rest = self.num_examples - self.num_measured
        if not rest:
            return None
        why = f"after {self.seconds:g} s the others were left out" if self.seconds is not None else self.first_fault
        return f"the opening prompts of {rest:,} of {self.num_examples:,} examples were not measured: {why}"


async def measure_openings(
    environment: Environment,
    examples: Sequence[Example],
    *,
    seq_len: int,
    renderer: Renderer | None = None,
    seconds: float = 20.0,
    until_one_fits: bool = False,
    clock: Callable[[], float] = time.monotonic,
) -> Openings:
    """Start an episode of each example, and measure the first prompt that it asks the policy for; nothing is sampled.

    An episode that owns its control flow runs up to there. Where the opening depends on the episode's seed, one seed is
    looked at. Where it takes longer than `seconds`, the rest is left out.

    Args:
        environment: Its episodes are closed again, and never scored.
        examples: In the order in which they are measured.
        seq_len: Tokens of the context.
        renderer: Of the model; None: tokens are estimated from the characters.
        seconds: For all of them.
        until_one_fits: Whether one that leaves room is enough; then they are started one after the other.
        clock: For tests.

    Raises:
        ModelError: the model's chat format cannot show an episode's tools.
    """
    end, waiting = clock() + seconds, iter(examples)
    tokens: dict[str, int] = {}
    faults: list[_Fault] = []
    late = False

    async def work() -> None:
        nonlocal late
        for example in waiting:
            late = late or clock() >= end
            if late or (len(faults) >= _HOPELESS and not tokens):
                return
            if until_one_fits and any(number < seq_len for number in tokens.values()):
                return
            found = await _measured(environment, example, renderer, seconds)
            if isinstance(found, int):
                tokens[example.id] = found
            else:
                faults.append(found)

    await run_together(work() for _ in range(1 if until_one_fits else _AT_ONCE))
    return Openings(
        num_examples=len(examples),
        num_measured=len(tokens),
        seq_len=seq_len,
        is_exact=renderer is not None,
        too_long={e.id: tokens[e.id] for e in examples if tokens.get(e.id, 0) >= seq_len},
        first_fault=faults[0].why if faults else None,
        cannot_begin=not tokens and not late and bool(faults) and all(fault.is_sure for fault in faults),
        seconds=seconds if late else None,
    )


@dataclass(frozen=True, kw_only=True)
class _Fault:
    """An opening prompt that was not measured."""

    why: str
    is_sure: bool
    """Whether no episode of the example can begin; else it may, given more time or the run's own sampler."""


async def _measured(
    environment: Environment, example: Example, renderer: Renderer | None, seconds: float
) -> int | _Fault:
    """The tokens of one opening prompt, or why it has none."""
    seed = derive_seed(0, "opening", example.id)
    loop = _Measuring(renderer, seconds)
    made: list[Episode] = []

    async def start() -> Episode:
        made.append(await environment.start(example, seed))
        return made[0]

    run = EpisodeRun(start, loop, RolloutIdentity(example_id=example.id))
    await run.run()
    lacks = wrong_episode(made[0]) if made else None
    if lacks is None and loop.tokens is not None:
        return loop.tokens
    error = lacks or str(run.trajectory().error)
    owns = bool(made) and getattr(made[0], "run", None) is not None
    may_begin = error.startswith("timeout") or (owns and not loop.was_asked)  # a program asks through the gateway
    return _Fault(why=f"example {example.id!r}: {error}", is_sure=lacks is not None or not may_begin)


class _Measuring(EpisodeLoop):
    """Ends the episode at its first prompt."""

    def __init__(self, renderer: Renderer | None, seconds: float) -> None:
        super().__init__(limits=EpisodeLimits(timeout=seconds), recorder=Recorder(1))
        self._renderer = renderer
        self.tokens: int | None = None
        self.was_asked = False

    async def complete(self, prompt_ids: Sequence[int], *given: Any, **more: Any) -> Any:
        """The same for an environment that renders by itself."""
        self._measure(len(prompt_ids))

    async def _answer(self, prompt: Prompt) -> SampledAnswer:
        self.was_asked = True
        self._measure(_num_tokens(prompt, self._renderer))
        raise AssertionError("the episode is over")

    def _measure(self, num_tokens: int) -> None:
        self.tokens = num_tokens if self.tokens is None else self.tokens
        self._end(StopReason.CANCELLED)


def _num_tokens(prompt: Prompt, renderer: Renderer | None) -> int:
    if renderer is not None:
        return len(Conversation.open(renderer, prompt.messages, prompt.schemas or None).prompt_ids)
    return sum(map(len, _texts(prompt))) // CHARACTERS_PER_TOKEN


def _texts(prompt: Prompt) -> Iterator[str]:
    for message in prompt.messages:
        yield str(message.get("content") or "")
    for schema in prompt.schemas:
        yield json.dumps(schema, default=str)
