"""Defines the exit statuses of the commands; docs/reliability.md has a table of their meaning for each command."""

from __future__ import annotations

from verbatim.core import ctrl_c

FINISHED = 0
"""Everything was done: a run took all its steps or used up its examples, and it trained something."""
STOPPED = 1
"""The command could not continue: every rollout failed, a process died, the machine failed; or part of its work
failed."""
USAGE = 2
"""The user has to correct a mistake: in the command, in the configuration, or in a file or folder that the command or
the configuration names."""
NOTHING_TRAINED = 3
"""The run finished without training a single token; the message has the reason."""
ALARM = 4
"""An alarm ended the run early, with a checkpoint; the message has the finding and what to change."""
INTERRUPTED = ctrl_c.INTERRUPTED
"""Ctrl-C or SIGTERM ended the command."""
