"""Breaks whose class is known, because each was made on purpose: at least five of every class.

A case is a trajectory whose last turn breaks, unless it says which. Prompts are texts of a chat format with its control
tokens written out; ids come from a small byte-level tokenizer, whose chat template is Qwen3's.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path

from verbatim import Trajectory, Turn
from verbatim.inspection.doctor import BreakClass, LoggedTrajectory
from verbatim.models.trained_tokenizer import build_tokenizer

QWEN3 = Path(__file__).parents[2] / "models" / "renderers" / "data" / "trl_templates" / "qwen3.jinja"

TEXTS = [
    "system\nYou are a careful assistant. Be brief.",
    "user\nHow warm is it in Bonn, and how warm will it be tomorrow?",
    "assistant\nIt is 20 degrees in Bonn. Tomorrow it will be warmer.",
    '{"name": "look", "arguments": {"place": "Bonn", "days": [1, 2]}}',
    '{"type": "function", "function": {"name": "look", "description": "Look at the sky.", "parameters": {}}}',
    "The user asks for the weather, so look first. Then say what was seen.",
    "# Tools\n\nYou may call one or more functions to assist with the user query.",
] * 4


@functools.cache
def tokenizer():
    found = build_tokenizer(TEXTS, vocab_size=700, context_length=4096)
    found.chat_template = QWEN3.read_text(encoding="utf-8")
    return found


def ids(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False)


def letters(text: str) -> list[int]:
    """The same text in as many tokens as it has bytes."""
    backend = tokenizer().backend_tokenizer
    return [i for character in text for i in (backend.encode(character).ids)]


def render(*messages, tools=None) -> str:
    return tokenizer().apply_chat_template(list(messages), tools=tools, tokenize=False, add_generation_prompt=True)


def user(text):
    return {"role": "user", "content": text}


def system(text):
    return {"role": "system", "content": text}


def assistant(text, thinking=None, calls=()):
    message = {"role": "assistant", "content": text}
    if thinking is not None:
        message["reasoning_content"] = thinking
    if calls:
        message["tool_calls"] = [
            {"id": f"c{n}", "type": "function", "function": {"name": "look", "arguments": arguments}}
            for n, arguments in enumerate(calls)
        ]
    return message


def tool(text):
    return {"role": "tool", "content": text, "tool_call_id": "c0", "name": "look"}


def schema(name, description="Look at the sky.", **properties):
    parameters = {"type": "object", "properties": properties or {"place": {"type": "string"}}}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


END = "<|im_end|>"
ASK = user("How warm is it in Bonn?")
NEXT = user("And tomorrow?")
LAST = user("Thanks. And on Sunday?")
SYSTEM = system("You are a careful assistant. Be brief.")
LOOK, SAY, BOOK = schema("look"), schema("say", "Say it aloud."), schema("book", "Book a train.", to={"type": "string"})


@dataclass(frozen=True)
class Case:
    """One break."""

    name: str
    """What was done."""
    kind: BreakClass
    """Its class."""
    logged: LoggedTrajectory
    """The trajectory; nothing else in it breaks, but for sub-agents' other turns."""
    turn: int
    """The turn that breaks."""

    def __str__(self) -> str:
        return f"{self.kind}: {self.name}"


def turn(prompt, completion, **fields) -> Turn:
    """Texts, or ids as they are."""
    return Turn(
        prompt_ids=ids(prompt) if isinstance(prompt, str) else prompt,
        completion_ids=ids(completion) if isinstance(completion, str) else completion,
        **fields,
    )


def _case(name, kind, *turns, at=None, tools=()):
    trajectory = Trajectory(example_id="x", trajectory_id=name.replace(" ", "-"), turns=turns)
    return Case(
        name, kind, LoggedTrajectory(trajectory=trajectory, line=1, tools=tools), len(turns) - 1 if at is None else at
    )


def _rendered(name, kind, *steps, tools=None, **fields):
    """Steps of (messages, completion): each prompt is rendered anew by the chat template."""
    return _case(name, kind, *(turn(render(*messages, tools=tools), said) for messages, said in steps), **fields)


CALL = '<tool_call>\n{"name": "look", "arguments": {"place": "Bonn"}}\n</tool_call>'


