"""Defines the classes of breaks, with titles and advice."""

from __future__ import annotations

from collections.abc import Mapping
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
    PARALLEL = "parallel"
    TRUNCATED = "truncated"
    CONTROL_TOKEN = "control_token"
    OPEN_THOUGHT = "open_thought"
    OTHER_MESSAGES = "other_messages"
    FORMAT_UNKNOWN = "format_unknown"
    HISTORY_TEMPLATE = "history_template"
    UNKNOWN = "unknown"

    @property
    def by_design(self) -> bool:
        """Whether the break is intended: a new conversation has no history that could have changed, and of several
        answers after one turn only one can extend it."""
        return self in (BreakClass.SUB_AGENT, BreakClass.PARALLEL)

    @property
    def heading(self) -> str:
        """The class in words."""
        return _HEADINGS.get(self, self.value.replace("_", " "))

    def advice(self, format_name: str) -> str:
        """What to do about it, for a log of this format."""
        return (_IN_OUR_RUN.get(self) if format_name == "verbatim" else None) or _ADVICE[self]


_HEADINGS: Mapping[BreakClass, str] = {
    BreakClass.RETOKENISED: "re-tokenised",
    BreakClass.TOOL_ARGUMENTS: "tool-call arguments re-serialised",
    BreakClass.STOP_TOKEN: "stop token missing or doubled",
    BreakClass.NOT_READ_BACK: "part of an answer not read back",
    BreakClass.SUB_AGENT: "sub-agent",
    BreakClass.PARALLEL: "parallel answers",
}

_ADVICE: Mapping[BreakClass, str] = {
    BreakClass.THINKING_STRIPPED: "the chat template drops the thinking of earlier turns. Between tool calls a family "
    'renderer bridges (orchestrator.renderer.name = "auto"). Across user turns the break is what the model was trained '
    'with: keep it, with trainer.packing = "auto"; or keep the thinking, by editing the template line in '
    "chat_template.jinja",
    BreakClass.RETOKENISED: "the history went through text and came back as other ids. Send token ids: the sampled "
    "completion_ids plus the ids of the new messages only (a renderer's bridge), never the history as text or messages",
    BreakClass.WHITESPACE: "something strips or adds white space in the history: the template (trim, strip), the "
    "parser, or the client. Use a renderer that bridges, or pass the content on unchanged",
    BreakClass.TOOL_ARGUMENTS: "the call was parsed and written anew: the same values, other text. Keep the ids (a "
    "renderer's bridge), or keep the arguments as the text that was sampled, and a template that does not pass text "
    "through tojson",
    BreakClass.STOP_TOKEN: "a turn ends otherwise when sampled than in the history. Let the engine return the token "
    "that ends a turn (include_stop_str_in_output, no stop strings), and let only one side add it",
    BreakClass.NOT_READ_BACK: "the message that was made of an answer leaves out a part of it: a tool call that cannot "
    "be read, or text between and after calls. Send the sampled ids (a renderer's bridge), or keep the whole text as "
    "content",
    BreakClass.HISTORY_COMPACTED: "the context was shortened on purpose. The new sample is right as it is; compact "
    'more rarely and by more at once, or use trainer.packing = "tree", which computes what stayed at the front once',
    BreakClass.HISTORY_REWRITTEN: "something between two requests changes messages that were already sent: a time "
    "stamp, a counter or a hint in the system prompt, an edited answer. Put what changes into the newest message",
    BreakClass.TOOLS_CHANGED: "tool schemas stand at the front of the prompt, so any change of theirs costs the whole "
    "history. Offer the same tools, in the same order and text, all episode long, and refuse a call instead",
    BreakClass.SUB_AGENT: "nothing: another conversation begins. Where agents share a long opening, trainer.packing = "
    '"tree" computes it once',
    BreakClass.PARALLEL: "nothing: several requests follow one turn, or several answers were sampled for one prompt. "
    'trainer.packing = "tree" computes what they share once',
    BreakClass.TRUNCATED: "a completion was cut off, or the prompt lost its beginning. Raise max_tokens or the context "
    "length, end the episode there (Verbatim does), and switch off the engine's prompt truncation "
    "(truncate_prompt_tokens)",
    BreakClass.CONTROL_TOKEN: "the model sampled a token that opens or closes a turn inside of its own, so no prompt "
    "can go on from there. The new sample is right as it is; such turns become fewer as the format is learned: a "
    "longer warm start",
    BreakClass.OPEN_THOUGHT: "the model ended its turn inside of a thought, which the format does not write. The new "
    "sample is right as it is; such turns become fewer as the format is learned: a longer warm start",
    BreakClass.OTHER_MESSAGES: "after a turn, only tools and users can speak without a new sample. Give what a system "
    "message says there as a user's message, or as a part of the tool's answer",
    BreakClass.FORMAT_UNKNOWN: "it is not known what the format writes behind such a turn: a chat template writes what "
    "was there before it otherwise, as `verbatim doctor --template` shows with the line. Take the family of the model "
    "(orchestrator.renderer.name), or mend the line; the new sample is right as it is",
    BreakClass.HISTORY_TEMPLATE: 'orchestrator.renderer.history = "template" renders every prompt; "verbatim" '
    "continues what was sampled, and repeats no history",
    BreakClass.UNKNOWN: "without a tokenizer only ids can be compared; its text would tell more: add "
    "--model FOLDER_OR_ID",
}

_IN_OUR_RUN: Mapping[BreakClass, str] = {
    BreakClass.THINKING_STRIPPED: "the user has spoken, and the model's format drops what was thought before. That is "
    'what it was trained with: keep it, with trainer.packing = "auto", which computes what stayed at the front once; '
    'or keep all thoughts, and each dialogue in one sample, with orchestrator.renderer.thinking_retention = "all"',
    BreakClass.RETOKENISED: "the conversation was rendered anew, and its text came back as other ids: a control token "
    "that was sampled inside a text, or text in other pieces than the tokenizer makes. The new sample is right as it "
    "is; `verbatim doctor --template` says where a renderer can bridge",
    BreakClass.STOP_TOKEN: "a turn ends otherwise when sampled than the renderer writes it. Compare the renderer's "
    "stop_token_ids with the chat template's end of a turn, and eos_token_id in generation_config.json",
    BreakClass.NOT_READ_BACK: "the model sampled a tool call that cannot be read, or tags where none belong; its "
    "message leaves them out, and the next prompt starts a new sample, which is right as it is. They become fewer as "
    'calls are learned: a longer warm start; with tools = "hermes" such turns are bridged',
    BreakClass.TRUNCATED: "a completion was cut off, or the prompt lost its beginning. Raise max_tokens or seq_len; an "
    "environment with its own control flow should end where a turn was cut off",
}
"""Advice for runs of Verbatim, whose requests and answers are ids, where it differs."""
