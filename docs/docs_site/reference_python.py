"""Writes the Python reference: the public names of the packages that users import from, from their docstrings.

The site has the whole page. Too much of it changes with the code to be kept as a file, so docs/reference_python.md, for
readers without the site, names the packages only.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import re
import typing
from collections.abc import Callable
from types import ModuleType
from typing import Any

from docstring_parser import Docstring, DocstringStyle, parse
from docstring_parser.attrdoc import add_attribute_docstrings

from docs_site.markdown import cell, code, table

PACKAGES = (
    "verbatim", "verbatim.environments", "verbatim.algorithms", "verbatim.core.types", "verbatim.core.errors",
    "verbatim.core.trajectories", "verbatim.config", "verbatim.models.renderers", "verbatim.environments.tools",
    "verbatim.inference", "verbatim.inference.openai", "verbatim.rollouts", "verbatim.algorithms.credit",
    "verbatim.algorithms.filters", "verbatim.algorithms.curriculum", "verbatim.algorithms.losses",
    "verbatim.trainer.packing", "verbatim.logs.monitors", "verbatim.inspection.envcheck", "verbatim.inspection.doctor",
)  # fmt: skip

HEAD = """# Python reference

The public names, with their docstrings. This page is generated from the code.
[From Python](python.md), [Rollouts](rollouts.md) and [Extending](extending.md) show how they are used.

