"""Recognises passwords by their context: `basic_auth = "user:password"`, `auth = ["user", "password"]`, and commands
such as `curl -u user:password`, which may be a list or a string."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from verbatim.core.key_names import is_login_name, is_sure_login_name, names_key, words_of

_LOGIN = re.compile(r"[^\s:/\\]+:(?P<password>[^\s/\\$<{\[*][^\s]*)")
"""Matches `user:password`, but not a path, a variable or a placeholder."""
_METHODS = frozenset({
    "admin", "api_key", "apikey", "basic", "bearer", "cert", "certificate", "cookie", "digest", "false", "header",
    "iam", "jwt", "kerberos", "ldap", "mtls", "negotiate", "none", "ntlm", "oauth", "oauth1", "oauth2", "optional",
    "pass", "passwd", "password", "private", "public", "query", "read", "required", "saml", "secret", "sso", "tls",
    "token", "true", "user", "write",
})  # fmt: skip
"""If a login's value is one of these words, it is an authentication method, a permission or a placeholder, not a
password."""
_HTTP_CLIENTS = frozenset({"curl", "wget", "http", "https", "httpie", "xh", "xhs", "curlie"})
_LOGIN_OPTIONS = frozenset({"-u", "-U", "--user", "--proxy-user", "-a", "--auth"})
"""Options of HTTP clients that take `user:password`; in other programs `-u`, `--user` and `--proxy-user` may have a
different meaning."""
_PASSWORD_OPTIONS = frozenset({("sshpass", "-p"), ("redis-cli", "-a"), ("twine", "-p")})
"""Pairs of program and option whose value is a password."""
_CONTAINERS = frozenset({"docker", "podman", "nerdctl", "helm"})
"""Programs whose option `-u` is the user that runs a process, and whose `login -p` is a password."""
_LOGIN_WORD = "login"
_ATTACHED = frozenset({
    *((client, option) for client in _HTTP_CLIENTS for option in ("-u", "-U")),
    *((program, "-p") for program in ("mysql", "mysqldump", "mariadb", "sshpass")),
})  # fmt: skip
"""Options whose value may follow in the same word: `mysql -pPASSWORD`."""
_PROGRAMS = _HTTP_CLIENTS | _CONTAINERS | {program for program, _ in _PASSWORD_OPTIONS | _ATTACHED}
_COMMAND = re.compile(
    r"(?<![\w\-.])(?<!//)(?:" + "|".join(sorted(_PROGRAMS, key=len, reverse=True)) + r")(?![\w\-]|\.\w|:/)"
)
_PART = re.compile(r"""[^\s"',;|&\[\]()\\]+|[\n;|&]""")


def password_in(name: str, value: str) -> str | None:
    """The password in a value with this name, or None if the value is not `user:password`.

    >>> password_in("basic_auth", "me:swordfish"), password_in("auth", "package.module:function")
    ('swordfish', None)
    """
    found = _LOGIN.fullmatch(value) if is_login_name(name) else None
    password = "" if found is None else found["password"]
    if not password or password.lower() in _METHODS:
        return None
    return password if is_sure_login_name(name) or _is_mixed(password) else None


def is_login_pair(name: str, values: Sequence[Any]) -> bool:
    """True if a list with this name consists of a user and a password.

    >>> is_login_pair("auth", ["me", "swordfish"]), is_login_pair("auth", ["basic", "digest"])
    (True, False)
    """
    if len(values) != 2 or not is_login_name(name):
        return False
    user, password = values
    if not isinstance(user, str) or not isinstance(password, str | int) or isinstance(password, bool):
        return False
    if any(c.isspace() or c in "/\\" for c in user) or _is_word_for_it(str(password)):
        return False
    return _is_mixed(str(password)) or words_of(name)[-1] not in ("cred", "credential")


