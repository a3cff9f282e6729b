"""Tells keys and passwords by their names, forms and values, and redacts them in what is stored, logged or sent."""

from __future__ import annotations

import base64
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any
from urllib.parse import quote

REDACTED = "[redacted]"
SHORTEST = 6
"""Characters of a key's value that is looked for: a shorter one would be found in any text."""
SHORTEST_OF_VARIABLE = 8
"""The same of an environment variable, which nobody said is a key: only its name does."""

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_SURE = frozenset({
    "apikey", "authorization", "bearer", "cred", "credential", "jwt", "pass", "passcode", "passphrase", "passwd",
    "password", "pw", "pwd",
})  # fmt: skip
_SURE_PAIRS = frozenset(
    (kind, what)
    for kind in ("access", "api", "auth", "client", "master", "private", "secret", "service", "signing")
    for what in ("key", "secret", "token")
)
_MAYBE = frozenset({"auth", "cookie", "key", "pat", "secret", "token"})
"""Last words of names that hold keys, and other things too: `key = "answer"`."""
_BEHIND = frozenset(
    {"base", "default", "dev", "hash", "live", "plain", "prod", "production", "raw", "staging", "test", "text", "value"}
)
"""Words that may stand behind them: API_KEY_PROD. Others change the meaning: api_key_env."""
_FOLDERS = ("PWD", "OLDPWD")
"""Variables of a shell that have the working folder, not a password."""
_NO_KEY = frozenset({
    "", "-", "0", "1", "always", "default", "disabled", "dummy", "empty", "enabled", "false", "never", "no", "none",
    "null", "off", "on", "optional", "required", "true", "unused", "x", "yes",
})  # fmt: skip

_FORMS = re.compile(
    r"(?<=://)[^/\s@:]*:[^/\s@]+(?=@)"  # user:password@host
    r"|(?<=[?&]key=)[^&\s]+|(?<=[?&]token=)[^&\s]+|(?<=[?&]api_key=)[^&\s]+"
    r"|(?<=Bearer )[^\s\"',]{3,}|(?<=Basic )(?=\S*[\dA-Z=+/])[^\s\"',]+"
    r"|(?i:(?<=bearer )|(?<=basic ))(?=\S*\d)[\w\-.~+/=]{8,}"
    r"|\b(?:sk|pk|rk)[\-_][\w\-]{16,}|\bhf_\w{16,}|\bgh[pousr]_\w{16,}|\bgithub_pat_\w{16,}|\bwandb_v\d_\w{16,}"
    r"|\bglpat-[\w\-]{16,}|\bxox[abprs]-[\w\-]{10,}|\bAKIA[0-9A-Z]{16}\b|\bAIza[\w\-]{30,}|\bgsk_\w{16,}"
    r"|\bnvapi-[\w\-]{16,}|\bnpm_\w{30,}|\bpypi-[\w\-]{30,}|\bvb-[0-9a-f]{16}-[\w\-]{16,}"
    r"|(?<![\w\-])eyJ[\w\-]{8,2000}\.[\w\-]{8,}\.[\w\-]*"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*-----|\Z)"
)
_MAYBE_FORMS = re.compile(r"(?<=://)[^/\s@]+(?=@)|\b(?:local-)?[0-9a-f]{40}\b")
"""Redacted in texts, but no reason to refuse a setting: the user of an address, the id of a commit."""
_NAME = r"(?<![\w\-.])-{0,2}(?P<name>[A-Za-z_][\w\-.]{0,200})(?![\w\-.])"
_NAMED = (
    re.compile(_NAME + r"""["']?\s*[=:]\s*(?P<quote>["'])(?P<value>[^"'\n]+)(?=(?P=quote))"""),
    re.compile(_NAME + r"""=(?P<value>[^\s"',;&()\[\]{}]+)"""),
    re.compile(
        r"(?<![\w\-.])--?(?P<name>[A-Za-z_][\w\-.]{0,200})"
        + r"""["']?(?:,\s*|\s+)["']?(?P<value>[^\s"',\-\[][^\s"',]*)"""
    ),
)
"""`"api_key": "..."`, `API_KEY=...`, `--api-key ...` and `"--api-key", "..."`."""
_YAML = re.compile(
    _NAME + r"""["']?:[ \t]+(?=\S*[\d+/=!@#%^&*])(?P<value>[^\s"',;{}\[\]]{6,})(?=[ \t]*(?:[\r\n]|\Z))"""
)
"""`MY_PASS: ...` to the end of a line; a word there is rather a sentence: `password: missing`."""
_HEADERS = (
    re.compile(r"(?i:(?<![\w\-.])(?:proxy-)?authorization)\s*:\s*(?P<value>[^\s\"'][^\r\n\"']*)"),
    re.compile(
        r"(?i:(?<![\w\-])x-[\w\-]{0,40}(?:key|token|auth))\s*:\s*(?P<value>(?=[^\s\"',;]*\d)(?=[^\s\"',;]*[A-Za-z])"
        r"[^\s\"',;]+|[^\s\"',;]+(?=[ \t]*(?:[\"',;\r\n]|\Z)))"
    ),
    re.compile(r"(?i:(?<![\w\-.])(?:set-)?cookie)\s*:\s*(?P<value>[\w\-.]+=[^\r\n\"']*|(?=[^\s\"']*\d)[^\s\"']{16,})"),
)
"""HTTP headers; `x-token: 5 tokens left` and `cookie: chocolate` are none."""

