"""Environments: examples, tools and rewards, in messages only."""

from verbatim.environments.base import (
    Agent,
    Demonstrates,
    Demonstration,
    Environment,
    Episode,
    Reply,
    Score,
    tool_call,
    tool_exchange,
)

ENVIRONMENTS = {
    "alphabet_sort": "verbatim.environments.alphabet_sort:AlphabetSort",
    "calculator": "verbatim.environments.calculator:Calculator",
    "delegate": "verbatim.environments.delegate:Delegate",
    "guess_number": "verbatim.environments.guess_number:GuessNumber",
    "terminal": "verbatim.environments.terminal:Terminal",
    "verifiers": "verbatim.rollouts.verifiers.environment:VerifiersEnvironment",
}
"""Import path of each bundled environment."""

__all__ = ["ENVIRONMENTS", "Agent", "Demonstrates", "Demonstration", "Environment", "Episode", "Reply", "Score",
           "tool_call", "tool_exchange"]
