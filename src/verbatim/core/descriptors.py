"""Raises a process's limit of open files: the usual soft limit of 1024 is too low for the sockets of a batch."""

from __future__ import annotations

import contextlib
import resource

_MOST = 65536
"""Limit to request, unless the system's maximum is lower."""
_RESERVE = 128
"""File descriptors reserved for the rest of the process."""


def raise_descriptor_limit() -> int:
    """Raise this process's limit of open files as far as the system allows, and return how many connections the new
    limit allows. Child processes inherit the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # some systems allow fewer than they report
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    # With a very low limit, half of it is used, because subtracting the reserve would leave too little or nothing.
    return _MOST if soft == resource.RLIM_INFINITY else max(soft - _RESERVE, soft // 2)
