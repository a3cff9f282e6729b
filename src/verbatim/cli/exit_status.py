"""What the command's exit status says; docs/configuration.md has the same table."""

FINISHED = 0
"""Done: all steps were taken, or the examples were used up, and something was learned."""
STOPPED = 1
"""It cannot go on: every rollout fails, a process died, a full disk."""
USAGE = 2
"""A mistake in what was typed or configured, found before anything was started or changed."""
NOTHING_TRAINED = 3
"""The run came to its end and learned from no token; it says which reason took them."""
INTERRUPTED = 130
"""Ctrl-C, or a termination signal."""
