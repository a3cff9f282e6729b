"""Measures the opening prompts of an environment's examples, to find the prompts that leave no room in the context."""

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
"""Assumed number of characters per token, which is about right for English. Numbers and other languages have fewer
characters per token, so a prompt may be longer than estimated."""
_AT_ONCE = 16
"""Number of episodes that are started concurrently."""
_HOPELESS = 8
"""If no example could be measured, measuring stops after this many failures."""
_MOST_NAMED = 10


@dataclass(frozen=True, kw_only=True)
class Openings:
    """The measured opening prompts of one split of an environment."""

    num_examples: int
    """Number of examples in the split."""
    num_measured: int
    """Number of examples whose opening prompt was measured."""
    too_long: Mapping[str, int]
    """Length in tokens of each opening prompt that leaves no room for a completion, keyed by example id."""
    seq_len: int
    """Length of the context in tokens."""
    is_exact: bool
    """True if a renderer counted the tokens; False if they were estimated from the characters."""
    first_fault: str | None = None
    """The reason why the first unmeasured example could not be measured, or None if no example failed."""
    cannot_begin: bool = False
    """True if none of the tried examples can start, independently of the policy: the environment raises an exception,
    or `start` does not return an episode."""
    seconds: float | None = None
    """The time limit in seconds if measuring reached it, else None."""

    @property
    def none_fits(self) -> bool:
        """True if all opening prompts are known to be too long."""
        return self.is_exact and len(self.too_long) == self.num_examples > 0

    @property
    def found(self) -> str | None:
        """A message that names the opening prompts that are too long, or None if there are none."""
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
        """A message that says how many examples were not measured, and why; None if all were measured."""
        rest = self.num_examples - self.num_measured
        if not rest:
            return None
        why = f"the time limit of {self.seconds:g} s was reached" if self.seconds is not None else self.first_fault
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
    """Start an episode of each example, and measure the first prompt that the episode would send to the policy. Nothing
    is sampled.

    An episode with its own control flow runs up to that prompt. If the opening depends on the episode's seed, only one
    seed is tried. After `seconds`, the remaining examples are skipped.

    Args:
        environment: The environment. Its episodes are closed, but not scored.
        examples: The examples, in the order in which they are to be measured.
        seq_len: Length of the context in tokens.
        renderer: The model's renderer; None to estimate the number of tokens from the characters.
        seconds: Time limit for all examples together, in seconds.
        until_one_fits: True to stop at the first prompt that leaves room. The examples are then started one by one.
        clock: Monotonic clock in seconds. Tests pass a simulated clock.

    Raises:
        ModelError: the model's chat format cannot show the tools of an episode.
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
    """The reason why an opening prompt could not be measured."""

    why: str
    """The reason in words."""
    is_sure: bool
    """True if no episode of the example can start. False if an episode might start with more time or with the run's
    sampler."""


async def _measured(
    environment: Environment, example: Example, renderer: Renderer | None, seconds: float
) -> int | _Fault:
    """Measure one opening prompt. Return its length in tokens, or the reason why it could not be measured."""
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
    # A program sends its requests through the gateway, which needs the run's sampler. So if it fails here, that
    # proves nothing.
    may_begin = error.startswith("timeout") or (owns and not loop.was_asked)
    return _Fault(why=f"example {example.id!r}: {error}", is_sure=lacks is not None or not may_begin)


class _Measuring(EpisodeLoop):
    """An episode loop that ends the episode at its first prompt, after measuring the prompt."""

    def __init__(self, renderer: Renderer | None, seconds: float) -> None:
        super().__init__(limits=EpisodeLimits(timeout=seconds), recorder=Recorder(1))
        self._renderer = renderer
        self.tokens: int | None = None
        self.was_asked = False

    async def complete(self, prompt_ids: Sequence[int], *given: Any, **more: Any) -> Any:
        """Measure the prompt of an environment that renders prompts itself, and end the episode."""
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
