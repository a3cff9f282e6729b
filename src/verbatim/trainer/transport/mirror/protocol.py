"""Defines the requests of a trainer's host to the orchestrator's host.

```
POST   /verbatim/v1/run                        {"protocol": 1}: the configuration, and the folders that are offered
GET    /verbatim/v1/run/files?file=NAME        a file of an offered folder, from a byte on (Range)
POST   .../sessions/S                          begin session S as the trainer: {"who": ..., "checkpoint": ...}
PUT    .../sessions/S/beat                     the trainer's heartbeat; the answer has the orchestrator's
GET    .../sessions/S/messages/7               size and sha256 of a message, as soon as it is there, or null
GET    .../sessions/S/messages/7/content       its bytes, from a byte on (Range)
POST   .../sessions/S/folders?folder=NAME      {"file": [size, sha256]}: bytes that are there of what is missing;
                                               nothing missing: the folder is whole, and now has its name
PUT    .../sessions/S/parts?folder=&file=&offset=    bytes of a file of that folder, in order
PUT    .../sessions/S/ready                    the trainer's state
PUT    .../sessions/S/answers/7                the answer to a message
DELETE .../sessions/S                          the trainer ends: {"why": ...}
```

Every request needs the key (bearer token). Answers are JSON; those that are refused have "error", a sentence.
Every request may be sent again: what it asks for is then done already.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

PROTOCOL = 1
"""Both hosts have to speak the same one."""
RUN = "/verbatim/v1/run"
SESSIONS = f"{RUN}/sessions"
PART = 2**23
"""Most bytes of a file in one request."""
MOST_JSON = 2**26
"""Most bytes of any other request."""
LONGEST_WAIT = 5.0
"""Seconds that the orchestrator's host holds a request for a message that is not there yet."""
OTHER_BYTES = 3
"""Times that a file may arrive with another sha256 than it was sent with."""

Files = Mapping[str, tuple[int, str]]
"""Size and sha256 of each file of a folder, by its name below the folder."""

_NAME = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9._-]{0,127}/){0,7}[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_UPLOADED = re.compile(r"weights/v\d{6,12}|exchange/\w{1,64}/states/v\d{6,12}|model|warm_start")


def is_file_name(name: str) -> bool:
    """Whether this names a file below a folder: letters, digits, dots, dashes and underscores, no hidden ones.

    >>> is_file_name("trainer/optimizer.safetensors"), is_file_name("../x"), is_file_name("/x"), is_file_name(".x")
    (True, False, False, False)
    """
    return _NAME.fullmatch(name) is not None


def is_uploaded(folder: str) -> bool:
    """Whether a trainer may send this folder of the run.

    >>> is_uploaded("weights/v000012"), is_uploaded("checkpoints/step_000012"), is_uploaded("weights")
    (True, False, False)
    """
    return _UPLOADED.fullmatch(folder) is not None


def files_of(folder: Path) -> dict[str, tuple[int, str]]:
    """Size and sha256 of each file of a folder."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            found[path.relative_to(folder).as_posix()] = mark_of(path)
    return found


def mark_of(path: Path) -> tuple[int, str]:
    """Size and sha256 of a file."""
    with path.open("rb") as file:
        return path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()