def has_password(before: Collection[str], option: str, value: str) -> bool:
    """True if the value of a command's option holds a password.

    Args:
        before: The preceding words of the command; names of programs are given without their folder.
        option: The option, such as `-u` or `--user`.
        value: The word after the option.

    >>> has_password({"curl"}, "-u", "me:swordfish"), has_password({"docker", "run"}, "-u", "1000:1000")
    (True, False)
    """
    of_containers = not _CONTAINERS.isdisjoint(before)
    if any(program in before and option == own for program, own in _PASSWORD_OPTIONS) or (
        of_containers and _LOGIN_WORD in before and option == "-p"
    ):
        return bool(value) and not value.startswith(("-", "$", "{", "<"))
    found = _LOGIN.fullmatch(value) if option in _LOGIN_OPTIONS else None
    if found is None:
        return False
    if option == "--proxy-user" or not _HTTP_CLIENTS.isdisjoint(before):
        return True
    return option in ("-u", "--user") and not of_containers and _is_mixed(found["password"])


def attached_password(before: Collection[str], word: str) -> int:
    """The index at which an attached password or login begins in a command's word (`-uuser:password`,
    `--user=user:password`), or 0 if there is none."""
    option, equals, value = word.partition("=")
    if equals and word.startswith("-") and has_password(before, option, value):
        return len(option) + 1
    short, value = word[:2], word[2:]
    programs = [program for program, own in _ATTACHED if program in before and own == short]
    if not programs or not value or value[0] in "$={<-":
        return 0
    return 2 if _LOGIN.fullmatch(value) or not _HTTP_CLIENTS.issuperset(programs) else 0


def program_of(word: str) -> str:
    """The program's name without its folder, if the program determines the meaning of options; otherwise an empty
    string."""
    name = word.rpartition("/")[2]
    return name if name in _PROGRAMS or word == _LOGIN_WORD else ""


def logins_in(text: str, *, surely: bool = False) -> Iterator[tuple[int, int]]:
    """The start and end of each password and login in the commands of a string. The time taken is linear in the length
    of the string.

    Args:
        text: A string with commands, or with anything else.
        surely: True to skip strings that may be prose about a command: `sshpass -p takes it`.

    >>> text = "curl -s -u me:swordfish https://host; docker run -u 1000:1000 -p 80:80 image"
    >>> [text[slice(*place)] for place in logins_in(text)]
    ['me:swordfish']
    """
    starts = [found.span() for found in _COMMAND.finditer(text)]
    for number, (start, place) in enumerate(starts):
        end = starts[number + 1][0] if number + 1 < len(starts) else len(text)
        for found in _of_command(text, {text[start:place]}, place, end):
            value = text[slice(*found)]
            if not surely or (":" in value and not _is_word_for_it(value.partition(":")[2])) or _is_mixed(value):
                yield found


def _of_command(text: str, before: set[str], place: int, end: int) -> Iterator[tuple[int, int]]:
    option = ""
    for found in _PART.finditer(text, place, end):
        word = found[0]
        if word in "\n;|&":
            if text[found.start() - 1] == "\\":  # an escaped newline: the command continues
                continue
            return
        if has_password(before, option, word) and not _is_left_out(word):
            yield found.span()
        elif (skipped := attached_password(before, word)) and not _is_left_out(word[skipped:]):
            yield found.start() + skipped, found.end()
        option = word if word.startswith("-") else ""
        if word == _LOGIN_WORD:
            before.add(word)


def _is_left_out(value: str) -> bool:
    return value.rpartition(":")[2].lower() in _METHODS


def _is_word_for_it(password: str) -> bool:
    """True for an authentication method or a placeholder for a password or key: `YOUR_API_KEY`."""
    return password.lower() in _METHODS or (names_key(password) and not any(c.isdecimal() for c in password))


def _is_mixed(password: str) -> bool:
    return len(password) >= 6 and any(c.isdecimal() for c in password) and any(c.isalpha() for c in password)