def _thinking():
    kind = BreakClass.THINKING_STRIPPED
    yield _rendered(
        "the Qwen3 example of the documents",
        kind,
        ([user("U1")], f"<think>R1</think>A1{END}"),
        ([user("U1"), assistant("<think>R1</think>A1"), user("U2")], f"<think>R2</think>A2{END}"),
    )
    thought = "The user asks for the weather.\n\nSo look first. Then say what was seen."
    looked = assistant("", thought, calls=[{"place": "Bonn"}])
    yield _rendered(
        "kept between tool calls and stripped when the user speaks",
        kind,
        ([ASK], f"<think>\n{thought}\n</think>\n\n{CALL}{END}"),
        ([ASK, looked, tool("20")], f"<think>\n20 is warm.\n</think>\n\nIt is 20 degrees.{END}"),
        ([ASK, looked, tool("20"), assistant("It is 20 degrees.", "20 is warm."), NEXT], f"Warmer.{END}"),
        tools=[LOOK],
    )
    yield _rendered(
        "of the second answer only",
        kind,
        ([ASK], f"It is 20 degrees.{END}"),
        ([ASK, assistant("It is 20 degrees."), NEXT], f"<think>\n{thought}\n</think>\n\nWarmer.{END}"),
        ([ASK, assistant("It is 20 degrees."), NEXT, assistant("Warmer.", thought), LAST], f"Colder.{END}"),
    )
    first = render(ASK)
    yield _case(
        "opened by the generation prompt",
        kind,
        turn(f"{first}<think>\n", f"{thought}\n</think>\n\nIt is 20 degrees.{END}"),
        turn(
            f"{first}It is 20 degrees.{END}\n<|im_start|>user\nAnd?{END}\n<|im_start|>assistant\n<think>\n",
            f"No.\n</think>\n\nWarm.{END}",
        ),
    )
    yield _case(
        "emptied",
        kind,
        turn(first, f"<think>\n{thought}\n</think>\n\nIt is 20 degrees.{END}"),
        turn(f"{first}<think>\n\n</think>\n\nIt is 20 degrees.{END}\n<|im_start|>user\nAnd?{END}\n", f"W{END}"),
    )
    yield _case(
        "an empty one that the generation prompt wrote",
        kind,
        turn(f"{first}<think>\n\n</think>\n\n", f"It is 20 degrees.{END}"),
        turn(f"{first}It is 20 degrees.{END}\n<|im_start|>user\nAnd?{END}\n<|im_start|>assistant\n", f"W{END}"),
    )
    bad = '<tool_call>\n{"name": look}\n</tool_call>'
    silent = f"{first}{END}\n<|im_start|>user\n"
    for name, said in (
        ("an empty one with a call that cannot be read", f"<think>\n\n</think>\n\n{bad}"),
        ("one with a call that cannot be read", f"<think>\n{thought}\n</think>\n\n{bad}"),
        ("an open one", f"<think>\n{thought}"),
        ("two empty ones and nothing else", "<think>\n\n</think>\n\n<think></think>"),
    ):
        yield _case(
            name, kind, turn(first, f"{said}{END}"), turn(f"{silent}And?{END}\n<|im_start|>assistant\n", f"W{END}")
        )
    yield _rendered(
        "two empty ones before an answer",
        kind,
        ([ASK], f"<think></think><think></think>It is 20.{END}"),
        ([ASK, assistant("It is 20."), NEXT], f"W{END}"),
    )
    yield _case(
        "in Mistral's brackets",
        kind,
        turn("[INST]How warm?[/INST]", f"[THINK]{thought}[/THINK]It is 20 degrees.{END}"),
        turn(f"[INST]How warm?[/INST]It is 20 degrees.{END}[INST]And?[/INST]", f"W{END}"),
    )
    harmony = "<|start|>user<|message|>How warm?<|end|><|start|>assistant"
    yield _case(
        "in harmony's analysis channel",
        kind,
        turn(
            harmony,
            f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant<|channel|>final"
            "<|message|>It is 20 degrees.<|return|>",
        ),
        turn(f"{harmony}<|channel|>final<|message|>It is 20 degrees.<|end|><|start|>user", "W<|return|>"),
    )


