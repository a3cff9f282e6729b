"""The environment `guess_number`: find a secret number by guessing. It is the smallest task that needs the answers of a
tool."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from verbatim.core.errors import UsageError
from verbatim.core.types import Example, Message, Trajectory
from verbatim.environments.environment import Demonstration, Episode, check_split, tool_call, tool_exchange
from verbatim.environments.tools import FunctionTool, ToolResult

FORGETS = 1 / 6
"""Probability that a demonstration repeats an earlier guess."""
AVERAGED = 5
"""A demonstration guesses the average of this many random numbers. The more numbers, the closer the guess is to the
middle of the possible range."""


@dataclass(frozen=True, kw_only=True)
class GuessNumber:
    """The agent calls `guess(number)`, which answers "higher", "lower" or "correct". Finding the secret earns 1.

    With the defaults, bisection always wins, and ignoring the answers wins 4 games in 15.

    Raises:
        UsageError: the range is empty, or no guess is allowed.
    """

    low: int = 1
    """Smallest possible secret."""
    high: int = 15
    """Largest possible secret."""
    max_guesses: int = 4
    """Maximum number of guesses in an episode."""

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise UsageError(f"guess_number: low = {self.low} is above high = {self.high}")
        if self.max_guesses < 1:
            raise UsageError(f"guess_number: max_guesses = {self.max_guesses}; expected at least 1")

    def examples(self, split: str) -> Sequence[Example]:
        """Return one example per secret. Both splits are the same, because the model learns to search, not the
        secrets."""
        check_split("guess_number", split)
        return [Example(id=f"secret-{n}", payload={"secret": n}) for n in range(self.low, self.high + 1)]

    async def start(self, example: Example, seed: int) -> GuessNumberEpisode:
        """Start a game with the example's secret. `seed` is unused, because nothing else in the game is random."""
        return GuessNumberEpisode(self, int(example.payload["secret"]))

    def demonstrations(self, count: int, seed: int) -> list[Demonstration]:
        """Return well-formed demonstrations that win two thirds of the games, so that reinforcement learning has
        something to improve. Some guesses repeat an earlier guess; each of the other guesses is the average of five
        random numbers of the possible range."""
        rng = random.Random(seed)
        return [self._demonstration(rng) for _ in range(count)]

    def best_constant_policy_success(self) -> float:
        """Return the success rate of the best policy that ignores the answers: it tries a different number each
        time."""
        return min(1.0, self.max_guesses / (self.high - self.low + 1))

    def _demonstration(self, rng: random.Random) -> Demonstration:
        game = GuessNumberEpisode(self, rng.randint(self.low, self.high))
        messages = list(game.messages)
        tried: list[int] = []
        for turn in range(self.max_guesses):
            if tried and rng.random() < FORGETS:
                number = rng.choice(tried)
            else:
                picks = [rng.randint(*game.possible) for _ in range(AVERAGED)]
                number = (sum(picks) + rng.randrange(AVERAGED)) // AVERAGED  # rounded up as often as down
            tried.append(number)
            answer = game.guess(number)
            messages += tool_exchange("guess", {"number": number}, answer.content, call_id=f"call_{turn}")
            if answer.done:
                break
        return Demonstration(messages=messages, tools=[tool.schema for tool in game.tools])


class GuessNumberEpisode(Episode):
    """One game. Has the secret, and the range that is still possible after the answers so far."""

    def __init__(self, rules: GuessNumber, secret: int) -> None:
        self.secret = secret
        self.guesses_left = rules.max_guesses
        self.found = False
        self.possible = (rules.low, rules.high)
        text = f"Find the number from {rules.low} to {rules.high} in {rules.max_guesses} guesses."
        self.messages = [{"role": "system", "content": "You play a game."}, {"role": "user", "content": text}]
        self.tools = (FunctionTool(self.guess, description="", inline=True),)

    def guess(self, number: int) -> ToolResult:
        """Answer one guess."""
        if self.found or self.guesses_left == 0:
            return ToolResult(content="the game is over", done=True)
        self.guesses_left -= 1
        low, high = self.possible
        if number == self.secret:
            self.found = True
            self.possible = (number, number)
            return ToolResult(content="correct", done=True)
        if number < self.secret:
            self.possible = (max(low, number + 1), high)
            answer = "higher"
        else:
            self.possible = (low, min(high, number - 1))
            answer = "lower"
        return ToolResult(content=answer, done=self.guesses_left == 0)

    async def score(self, trajectory: Trajectory) -> float:
        """Return 1 if the secret was found, else 0."""
        return float(self.found)

    def solution(self) -> list[Message]:
        """Return the message that guesses the secret right away."""
        return [tool_call("guess", {"number": self.secret})]

    def state_key(self) -> str:
        """Return the possible range, and the number of guesses left."""
        low, high = self.possible
        return f"{low}-{high}, {self.guesses_left} left"
