"""A chat template's first run, under watch: a template is a program, and this one may never end."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from jinja2 import nodes

from verbatim.errors import ModelError
from verbatim.renderers.chat_template import parse_template

MAX_STEPS = 200_000
"""Rounds of loops, calls and items of lists together, over messages of a few words; published templates need some
hundred."""
_CALL = 10
"""Steps that a call is worth: it takes as long."""
_CHARACTERS = 1000
"""Of a text that cost as much as one item of a list."""
_MAX_BITS = 10_000
"""Of a whole number that is computed."""
_ROUNDS, _JOINED, _FILTERED = "verbatim_rounds", "verbatim_joined", "verbatim_filtered"
_OPERATIONS: Mapping[str, Callable[[Any, Any], Any]] = {"+": operator.add, "*": operator.mul, "**": operator.pow}
"""What makes big values of small ones."""


class _Endless(Exception):
    pass


def check_ends(source: str, messages: Sequence[Mapping[str, Any]], tools: Any, variables: Mapping[str, str]) -> None:
    """Render once and count the steps. What else may go wrong shows when the template is used.

    Raises:
        ModelError: the template is no template, or does not come to an end.
    """
    environment, template = parse_template(source)
    meter = _Meter()
    for loop in template.find_all(nodes.For):
        loop.iter = _counted_by(_ROUNDS, loop.iter)
    for filtered in template.find_all(nodes.Filter):
        if filtered.node is not None:  # none in a block with a filter
            filtered.node = _counted_by(_FILTERED, filtered.node)
    for joined in template.find_all(nodes.Concat):
        joined.nodes = [_counted_by(_JOINED, nodes.List(joined.nodes, lineno=joined.lineno))]
    counters = {_ROUNDS: meter.rounds, _FILTERED: meter.filtered, _JOINED: meter.joined}
    watched: Any = environment.overlay()
    watched.call = meter.watch(environment.call)  # type: ignore[attr-defined]  # the sandbox's
    watched.call_binop = lambda _, name, left, right: meter.binary(name, left, right)
    watched.intercepted_binops = frozenset(_OPERATIONS)
    template.set_environment(watched)
    given = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": True, **variables}
    try:
        watched.from_string(template).render(**given, **counters)
    except (_Endless, MemoryError, RecursionError) as error:
        raise ModelError(
            f"the chat template does not come to an end: {MAX_STEPS} steps are not enough for {len(messages)} short "
            f"messages ({type(error).__name__.lstrip('_')}); mend the model's chat_template.jinja"
        ) from error
    except Exception:  # noqa: BLE001  (somebody else's program may raise anything; `_render` says what)
        return


class _Meter:
    """Counts what a template does, and ends it."""

    def __init__(self) -> None:
        self._left = MAX_STEPS

    def rounds(self, items: Iterable[Any]) -> Iterator[Any]:
        """The items of a loop."""
        for item in items:
            self._spend(1)
            yield item

    def filtered(self, value: Any) -> Any:
        """What a filter is given; it may look at all of it."""
        self._spend(_size(value))
        return value

    def joined(self, parts: Sequence[Any]) -> str:
        """What `~` makes of its operands."""
        texts = [str(part) for part in parts]
        self._spend(sum(map(_size, texts)))
        return "".join(texts)

    def watch(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The environment's way to call macros, methods and functions, counted."""

        def counted(context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
            self._spend(_CALL)
            result = call(context, function, *args, **kwargs)
            self._spend(_size(result))
            return result

        return counted

    def binary(self, name: str, left: Any, right: Any) -> Any:
        """An operation, counted before it makes something big."""
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * (right if name == "**" else 1) + right.bit_length() * (name == "*")
            if bits > _MAX_BITS:
                raise _Endless
        elif name == "*":
            times, repeated = (left, right) if isinstance(left, int) else (right, left)
            self._spend(_size(repeated, times) if isinstance(times, int) else 0)
        else:
            self._spend(_size(left) + _size(right))
        return _OPERATIONS[name](left, right)

    def _spend(self, steps: int) -> None:
        self._left -= steps
        if self._left < 0:
            raise _Endless


def _size(value: Any, times: int = 1) -> int:
    """The steps that a value is worth, if it is repeated that often."""
    if isinstance(value, str):
        return len(value) * times // _CHARACTERS
    return len(value) * times if isinstance(value, (list, tuple, range)) else 0


def _counted_by(name: str, argument: Any) -> nodes.Call:
    return nodes.Call(nodes.Name(name, "load"), [argument], [], None, None, lineno=argument.lineno)
