"""Reads the fields of requests. Each field is honoured, known to have no effect, or refused by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from verbatim.core.sampling import LONGEST_STOP, MOST_STOP_IDS, MOST_STOPS, SamplingParams, stop_problem
from verbatim.core.texts import brief
from verbatim.inference.chat.protocol import UNENFORCEABLE, Options, RequestedSampling, ToolChoice
from verbatim.inference.http.lone_surrogates import refuse_lone_surrogates
from verbatim.inference.http.refused import Refused
from verbatim.models.renderers.nesting import MAX_DEPTH, levels

MOST_MESSAGES = 20_000
"""Maximum number of messages, items or content parts in one list."""
MOST_TOOLS = 1024
_LONGEST_NAME = 1024  # maximum length of a session's name, in characters
_LARGEST_FLOAT = 1.7e308  # below the largest double, so that any integer up to it converts without an OverflowError
_NONE_PASS = Options()
_CHOICES: Mapping[str, ToolChoice] = {"auto": "auto", "none": "none", "required": "required"}
_SHOWN_PARTS = 5
"""Number of path components that an error shows for a value that is nested too deeply."""


class BadField(Refused):
    """A field is refused. The message says what was found and what was expected.

    Args:
        field: Path of the field, without list indices: "messages.content".
        message: One sentence that includes the name of the field.
        unknown: True if none of our protocols has a field of this name.
    """

    def __init__(self, field: str, message: str, *, unknown: bool = False) -> None:
        super().__init__(400, message, field=field, unknown=unknown)


@dataclass(frozen=True, kw_only=True)
class Fields:
    """The fields that a protocol knows. Any other field is refused unless its value is null, because ignoring a setting
    could silently change what is sampled."""

    honoured: Collection[str]
    """Fields that are read."""
    without_effect: Collection[str] = ()
    """Fields that change neither prompt nor sampling; any value is accepted."""
    neutral: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Fields that are accepted only with the listed values, because these values have no effect. If the list is empty,
    only null is accepted."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Maps this protocol's name of a field to the field's name in `UNENFORCEABLE`."""

    def check(self, body: Mapping[str, Any], options: Options = _NONE_PASS, where: str = "") -> tuple[str, ...]:
        """Refuse fields that cannot be honoured.

        Args:
            body: The object; null values count as absent.
            options: Names the fields that are accepted without being enforced; none by default.
            where: Path of the object for error messages, such as "stream_options"; "" for the request itself.

        Returns:
            The fields that were accepted but are not enforced.

        Raises:
            BadField: a field is refused; the message names the first such field.
        """
        passed: list[str] = []
        for name, value in body.items():
            if value is None or name in self.honoured or name in self.without_effect:
                continue
            path = f"{where}.{name}"[:120] if where else name[:80]
            if name not in self.neutral:
                raise BadField(
                    _path(path), f"{path} = {brief(value)} is not a field that this server knows", unknown=True
                )
            # The types are compared too, because False == 0 and True == 1.
            if any(type(value) is type(ok) and value == ok for ok in self.neutral[name]):
                continue
            if self.aliases.get(name, name) in options.unenforced & UNENFORCEABLE:
                passed.append(name)
                continue
            accepted = self.neutral[name]
            hint = f"; only {' or '.join(map(brief, accepted))} is accepted" if accepted else ""
            raise BadField(_path(path), f"{path} = {brief(value)} cannot be honoured here{hint}")
        return tuple(passed)


def check_values(body: Mapping[str, Any]) -> None:
    """Refuse a field that is nested deeply enough to overflow the stack later, or that contains a lone surrogate or a
    number that JSON cannot represent (Python parses 1e999 as infinity)."""
    for name, value in body.items():
        for depth, level in enumerate(levels(value)):
            if depth == MAX_DEPTH:
                where = _deep_path(value, MAX_DEPTH)[:_SHOWN_PARTS]
                raise BadField(
                    name[:80],
                    f"{name[:80]} is nested deeper than {MAX_DEPTH} levels, at {name[:80]}{''.join(where)}",
                    unknown=True,
                )
            if any(isinstance(item, float) and not math.isfinite(item) for item in level):
                raise BadField(name[:80], f"{name[:80]} contains a number that is too large", unknown=True)
    refuse_lone_surrogates(body)


