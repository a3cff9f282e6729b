"""The sandbox for chat templates: `transformers`' own, with a charge for every operation that can be slow or grow.

Templates see only values of JSON's types, so everything that they are able to call is known by name. Any other call is
refused.
"""

from __future__ import annotations

from functools import cache
from types import BuiltinMethodType, MethodType
from typing import Any, ClassVar

from jinja2 import pass_context
from jinja2.exceptions import SecurityError
from jinja2.runtime import BlockReference, Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Cycler, Joiner
from markupsafe import Markup
from transformers.utils.chat_template_utils import _compile_jinja_template

from verbatim.models.renderers.metering.calls import call_method, count_operation, metered_filter, metered_test
from verbatim.models.renderers.metering.meter import Meter, Overrun

LOOKED_AT, WRITTEN, ROUNDS, SPEND = (f"verbatim {name}" for name in ("looked at", "written", "rounds", "spend"))
"""Names of the filters that a compiled template calls to charge its budget."""

_DICT_ATTRIBUTES = frozenset(dir(dict))
_OWNERS = frozenset({str, Markup, bytes, int, bool, float, list, tuple, dict, range})
"""Types with methods that templates may call."""
_CALL = 10
"""Steps charged for the call of a macro, which takes about as long as this many steps."""
_LONGEST_DATE_FORMAT = 200
_MOST_REMEMBERED = 10_000
_PLENTY = 1 << 60
"""Integers below this are added without a check of their size."""


class MeteredContext(Context):
    """The variables of one rendering, and its budget."""

    meter: Meter

    def derived(self, locals: dict[str, Any] | None = None) -> Context:
        """Same as Jinja's `derived`, but the derived context shares the budget, because macros and blocks run in
        derived contexts."""
        context = super().derived(locals)
        assert isinstance(context, MeteredContext)
        context.meter = self.meter
        return context


class MeteredEnvironment(ImmutableSandboxedEnvironment):
    """The Jinja environment as `transformers` configures it, with metering."""

    context_class = MeteredContext
    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)
    callables: tuple[Any, ...] = ()
    """Global functions and extensions. Templates may call them and their methods."""
    _safe: ClassVar[dict[tuple[type, str], bool]] = {}

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Run an operator, charged before it can create something big."""
        meter: Meter = context.meter  # type: ignore[attr-defined]  # a MeteredContext
        if type(left) is type(right) is str and operator == "+":  # fast path: the most frequent operation
            meter.make(len(left) + len(right))
            return left + right
        if type(left) is type(right) is int and left < _PLENTY > right and operator in ("+", "-"):
            return super().call_binop(context, operator, left, right)
        count_operation(meter, operator, left, right)
        return meter.made(super().call_binop(context, operator, left, right))

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Like the sandbox's method, but looks up fields of messages directly, without trying attributes first."""
        if type(obj) is dict and attribute not in _DICT_ATTRIBUTES:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        try:
            if self._safe[type(obj), attribute]:
                return getattr(obj, attribute)
        except (KeyError, AttributeError):
            pass
        return super().getattr(obj, attribute)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Like the sandbox's method, but cached by type and name, which determine the result and recur all the time."""
        key = type(obj), attr
        if key not in self._safe:
            if len(self._safe) > _MOST_REMEMBERED:
                self._safe.clear()
            self._safe[key] = super().is_safe_attribute(obj, attr, value)
        return self._safe[key]

    def wrap_str_format(self, value: Any) -> None:
        """Do not wrap `str.format`: it stays a method, which `call` meters and sandboxes."""

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a macro, a method of JSON's types, or one of the functions that templates are given."""
        meter: Meter = __context.meter
        kwargs.pop("_loop_vars", None)  # only functions that take the context use these; there are none
        kwargs.pop("_block_vars", None)
        if type(__obj) is Macro:
            meter.step(_CALL + len(args) + len(kwargs))
            return __context.call(__obj, *args, **kwargs)
        owner = __obj.__self__ if isinstance(__obj, (BuiltinMethodType, MethodType)) else __obj
        if type(owner) in _OWNERS and owner is not __obj:
            return call_method(__self, meter, __obj, args, kwargs)
        meter.look(*args, *kwargs.values())
        if isinstance(owner, (LoopContext, Cycler, BlockReference, Joiner, Undefined)) or not callable(__obj):
            return __context.call(__obj, *args, **kwargs)
        if any(owner is known for known in __self.callables):
            return meter.made(__context.call(__obj, *args, **kwargs))
        raise SecurityError(f"a chat template must not call a {type(__obj).__name__}")


@cache
def metered_environment() -> MeteredEnvironment:
    """The environment that all templates share."""
    like: Any = _compile_jinja_template("").environment
    environment = MeteredEnvironment(
        trim_blocks=like.trim_blocks,
        lstrip_blocks=like.lstrip_blocks,
        finalize=_written,
        extensions=[type(extension) for extension in like.extensions.values()],
    )
    environment.filters = {name: metered_filter(name, call) for name, call in like.filters.items()}
    environment.filters |= {LOOKED_AT: _looked_at, WRITTEN: _written, ROUNDS: _rounds, SPEND: _spend}
    environment.tests = {name: metered_test(name, call) for name, call in like.tests.items()}
    given = {name: value for name, value in like.globals.items() if name != "lipsum"}  # this creates text of any length
    date = given["strftime_now"]

    def strftime_now(format: str) -> Any:
        if len(format) > _LONGEST_DATE_FORMAT or any(character.isdigit() for character in format):
            raise Overrun("its date format is too long, or contains a digit, which can set a width")
        return date(format)

    # A namespace's text omits its members, because a namespace may contain itself, and the text would be infinite.
    namespace = type("Namespace", (given["namespace"],), {"__repr__": lambda space: "<Namespace>"})
    environment.globals = {**given, "strftime_now": strftime_now, "namespace": namespace}
    environment.callables = (*environment.globals.values(), *environment.extensions.values())
    return environment


@pass_context
def _looked_at(context: MeteredContext, value: Any) -> Any:
    context.meter.look(value)
    return value


@pass_context
def _written(context: MeteredContext, value: Any) -> Any:
    context.meter.write(value)
    return value


@pass_context
def _rounds(context: MeteredContext, items: Any, steps: int = 1, characters: int = 0) -> Any:
    return context.meter.counted(items, abs(steps), abs(characters))  # abs: a template may use the filter itself


@pass_context
def _spend(context: MeteredContext, value: Any, steps: int = 1, characters: int = 0) -> Any:
    context.meter.step(abs(steps))
    context.meter.make(abs(characters))
    return value