def _retokenised():
    kind = BreakClass.RETOKENISED
    said = "It is 20 degrees in Bonn."
    first, second = render(ASK), render(ASK, assistant(said), NEXT)
    yield _case("sampled letter by letter", kind, turn(first, [*letters(said), *ids(END)]), turn(second, f"W{END}"))
    yield _case(
        "one word in two tokens",
        kind,
        turn(first, [*ids("It is 20"), *letters(" deg"), *letters("rees in Bonn."), *ids(END)]),
        turn(second, f"W{END}"),
    )
    emoji = "Sonnig 🙂 und schön 日本"
    yield _case(
        "the bytes of a character in other tokens",
        kind,
        turn(first, [*letters("Sonnig 🙂 und schön"), *ids(" 日本"), *ids(END)]),
        turn(render(ASK, assistant(emoji), NEXT), f"W{END}"),
    )
    spoken = [*ids("<|im_start|>user\nSay "), *letters("<|im_end|>"), *ids(f".{END}\n<|im_start|>assistant\n")]
    yield _case(
        "a control token of the user's text becomes one",
        kind,
        turn(spoken, f"No.{END}"),
        turn(f"<|im_start|>user\nSay <|im_end|>.{END}\n<|im_start|>assistant\nNo.{END}\n", f"W{END}"),
    )
    yield _case(
        "two texts joined at a stop string",
        kind,
        turn(first, letters("It is twenty deg")),
        turn(f"{first}It is twenty degrees.{END}\n", f"W{END}"),
    )
    result = [
        *ids(f"{render(ASK)}{CALL}{END}\n<|im_start|>user\n<tool_response>\n"),
        *letters("20 degrees"),
        *ids(f"\n</tool_response>{END}\n<|im_start|>assistant\n"),
    ]
    yield _case(
        "a tool's answer in other tokens",
        kind,
        turn(first, f"{CALL}{END}"),
        turn(result, f"It is 20 degrees.{END}"),
        turn(
            render(
                ASK, assistant("", calls=[{"place": "Bonn"}]), tool("20 degrees"), assistant("It is 20 degrees."), NEXT
            ),
            f"W{END}",
        ),
    )


def _whitespace():
    kind = BreakClass.WHITESPACE
    for name, said, kept in (
        ("a line end stripped at the end of an answer", "It is 20 degrees.\n", "It is 20 degrees."),
        ("line ends stripped at the start of an answer", "\n\nIt is 20 degrees.", "It is 20 degrees."),
        ("two spaces made one", "It is  20 degrees.", "It is 20 degrees."),
        ("Windows line ends", "It is 20.\r\nAnd sunny.", "It is 20.\nAnd sunny."),
        ("a paragraph made a line", "It is 20.\n\nAnd sunny.", "It is 20.\nAnd sunny."),
        ("a space added", "It is 20,and sunny.", "It is 20, and sunny."),
    ):
        yield _rendered(name, kind, ([ASK], f"{said}{END}"), ([ASK, assistant(kept), NEXT], f"W{END}"))
    yield _rendered(
        "a space stripped from the user's text",
        kind,
        ([user("How warm? ")], f"Very.{END}"),
        ([user("How warm?"), assistant("Very."), NEXT], f"W{END}"),
    )
    thought = "<think>\nLook.\n</think>\n\n"
    yield _case(
        "between the thinking and the answer",
        kind,
        turn(render(ASK), f"<think>\nLook.\n</think>\nIt is 20.{END}"),
        turn(f"{render(ASK)}{thought}It is 20.{END}\n<|im_start|>user\n", f"W{END}"),
    )


def _arguments():
    kind = BreakClass.TOOL_ARGUMENTS
    for name, said, arguments in (
        ("without spaces", '{"name":"look","arguments":{"place":"Bonn","days":[1]}}', {"place": "Bonn", "days": [1]}),
        ("in another order", '{"name": "look", "arguments": {"n": 1, "place": "Bonn"}}', {"place": "Bonn", "n": 1}),
        ("escaped", '{"name": "look", "arguments": {"place": "K\\u00f6ln"}}', {"place": "Köln"}),
        ("a number written otherwise", '{"name": "look", "arguments": {"days": 1.50}}', {"days": 1.5}),
        ("as a text that holds JSON", '{"name": "look", "arguments": "{\\"place\\": \\"Bonn\\"}"}', {"place": "Bonn"}),
        ("on several lines", '{\n  "name": "look",\n  "arguments": {\n    "place": "Bonn"\n  }\n}', {"place": "Bonn"}),
        ("the name last", '{"arguments": {"place": "Bonn"}, "name": "look"}', {"place": "Bonn"}),
        ("nested", '{"name": "look", "arguments": {"a": {"b": [ {"c":null} ]}}}', {"a": {"b": [{"c": None}]}}),
    ):
        yield _rendered(
            name,
            kind,
            ([ASK], f"<tool_call>\n{said}\n</tool_call>{END}"),
            ([ASK, assistant("", calls=[arguments]), tool("20")], f"It is 20.{END}"),
        )


