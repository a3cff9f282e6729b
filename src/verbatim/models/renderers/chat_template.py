"""Compiles and renders a model's chat template, within a budget of steps, characters and time.

All template rendering goes through this module: family detection, checks, bridges, every turn of every episode, the
server and the doctor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jinja2

from verbatim.core.errors import EnvironmentFault, ModelError, TemplateFault
from verbatim.core.texts import cut, error_text
from verbatim.models.renderers.metering.environment import MeteredContext
from verbatim.models.renderers.metering.meter import Meter, Overrun
from verbatim.models.renderers.metering.program import compiled

MAX_SOURCE = 400_000
"""The longest template source, in characters; published templates have about 10,000."""
_MEND = "fix the model's chat_template.jinja"
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""The fields in which a message may carry its reasoning. Templates read `reasoning_content` or `thinking`."""


def compile_template(source: str, name: str = "") -> jinja2.Template:
    """Compile a template.

    Args:
        source: Jinja.
        name: The model or file that the template belongs to, for error messages.

    Raises:
        ModelError: the source is not a valid template, or cannot be compiled.
    """
    called = _called(name)
    if not isinstance(source, str):
        raise ModelError(f"{called} is of type {type(source).__name__}; expected Jinja source; {_MEND}")
    if not source.strip():
        raise ModelError(f"{called} is empty; expected a template that writes messages as a prompt")
    if len(source) > MAX_SOURCE:
        raise ModelError(f"{called} has {len(source):,} characters; expected at most {MAX_SOURCE:,}; {_MEND}")
    try:
        source.encode()  # text with half a surrogate pair cannot be tokenised
        return compiled(source)
    except jinja2.TemplateSyntaxError as error:
        where = f"line {error.lineno}: {cut(str(error.message))}"
        raise ModelError(f"{called} is not valid Jinja ({where}); {_MEND}") from error
    except Exception as error:  # any exception, because deep nesting and huge numbers break the compiler in many ways
        raise ModelError(f"{called} cannot be compiled ({error_text(error)}); {_MEND}") from error


class ChatTemplate:
    """A compiled template with the special tokens of one model.

    Args:
        source: Jinja.
        variables: The special tokens that the template may read, by name.
        name: The model or file that the template belongs to, for error messages.

    Raises:
        ModelError: as for `compile_template`.
    """

    def __init__(self, source: str, variables: Mapping[str, Any], name: str = "") -> None:
        self.program = compile_template(source, name)
        """The compiled template."""
        self._variables = dict(variables)
        self._called = _called(name)

    def text(self, messages: Sequence[Mapping[str, Any]], tools: Any, add_generation_prompt: bool) -> str:
        """Render the messages to the text that `apply_chat_template` of `transformers` would return.

        Raises:
            EnvironmentFault: the template refuses these messages, or raises any other error.
            TemplateFault: the rendering exceeds its budget.
        """
        return self._write(messages, tools, add_generation_prompt, lambda pieces: pieces)

    def lines(
        self, messages: Sequence[Mapping[str, Any]], tools: Any, add_generation_prompt: bool
    ) -> list[tuple[str, int]]:
        """Render the messages to pieces of text, each with the line of the template that wrote it.

        Raises:
            EnvironmentFault: as for `text`.
            TemplateFault: as for `text`.
        """
        found: list[tuple[str, int]] = []

        def noted(pieces: Iterator[str]) -> Iterator[str]:
            for piece in pieces:
                line = pieces.gi_frame.f_lineno  # type: ignore[attr-defined]  # a compiled template is a generator
                found.append((piece, self.program.get_corresponding_lineno(line)))
                yield piece

        self._write(messages, tools, add_generation_prompt, noted)
        return found

    def _write(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Any,
        add_generation_prompt: bool,
        passed: Callable[[Iterator[str]], Iterator[str]],
    ) -> str:
        """Render, passing all pieces through `passed`."""
        meter = Meter()
        try:
            given = meter.given([_as_templates_read(message) for message in messages], tools, copies=len(messages))
            context = self.program.new_context(
                {
                    **self._variables,
                    "messages": given[0],
                    "tools": given[1],
                    "documents": None,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
            assert isinstance(context, MeteredContext)
            context.meter = meter
            text = meter.whole(passed(self.program.root_render_func(context)))
            text.encode()  # raises on half a surrogate pair, which a template may write
        except MemoryError:
            raise  # the machine's fault: the meter stops a template long before it could use up the memory
        except (Overrun, RecursionError) as error:
            why = str(error) if isinstance(error, Overrun) else type(error).__name__
            raise TemplateFault(
                f"{self._called} does not finish rendering {len(messages)} messages ({why}); {_MEND}"
            ) from error
        except Exception as error:  # a template may raise anything
            roles = cut(", ".join(str(message.get("role")) for message in messages), 300)
            raise EnvironmentFault(
                f"{self._called} refuses these messages ({error_text(error)}); their roles are {roles}; change the "
                "environment's messages, or the model's chat_template.jinja"
            ) from error
        return text


def _as_templates_read(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message as `transformers` passes it: without None fields, and with reasoning named as templates expect."""
    fields = {key: value for key, value in message.items() if value is not None}
    reasoning = next((fields[key] for key in _REASONING if key in fields), None)
    return fields if reasoning is None else {"thinking": reasoning, **fields, "reasoning_content": reasoning}


def _called(name: str) -> str:
    return f"the chat template of {name!r}" if name else "the model's chat template"