Place = tuple[str | int, ...]
"""Keys and indices of a value in tables and lists."""

_hidden: set[str] = set()


def hide(value: str | None) -> None:
    """Redact this key in all that this process stores or logs from now on, whatever the name of what held it."""
    if value is not None and len(value) >= SHORTEST and value.lower() not in _NO_KEY:
        _hidden.add(value)


def hide_in(name: str, value: str) -> None:
    """`hide` a setting that is a key, or the keys in it."""
    if _is_under(name, value):
        hide(value)
        hide(value.rpartition(" ")[2])  # "Bearer ..."
        return
    for found in (match for pattern in (_FORMS, *_HEADERS) for match in pattern.finditer(value)):
        hide(found.groupdict().get("value") or found[0])
    for pattern in _NAMED:
        for found in pattern.finditer(value):
            if _is_under(found["name"], found["value"]):
                hide(found["value"])


def without_secrets(text: str) -> str:
    """A text without keys: neither those that this process has been given, nor what looks like one.

    >>> without_secrets("GET http://me:secret@host failed: Bearer abc")
    'GET http://[redacted]@host failed: Bearer [redacted]'
    """
    return _MAYBE_FORMS.sub(REDACTED, _without_keys(text))


def is_key(name: str, value: str) -> bool:
    """Whether a setting is a key: by its name, its value, or the names and values of others in it.

    >>> is_key("MY_PASS", "hunter2"), is_key("key", "answer"), is_key("command", "agent --api-key 1234abcd")
    (True, False, True)
    """
    return _is_under(name, value) or _without_keys(value) != value


@lru_cache(4096)
def names_key(name: str) -> bool:
    """Whether what has this name may be a key.

    >>> [name for name in ("openaiKey", "MY_PASS", "--api-key", "api_key_env", "max_tokens") if names_key(name)]
    ['openaiKey', 'MY_PASS', '--api-key', 'max_tokens']
    """
    words = words_of(name)
    return bool(words) and name not in _FOLDERS and (_is_sure(words) or words[-1] in _MAYBE)


def words_of(name: str) -> list[str]:
    """The words of a name in lower case and the singular, without numbers and the like behind them."""
    words = [word.lower() for word in _WORD.findall(name)]
    words = [word[:-1] if word.endswith("s") and not word.endswith("ss") else word for word in words]
    while words and (words[-1].isdecimal() or words[-1] in _BEHIND):
        words.pop()
    return words


