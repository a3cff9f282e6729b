"""Kinds of sampled turns and of what follows them, in the form that each format samples them in; and the table of what
continues, which benchmarks/notes/renderers.md holds. `test_bridge_table.py` says how to write it there."""

import dataclasses
import re
from functools import cache
from pathlib import Path

from bridge_oracle import behind, ids, wrong
from families import FAMILIES, MORE, family_tokenizer
from random_dialogues import byte_tokenizer

from verbatim.core.errors import EnvironmentFault
from verbatim.models.renderers import BreakReason, Conversation, create_renderer
from verbatim.models.renderers.tool_support import COMPLETE

PAGE = Path(__file__).parents[3] / "benchmarks" / "notes" / "renderers.md"
BEGIN, END = (f"<!-- tests/models/renderers/test_bridge_table.py: {place} -->" for place in ("begin", "end"))
FOLDER = Path(__file__).parent / "data" / "trl_templates"
TEXTLESS = ("llava", "idefics", "smolvlm")
TEMPLATES = {
    f"template {file.stem}": file.read_text(encoding="utf-8")
    for file in sorted(FOLDER.glob("*.jinja"))
    if not file.stem.startswith(TEXTLESS)
}

ASK = {"role": "user", "content": "How warm is it?"}
AGAIN = {"role": "user", "content": "And tomorrow?"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look at the sky.",
            "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
        },
    }
]
LETTERS = {
    BreakReason.CONTROL_TOKEN: "a",
    BreakReason.OTHER_END: "b",
    BreakReason.OPEN_THOUGHT: "c",
    BreakReason.TOOLS_CHANGED: "d",
    BreakReason.OTHER_MESSAGES: "e",
    BreakReason.THOUGHT_DROPPED: "f",
    BreakReason.FORMAT_UNKNOWN: "g",
}


def call(number=0):
    arguments = {"place": ("Bonn", "Rome")[number]}
    # Kimi wants such ids; some templates want nine letters and digits, and get them in calls of their own.
    return {"id": f"functions.look:{number}", "type": "function", "function": {"name": "look", "arguments": arguments}}


def sees(number=0):
    return {"role": "tool", "content": "20 C", "tool_call_id": f"functions.look:{number}", "name": "look"}


KINDS = {
    "tool: no block": ("call", None),
    "tool: empty block": ("call", ""),
    "tool: thought": ("call", "hm"),
    "tool: text and call": ("talk", None),
    "tool: two calls": ("calls", None),
    "tool: unreadable call": ("unreadable", None),
    "tool: other spelling": ("spelt", None),
    "user: plain": ("answer", None),
    "user: empty block": ("answer", ""),
    "user: thought": ("answer", "hm"),
}
"""(what is sampled, the thought before it: None = no block)"""


@cache
def renderer_of(name, retention="tool_cycle"):
    """A family by its name, or the template renderer of a file."""
    if name in TEMPLATES:
        renderer = create_renderer("template", byte_tokenizer(TEMPLATES[name]), thinking_retention=retention)
    else:
        renderer = create_renderer(name, family_tokenizer(name), thinking_retention=retention)
    renderer.tool_support = COMPLETE  # what is known of turns holds also where a run with tools would be refused
    return renderer


def body(renderer, what):
    """The text of a turn without its thought and its end; None where the format writes no such turn."""
    if what == "answer":
        return "<|channel|>final<|message|>About 20." if renderer.name == "gpt-oss" else "About 20."
    if what == "talk" and renderer.name == "gpt-oss":
        return f"<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant{body(renderer, 'call')}"
    calls = [call(0), call(1)] if what == "calls" else [call()]
    content = "Let me see." if what == "talk" else ""
    new = [sees(number) for number in range(len(calls))]
    for text in ("zqsaid", ""):
        try:
            turn = {"role": "assistant", "content": text, "tool_calls": calls}
            whole = renderer.decode(renderer.write_ids([ASK, turn, *new], None, True))
        except EnvironmentFault:
            continue
        if "look" not in whole or "Bonn" not in whole:
            continue
        prompt = renderer.decode(renderer.write_ids([ASK], None, True))
        start = whole.index(text) + len(text) if text and text in whole else len(prompt)
        end = _end(renderer, whole, whole.index("Bonn"), len(calls))
        said = content + whole[start:end]
        if text and renderer.turn_token_ids & set(renderer.tokenizer.encode(whole[start:end])):
            continue  # text beside a call is a message of its own
        if what == "unreadable":
            return said.replace("Bonn", '{"Bo[', 1).replace('"}', "", 1).replace("look", "", 1)
        if what == "spelt":
            return re.sub(r'": ?"', '":   "', said, count=1).replace("<arg_key>", "\n<arg_key>", 1)
        return said
    return None


def _end(renderer, whole, place, num_calls):
    place = whole.index("Rome", place) if num_calls == 2 and "Rome" in whole[place:] else place
    ends = [renderer.decode(ids([token])) for token in renderer.stop_token_ids]
    found = re.search("|".join(map(re.escape, sorted(filter(None, ends), key=len, reverse=True))), whole[place:])
    return place + found.start() if found else len(whole)


