"""Finds keys and passwords by name, form and value, and redacts them in everything stored, logged or sent."""

from __future__ import annotations

import base64
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any
from urllib.parse import quote

from verbatim.core.key_forms import keys_of_services
from verbatim.core.key_names import inner_name, is_sure_name, names_key
from verbatim.core.logins import attached_password, has_password, is_login_pair, logins_in, password_in, program_of
from verbatim.core.named_values import HEADERS, LINES, SETTINGS

REDACTED = "[redacted]"
SHORTEST = 6
"""Minimum length of a key's value in characters; a shorter value would match in almost any string."""
SHORTEST_OF_VARIABLE = 8
"""Minimum length of an environment variable's value; greater than `SHORTEST`, because only the variable's name suggests
that the value is a key."""

_NO_KEY = frozenset({
    "", "-", "0", "1", "always", "default", "disabled", "dummy", "empty", "enabled", "false", "never", "no", "none",
    "null", "off", "on", "optional", "required", "true", "unused", "x", "yes",
})  # fmt: skip

_FORMS = re.compile(
    r"(?<=://)[^/\s@:?#\"']*:[^/\s?#\"']+(?=@)"  # user:password@host
    r"|(?<![\w/.\-%+])[\w.\-%+]+:[^/\s@\"']{1,200}(?=@[\w.\-]{1,253}:\d{2,5}\b)"  # without http://
    r"|(?<=[?&]key=)[^&\s]+|(?<=[?&]token=)[^&\s]+|(?<=[?&]api_key=)[^&\s]+"
    r"|(?<=Bearer )[^\s\"',\\]{3,}|(?<=Basic )(?=\S*[\dA-Z=+/])[^\s\"',\\]+"
    r"|(?i:(?<=bearer )|(?<=basic ))(?=\S*\d)[\w\-.~+/=]{8,}"
    r"|(?:\b|(?<=\\[nrt])|(?<=%[0-9A-Fa-f]{2}))(?:(?:sk|pk|rk)[\-_][\w\-]{16,}|hf_\w{16,}|gh[pousr]_\w{16,}"
    r"|github_pat_\w{16,}|wandb_v\d_\w{16,}|glpat-[\w\-]{16,}|xox[a-eoprs]-[\w\-]{10,}|AIza[\w\-]{30,}|gsk_\w{16,}"
    r"|nvapi-[\w\-]{16,}|npm_\w{30,}|pypi-[\w\-]{30,})"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*-----|\Z)"
)
_MAYBE_FORMS = re.compile(r"(?<=://)[^/\s@]+(?=@)|\b(?:local-)?[0-9a-f]{40}\b")
"""Forms that are redacted in strings, but are not a reason to refuse a setting: the user in a URL, a commit id."""
_OPTION = re.compile(r"--?[A-Za-z][\w\-.]*")
_PASSWORD = "password"
_LOGGED, _ACROSS = 32_768, 4096
"""(1) Number of characters kept at each end of a long log record, and (2) number of characters next to the kept
characters that are also searched for keys."""

Place = tuple[str | int, ...]
"""Keys and indices that lead to a value in tables and lists."""

_hidden: set[str] = set()


def hide(value: str | None) -> None:
    """Redact this key from now on in everything that this process stores or logs, under any name."""
    if value is not None and len(value) >= SHORTEST and value.lower() not in _NO_KEY:
        _hidden.add(value)


def hide_in(name: str, value: str) -> None:
    """Call `hide` for a setting's value if the whole value is a key, otherwise for each key inside the value."""
    if _is_under(name, value):
        hide(value)
        hide(value.rpartition(" ")[2])  # "Bearer ..."
        hide(password_in(name, value))
        return
    for found in _FORMS.finditer(value):
        hide(found[0])
        hide(found[0].partition(":")[2])  # the password in user:password
    for start, end in (*keys_of_services(value), *logins_in(value)):
        hide(value[start:end])
        hide(value[start:end].partition(":")[2])
    for find in HEADERS:
        for named in find(value):
            hide(value[named.start : named.end])
    for find in SETTINGS:
        for named in find(value):
            if _is_under(named.name, value[named.start : named.end]):
                hide(value[named.start : named.end])