def _not_read_back():
    kind = BreakClass.NOT_READ_BACK
    looked = assistant("", calls=[{"place": "Bonn"}])
    for name, said, read, status in (
        ("a call that is no JSON", '<tool_call>\n{"name": look}\n</tool_call>', assistant(""), "invalid_json"),
        ("a call that is not closed", 'Well.<tool_call>\n{"name": "look"', assistant("Well."), "unclosed_block"),
        ("text after a call", f'{CALL}"cellar"}}}}\n</tool_call>', looked, "ok"),
        ("a tag after a call", f"{CALL}</tool_call>", looked, "ok"),
        ("a second call that is no JSON", f"{CALL}\n<tool_call>\n[\n</tool_call>", looked, "malformed_structure"),
    ):
        yield _case(
            name,
            kind,
            turn(render(ASK), f"{said}{END}", parse_status=status),
            turn(render(ASK, read, tool("20") if "after" in name or "second" in name else NEXT), f"W{END}"),
        )


def _stops():
    kind = BreakClass.STOP_TOKEN
    first = render(ASK)
    asked = f"\n<|im_start|>user\nAnd tomorrow?{END}\n<|im_start|>assistant\n"
    more = f"\n<|im_start|>user\nAnd on Sunday?{END}\n<|im_start|>assistant\n"
    yield _case(
        "missing in the history", kind, turn(first, f"It is 20.{END}"), turn(f"{first}It is 20.{asked}", f"W{END}")
    )
    yield _case(
        "doubled by the client, not by the template",
        kind,
        turn(first, f"It is 20.{END}"),
        turn(f"{first}It is 20.{END}{END}{asked}", f"W{END}"),
        turn(f"{first}It is 20.{END}{asked}W{END}{more}", f"C{END}"),
    )
    yield _case(
        "doubled by the template",
        kind,
        turn(first, f"It is 20.{END}"),
        turn(f"{first}It is 20.{END}{asked}", f"W{END}"),
        turn(f"{first}It is 20.{END}{END}{asked}W{END}{END}{more}", f"C{END}"),
    )
    yield _case(
        "another one", kind, turn(first, "It is 20.<|endoftext|>"), turn(f"{first}It is 20.{END}{asked}", f"W{END}")
    )
    yield _case(
        "not returned by the engine, then written by the template",
        kind,
        turn(first, "It is 20."),
        turn(f"{first}It is 20.{asked}", f"W{END}"),
        turn(f"{first}It is 20.{END}{asked}W{END}{more}", f"C{END}"),
    )
    yield _case(
        "missing after the second answer",
        kind,
        turn(first, f"It is 20.{END}"),
        turn(f"{first}It is 20.{END}{asked}", f"W{END}"),
        turn(f"{first}It is 20.{END}{asked}W{more}", f"C{END}"),
    )
    yield _case(
        "sampled twice", kind, turn(first, f"It is 20.{END}{END}"), turn(f"{first}It is 20.{END}{asked}", f"W{END}")
    )


LONG = " ".join(f"Line {n}: it was {n} degrees in Bonn, and the wind came from the west." for n in range(30))


