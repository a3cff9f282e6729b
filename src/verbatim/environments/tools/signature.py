"""Reads the signature and docstring of a function that is to be a tool: the parameters with their JSON schema and
descriptions, and the pydantic model that validates a call."""

from __future__ import annotations

import functools
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, create_model
from pydantic.errors import PydanticSchemaGenerationError, PydanticUserError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticKnownError, PydanticSerializationError, to_json

from verbatim.core.errors import ComponentError
from verbatim.core.texts import nearest
from verbatim.environments.tools.json_types import ToolSchema, readable, untitled, with_enums_inside
from verbatim.environments.tools.tool import ToolArgumentsError

_SECTIONS = "Args|Arguments|Parameters|Params|Returns|Raises|Exceptions|Except|Yields"
_SECTION = re.compile(rf"^[ \t]*(?:{_SECTIONS}):", re.MULTILINE)
_ARGUMENTS = re.compile(r"(?:Args|Arguments|Parameters|Params):\s*")
_ENTRY = re.compile(r"\s*\*{0,2}\w+\s*(?:\(.*?\)\s*)?:")
_RETURNS = re.compile(
    rf"^[ \t]*Returns:[ \t]*\n(.*?)(?=^[ \t]*(?:{_SECTIONS}|Examples?|Notes?):[ \t]*$|\Z)", re.MULTILINE | re.DOTALL
)
_CHOICES = re.compile(r"\(choices:\s*(.*?)\)\s*$", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class UnwrappedCallable:
    """A callable, and the plain function inside it. The signature of the plain function is read.

    Example: `partial(search, index)` is unwrapped to the function `search` with one bound parameter.
    """

    function: Callable[..., Any]
    """The plain function."""
    name: str
    """The name of the function, or of the class of a callable object."""
    doc: str
    """The function's docstring; for an object whose `__call__` has none, the class's docstring."""
    num_bound: int = 0
    """Number of leading parameters that are already bound: `self`, and the positional arguments of
    `functools.partial`."""
    bound: frozenset[str] = frozenset()
    """Names of the parameters that are already bound by keyword."""

    @classmethod
    def of(cls, function: Callable[..., Any]) -> UnwrappedCallable:
        """Unwrap `functools.partial`, bound methods, static methods and objects with `__call__`."""
        inner: Any = function
        num_bound, bound, doc, name = 0, frozenset[str](), "", getattr(function, "__name__", None)
        while True:
            if isinstance(inner, functools.partial):
                num_bound += len(inner.args)
                bound |= set(inner.keywords)
                inner = inner.func
            elif isinstance(inner, types.MethodType):
                num_bound += 1
                inner = inner.__func__
            elif isinstance(inner, staticmethod):
                inner = inner.__func__
            elif not hasattr(inner, "__name__") and isinstance(getattr(inner, "__call__", None), types.MethodType):  # noqa: B004
                name = name or type(inner).__name__
                doc = doc or inspect.getdoc(type(inner)) or ""
                inner = inner.__call__
            else:
                break
        own = inspect.getdoc(inner) if getattr(inner, "__doc__", None) or not doc else None
        return cls(
            function=inner,
            name=name or str(getattr(inner, "__name__", type(inner).__name__)),
            doc=own or doc,
            num_bound=num_bound,
            bound=bound,
        )


@dataclass(frozen=True, kw_only=True)
class Signature:
    """A function's parameters, as a pydantic model and as a JSON schema, and its description."""

    description: str
    """The function's description."""
    model: type[BaseModel]
    """Model with one field per parameter. The fields are called `p0`, `p1`, ... and have the parameter's name as alias,
    because a parameter may have a name that pydantic models use themselves, such as `copy`."""
    names: Mapping[str, str]
    """The model's field names, keyed by parameter name."""
    by_position: tuple[str, ...]
    """Names of the positional-only parameters."""
    schema: Mapping[str, Any]
    """JSON schema of an object with one property per parameter."""
    returns: Mapping[str, Any] | None
    """JSON schema of the return value, or None if the function has no return annotation or JSON cannot express the
    annotated type."""

    def validate(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Validate the arguments as strict JSON: the string "5" is not an integer, but a date may be given as a string.

        Raises:
            ToolArgumentsError: an argument is unknown, missing or invalid; the message says which one, and why.
        """
        if not arguments.keys() <= self.names.keys():
            unknown = [name for name in arguments if name not in self.names]
            expected = ", ".join(self.names) or "no arguments"
            raise ToolArgumentsError(
                f"unknown argument {unknown[0]}; expected {expected}{nearest(unknown[0], self.names)}"
            )
        try:
            checked = self.model.model_validate_json(_written(arguments), strict=True)
        except ValidationError as error:
            raise ToolArgumentsError("; ".join(_explain(item) for item in error.errors())) from None
        return {name: getattr(checked, field) for name, field in self.names.items()}


_PLAIN = frozenset({str, int, bool, types.NoneType})


def _written(arguments: Mapping[str, Any]) -> str | bytes:
    """Write the arguments as JSON text, because pydantic accepts dates and enumerations as strings only when it parses
    JSON."""
    if _PLAIN.issuperset(map(type, arguments.values())):
        try:
            return to_json(arguments)  # takes a fifth of the time of json.dumps
        except PydanticSerializationError:  # a lone surrogate, which UTF-8 cannot encode
            pass
    return json.dumps(dict(arguments))


# Cached by the plain function, because building a pydantic model is slow and each episode creates its tools from new
# objects.
@lru_cache(maxsize=1024)
def read_signature(subject: UnwrappedCallable) -> Signature:
    """Read those parameters of a callable that are not bound yet.

    Raises:
        ComponentError: a parameter has no type, or a type without a JSON form; or there is `*args` or `**kwargs`.
    """
    function, num_bound = subject.function, subject.num_bound
    where = f"tool {getattr(function, '__qualname__', function)!s}"
    try:
        hints = typing.get_type_hints(function, include_extras=True)
        parameters = list(inspect.signature(function).parameters.values())
    except (NameError, TypeError, ValueError) as error:
        raise ComponentError(f"{where}: its type hints cannot be read: {error}") from error
    parameters = [parameter for parameter in parameters[num_bound:] if parameter.name not in subject.bound]
    docstring = read_docstring(subject.doc, [parameter.name for parameter in parameters])
    fields: dict[str, Any] = {}
    for index, parameter in enumerate(parameters):
        _check_parameter(parameter, hints, where, is_first=index == 0 and not num_bound)
        fields[f"p{index}"] = _field(parameter, hints[parameter.name], docstring.arguments.get(parameter.name))
    try:
        model = create_model("Arguments", __config__=ConfigDict(arbitrary_types_allowed=False), **fields)
        raw = model.model_json_schema(by_alias=True, schema_generator=ToolSchema)
    except PydanticUserError as error:
        if error.code == "typed-dict-version":
            raise ComponentError(
                f"{where}: a dataclass contains a typed dict; before Python 3.12, import its base class with `from "
                "typing_extensions import TypedDict`"
            ) from error
        raise ComponentError(f"{where}: a parameter's type has no JSON form: {error}") from error
    except (PydanticSchemaGenerationError, PydanticSerializationError, TypeError, AssertionError) as error:
        raise ComponentError(f"{where}: a parameter's type has no JSON form: {error}") from error
    return Signature(
        description=docstring.description,
        model=model,
        names={parameter.name: f"p{index}" for index, parameter in enumerate(parameters)},
        by_position=tuple(p.name for p in parameters if p.kind is p.POSITIONAL_ONLY),
        schema=_object(raw),
        returns=_returns(hints["return"], docstring.returns) if "return" in hints else None,
    )


def _check_parameter(parameter: inspect.Parameter, hints: Mapping[str, Any], where: str, *, is_first: bool) -> None:
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
        raise ComponentError(
            f"{where}: parameter {parameter} stands for any number of arguments; expected ordinary "
            "named parameters, such as `number: int` or `numbers: list[int]`"
        )
    if parameter.name in hints:
        return
    if is_first and parameter.name in ("self", "cls"):
        raise ComponentError(
            f"{where}: a method without its object; give the object's bound method, such as "
            f"`FunctionTool(thing.{where.rpartition('.')[2]})`"
        )
    raise ComponentError(f"{where}: parameter {parameter.name} has no type; write for example `{parameter.name}: str`")


def _field(parameter: inspect.Parameter, hint: Any, description: str | None) -> tuple[Any, Any]:
    hint = readable(hint)
    about: dict[str, Any] = {"alias": parameter.name}
    if isinstance(parameter.default, FieldInfo):  # `number: int = Field(3, ge=0)`
        hint = Annotated[hint, parameter.default]
    elif parameter.default is not parameter.empty:
        about["default"] = parameter.default
    if description:
        about["description"], choices = _choices(description)
        if choices:
            hint = Annotated[hint, AfterValidator(functools.partial(_one_of, choices))]
            about["json_schema_extra"] = {"enum": list(choices)}
    return hint, Field(**about)


def _choices(description: str) -> tuple[str, tuple[Any, ...]]:
    """Split a description such as `What to drink (choices: ["tea", "coffee"])` into the text and the values."""
    match = _CHOICES.search(description)
    try:
        values = json.loads(match[1]) if match else None
    except json.JSONDecodeError:
        values = None
    if match is None or not isinstance(values, list):
        return description, ()
    return description[: match.start()].strip(), tuple(v.strip() if isinstance(v, str) else v for v in values)


def _one_of(choices: tuple[Any, ...], value: Any) -> Any:
    if value not in choices:
        raise PydanticKnownError("literal_error", {"expected": " or ".join(map(repr, choices))})
    return value


def _object(raw: dict[str, Any]) -> dict[str, Any]:
    """Clean the JSON schema of the arguments: remove the parts that only pydantic needs."""
    raw = with_enums_inside(raw)
    properties = untitled(raw.get("properties", {}), names_first=True)
    schema = {"type": "object", "properties": {name: _in_order(about) for name, about in properties.items()}}
    if raw.get("required"):
        schema["required"] = raw["required"]
    if "$defs" in raw:
        schema["$defs"] = untitled(raw["$defs"], names_first=True)
    return schema


def _in_order(schema: dict[str, Any]) -> dict[str, Any]:
    """Sort the keys as transformers does, with the default last. Chat templates print the schema, so the order changes
    the prompt."""
    last = [key for key in ("description", "default") if key in schema]
    return {**{key: value for key, value in schema.items() if key not in last}, **{key: schema[key] for key in last}}


def _returns(hint: Any, description: str | None) -> dict[str, Any] | None:
    try:
        adapter = TypeAdapter(readable(hint))
        schema = untitled(with_enums_inside(adapter.json_schema(mode="serialization", schema_generator=ToolSchema)))
    except (PydanticSchemaGenerationError, PydanticUserError, TypeError):
        return None  # not an error: the model never has to write a return value
    return {**schema, **({"description": description} if description is not None else {})}


def _explain(error: Mapping[str, Any]) -> str:
    where = ".".join(str(part) for part in error["loc"]) or "arguments"
    found = json.dumps(error["input"], ensure_ascii=False, default=str)
    if error["type"] == "missing":
        return f"{where}: missing"
    return f"{where}: {error['msg'][:1].lower()}{error['msg'][1:]}, found {found[:80]}"


@dataclass(frozen=True, kw_only=True)
class FunctionDoc:
    """A parsed docstring.

    Example: `"Look.\\n\\nArgs:\\n    place: A town."` is parsed to the description "Look." and the arguments
    `{"place": "A town."}`.
    """

    description: str = ""
    """The text before the sections, with its line breaks."""
    arguments: Mapping[str, str] = field(default_factory=dict)
    """Descriptions of the arguments by name, each without line breaks."""
    returns: str | None = None
    """Description of the return value; None if the docstring has no such section."""


def read_docstring(text: str, names: Collection[str]) -> FunctionDoc:
    """Parse a docstring in Google, NumPy or Sphinx style. The style that finds the most parameters is chosen.

    Args:
        text: The docstring.
        names: The function's parameters. Descriptions of other names are dropped.
    """
    if "\n" not in text.strip():
        return FunctionDoc(description=text.strip())
    from docstring_parser import ParseError, google, numpydoc, rest  # imported here: most docstrings are one line

    best, best_score = FunctionDoc(description=_before_sections(text)), 0
    for style in (google, numpydoc, rest):
        try:
            parsed = style.parse(_with_indented_continuations(text) if style is google else text)
        except ParseError:
            continue
        arguments = {p.arg_name: _one_line(p.description) for p in parsed.params if p.arg_name in names}
        arguments = {name: description for name, description in arguments.items() if description}
        score = 2 * len(arguments) + (parsed.returns is not None) + bool(parsed.raises)
        if score > best_score:
            description, returns = parsed.description or "", parsed.returns.description if parsed.returns else None
            if style is google:
                found = _RETURNS.search(text)
                description, returns = _before_sections(text), found[1].strip() if found else None
            best, best_score = FunctionDoc(description=description, arguments=arguments, returns=returns), score
    return best


def _before_sections(text: str) -> str:
    match = _SECTION.search(text)
    return (text[: match.start()] if match else text).strip()


def _with_indented_continuations(text: str) -> str:
    """Indent continuation lines, as Google style requires. A continuation line is a line of the arguments section that
    does not start an entry."""
    lines: list[str] = []
    inside, indent = False, None
    for line in text.splitlines():
        if not line.strip():
            lines.append(line)
            continue
        depth = len(line) - len(line.lstrip())
        if depth == 0:
            inside, indent = _ARGUMENTS.fullmatch(line) is not None, None
        elif inside:
            indent = depth if indent is None else indent
            if depth == indent and not _ENTRY.match(line):
                line = f"    {line}"  # noqa: PLW2901
        lines.append(line)
    return "\n".join(lines)


def _one_line(text: str | None) -> str:
    return re.sub(r"\s*\n+\s*", " ", (text or "").strip())
