"""The doctor names the class of every break of the corpus, and says no more than it knows."""

from __future__ import annotations

from collections import Counter

import pytest

from inspection.doctor.corpus import ASK, END, NEXT, assistant, cases, render, tokenizer, turn, user
from verbatim import Trajectory, Turn
from verbatim.inspection.doctor import BreakClass, Diagnosis, Doctor, LoggedTrajectory
from verbatim.inspection.doctor.template_lines import template_lines
from verbatim.inspection.doctor.text import TokenText, printable
from verbatim.models.renderers import BreakReason


@pytest.fixture(scope="module")
def text() -> TokenText:
    return TokenText(tokenizer())


def examine(*turns, text: TokenText | None) -> list[Diagnosis]:
    trajectory = Trajectory(example_id="x", trajectory_id="t", turns=turns)
    return Doctor(text).examine(LoggedTrajectory(trajectory=trajectory, line=1))


def test_the_corpus_has_at_least_five_cases_of_every_class_that_text_can_tell():
    counts = Counter(case.kind for case in cases())
    told_by_the_record = {
        BreakClass.UNKNOWN,
        BreakClass.PARALLEL,
        BreakClass.CONTROL_TOKEN,
        BreakClass.OPEN_THOUGHT,
        BreakClass.OTHER_MESSAGES,
        BreakClass.FORMAT_UNKNOWN,
        BreakClass.HISTORY_TEMPLATE,
    }
    assert set(counts) == set(BreakClass) - told_by_the_record
    assert min(counts.values()) >= 5


@pytest.mark.parametrize("case", cases(), ids=str)
def test_the_class_is_the_one_that_was_made(case, text: TokenText):
    found = Doctor(text).examine(case.logged)
    assert [(d.turn, d.kind) for d in found] == [(case.turn, case.kind)]


def test_every_class_says_what_to_do():
    assert all(kind.advice("vllm") and kind.advice("verbatim") and kind.heading for kind in BreakClass)


def test_the_qwen3_example_of_the_documents_points_to_the_stripped_block(text: TokenText):
    case = next(case for case in cases() if "Qwen3" in case.name)
    template = tokenizer().chat_template
    (found,) = Doctor(text, template_lines(template)).examine(case.logged)
    assert found.found == "the <think> block of turn 0 is not in turn 1's prompt: “R1”"
    assert (found.turn, found.against) == (1, 0)
    first = next(row for row in found.rows if row.differs)
    assert (first.earlier.text, first.earlier.position) == ("<think>", found.position)
    lost = [row.earlier.text for row in found.rows if row.differs]
    assert "".join(lost) == "<think>R1</think>"
    assert [row.now for row in found.rows if row.differs] == [None] * len(lost)
    assert found.template_line.text == "{%- if loop.index0 > ns.last_query_index %}"
    assert template.split("\n")[found.template_line.number - 1].strip() == found.template_line.text


@pytest.mark.parametrize("case", cases(), ids=str)
def test_without_a_tokenizer_a_class_is_right_or_unknown(case):
    (found,) = Doctor().examine(case.logged)
    assert found.turn == case.turn
    assert found.kind in (case.kind, BreakClass.UNKNOWN)
    if found.kind is BreakClass.UNKNOWN:
        assert "--model" in found.kind.advice("vllm")


def test_other_tools_in_the_request_are_seen_without_a_tokenizer():
    turns = (turn([1, 2, 3, 4], [9]), turn([1, 7, 3, 4, 9, 5], [9]))
    logged = LoggedTrajectory(trajectory=Trajectory(example_id="x", turns=turns), line=1, tools=("[1]", "[2]"))
    (found,) = Doctor().examine(logged)
    assert found.kind is BreakClass.TOOLS_CHANGED


def test_a_conversation_that_extends_has_no_breaks(text: TokenText):
    first = f"{render(ASK)}It is 20.{END}\n<|im_start|>user\nAnd?{END}\n<|im_start|>assistant\n"
    assert examine(turn(render(ASK), f"It is 20.{END}"), turn(first, f"W{END}"), text=text) == []


def test_a_turn_that_sampled_nothing_is_no_break(text: TokenText):
    assert examine(turn(render(ASK), f"It is 20.{END}"), turn(render(NEXT), []), text=text) == []


def test_only_the_first_turn_of_a_sub_agent_is_by_design(text: TokenText):
    sub = [
        turn(render(NEXT), f"<think>\nR\n</think>\n\nA{END}", agent="sub"),
        turn(render(NEXT, assistant("A", "R"), ASK), f"B{END}", agent="sub"),
    ]
    found = examine(turn(render(ASK), f"It is 20.{END}"), *sub, text=text)
    assert [(d.turn, d.kind) for d in found] == [(1, "sub_agent"), (2, "thinking_stripped")]
    assert found[1].against == 1


