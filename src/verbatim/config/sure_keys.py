"""Finds strings in a configuration that are certainly keys or passwords. Such strings make a configuration invalid.

Redaction hides everything that may be a key. Refusing a configuration stops the user's work, so the rules here are
stricter than the rules of redaction. A string is certainly a key if it occurs
- in the form that a service gives its keys: a known prefix, followed by letters and digits without a break;
- as the password in a URL, after `Bearer` or `Basic`, or as the value of an environment variable named like a key;
- as a login or password in a command (`curl -u user:password`) or in a setting (`basic_auth = "user:password"`);
- in a setting named like a password or API key (`password`, `api_key`, `authorization`), if it has no spaces or has a
  digit;
- in a setting with a different name that only keys have (`MY_PASS`, `client_secret`), if it has letters and digits and
  is neither a path nor words: `hunter2`, but not `label_v2` or `pass@8`. The same test applies to a value that follows
  such a name, or a name of the previous point, inside a longer string;
- in a setting with an ambiguous name (`key`, `token`, `pass` alone, plurals) if it looks random: at least 16 letters
  and digits without a break, which change at least three times between letters and digits.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from verbatim.core.key_forms import keys_of_services
from verbatim.core.key_names import is_sure_login_name, is_sure_name, names_key, words_of
from verbatim.core.logins import logins_in, password_in
from verbatim.core.redaction import Place, given_in, is_placeholder, named_texts, named_within, variable_in

_PASSWORDS = ("apikey", "authorization", "passcode", "passphrase", "passwd", "password")
_MIXED = r"(?:(?=[A-Za-z]*\d)(?=\d*[A-Za-z])[A-Za-z0-9]{16,}|(?=[a-z]*[A-Z])(?=[A-Z]*[a-z])[A-Za-z]{30,})"
_LONG = r"(?=[\w\-]*[a-z])(?=[\w\-]*[A-Z])(?=[\w\-]*\d)[\w\-]{40,}"
_FORMS = re.compile(
    r"(?<=://)[^/\s@:?#\"']*:(?![$<{*\[])[^/\s?#\"']+(?=@)"  # user:password@host
    r"|(?<![\w/.\-%+])[\w.\-%+]+:(?![$<{*\[])[^/\s@\"']{1,200}(?=@[\w.\-]{1,253}:\d{2,5}\b)"  # without http://
    r"|(?i:\b(?:bearer|basic)) +(?=[\w\-.~+/=]*\d)[\w\-.~+/=]{16,}"
    r"|(?<![\w\-./])(?:"
    r"(?:[spr]k[\-_](?:(?:live|test|proj|or-v1|ant-\w+)[\-_])?|(?:hf|gh[pousr]|gsk|npm|wandb_v\d)_|glpat-|nvapi-"
    r"|xox[abprs]-(?:\d+-)*)"
    + _MIXED
    + r"|(?:sk-(?:proj|ant|svcacct|admin)-|github_pat_|nvapi-|pypi-)"
    + _LONG
    + r"|AIza(?=[\w\-]*\d)[\w\-]{35})"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----"
)
_BEGINNING = re.compile(r"[spr]k[\-_][A-Za-z0-9]{16,}")
_RUN = re.compile(r"[A-Za-z0-9]{16,}")
_PATH = re.compile(r"(?:~|\.{0,2})/.*|[A-Za-z]:\\.*|.*/[^/]*\.\w{1,5}")
_WORDS = re.compile(r"(?:[A-Za-z]+|v?\d{1,4})(?:[_\-.:/](?:[A-Za-z]+|v?\d{1,4}))+")
_OTHER = re.compile(r"<.*>|[A-Za-z_]+@\d+")
"""Matches special tokens, and metrics such as pass@8, which are not keys."""


def keys_in(value: Any) -> Iterator[tuple[Place, str, str]]:
    """The strings in a configuration that certainly are or contain keys, as (place, name, string).

    >>> list(keys_in({"args": {"env": {"MY_PASS": "hunter2"}, "command": ["agent", "--key", "a1b2c3d4e5f6g7h8"]}}))
    [(('args', 'env', 'MY_PASS'), 'MY_PASS', 'hunter2'), (('args', 'command', 2), '--key', 'a1b2c3d4e5f6g7h8')]
    """
    return ((path, name, text) for path, name, text in named_texts(value) if is_sure_key(name, text))


def is_sure_key(name: str, text: str) -> bool:
    """True if a string with this name certainly is a key or contains a key.

    >>> is_sure_key("MY_PASS", "hunter2"), is_sure_key("pass", "pass@8"), is_sure_key("model", "sk-learn_models_v2")
    (True, False, False)
    """
    if _FORMS.search(text) or any(keys_of_services(text)) or any(logins_in(text, surely=True)):
        return True
    if variable_in(text) or given_in(text):
        return True
    return _is_named(name, text) or any(_is_named(inner, found, within=True) for inner, found in named_within(text))


def _is_named(name: str, value: str, *, within: bool = False) -> bool:
    """True if a value is a key because of its name. With `within`, the name and value were found in a longer string,
    which may be prose, such as `password: swordfish`; the rules for passwords are then stricter."""
    words = words_of(name)
    if not names_key(name) or is_placeholder(value):
        return False
    if (password := password_in(name, value)) is not None and not within:
        return is_sure_login_name(name) or _is_plausible(password)
    if within and words[-1] == "authorization":
        value = value.rpartition(" ")[2]
    if _is_plural(name) or not _says_whose(name, words):
        return _looks_drawn(value)
    if _is_password(words) and not within:
        return not any(c.isspace() for c in value) or any(c.isdecimal() for c in value)
    return _is_plausible(value)


def _is_plural(name: str) -> bool:
    letters = name.lower().rstrip("0123456789_-")
    return letters.endswith("s") and not letters.endswith("ss")


def _says_whose(name: str, words: Sequence[str]) -> bool:
    """False for `key`, `pass` and similar words alone, and for names that merely end in such a word: sort_key."""
    return name.isupper() or _is_password(words) or (len(words) > 1 and is_sure_name(name))


def _is_password(words: Sequence[str]) -> bool:
    return words[-1].endswith(_PASSWORDS) or tuple(words[-2:]) == ("api", "key")


def _is_plausible(value: str) -> bool:
    if len(value) < 6 or any(c.isspace() for c in value):
        return False
    if any(form.fullmatch(value) for form in (_PATH, _WORDS, _OTHER)):
        return False
    return any(c.isdecimal() for c in value) and any(c.isalpha() for c in value)


def _looks_drawn(value: str) -> bool:
    if _PATH.fullmatch(value) or _OTHER.fullmatch(value) or any(c.isspace() for c in value):
        return False
    turns = (sum(a.isdecimal() != b.isdecimal() for a, b in pairwise(run)) for run in _RUN.findall(value))
    return bool(_BEGINNING.fullmatch(value)) or max(turns, default=0) >= 3
