"""Defines the job that `beside_trl.py` gives to both trainers: a game, written as a class with `reset` and a tool,
which is the form that TRL accepts.

This module imports neither of the two trainers. After its guesses, the agent says a last sentence, so that an episode
ends in the same way in both trainers.
"""

from __future__ import annotations

import random
from typing import Any

LOW, HIGH, GUESSES = 1, 15, 4
SYSTEM = (
    "You play a game against the house. The house has thought of a whole number, and you find it with as few guesses "
    "as you can. Call the tool once in each turn, read what it answers, and use the answer for the next guess. When "
    "the number is found, or no guess is left, say so in one short sentence and stop."
)
USER = f"Find the number from {LOW} to {HIGH} in {GUESSES} guesses."
LAST = "That was my last guess. The game is over."
OPENING = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": USER}]
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "guess",
        "description": "Guess the number.",
        "parameters": {
            "type": "object",
            "properties": {"number": {"type": "integer", "description": "The number to guess."}},
            "required": ["number"],
        },
    },
}

TOOL_OF_TRL = {**TOOL, "function": {**TOOL["function"], "return": {"type": "string"}}}
"""The schema that TRL makes of the tool, which also names the type of the answer. The model learns both prompts."""


class GuessTheNumber:
    """One game of guessing a number."""

    def __init__(self) -> None:
        self.secret, self.left, self.is_found = 0, GUESSES, False

    def reset(self, secret: int, **_: Any) -> None:
        """Begin a game.

        Args:
            secret: The number to find.
        """
        self.secret, self.left, self.is_found = secret, GUESSES, False

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: The number to guess.
        """
        if self.is_found or not self.left:
            return "The game is over."
        self.left -= 1
        if number == self.secret:
            self.is_found = True
            return "That is the number. The game is over."
        where = "higher" if number < self.secret else "lower"
        return f"The number is {where}. Guesses left: {self.left}."

    def get_reward(self) -> float:
        """Return 1 if the number was found, else 0."""
        return float(self.is_found)


def rows() -> list[dict[str, Any]]:
    """Return one example for each secret number."""
    return [{"prompt": OPENING, "secret": secret} for secret in range(LOW, HIGH + 1)]


def conversations(count: int, seed: int) -> list[dict[str, Any]]:
    """Return games of a player who guesses any number in the remaining range. The model's warm start trains on these
    games."""
    rng = random.Random(seed)
    both = (TOOL, TOOL_OF_TRL)
    return [{"messages": _conversation(rng), "tools": [tool]} for _ in range(count // 2) for tool in both]


def _conversation(rng: random.Random) -> list[dict[str, Any]]:
    game = GuessTheNumber()
    game.reset(rng.randint(LOW, HIGH))
    messages: list[dict[str, Any]] = [dict(message) for message in OPENING]
    low, high = LOW, HIGH
    while game.left and not game.is_found:
        number = rng.randint(low, high)
        answer = game.guess(number)
        if "higher" in answer:
            low = number + 1
        elif "lower" in answer:
            high = number - 1
        call_id = f"call_{GUESSES - game.left}"
        function = {"name": "guess", "arguments": {"number": number}}
        messages.append(
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": call_id, "type": "function", "function": function}],
            }
        )
        messages.append({"role": "tool", "name": "guess", "tool_call_id": call_id, "content": answer})
    return [*messages, {"role": "assistant", "content": LAST}]
