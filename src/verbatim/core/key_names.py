"""Decides by a value's name whether the value may be a key or a password."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_SURE = frozenset({
    "apikey", "authorization", "bearer", "cred", "credential", "jwt", "pass", "passcode", "passphrase", "passwd",
    "password", "pw", "pwd", "userpwd",
})  # fmt: skip
_SURE_PAIRS = frozenset(
    (kind, what)
    for kind in ("access", "api", "auth", "client", "master", "private", "secret", "service", "signing")
    for what in ("key", "secret", "token")
)
_MAYBE = frozenset({"cookie", "key", "pat", "secret", "token"})
"""Words with which the names of keys end, but also the names of other values: `key = "answer"`."""
_BEHIND = frozenset(
    {"base", "default", "dev", "hash", "live", "plain", "prod", "production", "raw", "staging", "test", "text", "value"}
)
"""Words that may follow a word for a key: API_KEY_PROD. Other words change the meaning: api_key_env is not a key."""
_FOLDERS = ("PWD", "OLDPWD")
"""Shell variables that hold the working folder, not a password."""
_OF_A_LOGIN = ("basic", "digest", "http", "https", "ntlm", "proxy")


@lru_cache(4096)
def names_key(name: str) -> bool:
    """True if a value with this name may be a key.

    >>> [name for name in ("openaiKey", "MY_PASS", "--api-key", "api_key_env", "max_tokens") if names_key(name)]
    ['openaiKey', 'MY_PASS', '--api-key', 'max_tokens']
    """
    words = words_of(name)
    return bool(words) and name not in _FOLDERS and (_is_sure(words) or words[-1] in _MAYBE or is_login_name(name))


def words_of(name: str) -> list[str]:
    """The words of a name in lower case and singular, without trailing numbers and words of `_BEHIND`."""
    words = [word.lower() for word in _WORD.findall(name)]
    words = [word[:-1] if word.endswith("s") and not word.endswith("ss") else word for word in words]
    while words and (words[-1].isdecimal() or words[-1] in _BEHIND):
        words.pop()
    return words


def is_sure_name(name: str) -> bool:
    """True if the name alone shows that the value is a key, like `client_secret`; `key` and `token` also name other
    things."""
    words = words_of(name)
    return bool(words) and _is_sure(words)


def is_login_name(name: str) -> bool:
    """True if a value with this name may be a login (user and password): `auth`, `http_auth`, `credentials`."""
    words = words_of(name)
    return bool(words) and (words[-1] in ("cred", "credential", "userpwd") or _is_auth(words[-1]))


def is_sure_login_name(name: str) -> bool:
    """True if a value with this name is almost certainly a login: `basic_auth`, `proxyAuth`, `userpwd`."""
    words = words_of(name)
    last = words[-1] if words else ""
    kind = last.removesuffix("auth") or (words[-2] if len(words) > 1 else "")
    return last == "userpwd" or (_is_auth(last) and kind in _OF_A_LOGIN)


def inner_name(own: str, outer: str) -> str:
    """The name that decides whether a value is a key: the value's own name, the name of the table that contains the
    value, or both."""
    if not names_key(own):
        return outer if names_key(outer) else own
    if is_sure_name(outer) and not is_sure_name(own):
        return outer
    return f"{outer}.{own}" if len(words_of(own)) == 1 and is_login_name(outer) and not is_login_name(own) else own


def _is_sure(words: Sequence[str]) -> bool:
    return words[-1] in _SURE or words[-1].endswith(("apikey", "password")) or tuple(words[-2:]) in _SURE_PAIRS


def _is_auth(word: str) -> bool:
    return word.endswith("auth") and word != "oauth"