def is_sure_name(name: str) -> bool:
    """Whether a name says that it is of a key, as `client_secret` does; `key` and `token` also name other things."""
    words = words_of(name)
    return bool(words) and _is_sure(words)


def redacted(value: Any, name: str = "") -> Any:
    """A configuration without secrets: neither under names of keys, as `is_key` tells them, nor inside other texts.

    Args:
        value: Tables, lists and plain values.
        name: What it is called.

    >>> redacted({"api_key": "abc", "api_key_env": "KEY", "key": "answer", "max_tokens": 8})
    {'api_key': '[redacted]', 'api_key_env': 'KEY', 'key': 'answer', 'max_tokens': 8}
    """
    if isinstance(value, Mapping):
        return {key: redacted(inner, _inner_name(_name_of(value, key), name)) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [redacted(inner, option or name) for option, inner in _optioned(value)]
    if _is_number_of_key(name, value):
        return REDACTED
    if not isinstance(value, str):
        return value
    return REDACTED if _is_under(name, value) else without_secrets(value)


def redacted_at(key: str, value: Any) -> Any:
    """The value at a dotted key, without secrets.

    >>> redacted_at("orchestrator.train.env.0.args.api_key", "abc")
    '[redacted]'
    """
    name = ""
    for part in key.split("."):
        name = _inner_name(part, name)
    return redacted(value, name)


def named_texts(value: Any, path: Place = (), name: str = "") -> Iterator[tuple[Place, str, str]]:
    """Each text in a configuration: its place, what it is called, and the text.

    Args:
        value: Tables, lists and plain values.
        path: Its own place.
        name: What it is called, where that is not the end of its place.

    >>> list(named_texts({"env": {"MY_PASS": "hunter2"}, "command": ["agent", "--key", "abc"]}))[2:]
    [(('command', 1), 'command', '--key'), (('command', 2), '--key', 'abc')]
    """
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from named_texts(inner, (*path, key), _inner_name(_name_of(value, key), name))
    elif isinstance(value, list | tuple):
        for index, (option, inner) in enumerate(_optioned(value)):
            yield from named_texts(inner, (*path, index), option or name)
    elif isinstance(value, str) or _is_number_of_key(name, value):
        yield path, name, str(value)


def named_within(text: str) -> Iterator[tuple[str, str]]:
    """Names and values that a text holds: of settings, of options, and of HTTP headers the last word.

    >>> list(named_within("agent --api-key abc")), list(named_within("Authorization: Digest c"))
    ([('api-key', 'abc')], [('Authorization', 'c')])
    """
    for pattern in _NAMED:
        yield from ((found["name"], found["value"]) for found in pattern.finditer(text))
    for pattern in _HEADERS:
        for found in pattern.finditer(text):
            yield found[0].partition(":")[0].strip(), found["value"].split()[-1]


def is_placeholder(value: str) -> bool:
    """Whether a value stands for no key: `none`, `EMPTY`, `$VARIABLE`, one that is redacted."""
    return value.lower() in _NO_KEY or value.startswith(("$", REDACTED))


def variable_in(text: str) -> str | None:
    """The name of an environment variable with a key that stands in a text; None where there is none."""
    found = (name for name, value in _key_variables().items() if _any_of(frozenset(_quoted(value))).search(text))
    return next(found, None)


def given_in(text: str) -> bool:
    """Whether a key that this process was given stands in a text; not one that is a word or a number."""
    return any(_is_telling(value) and _any_of(frozenset(_quoted(value))).search(text) for value in _hidden)


class WithoutSecrets(logging.Formatter):
    """Formats log records without keys, those in tracebacks too."""

    def format(self, record: logging.LogRecord) -> str:
        return without_secrets(super().format(record))


def _without_keys(text: str) -> str:
    text = _any_of(_values()).sub(REDACTED, text)
    text = _FORMS.sub(REDACTED, text)
    for pattern in _HEADERS:
        text = pattern.sub(_of_match, text)
    for pattern in (*_NAMED, _YAML):
        text = pattern.sub(_of_named, text)
    return text


def _of_named(found: re.Match[str]) -> str:
    return _of_match(found) if _is_under(found["name"], found["value"]) else found[0]


def _of_match(found: re.Match[str]) -> str:
    return found[0][: found.start("value") - found.start()] + REDACTED if REDACTED not in found["value"] else found[0]


def _values() -> frozenset[str]:
    """The keys that this process knows, and how texts quote them."""
    return frozenset(form for value in _hidden.union(_key_variables().values()) for form in _quoted(value))


def _key_variables() -> dict[str, str]:
    """The environment variables with keys."""
    return {name: value for name, value in os.environ.items() if _is_telling(value) and names_key(name)}


def _is_telling(value: str) -> bool:
    """False for short values, numbers and words, which stand in many texts."""
    is_word = value.isdecimal() or (value.isalpha() and value.islower()) or value.lower() in _NO_KEY
    return len(value) >= SHORTEST_OF_VARIABLE and not is_word


@lru_cache(256)
def _any_of(values: frozenset[str]) -> re.Pattern[str]:
    """Finds each of the texts, the longest first: as whole words, and also within words where it is no word itself."""
    longest_first = sorted(values, key=lambda value: (-len(value), value))
    return re.compile("|".join(map(_found_as, longest_first)) or "(?!)")


def _found_as(value: str) -> str:
    escaped = re.escape(value)
    if _looks_random(value):
        return escaped
    starts = r"(?:(?<!\w)|(?<=%[0-9A-Fa-f]{2})|(?<=\\[nrt]))" if re.match(r"\w", value) else ""
    return starts + escaped + (r"(?!\w)" if re.search(r"\w\Z", value) else "")


def _looks_random(value: str) -> bool:
    has_both = any(c.isdecimal() for c in value) and any(c.isalpha() for c in value)
    return len(value) >= 16 and has_both and not any(c.isspace() for c in value)


@lru_cache(4096)
def _quoted(value: str) -> tuple[str, ...]:
    """A text as it stands in Python, JSON, an address, and in base64."""
    data = value.encode(errors="surrogateescape")
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return value, repr(value)[1:-1], escaped, quote(data, safe=""), base64.b64encode(data).decode()


def _is_sure(words: Sequence[str]) -> bool:
    return words[-1] in _SURE or words[-1].endswith(("apikey", "password")) or tuple(words[-2:]) in _SURE_PAIRS


def _is_under(name: str, value: str) -> bool:
    """Whether a text of this name is a key: always where the name leaves no doubt, else where it looks like one."""
    words = words_of(name)
    if not words or not names_key(name) or is_placeholder(value):
        return False
    if _is_sure(words) or (name.isupper() and len(value) >= SHORTEST):
        return True
    return _looks_random(value)


def _inner_name(own: str, outer: str) -> str:
    """What tells whether a value is a key: its own name, or that of a table of keys which it is in."""
    return outer if names_key(outer) and not names_key(own) else own


def _is_number_of_key(name: str, value: object) -> bool:
    """Whether a number is a password or a key: `password = 12345678`."""
    return type(value) is int and len(str(value)) >= SHORTEST and is_sure_name(name)


def _name_of(table: Mapping[Any, Any], key: object) -> str:
    """What a value is called: by its key, or as in {name = "API_KEY", value = "..."} and {key = "API_KEY", ...}."""
    if str(key).lower() == "value":
        names = [str(name) for word, name in table.items() if str(word).lower() in ("name", "key")]
        return names[0] if names else str(key)
    return str(key)


def _optioned(values: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Each element of a list, with the option of a command line that it is the value of, `["--api-key", "..."]`, or in
    a pair the name of a key, `["API_KEY", "..."]`."""
    before = ""
    for value in values:
        yield before, value
        names = isinstance(value, str) and (
            re.fullmatch(r"--?[A-Za-z][\w\-.]*", value) or (len(values) == 2 and is_sure_name(value))
        )
        before = value if names else ""
