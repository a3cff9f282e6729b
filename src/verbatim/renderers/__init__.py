"""Messages to ids and back: model families, any chat template, and how the right one is found."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from verbatim.errors import ModelError, UsageError
from verbatim.renderers.base import ParsedResponse, Renderer

if TYPE_CHECKING:
    from verbatim.renderers.guard import GuardedTokenizer

_PACKAGE = "verbatim.renderers.package:PackageRenderer"

RENDERERS: Mapping[str, str] = {
    "template": "verbatim.renderers.template:TemplateRenderer",
    **dict.fromkeys(
        (
            "qwen3", "prime-qwen3", "qwen3-vl", "qwen3.5", "qwen3.6", "qwen3.8", "deepseek-r1", "deepseek-v3",
            "deepseek-v4", "gemma4", "glm-4.5", "glm-5", "glm-5.1", "glm-5.3", "gpt-oss", "hy3", "inkling", "kimi-k2",
            "kimi-k2.5", "laguna-m.1", "laguna-s-2.1", "laguna-xs-2.1", "laguna-xs.2", "llama-3", "minimax-m2",
            "nemotron-3", "nemotron-3-ultra", "nemotron-3.5",
        ),
        _PACKAGE,
    ),
}  # fmt: skip
"""Where each renderer lives: called with (tokenizer, name); heavy libraries load with the one that is used."""

AUTO_FAMILIES = ("qwen3", "qwen3.5")
"""What "auto" tries, in this order."""

_log = logging.getLogger(__name__)


def create_renderer(name: str, tokenizer: Any) -> Renderer:
    """The renderer of that name for a tokenizer with a chat template.

    "auto" takes the first family that renders every probe dialogue to the ids of the model's own chat template,
    otherwise the template itself.

    Raises:
        UsageError: no such renderer.
        ModelError: the tokenizer does not fit it.
    """
    if name != "auto" and name not in RENDERERS:
        near = get_close_matches(name, ["auto", *RENDERERS], n=1)
        hint = f'did you mean "{near[0]}"? ' if near else ""
        raise UsageError(f"there is no renderer {name!r}; {hint}There are: auto, {', '.join(RENDERERS)}")
    from verbatim.renderers.guard import GuardedTokenizer
    from verbatim.renderers.recognise import check_guarded, first_difference

    guarded = GuardedTokenizer(tokenizer)
    renderer = _recognise(guarded) if name == "auto" else _make(name, guarded)
    check_guarded(renderer, guarded)
    if name not in ("auto", "template"):
        differs = first_difference(renderer, guarded)
        if differs is not None:
            _log.warning(
                'renderer "%s" and the chat template of this model give different ids (%s). Unless the model was '
                'trained on the format of "%s", use renderer = "auto"', name, differs, name,
            )  # fmt: skip
    return renderer


def _make(name: str, tokenizer: GuardedTokenizer) -> Renderer:
    module, _, attribute = RENDERERS[name].partition(":")
    renderer: Renderer = getattr(importlib.import_module(module), attribute)(tokenizer, name)
    return renderer


def _recognise(tokenizer: GuardedTokenizer) -> Renderer:
    from verbatim.renderers.recognise import first_difference

    reasons = []
    for name in AUTO_FAMILIES:
        try:
            renderer = _make(name, tokenizer)
        except ModelError:
            reasons.append(f"{name} needs tokens that it lacks")
            continue
        differs = first_difference(renderer, tokenizer)
        if differs is None:
            _log.info('the chat template is that of renderer "%s"', name)
            return renderer
        reasons.append(f"{name} renders {differs} differently")
    _log.warning(
        "no renderer family matches this model's chat template (%s); using the template itself. Later turns then "
        "start training samples of their own, which is correct but costs more tokens", "; ".join(reasons),
    )  # fmt: skip
    return _make("template", tokenizer)


__all__ = ["AUTO_FAMILIES", "RENDERERS", "ParsedResponse", "Renderer", "create_renderer"]
