"""A chat template's source, read as the program that it is, by the environment that renders it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import Environment, nodes
from transformers.utils.chat_template_utils import _compile_jinja_template

from verbatim.errors import EnvironmentFault, ModelError

_MEND = "mend the model's chat_template.jinja"


def parse_template(source: str) -> tuple[Environment, nodes.Template]:
    """The environment in which a template is rendered, and the template's tree, which is the caller's own.

    Raises:
        ModelError: it is no template, or one that cannot be compiled.
    """
    if not isinstance(source, str):
        raise ModelError(f"the chat template is of type {type(source).__name__}; expected Jinja's text; {_MEND}")
    if not source.strip():
        raise ModelError("the chat template is empty; expected a template that writes messages as a prompt")
    try:
        source.encode()  # half a surrogate pair cannot be tokenised
        environment: Environment = _compile_jinja_template(source).environment
        return environment, environment.parse(source)
    except jinja2.TemplateSyntaxError as error:
        where = f"line {error.lineno}: {error.message}"
        raise ModelError(f"the chat template is not valid Jinja ({where}); {_MEND}") from error
    except Exception as error:  # somebody else's program: deep nesting and huge numbers end compilers in many ways
        raise ModelError(f"the chat template cannot be compiled ({type(error).__name__}: {error}); {_MEND}") from error


def text_of(source: str, variables: Mapping[str, str]) -> Callable[[list[dict[str, Any]], Any, bool], str]:
    """(messages, tools, add_generation_prompt) -> what a template writes, for one that is known to come to an end.

    Args:
        source: The template.
        variables: The special tokens that it is given, by name.

    Raises:
        ModelError: as `parse_template`. Messages that the template refuses are an `EnvironmentFault`.
    """
    environment, _ = parse_template(source)
    template = environment.from_string(source)

    def text(messages: Sequence[Mapping[str, Any]], tools: Any, add_generation_prompt: bool) -> str:
        given = {"messages": messages, "tools": tools, "documents": None, **variables}
        try:
            return template.render(**given, add_generation_prompt=add_generation_prompt)
        except Exception as error:  # a chat template may raise anything
            raise EnvironmentFault(f"the chat template refuses these messages ({error})") from error

    return text