def test_a_break_is_held_against_what_the_agent_said_last(text: TokenText):
    thought = "<think>\nR\n</think>\n\n"
    found = examine(
        turn(render(ASK), f"{thought}A{END}"),
        turn(render(ASK, assistant("A", "R"), NEXT), f"{thought}B{END}"),
        turn(render(ASK, assistant("A", "R"), NEXT, assistant("B", "R"), ASK), f"C{END}"),
        text=text,
    )
    assert [(d.turn, d.against, d.kind.value) for d in found] == [
        (1, 0, "thinking_stripped"),
        (2, 1, "thinking_stripped"),
    ]


def test_thinking_that_is_stripped_with_the_whole_answer_is_no_stripped_thinking(text: TokenText):
    (found,) = examine(
        turn(render(ASK), f"<think>\nLook first.\n</think>\n\nIt is 20 degrees.{END}"),
        turn(render(ASK, assistant("No idea whatsoever, sorry."), NEXT), f"W{END}"),
        text=text,
    )
    assert found.kind is BreakClass.HISTORY_REWRITTEN


def test_of_two_samples_that_share_as_much_the_later_one_was_to_be_extended():
    found = examine(turn([1, 2], [3]), turn([1, 9], [4]), turn([1, 8], [5]), text=None)
    assert [(d.turn, d.against, d.position) for d in found] == [(1, 0, 1), (2, 1, 1)]


def test_an_answer_that_goes_on_in_the_history_has_not_lost_its_stop_token(text: TokenText):
    (found,) = examine(
        turn(render(ASK), f"20{END}"), turn(render(ASK, assistant("20 degrees."), NEXT), f"W{END}"), text=text
    )
    assert found.position == len(turn(render(ASK), "20").path)
    assert found.kind is BreakClass.HISTORY_REWRITTEN


def test_a_history_replaced_by_one_as_long_is_not_compacted(text: TokenText):
    said = "It is 20 degrees in Bonn. Tomorrow it will be warmer. "
    (found,) = examine(
        turn(render(ASK, assistant(said * 3), NEXT), f"It is 20 degrees.{END}"),
        turn(render(user("Book a train."), assistant("When and where to? " * 9), user("At 9, to Rome.")), f"W{END}"),
        text=text,
    )
    assert found.kind is BreakClass.HISTORY_REWRITTEN


def test_a_thought_alone_that_is_sampled_again_is_not_stripped(text: TokenText):
    (found,) = examine(turn(render(ASK), "<think>\nLook first.\n</think>"), turn(render(ASK), f"W{END}"), text=text)
    assert found.kind is BreakClass.HISTORY_REWRITTEN
    assert "sampled again" in found.found


@pytest.mark.parametrize(("value", "other"), [("1", "true"), ('"1"', "1"), ("[1]", "[2]"), ('{"a": 1}', '{"b": 1}')])
def test_unequal_values_are_not_re_serialised(text: TokenText, value: str, other: str):
    call = '<tool_call>\n{{"name": "look", "arguments": {{"x": {}}}}}\n</tool_call>'
    asked = f"{END}\n<|im_start|>user\nAnd?{END}\n"
    (found,) = examine(
        turn(render(ASK), f"{call.format(value)}{END}"),
        turn(f"{render(ASK)}{call.format(other)}{asked}", f"W{END}"),
        text=text,
    )
    assert found.kind is BreakClass.HISTORY_REWRITTEN


def test_nothing_that_a_terminal_obeys_is_shown():
    assert printable("a b\n\x1b[31m\u202e\x00é") == "a·b\\n\\x1b[31m\\u202e\\x00é"


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("control_token", "control_token"),
        ("other_end", "stop_token"),
        ("open_thought", "open_thought"),
        ("tools_changed", "tools_changed"),
        ("other_messages", "other_messages"),
        ("thought_dropped", "thinking_stripped"),
        ("format_unknown", "format_unknown"),
        ("history_template", "history_template"),
    ],
)
def test_the_reason_that_a_run_has_noted_is_told_in_words(reason: str, kind: str):
    turns = (Turn(prompt_ids=[1, 2], completion_ids=[3]), Turn(prompt_ids=[1, 2, 4], completion_ids=[5]))
    info = {"rendered_again": [{"turn": 1, "after": 0, "reason": reason}]}
    trajectory = Trajectory(example_id="x", trajectory_id="t", turns=turns, info=info)
    (found,) = Doctor(None).examine(LoggedTrajectory(trajectory=trajectory, line=1))
    assert (found.turn, found.kind) == (1, kind)
    assert found.found == f"{reason.replace('_', ' ')}: {BreakReason(reason).sentence}"
    assert BreakReason(reason).sentence