def _compacted():
    kind = BreakClass.HISTORY_COMPACTED
    opening = [SYSTEM, ASK]
    looked = [assistant("", calls=[{"place": "Bonn"}]), tool(LONG)]
    answered = [*looked, assistant("It is 20 degrees in Bonn. Tomorrow it will be warmer.")]
    begin = [(opening, f"{CALL}{END}"), ([*opening, *looked], f"{answered[-1]['content']}{END}")]
    yield _rendered(
        "a summary instead of the turns",
        kind,
        *begin,
        ([*opening, user("Summary: it was 20 degrees. Go on."), NEXT], f"W{END}"),
    )
    yield _rendered(
        "a tool's answer left out",
        kind,
        *begin,
        ([*opening, looked[0], tool("[left out]"), answered[-1], NEXT], f"W{END}"),
    )
    yield _rendered(
        "a tool's answer cut short",
        kind,
        *begin,
        ([*opening, looked[0], tool(LONG[:200]), answered[-1], NEXT], f"W{END}"),
    )
    yield _rendered("the turns in the middle dropped", kind, *begin, ([*opening, answered[-1], NEXT], f"W{END}"))
    yield _rendered(
        "the oldest messages dropped",
        kind,
        ([ASK], f"It is 20 degrees in Bonn.{END}"),
        ([ASK, assistant("It is 20 degrees in Bonn."), NEXT], f"Warmer.{END}"),
        ([NEXT, assistant("Warmer."), LAST], f"C{END}"),
    )
    yield _rendered("only the newest message kept", kind, *begin, ([SYSTEM, LAST], f"C{END}"))


def _rewritten():
    kind = BreakClass.HISTORY_REWRITTEN
    said = assistant("It is 20 degrees.")
    clock = "It is {} now. You are a careful assistant."
    yield _rendered(
        "a clock in the system prompt",
        kind,
        ([system(clock.format("12:01")), ASK], f"It is 20 degrees.{END}"),
        ([system(clock.format("12:02")), ASK, said, NEXT], f"W{END}"),
    )
    yield _rendered(
        "the user's question edited",
        kind,
        ([ASK], f"It is 20 degrees.{END}"),
        ([user("How warm is it in Rome?"), said, NEXT], f"W{END}"),
    )
    yield _rendered(
        "an answer edited",
        kind,
        ([ASK], f"It is 20 degrees.{END}"),
        ([ASK, assistant("It is 25 degrees."), NEXT], f"W{END}"),
    )
    yield _rendered(
        "a hint added to an answer",
        kind,
        ([ASK], f"It is 20 degrees.{END}"),
        ([ASK, assistant("It is 20 degrees. (checked)"), NEXT], f"W{END}"),
    )
    yield _rendered(
        "another call than was sampled",
        kind,
        ([ASK], f"{CALL}{END}"),
        ([ASK, assistant("", calls=[{"place": "Rome"}]), tool("20")], f"W{END}"),
    )
    yield _rendered(
        "sampled again from the same prompt", kind, ([ASK], f"It is 20 degrees.{END}"), ([ASK], f"Warm.{END}")
    )
    yield _rendered(
        "a longer tool's answer",
        kind,
        ([ASK], f"{CALL}{END}"),
        ([ASK, assistant("", calls=[{"place": "Bonn"}]), tool("20")], f"It is 20 degrees.{END}"),
        ([ASK, assistant("", calls=[{"place": "Bonn"}]), tool("20 degrees and sunny"), said, NEXT], f"W{END}"),
    )


def _tools():
    kind = BreakClass.TOOLS_CHANGED
    said = assistant("It is 20 degrees.")
    for name, before, after in (
        ("one added", [LOOK], [LOOK, SAY]),
        ("one gone", [LOOK, SAY, BOOK], [LOOK, BOOK]),
        ("in another order", [LOOK, SAY], [SAY, LOOK]),
        ("another description", [LOOK, SAY], [schema("look", "Look out of the window."), SAY]),
        ("the first ones", None, [LOOK]),
        ("no more", [LOOK], None),
        ("another parameter", [LOOK], [schema("look", place={"type": "string"}, days={"type": "integer"})]),
    ):
        yield _case(
            name,
            kind,
            turn(render(SYSTEM, ASK, tools=before), f"It is 20 degrees.{END}"),
            turn(render(SYSTEM, ASK, said, NEXT, tools=after), f"W{END}"),
        )
    compact = render(SYSTEM, ASK, tools=[LOOK])
    yield _case(
        "written with other spaces",
        kind,
        turn(compact, f"It is 20 degrees.{END}"),
        turn(compact.replace(json.dumps(LOOK), json.dumps(LOOK, indent=1)) + f"It is 20 degrees.{END}\n", f"W{END}"),
    )


