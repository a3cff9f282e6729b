"""Faults to plant in the rule by which prompts continue: each of its exceptions taken away."""

from __future__ import annotations

from planted_copy import Fault

_RULE = ("models/renderers/test_bridge_rule.py",)
BRIDGES = (
    Fault(
        name="(a) a turn may hold the tokens that open and close turns",
        file="models/renderers/bridge.py",
        old="        if self._holds_turn_token(body.tolist()):\n            return BreakReason.CONTROL_TOKEN\n",
        new="",
        harm="A policy that samples a user's turn is answered as if a user had spoken it.",
        tests=_RULE,
    ),
    Fault(
        name="(b) whatever ended a turn takes the place of its close",
        file="models/renderers/bridge.py",
        old="        if ended and behind[0] != completion[-1]:\n",
        new="        if ended and behind[0] != completion[-1] and behind[0] in self._thought_ids:\n",
        harm="A turn that ended as for a user is followed by a tool's answer, which no published format writes.",
        tests=_RULE,
    ),
    Fault(
        name="(b) a turn that was cut off gets no close",
        file="models/renderers/bridge.py",
        old="dtype=np.int32)\n        return np.concatenate([conversation.prompt_ids, completion, added]",
        new="dtype=np.int32)\n        added = added if ended else added[1:]\n"
        "        return np.concatenate([conversation.prompt_ids, completion, added]",
        harm="After a turn that was cut off, the next message stands inside of it.",
        tests=_RULE,
    ),
    Fault(
        name="(c) a thought that is open reads as one that is closed",
        file="models/renderers/template.py",
        old="thought_open=is_open)\n",
        new="thought_open=False)\n",
        harm="A tool's answer stands in a thought of the model.",
        tests=_RULE,
    ),
    Fault(
        name="(d) the tools are compared by their number",
        file="models/renderers/bridge.py",
        old="        if not same_tools(conversation.tools, tools):\n",
        new="        if bool(conversation.tools) != bool(tools):\n",
        harm="A model goes on with tools that its prompt does not show.",
        tests=_RULE,
    ),
    Fault(
        name="(e) only the last of the new messages is looked at",
        file="models/renderers/bridge.py",
        old='        if not new or any(message.get("role") not in _CONTINUED_ROLES for message in new):\n',
        new='        if not new or new[-1].get("role") not in _CONTINUED_ROLES:\n',
        harm="A system message in the middle of a conversation is lost, or stands where its format never writes it.",
        tests=_RULE,
    ),
    Fault(
        name="(f) the thoughts of earlier turns of a cycle are forgotten",
        file="models/renderers/bridge.py",
        old="        if drops and (conversation.thinks or said.thinks) and self.drops_thoughts:\n",
        new="        if drops and said.thinks and self.drops_thoughts:\n",
        harm="A user's message follows thoughts that the published format leaves out there.",
        tests=_RULE,
    ),
    Fault(
        name="(f) every turn holds a thought",
        file="models/renderers/conversation.py",
        old='        return bool((self.parsed.reasoning_content or "").strip())\n',
        new="        return True\n",
        harm="A model in its non-thinking mode starts a sample at each message of a user.",
        tests=_RULE,
    ),
    Fault(
        name="(g) the first rendering is believed",
        file="models/renderers/stand_ins.py",
        old="not whole.startswith(before) or (found and whole[end.start() :] != found[0]):\n",
        new="(found and whole[end.start() :] != found[0]):\n",
        harm="A template that shows tools before the last message shows them again with each turn.",
        tests=_RULE,
    ),
    Fault(
        name="(g) one rendering is enough",
        file="models/renderers/stand_ins.py",
        old=" or (found and whole[end.start() :] != found[0]):\n",
        new=":\n",
        harm="What a template writes for one text or argument alone is taken for what it writes behind each turn.",
        tests=_RULE,
    ),
)
