"""Defines the classes of breaks, with titles and advice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class BreakClass(StrEnum):
    """Why a prompt does not extend the recorded tokens. The values are stable, because scripts read them."""

    THINKING_STRIPPED = "thinking_stripped"
    RETOKENISED = "retokenised"
    WHITESPACE = "whitespace"
    TOOL_ARGUMENTS = "tool_arguments"
    STOP_TOKEN = "stop_token"
    NOT_READ_BACK = "not_read_back"
    HISTORY_COMPACTED = "history_compacted"
    HISTORY_REWRITTEN = "history_rewritten"
    TOOLS_CHANGED = "tools_changed"
    SUB_AGENT = "sub_agent"
    TRUNCATED = "truncated"
    UNKNOWN = "unknown"

    @property
    def by_design(self) -> bool:
        """Whether the break is intended: a new conversation has no history that could have changed."""
        return self is BreakClass.SUB_AGENT


@dataclass(frozen=True, kw_only=True)
class About:
    """Title and advice of a class."""

    title: str
    """Its title."""
    advice: str
    """What to do about it."""
    in_our_run: str | None = None
    """Other advice for runs of Verbatim, whose requests and answers are ids; None = the same advice."""


CLASSES: Mapping[BreakClass, About] = {
    BreakClass.THINKING_STRIPPED: About(
        title="thinking stripped",
        advice="the chat template drops the thinking of earlier turns. Between tool calls a family renderer bridges "
        '(orchestrator.renderer.name = "auto"). Across user turns the break is what the model was trained with: keep '
        'it, with trainer.packing = "auto"; or keep the thinking, by editing the template line in chat_template.jinja',
    ),
    BreakClass.RETOKENISED: About(
        title="re-tokenised",
        advice="the history went through text and came back as other ids. Send token ids: the sampled completion_ids "
        "plus the ids of the new messages only (a renderer's bridge), never the history as text or messages",
        in_our_run="the conversation was rendered anew, and its text came back as other ids: a control token that was "
        "sampled inside a text, or text in other pieces than the tokenizer makes. The new sample is right as it is; "
        "`verbatim doctor --template` says where a renderer can bridge",
    ),
    BreakClass.WHITESPACE: About(
        title="whitespace",
        advice="something strips or adds white space in the history: the template (trim, strip), the parser, or the "
        "client. Use a renderer that bridges, or pass the content on unchanged",
    ),
    BreakClass.TOOL_ARGUMENTS: About(
        title="tool-call arguments re-serialised",
        advice="the call was parsed and written anew: the same values, other text. Keep the ids (a renderer's bridge), "
        "or keep the arguments as the text that was sampled, and a template that does not pass text through tojson",
    ),
    BreakClass.STOP_TOKEN: About(
        title="stop token missing or doubled",
        advice="a turn ends otherwise when sampled than in the history. Let the engine return the token that ends a "
        "turn (include_stop_str_in_output, no stop strings), and let only one side add it",
        in_our_run="a turn ends otherwise when sampled than the renderer writes it. Compare the renderer's "
        "stop_token_ids with the chat template's end of a turn, and eos_token_id in generation_config.json",
    ),
    BreakClass.NOT_READ_BACK: About(
        title="part of an answer not read back",
        advice="the message that was made of an answer leaves out a part of it: a tool call that cannot be read, or "
        "text between and after calls. Send the sampled ids (a renderer's bridge), or keep the whole text as content",
        in_our_run="the model sampled a tool call that cannot be read, or tags where none belong; its message leaves "
        "them out, and the next prompt starts a new sample, which is right as it is. They become fewer as calls are "
        'learned: a longer warm start; with tools = "hermes" such turns are bridged',
    ),
    BreakClass.HISTORY_COMPACTED: About(
        title="history compacted",
        advice="the context was shortened on purpose. The new sample is right as it is; compact more rarely and by "
        'more at once, or use trainer.packing = "tree", which computes what stayed at the front once',
    ),
    BreakClass.HISTORY_REWRITTEN: About(
        title="history rewritten",
        advice="something between two requests changes messages that were already sent: a time stamp, a counter or a "
        "hint in the system prompt, an edited answer. Put what changes into the newest message",
    ),
    BreakClass.TOOLS_CHANGED: About(
        title="tools changed",
        advice="tool schemas stand at the front of the prompt, so any change of theirs costs the whole history. Offer "
        "the same tools, in the same order and text, all episode long, and refuse a call instead",
    ),
    BreakClass.SUB_AGENT: About(
        title="sub-agent",
        advice='nothing: another conversation begins. Where agents share a long opening, trainer.packing = "tree" '
        "computes it once",
    ),
    BreakClass.TRUNCATED: About(
        title="truncated",
        advice="a completion was cut off, or the prompt lost its beginning. Raise max_tokens or the context length, "
        "end the episode there (Verbatim does), and switch off the engine's prompt truncation (truncate_prompt_tokens)",
        in_our_run="a completion was cut off, or the prompt lost its beginning. Raise max_tokens or seq_len; an "
        "environment with its own control flow should end where a turn was cut off",
    ),
    BreakClass.UNKNOWN: About(
        title="unknown",
        advice="without a tokenizer only ids can be compared; its text would tell more: add --model FOLDER_OR_ID",
    ),
}


def advice(kind: BreakClass, format_name: str) -> str:
    """The advice for a class in a log of this format."""
    about = CLASSES[kind]
    return about.in_our_run if about.in_our_run is not None and format_name == "verbatim" else about.advice
