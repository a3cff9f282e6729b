"""Checks that only this user can write to files and folders, because code that others can change must not be run."""

from __future__ import annotations

import errno
import grp
import os
import pwd
import stat
from pathlib import Path


def why_not_own(folder: Path) -> str | None:
    """Why other users could put files into a folder or replace the folder, or None if they can do neither.

    A folder is safe if it belongs to this user, its parents belong to this user or root, and no one else may write to
    any of them. A parent with the sticky bit, like /tmp, is safe, because users can rename only their own entries
    there.
    """
    path = folder.resolve()
    if path.stat().st_uid != os.geteuid():
        return f"{path} belongs to {_user(path.stat().st_uid)}"
    for step in (path, *path.parents):
        about = step.stat()
        if about.st_uid not in (0, os.geteuid()):
            return f"{step} belongs to {_user(about.st_uid)}"
        if _may_others_write(about) and not (step != path and about.st_mode & stat.S_ISVTX):
            return f"others may write to {step} (mode {stat.S_IMODE(about.st_mode):04o})"
    return None


def read_own(path: Path) -> bytes | None:
    """The content of a file, or None if the file is a link, not a regular file, not this user's, or writable by others.

    The checks are made on the open descriptor, so the file cannot be swapped between check and read.

    Raises:
        OSError: the file cannot be read.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno == errno.ELOOP:
            return None
        raise
    with open(descriptor, "rb") as file:
        about = os.fstat(descriptor)
        is_own = stat.S_ISREG(about.st_mode) and about.st_uid == os.geteuid() and not _may_others_write(about)
        return file.read() if is_own else None


def _may_others_write(about: os.stat_result) -> bool:
    by_group = bool(about.st_mode & stat.S_IWGRP) and not _is_own_group(about.st_gid)
    return by_group or bool(about.st_mode & stat.S_IWOTH)


def _is_own_group(gid: int) -> bool:
    """True for the private group that some systems create for each user, with no other members."""
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    return user.pw_gid == gid and user.pw_name == group.gr_name and not set(group.gr_mem) - {user.pw_name}


def _user(uid: int) -> str:
    try:
        return f"the user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"the user {uid}"
