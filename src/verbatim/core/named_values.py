"""Finds names with their values in strings, so that secrets can be found by name: settings, options, HTTP headers, and
lists and tables that follow a name. This includes JSON nested in JSON strings, with quotes escaped once or several
times."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from verbatim.core.key_names import inner_name, is_login_name, is_sure_name, names_key
from verbatim.core.logins import is_login_pair

_NAME = r"(?<![\w\-.])-{0,2}(?P<name>[A-Za-z_][\w\-.]{0,200})(?![\w\-.])"
_QUOTE = r"""\\*["']"""
_QUOTED = rf"""(?P<quote>{_QUOTE})(?P<value>(?:(?!(?<!\\)(?P=quote))[^\n])+)(?=(?P=quote))"""
"""A quoted value. It ends at the same kind of quote, after the same number of backslashes, and may contain quotes of
other kinds."""
_LITERAL = r"""\\(?![nrt"'\\])"""
"""A literal backslash, that is, a backslash that does not escape anything."""
_SETTINGS = (
    # A lookahead matches a quoted value without consuming it, because it may be JSON with names of its own.
    re.compile(rf"""{_NAME}(?:{_QUOTE})?\s*(?:=>|[=:])\s*(?=(?:""|'')?{_QUOTED})"""),
    re.compile(_NAME + r"""=(?P<value>(?:[^\s"',;&()\[\]{}\\]|""" + _LITERAL + ")+)"),
    re.compile(r"(?<![\w\-.])--?(?P<name>[A-Za-z_][\w\-.]{0,200})" + rf"""(?:{_QUOTE})?(?:,\s*|\s+)(?={_QUOTED})"""),
    re.compile(
        r"(?<![\w\-.])--?(?P<name>[A-Za-z_][\w\-.]{0,200})"
        rf"""(?:{_QUOTE})?(?:,\s*|\s+)(?:{_QUOTE})?(?P<value>[^\s"',\-\[\\](?:[^\s"',\\]|{_LITERAL})*)"""
    ),
    re.compile(rf"[\[(]\s*{_QUOTE}{_NAME}{_QUOTE}\s*,\s*{_QUOTED}(?P=quote)\s*[\])]"),
    re.compile(
        rf"(?i:\b(?:name|key){_QUOTE}\s*[=:]\s*{_QUOTE}){_NAME}"
        rf"{_QUOTE}\s*,\s*{_QUOTE}(?i:value){_QUOTE}\s*:\s*{_QUOTED}"
    ),
    re.compile(r"<(?P<name>[A-Za-z_][\w\-.]{0,200})>(?P<value>[^<>\s][^<>]*)(?=</)"),
    re.compile(r"\blogin\s{1,9}\S{1,200}\s{1,9}(?P<name>password)\s{1,9}(?P<value>\S+)"),
)
"""Match `"api_key": "..."`, `API_KEY=...`, `--api-key ...` and `"--api-key", "..."`, the pair `["API_KEY", "..."]`, the
table `{"name": "API_KEY", "value": "..."}`, `<api_key>...</api_key>`, and a line of a .netrc."""
_YAML = re.compile(
    _NAME + rf"""(?:{_QUOTE})?:[ \t]+"""
    r"""(?=\S*[\d+/=!@#%^&*])(?P<value>(?:[^\s"',;{}\[\]\\]|""" + _LITERAL + r"""){6,})(?=[ \t]*(?:[\r\n]|\\[rn]|\Z))"""
)
"""Matches `MY_PASS: ...` up to the end of a line, unless the value is a plain word, which is more likely prose:
`password: missing`."""
_HEADERS = (
    re.compile(rf"(?i:(?<![\w\-.])(?:proxy-)?authorization)\s*:\s*(?P<value>[^\s\"'\\](?:[^\r\n\"'\\]|{_LITERAL})*)"),
    re.compile(
        r"(?i:(?<![\w\-])x-[\w\-]{0,40}(?:key|token|auth))\s*:\s*(?P<value>(?=[^\s\"',;]*\d)(?=[^\s\"',;]*[A-Za-z])"
        rf"(?:[^\s\"',;\\]|{_LITERAL})+|(?:[^\s\"',;\\]|{_LITERAL})+(?=[ \t]*(?:[\"',;\r\n\\]|\Z)))"
    ),
    re.compile(
        rf"(?i:(?<![\w\-.])(?:set-)?cookie)\s*:\s*(?P<value>[\w\-.]+=(?:[^\r\n\"'\\]|{_LITERAL})*"
        r"|(?=[^\s\"']*\d)[^\s\"'\\]{16,})"
    ),
)
"""Match HTTP headers, but not `x-token: 5 tokens left` or `cookie: chocolate`."""
_OPENS = re.compile(rf"{_NAME}(?:(?:{_QUOTE})?\s*(?:=>|[=:])\s*[\[({{]|(?P<call>\())")
_TOKEN = re.compile(
    r"(?P<open>[\[({])|(?P<close>[\])}])"
    rf"|(?:(?<![\w\\])|(?<=\\[nrt]))(?P<quote>{_QUOTE})(?P<value>(?:(?!(?<!\\)(?P=quote))[^\n])*)(?P=quote)"
    r"(?P<is_key>\s*(?:=>|[=:]))?"
    r"""|(?P<bare>[^\s"',:;=\[\](){}\\]+)(?P<bare_is_key>\s*(?:=>|[=:])|(?P<call>(?=\()))?"""
)


_YAML_LIST = re.compile(
    _NAME + rf"""(?:{_QUOTE})?:[ \t]*(?:\r?\n|\\n)(?P<items>(?:[ \t]*-[ \t]+[^\s\\][^\r\n\\]*(?:\r?\n|\\n|\Z))+)"""
)
_YAML_ITEM = re.compile(r"""-[ \t]+["']?(?P<value>[^\s"'\\]+)""")


@dataclass(frozen=True, slots=True)
class Named:
    """A named value in a string."""

    name: str
    """The name that decides whether the value is a secret: the value's own name, or the name of the list or table that
    contains the value."""
    start: int
    end: int


Finder = Callable[[str], Iterator[Named]]


def _settings(pattern: re.Pattern[str]) -> Finder:
    return lambda text: map(_named, pattern.finditer(text))


def _headers(pattern: re.Pattern[str]) -> Finder:
    def find(text: str) -> Iterator[Named]:
        for found in pattern.finditer(text):
            yield Named(found[0].partition(":")[0].strip(), *found.span("value"))

    return find


def _named(found: re.Match[str]) -> Named:
    return Named(_named_by(found), *found.span("value"))


def _named_by(found: re.Match[str]) -> str:
    r"""The name that was matched. After a backslash the name's first letter may belong to an escape such as `\n`; this
    letter is then removed."""
    name, start = found["name"], found.start("name")
    is_escaped = found.string[max(0, start - 1) : start] == "\\"
    is_part = is_escaped and name[0] in "nrt" and names_key(name[1:]) and not is_sure_name(name)
    return name[1:] if is_part else name


@dataclass(slots=True)
class _Level:
    """A bracket that is open at the current position of the scan."""

    name: str
    texts: list[tuple[int, int]] = field(default_factory=list)
    is_list: bool = True


def _listed_in(text: str) -> Iterator[Named]:
    """The strings in lists and tables that follow a secret's name, found in one pass that starts at the first such
    name.

    An upper-case name without quotes is probably a constant of a program (`_TOKENS = ("input_ids", "starts")`), not an
    environment variable. So the strings that follow this name count as secrets only if they look like secrets.
    """
    first = next((found for found in _OPENS.finditer(text) if _may_hold_keys(found)), None)
    levels, name, has_name = [_Level("")], "", False
    for token in () if first is None else _TOKEN.finditer(text, _start_of_key(first)):
        own = token["bare"] if token["bare"] is not None else token["value"]
        if token["open"]:
            levels.append(_Level(name if has_name else levels[-1].name))
        elif token["close"]:
            closed = levels.pop() if len(levels) > 1 else levels[0]
            texts = [text[start:end] for start, end in closed.texts]
            if closed.is_list and is_login_pair(closed.name, texts):
                yield Named(f"{closed.name}.password", *closed.texts[1])
        elif token["is_key"] or token["bare_is_key"] is not None:
            if token["call"] is None:
                levels[-1].is_list = False
                own = own.lower() if token["is_key"] is None and own.isupper() and not is_sure_name(own) else own
                name = inner_name(own, levels[-1].name)
                name = name if names_key(name) else ""
            else:
                name = own if is_login_name(own) else levels[-1].name
            has_name = True
            continue
        elif len(levels) > 1 and levels[-1].name:
            place = token.span("value" if token["bare"] is None else "bare")
            if token["bare"] is None or _may_be_key(own):
                levels[-1].texts.append(place)
                yield Named(name if has_name else levels[-1].name, *place)
        name, has_name = "", False


def _items_in(text: str) -> Iterator[Named]:
    """The strings in YAML lists that follow a name."""
    for found in _YAML_LIST.finditer(text):
        for item in _YAML_ITEM.finditer(text, *found.span("items")):
            yield Named(_named_by(found), *item.span("value"))


def _start_of_key(found: re.Match[str]) -> int:
    """The start of a name, including its opening quote."""
    start = found.start()
    while start and found.string[start - 1] in "\\\"'":
        start -= 1
    return start


def _may_hold_keys(found: re.Match[str]) -> bool:
    """True if a list or table follows a secret's name, or if arguments follow the name of a login: `BasicAuth(...)`."""
    name = _named_by(found)
    return names_key(name) if found["call"] is None else is_login_name(name)


def _may_be_key(bare: str) -> bool:
    return len(bare) >= 6 and any(c.isdecimal() for c in bare)


HEADERS = tuple(map(_headers, _HEADERS))
"""Functions that find HTTP headers that hold secrets, and return the headers' values."""
SETTINGS = (*map(_settings, _SETTINGS), _listed_in, _items_in)
"""Functions that find the values of settings and options, and the values in lists and tables that follow a name."""
LINES = _settings(_YAML)
"""Finds the values of settings that extend to the end of a line, as in YAML; prose may have the same form."""
