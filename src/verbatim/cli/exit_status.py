"""Defines the exit statuses of the commands; the table in docs/reliability.md has the meaning for each command."""

from __future__ import annotations

from verbatim.core import ctrl_c

FINISHED = 0
"""Done, all that was asked: a run took all its steps, or used up its examples, and learned something."""
STOPPED = 1
"""It could not go on: every rollout fails, a process died, a fault of the machine; or a part of it failed."""
USAGE = 2
"""A mistake in what was typed or configured, or in the file or folder that it names: type something else."""
NOTHING_TRAINED = 3
"""The run came to its end and learned from no token; it says which reason took them."""
ALARM = 4
"""An alarm ended the run early, with a checkpoint; it says what was seen and what to change."""
INTERRUPTED = ctrl_c.INTERRUPTED
"""Ctrl-C, or SIGTERM."""