def without_secrets(text: str) -> str:
    """A string with all keys redacted: the keys that this process was given, and everything that looks like a key.

    >>> without_secrets("GET http://me:secret@host failed: Bearer abc")
    'GET http://[redacted]@host failed: Bearer [redacted]'
    """
    return _MAYBE_FORMS.sub(REDACTED, _without_keys(text))


def is_key(name: str, value: str) -> bool:
    """True if a setting's name or value shows that the value is a key, or if the value contains a key.

    >>> is_key("MY_PASS", "hunter2"), is_key("key", "answer"), is_key("command", "agent --api-key 1234abcd")
    (True, False, True)
    """
    return _is_under(name, value) or _without_keys(value) != value


def redacted(value: Any, name: str = "") -> Any:
    """A configuration with its secrets redacted, both under names of keys (as in `is_key`) and inside other strings.

    Args:
        value: Tables, lists and plain values.
        name: The name of the value.

    >>> redacted({"api_key": "abc", "api_key_env": "KEY", "key": "answer", "max_tokens": 8})
    {'api_key': '[redacted]', 'api_key_env': 'KEY', 'key': 'answer', 'max_tokens': 8}
    """
    if isinstance(value, Mapping):
        return {key: redacted(inner, inner_name(_name_of(value, key), name)) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [redacted(inner, option or name) for option, inner in _optioned(value, name)]
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
        name = inner_name(part, name)
    return redacted(value, name)


def named_texts(value: Any, path: Place = (), name: str = "") -> Iterator[tuple[Place, str, str]]:
    """Each string of a configuration, as (place, name, string).

    Args:
        value: Tables, lists and plain values.
        path: The place of the value itself.
        name: The name of the value, if it differs from the last part of its place.

    >>> list(named_texts({"env": {"MY_PASS": "hunter2"}, "command": ["agent", "--key", "abc"]}))[2:]
    [(('command', 1), 'command', '--key'), (('command', 2), '--key', 'abc')]
    """
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from named_texts(inner, (*path, key), inner_name(_name_of(value, key), name))
    elif isinstance(value, list | tuple):
        for index, (option, inner) in enumerate(_optioned(value, name)):
            yield from named_texts(inner, (*path, index), option or name)
    elif isinstance(value, str) or _is_number_of_key(name, value):
        yield path, name, str(value)


def named_within(text: str) -> Iterator[tuple[str, str]]:
    """Names and values of settings and options in a string, and names of HTTP headers with the last word of their
    value.

    >>> list(named_within("agent --api-key abc")), list(named_within("Authorization: Digest c"))
    ([('api-key', 'abc')], [('Authorization', 'c')])
    """
    for find in SETTINGS:
        yield from ((named.name, text[named.start : named.end]) for named in find(text))
    for find in HEADERS:
        yield from ((named.name, text[named.start : named.end].rsplit(maxsplit=1)[-1]) for named in find(text))


def is_placeholder(value: str) -> bool:
    """True if a value is a placeholder, not a key: `none`, `EMPTY`, `$VARIABLE`, or a redacted value."""
    return value.lower() in _NO_KEY or value.startswith(("$", REDACTED))


def variable_in(text: str) -> str | None:
    """The name of an environment variable whose key occurs in a string, or None."""
    found = (name for name, value in _key_variables().items() if _any_of(frozenset(_quoted(value))).search(text))
    return next(found, None)


def given_in(text: str) -> bool:
    """True if a string contains a key that this process was given; keys that are words or numbers do not count."""
    return any(_is_telling(value) and _any_of(frozenset(_quoted(value))).search(text) for value in _hidden)


class WithoutSecrets(logging.Formatter):
    """Formats log records without keys, also in tracebacks. Only the beginning and end of a very long record are kept,
    because a user's exception may have a text of any length."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        left_out = len(text) - 2 * _LOGGED
        if left_out <= 0:
            return without_secrets(text)
        # More is searched than is kept, because a key may lie across the cut.
        begin, end = without_secrets(text[: _LOGGED + _ACROSS])[:_LOGGED], without_secrets(text[-_LOGGED - _ACROSS :])
        return f"{begin}\n[cut: {left_out:,} of {len(text):,} characters]\n{end[-_LOGGED:]}"


def _without_keys(text: str) -> str:
    # Known values come first: a later pattern might redact only part of a known value, and the rest would no longer
    # match.
    text = _any_of(_values()).sub(REDACTED, text)
    text = _FORMS.sub(REDACTED, text)
    text = _cut(text, keys_of_services(text))
    for find in HEADERS:
        text = _cut(text, ((named.start, named.end) for named in find(text)))
    text = _cut(text, logins_in(text))
    for find in (*SETTINGS, LINES):
        found = [named for named in find(text) if _is_under(named.name, text[named.start : named.end])]
        text = _cut(text, ((named.start, named.end) for named in found))
    return text


def _cut(text: str, places: Iterable[tuple[int, int]]) -> str:
    """The string with these places (start, end) redacted, except places that already contain a redaction."""
    parts, done = [], 0
    for start, end in sorted(places):
        if start >= done and REDACTED not in text[start:end]:
            parts += [text[done:start], REDACTED]
            done = end
    return "".join([*parts, text[done:]])


def _values() -> frozenset[str]:
    """The keys known to this process, in every form in which strings may quote them."""
    return frozenset(form for value in _hidden.union(_key_variables().values()) for form in _quoted(value))


def _key_variables() -> dict[str, str]:
    """The environment variables whose names suggest that the values are keys."""
    return {name: value for name, value in os.environ.items() if _is_telling(value) and names_key(name)}


def _is_telling(value: str) -> bool:
    """True if finding this value in a string means something; False for short values, numbers and words, which occur in
    many strings."""
    is_word = value.isdecimal() or (value.isalpha() and value.islower()) or value.lower() in _NO_KEY
    return len(value) >= SHORTEST_OF_VARIABLE and not is_word


@lru_cache(256)
def _any_of(values: frozenset[str]) -> re.Pattern[str]:
    """A pattern for any of the strings, the longest first; strings that do not look random match as whole words
    only."""
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
    """All forms in which a string may occur: unchanged; quoted by the rules of Python, JSON or URLs; and in base64."""
    data = value.encode(errors="surrogateescape")
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return value, repr(value)[1:-1], escaped, quote(data, safe=""), base64.b64encode(data).decode()


def _is_under(name: str, value: str) -> bool:
    """True if a string with this name is a key: always for an unambiguous name, otherwise if the string looks like a
    key."""
    if not names_key(name) or is_placeholder(value):
        return False
    if is_sure_name(name) or (name.isupper() and len(value) >= SHORTEST):
        return True
    return password_in(name, value) is not None or _looks_random(value)


def _is_number_of_key(name: str, value: object) -> bool:
    """True if a number is a password or a key: `password = 12345678`."""
    return type(value) is int and len(str(value)) >= SHORTEST and is_sure_name(name)


def _name_of(table: Mapping[Any, Any], key: object) -> str:
    """The name of a value in a table: the value's key, but "API_KEY" for the value in {name = "API_KEY", value = "..."}
    or {key = "API_KEY", value = "..."}."""
    if str(key).lower() == "value":
        names = [str(name) for word, name in table.items() if str(word).lower() in ("name", "key")]
        return names[0] if names else str(key)
    return str(key)


def _optioned(values: Sequence[Any], name: str) -> Iterator[tuple[str, Any]]:
    """Each element of a list, with the name that may show that the element is a key: the command-line option before it
    (`["--api-key", "..."]`), the first element of a pair (`["API_KEY", "..."]`), or "password" for a login."""
    before = ""
    words: set[str] = set()
    is_pair = is_login_pair(name, values)
    for index, value in enumerate(values):
        is_text = isinstance(value, str)
        if is_text and (has_password(words, before, value) or attached_password(words, value)):
            before = _PASSWORD
        elif is_pair and index == 1:
            before = f"{name}.{_PASSWORD}"
        yield before, value
        is_name = is_text and (_OPTION.fullmatch(value) or (len(values) == 2 and is_sure_name(value)))
        before = value if is_name else ""
        if is_text and (program := program_of(value)):
            words.add(program)
