"""Dialogues of every shape, for tests that compare renderers."""

ASK = {"role": "user", "content": "How warm is it?"}
SYSTEM = {"role": "system", "content": "Be brief.\n"}
ANSWER = {"role": "assistant", "content": "About 20 degrees."}
THOUGHT = {"role": "assistant", "content": "It is 20.", "reasoning_content": "Look first.\n\nThen say."}
SEES = {"role": "tool", "content": "20 °C", "tool_call_id": "call_0", "name": "look"}


def call(**arguments):
    return {"id": "call_0", "type": "function", "function": {"name": "look", "arguments": arguments}}


CALL = {"role": "assistant", "content": "", "tool_calls": [call(place="Bonn")]}
CALLS = {
    **CALL,
    "content": "Let me see.",
    "tool_calls": [call(place="Bonn"), call(place="Köln", days=[1, {"a": None}])],
}
TEXT_ARGUMENTS = {
    **CALL,
    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"place":"Rom"}'}}],
}
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


def user(text):
    return {"role": "user", "content": text}


DIALOGUES = [
    ([ASK], None),
    ([ASK], TOOLS),
    ([SYSTEM, ASK], None),
    ([SYSTEM, ASK], TOOLS * 2),
    ([SYSTEM], None),
    ([user("")], None),
    ([user(" \n spaces \n\n"), ANSWER, user("\n\n")], None),
    ([user("日本語 🙂 é\u0000\t"), ANSWER], None),
    ([ASK, ANSWER], None),
    ([ASK, ANSWER, ASK], None),
    ([ASK, ASK, ANSWER, ASK], None),
    ([ASK, THOUGHT], None),
    ([ASK, THOUGHT, ASK], None),
    ([ASK, THOUGHT, ASK, THOUGHT, ASK, THOUGHT], None),
    ([ASK, THOUGHT, SYSTEM, ASK], None),
    ([ASK, CALL], TOOLS),
    ([ASK, CALL, SEES], TOOLS),
    ([SYSTEM, ASK, CALLS, SEES, SEES], TOOLS),
    ([ASK, CALLS, SEES, SEES, ANSWER], TOOLS),
    ([ASK, {**CALLS, "reasoning_content": "Two."}, SEES, SEES, THOUGHT], TOOLS),
    ([ASK, {**CALLS, "reasoning_content": "Two."}, SEES, SEES, THOUGHT, ASK], TOOLS),
    ([ASK, {**CALL, "reasoning_content": "\nOne.\n"}, SEES, CALL, SEES], TOOLS),
    ([ASK, CALL, SEES, {"role": "assistant", "content": "\n\nleading"}], TOOLS),
    ([ASK, CALL, SEES, {"role": "assistant", "content": "\nlater\n"}, ASK], TOOLS),
    ([ASK, TEXT_ARGUMENTS, SEES], TOOLS),
    ([ASK, {"role": "assistant", "content": ""}, ASK], None),
    ([ANSWER], None),
    ([SYSTEM, ANSWER, THOUGHT], None),
]