Shapes are in square brackets: `float32 [L]`. Records are frozen, and their fields are keyword-only.
"""


def document() -> str:
    """The whole page."""
    shown: dict[int, str] = {}
    """The heading of each object."""
    return "\n".join([HEAD, *(_package(name, shown) for name in PACKAGES)]).rstrip() + "\n"


def public_names(module: ModuleType) -> list[str]:
    """What `__all__` says, or the public classes and functions that are defined in the module."""
    names = getattr(module, "__all__", None)
    if names is not None:
        return list(names)
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]


def _package(name: str, shown: dict[int, str]) -> str:
    module = importlib.import_module(name)
    parts = [f"## `{name}`", "", _prose(parse(inspect.getdoc(module) or "", DocstringStyle.GOOGLE)), ""]
    elsewhere = []
    for public in public_names(module):
        value = getattr(module, public)
        if id(value) in shown and not isinstance(value, str | int | tuple):
            elsewhere.append(f"[`{public}`](#{_slug(shown[id(value)])})")
            continue
        heading = f"{name}.{public}" if public in shown.values() else public
        shown[id(value)] = heading
        parts += [f"### `{heading}`", "", _entry(f"{name}.{public}", public, value), ""]
    if elsewhere:
        parts.append(f"Described above: {', '.join(elsewhere)}.\n")
    return "\n".join(parts)


def _slug(heading: str) -> str:
    return re.sub(r"[^\w-]", "", heading.lower())


def _entry(full: str, name: str, value: Any) -> str:
    lines: list[str] = []
    if inspect.ismodule(value):  # verbatim.run, a package that is called
        value = importlib.import_module("verbatim.run.entry").run
    if inspect.isclass(value):
        lines += _class(name, value)
    elif callable(value) and hasattr(value, "__doc__") and inspect.isfunction(value):
        lines += [_signature(name, value), "", _docstring(value)]
    else:
        lines += [_value(full, name, value)]
    return "\n".join(lines)


def _value(full: str, name: str, value: Any) -> str:
    """A table of components, or another constant: the sentence below it in the source."""
    module = importlib.import_module(full.rpartition(".")[0])
    about = _attribute_doc(module, name)
    if isinstance(value, dict) or hasattr(value, "keys"):
        about = f"{about}\n\nIts keys: {', '.join(code(str(key)) for key in value)}.".strip()
    return about or code(repr(value))


def _attribute_doc(module: ModuleType, name: str) -> str:
    """The string below an assignment, where the name is defined."""
    for place in (module, *(vars(module).get(m) for m in list(vars(module)) if inspect.ismodule(vars(module).get(m)))):
        doc = parse("", DocstringStyle.GOOGLE)
        add_attribute_docstrings(place, doc)
        for entry in doc.params:
            if entry.arg_name == name and entry.description:
                return _inline(entry.description)
    return ""


def _class(name: str, cls: type) -> list[str]:
    doc = parse(_own_doc(cls), DocstringStyle.GOOGLE)
    kind = "protocol" if getattr(cls, "_is_protocol", False) else ""
    fields = _fields(cls)
    is_record = dataclasses.is_dataclass(cls) or typing.is_typeddict(cls) or bool(fields)
    lines = [] if is_record or issubclass(cls, enum.Enum | BaseException) or kind else [_signature(name, cls), ""]
    lines += [_prose(doc), ""]
    if fields:
        lines.append(table(["field", "type", "default", "meaning"], fields))
    lines += _parts(doc)
    if issubclass(cls, enum.Enum):
        lines.append(f"Values: {', '.join(code(str(member.value)) for member in cls)}.")
    for method, function in _methods(cls):
        lines += [f"- {_inline_signature(method, function)}: {_summary(function)}"]
    return lines


def _own_doc(cls: type) -> str:
    doc = inspect.cleandoc(cls.__doc__ or "")
    return "" if doc.startswith(f"{cls.__name__}(") else doc


def _fields(cls: type) -> list[list[str]]:
    """The fields of a dataclass or a typed dict, those of its bases first."""
    about: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        found = parse("", DocstringStyle.GOOGLE)
        if base.__module__.startswith("verbatim"):
            add_attribute_docstrings(base, found)
        about |= {p.arg_name: p.description or "" for p in found.params}
    if dataclasses.is_dataclass(cls):
        return [
            [code(f.name), code(str(f.type)), _default(f), cell(about.get(f.name, ""))]
            for f in dataclasses.fields(cls)
            if not f.name.startswith("_")
        ]
    if typing.is_typeddict(cls):
        types = {k: v for base in reversed(cls.__mro__) for k, v in vars(base).get("__annotations__", {}).items()}
        return [[code(k), code(_annotation(types.get(k, ""))), "", cell(about.get(k, ""))] for k in cls.__annotations__]
    return []


def _annotation(value: Any) -> str:
    return value if isinstance(value, str) else getattr(value, "__forward_arg__", None) or str(value)


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        value = field.default
        return code(repr(value.value) if isinstance(value, enum.Enum) else repr(value)) if _is_plain(value) else "set"
    return "empty" if field.default_factory is not dataclasses.MISSING else "required"


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str | tuple | enum.Enum)


def _methods(cls: type) -> list[tuple[str, Callable[..., Any]]]:
    found: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        if not base.__module__.startswith("verbatim"):
            continue
        for name, value in vars(base).items():
            function = value.__func__ if isinstance(value, classmethod | staticmethod) else value
            function = function.fget if isinstance(function, property) else function
            if inspect.isfunction(function) and not name.startswith("_") and function.__doc__:
                found[name] = value
    return list(found.items())


def _inline_signature(name: str, value: Any) -> str:
    if isinstance(value, property):
        return code(name)
    function = value.__func__ if isinstance(value, classmethod | staticmethod) else value
    prefix = "await " if inspect.iscoroutinefunction(function) else ""
    names = []
    for p in list(inspect.signature(function).parameters.values())[0 if isinstance(value, staticmethod) else 1 :]:
        names.append(p.name if p.default is p.empty else f"{p.name}={_shown(p.default)}")
    return code(f"{prefix}{name}({', '.join(names)})")


def _summary(value: Any) -> str:
    function = value.__func__ if isinstance(value, classmethod | staticmethod) else value
    function = function.fget if isinstance(function, property) else function
    paragraph = inspect.cleandoc(function.__doc__ or "").split("\n\n")[0]
    return _inline(re.split(r"(?<=[.:])\s+(?=[A-Z])", " ".join(paragraph.split()))[0])


def _shown(value: Any) -> str:
    return repr(value) if _is_plain(value) and not isinstance(value, enum.Enum) else "..."


def _signature(name: str, function: Any) -> str:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return ""
    lines, starred = [], False
    for p in parameters:
        if p.kind is p.KEYWORD_ONLY and not starred:
            lines.append("*")
            starred = True
        star = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        starred = starred or star == "*"
        text = f"{star}{p.name}" + (f": {_annotation(p.annotation)}" if p.annotation is not p.empty else "")
        lines.append(text + ("" if p.default is p.empty else f" = {_shown(p.default)}"))
    result = getattr(function, "__annotations__", {}).get("return") if inspect.isfunction(function) else None
    arrow = f" -> {_annotation(result)}" if result is not None else ""
    one = f"{name}({', '.join(lines)}){arrow}"
    if len(one) > 100:
        inner = "".join(f"    {line},\n" for line in lines)
        one = f"{name}(\n{inner}){arrow}"
    prefix = "async " if inspect.iscoroutinefunction(function) else ""
    return f"```text\n{prefix}{one}\n```"


def _docstring(function: Any) -> str:
    doc = parse(inspect.getdoc(function) or "", DocstringStyle.GOOGLE)
    return "\n".join([_prose(doc), "", *_parts(doc)])


def _prose(doc: Docstring) -> str:
    text = "\n\n".join(filter(None, [doc.short_description, doc.long_description]))
    return "\n\n".join(_block(part) for part in re.split(r"\n\s*\n", text))


def _block(part: str) -> str:
    """A paragraph as prose; one that is indented, or a session of Python, as it stands."""
    if part.lstrip().startswith(">>>") or part.startswith("    "):
        return f"```text\n{inspect.cleandoc(part)}\n```"
    return _inline(part)


def _parts(doc: Docstring) -> list[str]:
    """Arguments, result, errors and examples."""
    lines = []
    if doc.params:
        lines += [f"- `{p.arg_name}`: {_inline(p.description or '')}" for p in doc.params] + [""]
    if doc.returns and doc.returns.description:
        lines += [f"Returns {_inline(doc.returns.description)}", ""]
    for error in doc.raises:
        lines += [f"Raises `{error.type_name}`: {_inline(error.description or '')}", ""]
    for example in doc.examples:
        text = example.description or example.snippet or ""
        lines += [f"```text\n{inspect.cleandoc(text)}\n```", ""]
    return lines


def _inline(text: str) -> str:
    return cell(text).replace("\\|", "|")
