"""Sandboxes chat templates: the sandbox of `transformers`, with everything counted that can take long or grow.

A template holds values of JSON's types only, so that what it can call is known by name: anything else is refused.
"""

from __future__ import annotations

from functools import cache
from types import BuiltinMethodType, GeneratorType, MethodType
from typing import Any

from jinja2 import pass_context
from jinja2.exceptions import SecurityError
from jinja2.runtime import BlockReference, Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Cycler, Joiner
from markupsafe import Markup
from transformers.utils.chat_template_utils import _compile_jinja_template

from verbatim.renderers.metering.filters import FILTERS, metered_filter, metered_test
from verbatim.renderers.metering.formats import FormatMethod
from verbatim.renderers.metering.meter import CONTAINERS, Meter, Overrun
from verbatim.renderers.metering.methods import call_method
from verbatim.renderers.metering.operations import BINARY, OPERATORS

_DICT_ATTRIBUTES = frozenset(dir(dict))
_KEYS = frozenset({str, int, float, bool, type(None), slice})
_CALL = 10
"""Steps that the call of a macro is worth: it takes as long."""
_LONGEST_DATE_FORMAT = 200
_SMALL = 1_000
"""Items of a list or tuple that is used as a key."""


class MeteredContext(Context):
    """The variables of one rendering, and its budget."""

    meter: Meter

    def derived(self, locals: dict[str, Any] | None = None) -> Context:
        """As Jinja has it, with the same budget."""
        context = super().derived(locals)
        assert isinstance(context, MeteredContext)
        context.meter = self.meter
        return context


class MeteredEnvironment(ImmutableSandboxedEnvironment):
    """Jinja as `transformers` sets it up, counted."""

    context_class = MeteredContext
    intercepted_binops = frozenset(OPERATORS)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """An operation, counted before it makes something big."""
        return BINARY[operator](context.meter, left, right)  # type: ignore[attr-defined]  # a MeteredContext

    def getattr(self, obj: Any, attribute: str) -> Any:
        """As the sandbox has it; the fields of messages without the detour over their attributes."""
        kind = type(obj)
        if kind is dict and attribute not in _DICT_ATTRIBUTES:
            try:
                return obj[attribute]
            except KeyError:
                return self.undefined(obj=obj, name=attribute)
        try:
            value = getattr(obj, attribute)
        except AttributeError:
            try:
                return obj[attribute]
            except (TypeError, LookupError):
                return self.undefined(obj=obj, name=attribute)
        wrapped = self.wrap_str_format(value) if attribute in ("format", "format_map") else None
        if wrapped is not None:
            return wrapped
        return value if _is_safe(self, kind, attribute, obj, value) else self.unsafe_undefined(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """As the sandbox has it; a key that takes long to look up is refused."""
        if type(argument) not in _KEYS and not isinstance(argument, (str, Undefined)):
            _refuse_big(argument)
        return super().getitem(obj, argument)

    def wrap_str_format(self, value: Any) -> Any:
        """`format` of a text, which only `call` knows how to call."""
        if (
            isinstance(value, (MethodType, BuiltinMethodType))
            and value.__name__ in ("format", "format_map")
            and isinstance(value.__self__, str)
        ):
            return FormatMethod(value.__self__, value.__name__ == "format_map")
        return None

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a macro, a method of JSON's types, or one of the functions that templates are given."""
        meter: Meter = __context.meter
        if kwargs:  # for functions that are given the context: there are none
            kwargs.pop("_loop_vars", None)
            kwargs.pop("_block_vars", None)
        if type(__obj) is BuiltinMethodType:
            return call_method(meter, __obj, args, kwargs)
        if type(__obj) is Macro:
            meter.step(_CALL + len(args) + len(kwargs))
            return __context.call(__obj, *args, **kwargs)
        args = tuple(meter.counted(arg) if type(arg) is GeneratorType else arg for arg in args)
        if type(__obj) is LoopContext:
            return __context.call(__obj, *(meter.counted(arg) for arg in args), **kwargs)
        meter.look(*args, *kwargs.values())
        if type(__obj) is FormatMethod:
            return __obj.apply(__self, meter, args, kwargs)
        if isinstance(__obj, MethodType) and isinstance(__obj.__self__, (str, Markup)):
            return call_method(meter, __obj, args, kwargs)
        if isinstance(__obj, (BlockReference, Joiner, Undefined)) or not callable(__obj):
            return __context.call(__obj, *args, **kwargs)
        if isinstance(__obj, MethodType) and isinstance(__obj.__self__, (LoopContext, Cycler)):
            return __context.call(__obj, *args, **kwargs)
        owner = __obj.__self__ if isinstance(__obj, MethodType) else __obj
        if any(owner is known for known in __self.callables):
            return meter.made(__context.call(__obj, *args, **kwargs))
        raise SecurityError(f"a chat template must not call a {type(__obj).__name__}")

    callables: tuple[Any, ...] = ()
    """What templates are given, and the methods of."""


@cache
def metered_environment() -> MeteredEnvironment:
    """The one environment of all templates."""
    like: Any = _compile_jinja_template("").environment
    environment = MeteredEnvironment(
        trim_blocks=like.trim_blocks, lstrip_blocks=like.lstrip_blocks, finalize=_finalize,
        extensions=[type(extension) for extension in like.extensions.values()],
    )  # fmt: skip
    environment.filters = {**{name: metered_filter(name, call) for name, call in like.filters.items()}, **FILTERS}
    environment.tests = {name: metered_test(name, call) for name, call in like.tests.items()}
    given = {name: value for name, value in like.globals.items() if name != "lipsum"}  # it makes text of any length
    date = given["strftime_now"]

    def strftime_now(format: str) -> Any:
        if len(format) > _LONGEST_DATE_FORMAT or any(character.isdigit() for character in format):
            raise Overrun("it writes a date of any length")
        return date(format)

    # One that is written without what is in it, which may hold itself in many ways.
    namespace = type("Namespace", (given["namespace"],), {"__repr__": lambda space: "<Namespace>"})
    environment.globals = {**given, "strftime_now": strftime_now, "namespace": namespace}
    environment.callables = (*environment.globals.values(), *environment.extensions.values())
    return environment


def _is_safe(environment: MeteredEnvironment, kind: type, attribute: str, obj: Any, value: Any) -> bool:
    """Whether the sandbox lets an attribute be read, which depends on the type and the name."""
    safe = _SAFE.get((kind, attribute))
    if safe is None:
        if len(_SAFE) > _MOST_REMEMBERED:
            _SAFE.clear()
        safe = _SAFE[kind, attribute] = environment.is_safe_attribute(obj, attribute, value)
    return safe


_SAFE: dict[tuple[type, str], bool] = {}
_MOST_REMEMBERED = 10_000


@pass_context
def _finalize(context: MeteredContext, value: Any) -> Any:
    """Whatever is written, counted."""
    context.meter.write(value)
    return value


def _refuse_big(key: Any) -> None:
    waiting, seen = [key], 0
    while waiting:
        part = waiting.pop()
        seen += 1
        if seen > _SMALL:
            raise Overrun("it uses a large value as a key")
        if isinstance(part, dict):
            waiting += (inner for pair in part.items() for inner in pair)
        elif type(part) in CONTAINERS:
            waiting += part