def thinking(renderer, prompt, thought):
    """The text of a thought behind a prompt; "" as a thought is an empty block."""
    if renderer.name == "gpt-oss":
        return f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant"
    opened = renderer.decode(prompt).rstrip().endswith("<think>")
    return f"{'' if opened else '<think>'}\n{thought}\n</think>\n\n"


def conversation_of(renderer, kind):
    """(the conversation with a sampled turn of this kind, what follows); None where there is no such turn."""
    what, thought = KINDS[kind]
    said = body(renderer, what)
    if said is None:
        return None
    prompt = Conversation.open(renderer, [ASK], TOOLS)
    opened = renderer.decode(prompt.prompt_ids).rstrip().endswith("<think>")
    if opened and thought is None:
        thought = ""  # each turn begins in a thought
    text = said if thought is None else thinking(renderer, prompt.prompt_ids, thought) + said
    new = [AGAIN] if what == "answer" else [sees(number) for number in range(2 if what == "calls" else 1)]
    end = close_of(renderer, what, new)
    if end is None:
        return None
    completion = ids([*renderer.tokenizer.encode(text), end])
    parsed = renderer.parse_response(completion, prompt.prompt_ids, TOOLS)
    named = [dataclasses.replace(tool, id=f"functions.look:{n}") for n, tool in enumerate(parsed.tool_calls)]
    return prompt.answered(completion, parsed, None, named), new


def close_of(renderer, what, new):
    """The token that a model ends such a turn with."""
    tokens = renderer.tokenizer.control_tokens
    if renderer.name == "gpt-oss":
        return tokens["<|return|>" if what == "answer" else "<|call|>"]
    if "<|observation|>" in tokens and tokens["<|observation|>"] in renderer.stop_token_ids:
        return tokens["<|user|>" if what == "answer" else "<|observation|>"]
    turn = {"role": "assistant", "content": "zqsaid"}
    if what != "answer":
        turn = {**turn, "content": "", "tool_calls": [call()]}
    try:
        whole = renderer.decode(renderer.write_ids([ASK, turn, *new[:1]], None, True))
    except EnvironmentFault:
        return renderer.stop_token_ids[0]
    place = whole.find("zqsaid" if what == "answer" else "Bonn")
    ends = {renderer.decode(ids([token])): token for token in renderer.stop_token_ids}
    longest_first = sorted(filter(None, ends), key=len, reverse=True)
    found = re.search("|".join(map(re.escape, longest_first)), whole[max(place, 0) :])
    return ends[found[0]] if found else None


def outcome(name, kind, retention):
    """ "yes", the letter of the reason, or "-" where the format has no such turn."""
    renderer = renderer_of(name, retention)
    made = conversation_of(renderer, kind)
    if made is None:
        return "-"
    conversation, new = made
    found = conversation.bridged(new, TOOLS)
    return LETTERS[found] if isinstance(found, BreakReason) else "yes"


def faults_of(name):
    """(bridges of a format, what is wrong with them)"""
    num_bridges, faults = 0, {}
    for kind in KINDS:
        for retention in ("tool_cycle", "all"):
            renderer = renderer_of(name, retention)
            made = conversation_of(renderer, kind)
            if made is None:
                continue
            conversation, new = made
            found = conversation.bridged(new, TOOLS)
            if isinstance(found, BreakReason):
                continue
            num_bridges += 1
            said = conversation.said
            calls = [(call.name, call.id) for call in said.calls]
            thought = "hm" if renderer.decode(conversation.prompt_ids).rstrip().endswith("<think>") else None
            expected = behind(renderer, conversation.messages, TOOLS, new, calls, thought)
            fault = wrong(renderer, conversation.prompt_ids, said.completion_ids, found.prompt_ids, expected)
            if fault:
                faults[name, kind, retention] = fault
    return num_bridges, faults


def cell(name, kind):
    cycle, everything = outcome(name, kind, "tool_cycle"), outcome(name, kind, "all")
    return cycle if cycle == everything else f"{cycle} / {everything}"


def table(names=None):
    """The lines of the table; formats that continue alike share one."""
    names = [*FAMILIES, *MORE, *TEMPLATES] if names is None else names
    alike = {}
    for name in names:
        column = alike.setdefault(" | ".join(cell(name, kind) for kind in KINDS), ([], []))[name in TEMPLATES]
        column.append(f"`{name.removeprefix('template ')}`")
    lines = [f"| family | template | {' | '.join(KINDS)} |", f"|---|---|{'---|' * len(KINDS)}"]
    lines += [f"| {', '.join(some)} | {', '.join(more)} | {cells} |" for cells, (some, more) in alike.items()]
    return lines


def write_page():
    """Put the table into the page."""
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}\n\n" + "\n".join(table()) + f"\n\n{END}{after}", encoding="utf-8")
