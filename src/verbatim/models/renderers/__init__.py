"""Renderers turn messages into ids and ids into messages; `create_renderer` finds the renderer that fits a model."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args

from verbatim.core.errors import ModelError, TemplateFault, UsageError
from verbatim.core.imports import import_without
from verbatim.core.texts import nearest
from verbatim.models.renderers.conversation import BreakReason, Conversation, History, ThinkingRetention
from verbatim.models.renderers.message_support import LaterSystem
from verbatim.models.renderers.renderer import ParsedResponse, Renderer

if TYPE_CHECKING:
    from verbatim.models.renderers.special_token_escaping import EscapingTokenizer

_PACKAGE = "verbatim.models.renderers.package:PackageRenderer"

RENDERERS: Mapping[str, str] = {
    "template": "verbatim.models.renderers.template:TemplateRenderer",
    **dict.fromkeys(
        (
            "qwen3", "prime-qwen3", "qwen3-vl", "qwen3.5", "qwen3.6", "qwen3.8", "deepseek-r1", "deepseek-v3",
            "deepseek-v4", "gemma4", "glm-4.5", "glm-5", "glm-5.1", "glm-5.3", "hy3", "inkling", "kimi-k2",
            "kimi-k2.5", "laguna-m.1", "laguna-s-2.1", "laguna-xs-2.1", "laguna-xs.2", "llama-3", "minimax-m2",
            "nemotron-3", "nemotron-3-ultra", "nemotron-3.5",
        ),
        _PACKAGE,
    ),
    "gpt-oss": "verbatim.models.renderers.harmony:HarmonyRenderer",
}  # fmt: skip
"""The class of each renderer, as "module:class". The class is called with (tokenizer, name), `thinking_retention`,
`history` and `later_system`. Strings are used instead of the classes, so that only the renderer in use loads its heavy
libraries."""

ALIASES: Mapping[str, str] = {
    "glm4.5": "glm-4.5",
    "glm5": "glm-5",
    "glm5.1": "glm-5.1",
    "glm5.3": "glm-5.3",
    "DefaultRenderer": "template",
    "default": "template",
}
"""Alternative spellings of renderer names."""

AUTO_FAMILIES = tuple(name for name in RENDERERS if name != "template")
"""The families that "auto" tries, in order."""

_log = logging.getLogger(__name__)


def create_renderer(
    name: str,
    tokenizer: Any,
    tools: Literal["hermes"] | None = None,
    *,
    thinking_retention: ThinkingRetention = "tool_cycle",
    history: History = "verbatim",
    later_system: LaterSystem = "fold",
) -> Renderer:
    """Create the renderer with this name for a tokenizer.

    "auto" recognises published models by the name that the tokenizer was loaded under. For any other model it picks the
    first family that renders every probe dialogue to the same ids as the model's own chat template. If no family does,
    it uses the template itself.

    Args:
        name: "auto", "template", or a family.
        tokenizer: The model's tokenizer.
        tools: "hermes" renders with the chat template, and writes tools as text into the messages; None means the
            model's own tool format.
        thinking_retention: With "tool_cycle", earlier thoughts are dropped when a new user message follows, if the
            format drops them there. With "all", they are kept.
        history: With "verbatim", prompts continue the sampled tokens. With "template", every prompt is rendered from
            its messages, as a chat endpoint does.
        later_system: What to do with a system or developer message that the format does not write: "fold" it into
            another message, or "refuse" it (`message_support`).

    Raises:
        UsageError: no such renderer, or `tools` with a family that has its own tool format.
        ModelError: the tokenizer does not fit the renderer.
    """
    if tools not in (None, "hermes"):
        raise UsageError(f'tools = {tools!r}: expected "hermes", or nothing for the format that the model has')
    kept: dict[str, Any] = {"thinking_retention": thinking_retention, "history": history, "later_system": later_system}
    for (setting, value), allowed in zip(kept.items(), (ThinkingRetention, History, LaterSystem), strict=True):
        first, second = get_args(allowed)
        if value not in (first, second):
            raise UsageError(f'{setting} = {value!r}: expected "{first}" or "{second}"')
    known = ALIASES.get(name, name)
    if known != "auto" and known not in RENDERERS:
        hint = nearest(name, ["auto", *RENDERERS, *ALIASES]) or "."
        spelt = [
            f"{n} (or {', '.join(a for a in ALIASES if ALIASES[a] == n)})" if n in ALIASES.values() else n
            for n in RENDERERS
        ]
        raise UsageError(f"there is no renderer {name!r}{hint} There are: auto, {', '.join(spelt)}")
    # Saves half a second: the package imports it only for annotations.
    import_without("renderers", "openai")
    from verbatim.models.renderers.detect_family import check_escaping, first_difference
    from verbatim.models.renderers.special_token_escaping import EscapingTokenizer

    escaping = EscapingTokenizer(tokenizer)
    try:
        if tools is not None:
            renderer = _make_with_hermes(name, known, escaping, kept)
        else:
            renderer = _detect_family(escaping, kept) if known == "auto" else _make(known, escaping, kept)
        check_escaping(renderer, escaping)
        differs = first_difference(renderer, escaping) if known not in ("auto", "template") else None
    except TemplateFault as error:
        raise ModelError(str(error)) from error
    if differs is not None:
        _log.warning(
            'renderer "%s" and the chat template of this model give different ids (%s). Unless the model was trained '
            'on the format of "%s", use renderer = "auto"',
            known,
            differs,
            known,
        )
    return renderer


def _make_with_hermes(name: str, known: str, tokenizer: EscapingTokenizer, kept: Mapping[str, Any]) -> Renderer:
    """Make the template renderer that writes tools as text. Logs a warning if the template has its own tool format."""
    from verbatim.models.renderers.template import TemplateRenderer

    if known not in ("auto", "template"):
        raise UsageError(f'renderer "{name}" has a tool format of its own; tools = "hermes" needs "auto" or "template"')
    renderer = TemplateRenderer(tokenizer, tools="hermes", **kept)
    if TemplateRenderer(tokenizer).tool_support.complete:
        _log.warning(
            "this model's chat template has a tool format of its own, which the model was trained on; "
            'tools = "hermes" replaces it with another one'
        )
    return renderer


def _make(name: str, tokenizer: EscapingTokenizer, kept: Mapping[str, Any]) -> Renderer:
    module, _, attribute = RENDERERS[name].partition(":")
    renderer: Renderer = getattr(importlib.import_module(module), attribute)(tokenizer, name, **kept)
    return renderer


def _detect_family(tokenizer: EscapingTokenizer, kept: Mapping[str, Any]) -> Renderer:
    """Make the renderer that "auto" stands for."""
    from verbatim.models.renderers.detect_family import family_by_name, first_difference

    named = family_by_name(tokenizer)
    if named is not None:
        renderer = _make(named, tokenizer, kept)
        differs = first_difference(renderer, tokenizer)
        if differs is None:
            _log.info('"%s" is a model of renderer "%s"', tokenizer.name_or_path, named)
        else:
            _log.warning(
                '"%s" is a model of renderer "%s", which is used although its chat template gives other ids (%s); '
                'for those, use renderer = "template"',
                tokenizer.name_or_path,
                named,
                differs,
            )
        return renderer
    differing: dict[str, list[str]] = {}
    for name in AUTO_FAMILIES if tokenizer.chat_template else ():
        try:
            renderer = _make(name, tokenizer, kept)
        except ModelError:  # the tokenizer lacks the family's tokens
            continue
        differs = first_difference(renderer, tokenizer)
        if differs is None:
            _log.info('the chat template is that of renderer "%s"', name)
            return renderer
        differing.setdefault(differs, []).append(name)
    reasons = [f'"{about}" is rendered differently by {", ".join(names)}' for about, names in differing.items()]
    _log.warning(
        "no renderer family matches this model's chat template (%s); using the template itself",
        "; ".join(reasons) or "no family has its tokens",
    )
    return _make("template", tokenizer, kept)


__all__ = [
    "ALIASES",
    "AUTO_FAMILIES",
    "RENDERERS",
    "BreakReason",
    "Conversation",
    "ParsedResponse",
    "Renderer",
    "create_renderer",
]
