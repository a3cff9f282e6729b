"""What the command's exit status says."""

STOPPED = 1
"""A run that cannot go on, a full disk."""
USAGE = 2
"""A mistake in what was typed."""
INTERRUPTED = 130
"""Ctrl-C."""
