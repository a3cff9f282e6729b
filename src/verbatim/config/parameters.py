"""Reads the keyword parameters of a function as keys of a TOML table: names, types, defaults."""

from __future__ import annotations

import inspect
import json
import sys
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Any

from pydantic import PydanticUserError, TypeAdapter, ValidationError

from verbatim.config.known_keys import key_elsewhere
from verbatim.core.texts import nearest


def check_parameters(
    function: Callable[..., Any],
    values: Mapping[str, Any],
    *,
    num_inputs: int,
    label: str,
    given: Collection[str] = (),
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return (1) the values, converted to the types of the function's parameters, and (2) a message for each wrong
    value.

    Args:
        function: A function, or a class constructed from its parameters alone.
        values: The parameters from the file.
        num_inputs: If `function` is a function: the number of its leading positional parameters that receive data.
        label: The kind of component, for messages.
        given: Names of parameters that already have a value.
    """
    parameters, takes_any = _parameters_of(function, num_inputs)
    of_algorithm = label in ("loss", "advantage")
    label = f"{label} {getattr(function, '__qualname__', type(function).__qualname__)}"
    converted: dict[str, Any] = {}
    wrong: dict[str, str] = {}
    for name, value in values.items():
        if name in parameters:
            try:
                converted[name] = _convert(value, function, parameters[name])
            except ValidationError as error:
                expected = error.errors()[0]["msg"].removeprefix("Input should be ")
                wrong[name] = f"found {json.dumps(value)}, expected {expected} for this parameter of {label}"
        elif takes_any:
            converted[name] = value
        else:
            names = ", ".join(parameters) or "it has none"
            hint = (key_elsewhere(name) if of_algorithm else "") or nearest(name, parameters) or "."
            wrong[name] = f'unknown parameter "{name}"{hint} The parameters of {label}: {names}'
    for parameter in parameters.values():
        if parameter.default is parameter.empty and parameter.name not in (*values, *given):
            wrong[parameter.name] = f"missing: {label} needs this parameter"
    return converted, wrong


def is_made_of_parameters(function: Callable[..., Any]) -> bool:
    """True for a class whose instances are called with the data: `Rule(limit=8)(trajectory)`."""
    # Not `callable` or `hasattr`: a class itself can be called, through its metaclass.
    return inspect.isclass(function) and any("__call__" in vars(cls) for cls in function.__mro__)


def _parameters_of(function: Callable[..., Any], num_inputs: int) -> tuple[dict[str, inspect.Parameter], bool]:
    parameters = list(inspect.signature(function).parameters.values())
    num_data = 0 if is_made_of_parameters(function) else num_inputs
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    keyword_only = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    return {p.name: p for p in (*positional[num_data:], *keyword_only)}, takes_any


def _convert(value: Any, function: Callable[..., Any], parameter: inspect.Parameter) -> Any:
    annotation = parameter.annotation
    if annotation is parameter.empty:
        return value
    try:
        adapter = TypeAdapter(evaluate(annotation, function) if isinstance(annotation, str) else annotation)
    except (NameError, PydanticUserError):
        return value  # a type not importable here, or unknown to pydantic: as if unannotated
    # Strict JSON, as everywhere in the file: no "64" for 64, no true for 1.
    return adapter.validate_json(json.dumps(value), strict=True)


def evaluate(annotation: str, function: Callable[..., Any]) -> Any:
    """Resolve one string annotation of a function or class.

    `get_type_hints(function)` would resolve all annotations of the function, and some may name types that are imported
    for type checking only.

    Raises:
        NameError: the annotation names something that its module does not define.
    """

    def holder() -> None: ...

    holder.__annotations__ = {"parameter": annotation}
    code = function.__init__ if inspect.isclass(function) else inspect.unwrap(function)
    # An inherited `__init__` or a decorated function may be written in another module; that module's names count first.
    names = {**vars(sys.modules[function.__module__]), **getattr(code, "__globals__", {})}
    return typing.get_type_hints(holder, globalns=names, include_extras=True)["parameter"]