def _sub_agents():
    kind = BreakClass.SUB_AGENT
    sub = [system("You search the sky for others. Answer with a number."), user("Bonn")]
    said = assistant("It is 20 degrees.")
    first, later = turn(render(SYSTEM, ASK), f"It is 20 degrees.{END}"), render(SYSTEM, ASK, said, NEXT)
    yield _case("its name is recorded", kind, first, turn(render(*sub), f"20{END}", agent="sub/1"))
    yield _case(
        "its name is recorded, and its parent goes on",
        kind,
        first,
        turn(render(*sub), f"20{END}", agent="sub/1"),
        turn(later, f"W{END}"),
        at=1,
    )
    yield _case(
        "without a name, and its parent goes on",
        kind,
        first,
        turn(render(*sub), f"20{END}"),
        turn(later, f"W{END}"),
        at=1,
    )
    yield _case(
        "with its parent's system prompt",
        kind,
        first,
        turn(render(SYSTEM, user("Only a number: how warm is it?")), f"20{END}"),
        turn(later, f"W{END}"),
        at=1,
    )
    yield _case("without a name or a return, under another system prompt", kind, first, turn(render(*sub), f"20{END}"))
    yield _case(
        "with other tools, and its parent goes on",
        kind,
        turn(render(SYSTEM, ASK, tools=[LOOK]), f"It is 20 degrees.{END}"),
        turn(render(SYSTEM, user("Bonn"), tools=[BOOK]), f"20{END}"),
        turn(render(SYSTEM, ASK, said, NEXT, tools=[LOOK]), f"W{END}"),
        at=1,
    )


def _truncated():
    kind = BreakClass.TRUNCATED
    first = render(ASK)
    cut = {"stop_reason": "length"}
    yield _case(
        "in the middle of a thought, which is dropped",
        kind,
        turn(first, "<think>\nThe user asks for the weather, so look first. Then", **cut),
        turn(f"{first}{END}\n<|im_start|>user\nGo on.{END}\n<|im_start|>assistant\n", f"W{END}"),
    )
    yield _case(
        "in the middle of a call, which is dropped",
        kind,
        turn(first, 'Let me see.\n<tool_call>\n{"name": "look", "arg', **cut),
        turn(f"{first}Let me see.{END}\n<|im_start|>user\nGo on.{END}\n", f"W{END}"),
    )
    character = ids("It is 20 °C 🙂")[:-2]
    yield _case(
        "in the middle of a character",
        kind,
        turn(first, character, **cut),
        turn(f"{first}{tokenizer().decode(character)}{END}\n".replace("\ufffd", "?"), f"W{END}"),
    )
    yield _case(
        "in the middle of a word, then marked",
        kind,
        turn(first, "It is 20 degrees in Bonn and it will be warm", **cut),
        turn(f"{first}It is 20 degrees in Bonn and it will be [...]{END}\n<|im_start|>user\n", f"W{END}"),
    )
    yield _case(
        "the prompt without its first tokens",
        kind,
        turn(render(SYSTEM, ASK), f"It is 20 degrees.{END}"),
        turn(ids(render(SYSTEM, ASK, assistant("It is 20 degrees."), NEXT))[7:], f"W{END}"),
    )
    begin = ids("<|endoftext|>")
    yield _case(
        "the prompt without its first tokens, but for the one that begins every text",
        kind,
        turn([*begin, *ids(render(SYSTEM, ASK))], f"It is 20 degrees.{END}"),
        turn([*begin, *ids(render(SYSTEM, ASK, assistant("It is 20 degrees."), NEXT))[7:]], f"W{END}"),
    )
    again = f"{first}It is 20.{END}\n<|im_start|>user\nAnd?{END}\n<|im_start|>assistant\n"
    repaired = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    yield _case(
        "in the middle of the second answer, which is repaired",
        kind,
        turn(first, f"It is 20.{END}"),
        turn(again, '<tool_call>\n{"name": "look", "arguments": {"place": "Bo', **cut),
        turn(f"{again}{repaired}{END}\n", f"W{END}"),
    )


@functools.cache
def cases() -> tuple[Case, ...]:
    makers = (
        _thinking,
        _retokenised,
        _whitespace,
        _arguments,
        _stops,
        _not_read_back,
        _compacted,
        _rewritten,
        _tools,
        _sub_agents,
        _truncated,
    )
    return tuple(case for make in makers for case in make())
