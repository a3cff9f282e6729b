"""Tasks: examples, tools and rewards, in messages only."""

from verbatim.environments.base import Agent, Demonstrates, Demonstration, Environment, Episode, Reply, Score

ENVIRONMENTS = {
    "guess_number": "verbatim.environments.guess_number:GuessNumber",
}
"""Where each bundled environment lives."""

__all__ = ["ENVIRONMENTS", "Agent", "Demonstrates", "Demonstration", "Environment", "Episode", "Reply", "Score"]
