"""Redacts keys and passwords in what leaves the process: configurations, and texts of exceptions."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

REDACTED = "[redacted]"
SHORTEST = 8
"""Characters of an environment variable's value that is looked for: a shorter one would be found in any text."""

_SECRET = re.compile(
    r"(?:^|[_\-])(?:api_?key|key|token|secret|password|passwd|passphrase|credential|authorization|auth|cookie)s?$",
    re.IGNORECASE,
)
_LOOKS_SECRET = re.compile(
    r"(?<=://)[^/\s@]+(?=@)"  # user:password@host
    r"|(?<=[?&]key=)[^&\s]+|(?<=[?&]token=)[^&\s]+|(?<=[?&]api_key=)[^&\s]+"
    r"|(?<=Bearer )\S+|(?<=Basic )\S+"
    r"|\b(?:sk|pk|rk)-[\w\-]{16,}|\bhf_\w{16,}|\bghp_\w{16,}|\bwandb_v\d_\w{16,}|\b(?:local-)?[0-9a-f]{40}\b"
)


def without_secrets(text: str) -> str:
    """A text without the values of environment variables that hold keys, and without what looks like one.

    >>> without_secrets("GET http://me:secret@host failed: Bearer abc")
    'GET http://[redacted]@host failed: Bearer [redacted]'
    """
    for name, value in os.environ.items():
        if len(value) >= SHORTEST and _SECRET.search(name):
            text = text.replace(value, REDACTED)
    return _LOOKS_SECRET.sub(REDACTED, text)


def redacted(value: Any) -> Any:
    """A configuration without secrets: neither under keys that name one, nor inside other texts.

    >>> redacted({"api_key": "abc", "api_key_env": "KEY", "max_tokens": 8})
    {'api_key': '[redacted]', 'api_key_env': 'KEY', 'max_tokens': 8}
    """
    if isinstance(value, Mapping):
        return {key: REDACTED if _names_secret(key, inner) else redacted(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [redacted(inner) for inner in value]
    return without_secrets(value) if isinstance(value, str) else value


def redacted_at(key: str, value: Any) -> Any:
    """The value at a dotted key, without secrets.

    >>> redacted_at("orchestrator.train.env.0.args.api_key", "abc")
    '[redacted]'
    """
    return REDACTED if any(_names_secret(part, value) for part in key.split(".")) else redacted(value)


def _names_secret(key: object, value: object) -> bool:
    # Numbers are not secrets: max_tokens. A list or table under such a name may hold several.
    return _SECRET.search(str(key)) is not None and isinstance(value, str | list | tuple | Mapping) and bool(value)