def _deep_path(value: object, levels: int) -> list[str]:
    """The keys and indices along the first path that is `levels` deep; empty if no path is that deep."""
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        part = f"[{key}]" if isinstance(key, int) else f".{key[:40]}"
        if levels == 1:
            return [part]
        if below := _deep_path(item, levels - 1):
            return [part, *below]
    return []


def read_text(given: Mapping[str, Any], name: str, default: str = "", *, most: int | None = None) -> str:
    """Read a string field. Returns `default` if it is missing or null."""
    value = given.get(name)
    if value is None:
        return default
    if not isinstance(value, str) or (most is not None and len(value) > most):
        size = "" if most is None else f" of at most {most} characters"
        raise BadField(name, f"{name} = {brief(value)}; expected a string{size}")
    return value


def read_session(given: Mapping[str, Any], headers: Mapping[str, str]) -> str:
    """The session's name from our own part of the body, or else from the header that vLLM's clients send."""
    return read_text(given, "session", most=_LONGEST_NAME) or headers.get("x-session-id", "")[:_LONGEST_NAME]


def read_flag(given: Mapping[str, Any], name: str, *, default: bool = False) -> bool:
    """Read a boolean field. Returns `default` if it is missing or null."""
    value = given.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise BadField(name, f"{name} = {brief(value)}; expected true or false")
    return value


def read_integer(given: Mapping[str, Any], name: str, *, least: int, most: int = 2**31 - 1) -> int | None:
    """Read an integer field. Returns None if it is missing or null."""
    value = given.get(name)
    if value is None:
        return None
    if type(value) is not int or not least <= value <= most:
        raise BadField(name, f"{name} = {brief(value)}; expected an integer from {least} to {most}")
    return value


def read_list(given: Mapping[str, Any], name: str, *, most: int) -> list[Any]:
    """Read a list field. Returns an empty list if it is missing or null."""
    value = given.get(name)
    if value is None:
        return []
    if not isinstance(value, list):
        raise BadField(name, f"{name}: expected a list, found {brief(value)}")
    if len(value) > most:
        raise BadField(name, f"{name}: {len(value)} entries; at most {most} are accepted")
    return value


