"""A chat template's first run, under watch: a template is a program, and this one may never end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import nodes
from transformers.utils.chat_template_utils import _compile_jinja_template

from verbatim.errors import ModelError

MAX_ROUNDS = 200_000
"""Rounds of all loops together, over messages of a few words; published templates need some hundred."""
_COUNTER = "verbatim_counted"


class _Endless(Exception):
    pass


def check_ends(source: str, messages: Sequence[Mapping[str, Any]], tools: Any, variables: Mapping[str, str]) -> None:
    """Render once and count the rounds of loops. What else may go wrong shows when the template is used.

    Raises:
        ModelError: the template is no template, or does not come to an end.
    """
    try:
        environment = _compile_jinja_template(source).environment
        template = environment.parse(source)
    except jinja2.TemplateSyntaxError as error:
        raise ModelError(f"the chat template is not valid Jinja (line {error.lineno}: {error.message}); mend the "
                         "model's chat_template.jinja") from error  # fmt: skip
    for loop in template.find_all(nodes.For):
        counter = nodes.Name(_COUNTER, "load")
        loop.iter = nodes.Call(counter, [loop.iter], [], None, None, lineno=loop.lineno)
    left = MAX_ROUNDS

    def counted(items: Any) -> Iterator[Any]:
        nonlocal left
        for item in items:
            left -= 1
            if left < 0:
                raise _Endless
            yield item

    template.set_environment(environment)
    given = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": True, **variables}
    try:
        environment.from_string(template).render(**given, **{_COUNTER: counted})
    except (_Endless, MemoryError, RecursionError) as error:
        raise ModelError(
            f"the chat template does not come to an end: {MAX_ROUNDS} rounds of its loops are not enough for "
            f"{len(messages)} short messages ({type(error).__name__.lstrip('_')}); mend the model's chat_template.jinja"
        ) from error
    except (jinja2.TemplateError, TypeError, ValueError, KeyError, OverflowError):
        return
