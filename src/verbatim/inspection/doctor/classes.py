"""Defines the classes of breaks, with a heading and advice for each."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class BreakClass(StrEnum):
    """The reasons why a prompt does not extend the recorded tokens. Users' scripts read the values, so the values must
    not change."""

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
        """True if the break is expected: a new conversation has no history to extend, and of several parallel answers
        only one can extend the turn before them."""
        return self in (BreakClass.SUB_AGENT, BreakClass.PARALLEL)

    @property
    def heading(self) -> str:
        """The name of the class in words, for reports."""
        return _HEADINGS.get(self, self.value.replace("_", " "))

    def advice(self, format_name: str) -> str:
        """The advice on what to do about breaks of this class in a log of the given format."""
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
    'renderer bridges (orchestrator.renderer.name = "auto"). Across user turns, the break matches how the model was '
    'trained: accept it and set trainer.packing = "auto", or keep the thinking by editing the template line in '
    "chat_template.jinja",
    BreakClass.RETOKENISED: "the history was decoded to text and encoded to different ids. Send token ids: the "
    "sampled completion_ids plus the ids of the new messages only (a renderer's bridge), never the history as text or "
    "messages",
    BreakClass.WHITESPACE: "the template (trim, strip), the parser or the client strips or adds white space in the "
    "history. Use a renderer that bridges, or pass the content on unchanged",
    BreakClass.TOOL_ARGUMENTS: "the call was parsed and serialised again: the same values, but different text. Keep "
    "the ids (a renderer's bridge), or keep the arguments as the sampled text and use a template that does not pass "
    "text through tojson",
    BreakClass.STOP_TOKEN: "a sampled turn ends differently in the history. Let the engine return the token that ends "
    "a turn (include_stop_str_in_output, no stop strings), and add that token in only one place",
    BreakClass.NOT_READ_BACK: "the message parsed from an answer lacks a part of it: a tool call that cannot be "
    "parsed, or text between or after calls. Send the sampled ids (a renderer's bridge), or keep the whole text as "
    "content",
    BreakClass.HISTORY_COMPACTED: "the context was shortened on purpose. The new sample is correct. To save compute, "
    'compact less often and by more at once, or use trainer.packing = "tree", which computes the kept prefix once',
    BreakClass.HISTORY_REWRITTEN: "messages that were already sent changed between two requests: a timestamp, a "
    "counter or a hint in the system prompt, or an edited answer. Put changing content into the newest message",
    BreakClass.TOOLS_CHANGED: "tool schemas are at the front of the prompt, so any change to them costs the whole "
    "history. Offer the same tools, in the same order and wording, for the whole episode, and refuse calls instead",
    BreakClass.SUB_AGENT: "nothing: another conversation begins. If agents share a long prefix, trainer.packing = "
    '"tree" computes it once',
    BreakClass.PARALLEL: "nothing: several requests follow one turn, or several answers were sampled for one prompt. "
    'trainer.packing = "tree" computes their shared prefix once',
    BreakClass.TRUNCATED: "a completion was cut off, or the prompt lost its beginning. Raise max_tokens or the "
    "context length, end the episode at the cut-off (Verbatim does), and turn off the engine's prompt truncation "
    "(truncate_prompt_tokens)",
    BreakClass.CONTROL_TOKEN: "the model sampled a token that opens or closes a turn in the middle of its own turn, "
    "so no prompt can continue from there. The new sample is correct. Such turns become rarer as the model learns the "
    "format: use a longer warm start",
    BreakClass.OPEN_THOUGHT: "the model ended its turn without closing its thinking, which the format cannot express. "
    "The new sample is correct. Such turns become rarer as the model learns the format: use a longer warm start",
    BreakClass.OTHER_MESSAGES: "only messages from tools and users can follow a turn without starting a new sample. "
    "Send the content of a system message there as a user message, or as part of the tool's result",
    BreakClass.FORMAT_UNKNOWN: "it is not known what the format writes after such a turn, because the chat template "
    "writes the text before it differently; `verbatim doctor --template` shows the line. Select the model's family "
    "(orchestrator.renderer.name), or fix the line. The new sample is correct",
    BreakClass.HISTORY_TEMPLATE: 'orchestrator.renderer.history = "template" renders every prompt from its messages; '
    '"verbatim" continues the sampled tokens and repeats no history',
    BreakClass.UNKNOWN: "without a tokenizer, only ids can be compared. To compare the text too, add --model "
    "FOLDER_OR_ID",
}

_IN_OUR_RUN: Mapping[BreakClass, str] = {
    BreakClass.THINKING_STRIPPED: "after a user message, the model's format drops the earlier thinking, as in the "
    "model's training. Accept the break and set trainer.packing = "
    '"auto", which computes the kept prefix once; or keep all thinking, and each dialogue in one sample, with '
    'orchestrator.renderer.thinking_retention = "all"',
    BreakClass.RETOKENISED: "the conversation was rendered again, and its text was encoded to different ids: the "
    "model sampled a control token inside text, or split text differently from the tokenizer. The new sample is "
    "correct; `verbatim doctor --template` says where a renderer can bridge",
    BreakClass.STOP_TOKEN: "a sampled turn ends differently from how the renderer writes it. Compare the renderer's "
    "stop_token_ids with the chat template's end of a turn and with eos_token_id in generation_config.json",
    BreakClass.NOT_READ_BACK: "the model sampled a tool call that cannot be parsed, or misplaced tags. The parsed "
    "message lacks them, so the next prompt starts a new sample, which is correct. Such turns become rarer as the "
    'model learns to call tools: use a longer warm start; with tools = "hermes" such turns are bridged',
    BreakClass.TRUNCATED: "a completion was cut off, or the prompt lost its beginning. Raise max_tokens or seq_len; "
    "an environment with its own control flow should end the episode when a turn is cut off",
}
"""Advice that differs for runs of Verbatim, because their requests and answers are token ids."""