def read_object(given: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Read an object field. Returns an empty dict if it is missing or null."""
    value = given.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise BadField(name, f"{name}: expected an object, found {brief(value)}")
    return value


def read_sampling(
    given: Mapping[str, Any],
    ours: Mapping[str, Any],
    *,
    max_tokens: Sequence[str],
    most_stop_ids: int = MOST_STOP_IDS // 2,
) -> RequestedSampling:
    """Read the sampling parameters of a body.

    Args:
        given: The body, already checked against the protocol's fields.
        ours: Our own part of the body; its seed takes precedence.
        max_tokens: Possible names of the token limit; the first name that is present is used.
        most_stop_ids: Maximum number of stop ids.
    """
    limits = [read_integer(given, name, least=1) for name in max_tokens]
    values: dict[str, Any] = {name: read_number(given, name) for name in ("temperature", "top_p", "min_p")}
    top_k = read_integer(given, "top_k", least=-1)
    values["top_k"] = 0 if top_k == -1 else top_k  # vLLM uses -1 for "off"
    try:
        SamplingParams(**{name: value for name, value in values.items() if value is not None})
    except ValueError as error:
        text = str(error).removeprefix("sampling: ")  # the message starts with the field's name
        raise BadField(text.partition(" ")[0], text) from None
    stops = read_list(given, "stop_token_ids", most=most_stop_ids)
    if not all(type(i) is int and 0 <= i < 2**31 for i in stops):
        raise BadField("stop_token_ids", f"stop_token_ids: expected token ids, found {brief(stops)}")
    return RequestedSampling(
        **values,
        max_tokens=next((limit for limit in limits if limit is not None), None),
        seed=read_integer(given if ours.get("seed") is None else ours, "seed", least=-(2**63), most=2**63 - 1),
        stop_token_ids=tuple(stops),
        ignore_eos=read_flag(given, "ignore_eos"),
    )


def read_number(given: Mapping[str, Any], name: str) -> float | None:
    """Read a field with a finite number. Returns None if it is missing or null."""
    value = given.get(name)
    if value is None:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not -_LARGEST_FLOAT <= value <= _LARGEST_FLOAT or math.isnan(value):
        raise BadField(name, f"{name} = {brief(value)}; expected a number")
    return float(value)


def read_stops(given: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Read stop strings, given as one string or a list. Empty strings and duplicates are dropped."""
    value = given.get(name)
    stops = [value] if isinstance(value, str) else read_list(given, name, most=MOST_STOPS)
    for stop in stops:
        if not isinstance(stop, str) or len(stop) > LONGEST_STOP:
            raise BadField(name, f"{name}: expected strings of at most {LONGEST_STOP} characters, found {brief(stop)}")
        if stop and (problem := stop_problem(stop)) is not None:
            raise BadField(name, f"{name}: {brief(stop)} {problem}")
    return tuple(dict.fromkeys(stop for stop in stops if stop))


def check_tool_choice(
    choice: ToolChoice, name: str, tools: Sequence[Mapping[str, Any]], options: Options
) -> tuple[str, ...]:
    """Refuse a forced tool call unless the options accept it. Returns the names of the fields that are not enforced.

    A call could be forced only by masking the vocabulary. Masking would change the distribution that tokens are sampled
    from, and the trainer could not recompute the tokens' logprobs.
    """
    if choice not in ("required", "named"):
        return ()
    names = [tool["function"]["name"] for tool in tools]
    if not names:
        raise BadField("tool_choice", "tool_choice requires a tool call, but the request has no tools")
    if choice == "named" and name not in names:
        raise BadField("tool_choice", f"tool_choice names {brief(name)}, which is not one of the request's tools")
    if "tool_choice" not in options.unenforced:
        wanted = "a tool call" if choice == "required" else f"a call of {brief(name)}"
        raise BadField(
            "tool_choice",
            f"tool_choice requires {wanted}, which cannot be forced here: tokens are sampled "
            'from the model\'s own distribution, without a grammar. Send "auto" or "none"',
        )
    return ("tool_choice",)


def read_tool_choice(value: object, name_of: Callable[[Mapping[str, Any]], str | None]) -> tuple[ToolChoice, str]:
    """Read the `tool_choice` of OpenAI's protocols. Returns (the choice, the tool's name or "").

    Args:
        value: A keyword, or an object that names a tool.
        name_of: Returns the tool's name from an object, or None if the object does not name a tool.
    """
    if not isinstance(value, dict):
        return as_tool_choice(value, _CHOICES), ""
    name = name_of(value)
    if name is None:
        raise BadField(
            "tool_choice",
            f"tool_choice = {brief(value)} cannot be honoured here; expected auto, none, or a function by its name",
        )
    return "named", name


def as_tool_choice(value: object, accepted: Mapping[str, ToolChoice]) -> ToolChoice:
    """The tool choice for a keyword; "auto" for None."""
    if value is None:
        return "auto"
    if isinstance(value, str) and value in accepted:
        return accepted[value]
    raise BadField(
        "tool_choice", f"tool_choice = {brief(value)}; expected one of {', '.join(accepted)}, or a function by its name"
    )


def object_of(value: object, where: str) -> dict[str, Any]:
    """Return the value, which must be a JSON object."""
    if not isinstance(value, dict):
        raise BadField(_path(where), f"{where}: expected an object, found {brief(value)}")
    return cast("dict[str, Any]", value)


def text_of(value: object, where: str) -> str:
    """Return the value, which must be a string."""
    if not isinstance(value, str):
        raise BadField(_path(where), f"{where}: expected a string, found {brief(value)}")
    return value


def _path(where: str) -> str:
    """A field's name without list indices: "messages.content" for "messages[3].content"."""
    return "".join(part.partition("]")[2] if k else part for k, part in enumerate(where.split("[")))
