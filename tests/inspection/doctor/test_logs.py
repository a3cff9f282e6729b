"""Every kind of log gives the same trajectories, and a line that cannot be read costs that line only."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from verbatim import Trajectory, Turn
from verbatim.core.errors import UsageError
from verbatim.core.types import StopReason
from verbatim.inspection.doctor import LogFile, LoggedTrajectory, detect_format, known_formats
from verbatim.logs.monitors.trajectory_log import TrajectoryLog


def read(path: Path, *lines) -> tuple[list[LoggedTrajectory], LogFile, str]:
    """The trajectories, the file, and the note on how it was read."""
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    file = LogFile(path)
    known = detect_format(file, known_formats())
    found = list(known.read(file))
    return found, file, f"{known.name}: {known.about}"


def pairs(logged: LoggedTrajectory) -> list[tuple[list[int], list[int]]]:
    return [(t.prompt_ids.tolist(), t.completion_ids.tolist()) for t in logged.trajectory.turns]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "log.jsonl"


def chat(prompt, completion, finish="stop", **more):
    """A chat completion of vLLM, as it comes with return_token_ids."""
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "x"},
        "finish_reason": finish,
        "stop_reason": None,
        "token_ids": completion,
    }
    return {
        "id": f"chatcmpl-{prompt}",
        "object": "chat.completion",
        "choices": [choice],
        "prompt_token_ids": prompt,
        **more,
    }


def plain(prompt, completion):
    """A completion of vLLM: there the prompt's ids are the choice's."""
    choice = {"index": 0, "text": "x", "finish_reason": "length", "token_ids": completion, "prompt_token_ids": prompt}
    return {"id": f"cmpl-{prompt}", "object": "text_completion", "choices": [choice]}


TWO = [([1, 2], [3]), ([1, 2, 3, 4], [5])]


# ---- ours


def test_our_own_log_is_read_as_it_was_written(path: Path):
    log = TrajectoryLog(path)
    turns = [Turn(prompt_ids=p, completion_ids=c, agent="sub") for p, c in TWO]
    for name in ("a", "b"):
        log.write(1, Trajectory(example_id="x", trajectory_id=name, turns=turns))
    log.close()
    file = LogFile(path)
    found = list(detect_format(file, known_formats()).read(file))
    assert [(f.trajectory.trajectory_id, f.line) for f in found] == [("a", 1), ("b", 2)]
    assert pairs(found[0]) == TWO
    assert found[0].trajectory.turns[0].agent == "sub"


# ---- vLLM


def test_answers_of_one_conversation_are_one_trajectory_however_they_are_mixed(path: Path):
    lines = [
        chat([1, 2], [3], conversation_id="a"),
        chat([7], [8], conversation_id="b"),
        chat([1, 2, 3, 4], [5], conversation_id="a"),
        chat([7, 9], [8], conversation_id="b"),
    ]
    found, _, note = read(path, *lines)
    assert [(f.trajectory.trajectory_id, f.line, pairs(f)) for f in found] == [
        ("a", 1, TWO),
        ("b", 2, [([7], [8]), ([7, 9], [8])]),
    ]
    assert note == 'vllm: answers of vLLM, grouped by "conversation_id"'


def test_the_conversation_is_also_found_in_the_request_and_its_metadata(path: Path):
    found, *_ = read(
        path,
        {"request": {"metadata": {"session_id": 7}}, "response": chat([1], [2])},
        {"request": {"metadata": {"session_id": 8}}, "response": chat([1], [2])},
    )
    assert [f.trajectory.trajectory_id for f in found] == ["7", "8"]


def test_blank_lines_are_passed_over(path: Path):
    first, second = (json.dumps(chat(p, c, conversation_id="a")) for p, c in TWO)
    (found,), file, _ = read(path, "", first, "  ", "", second)
    assert (pairs(found), found.line, file.problems.count) == (TWO, 2, 0)


def test_without_a_name_the_file_is_one_trajectory(path: Path):
    (found,), _, note = read(path, *(chat(p, c, request_id=f"r{p}") for p, c in TWO))
    assert pairs(found) == TWO
    assert "one trajectory" in note


def test_a_request_id_that_comes_again_names_a_conversation(path: Path):
    lines = [chat(p, c, request_id=name) for name in ("a", "b") for p, c in TWO]
    found, *_ = read(path, *lines)
    assert [pairs(f) for f in found] == [TWO, TWO]


def test_a_line_may_hold_a_conversation(path: Path):
    found, _, note = read(path, {"responses": [chat(p, c) for p, c in TWO]}, {"responses": [plain([1], [2])]})
    assert [pairs(f) for f in found] == [TWO, [([1], [2])]]
    assert note.endswith("one conversation per line")


def test_a_plain_completion_has_its_prompt_in_the_choice(path: Path):
    (found,), *_ = read(path, *(plain(p, c) for p, c in TWO))
    assert pairs(found) == TWO
    assert [t.stop_reason for t in found.trajectory.turns] == [StopReason.LENGTH] * 2


def test_the_offline_engine_calls_its_choices_outputs(path: Path):
    (found,), *_ = read(path, *({"prompt_token_ids": p, "outputs": [{"index": 0, "token_ids": c}]} for p, c in TWO))
    assert pairs(found) == TWO


def test_the_chunks_of_a_stream_are_one_answer(path: Path):
    def chunk(name, ids, finish=None, **more):
        choice = {"index": 0, "delta": {}, "token_ids": ids, "finish_reason": finish}
        return {"id": name, "object": "chat.completion.chunk", "choices": [choice], **more}

    usage = {"id": "a", "object": "chat.completion.chunk", "choices": [], "usage": {}}
    lines = [
        chunk("a", None, prompt_token_ids=[1, 2]),
        chunk("a", [3]),
        chunk("b", [5], prompt_token_ids=[1, 2, 3, 4]),
        chunk("a", [6, 7]),
        chunk("a", [], "length"),
        usage,
        chunk("b", [8], "stop"),
    ]
    (found,), file, _ = read(path, *lines)
    assert pairs(found) == [([1, 2], [3, 6, 7]), ([1, 2, 3, 4], [5, 8])]
    assert [t.stop_reason for t in found.trajectory.turns] == [StopReason.LENGTH, StopReason.STOP]
    assert file.problems.count == 0


def test_several_choices_are_several_trajectories(path: Path):
    answer = chat([1, 2], [3])
    answer["choices"].append({**answer["choices"][0], "index": 1, "token_ids": [4]})
    found, *_ = read(path, answer)
    assert [pairs(f) for f in found] == [[([1, 2], [3])], [([1, 2], [4])]]


def test_the_tools_and_the_agent_of_a_request_are_kept(path: Path):
    tools = [{"type": "function", "function": {"name": "look"}}]
    (found,), *_ = read(
        path,
        {"request": {"tools": tools}, "agent": "planner", "response": chat([1], [2])},
        {"request": {}, "response": chat([1], [2])},
    )
    assert found.tools == (json.dumps(tools, sort_keys=True), "")
    assert [t.agent for t in found.trajectory.turns] == ["planner", "main"]


def test_an_answer_without_ids_says_how_to_get_them(path: Path):
    _, file, _ = read(path, chat([1], [2]), {"id": "x", "choices": [{"index": 0, "message": {}}]})
    assert file.problems.kept[0].line == 2
    assert "return_token_ids" in file.problems.kept[0].why


# ---- verifiers


def step(prompt, completion, **more):
    tokens = {
        "prompt_ids": prompt,
        "prompt_mask": [0] * len(prompt),
        "completion_ids": completion,
        "completion_mask": [1] * len(completion),
        "completion_logprobs": [-1.0] * len(completion),
        "overlong_prompt": False,
        "is_truncated": False,
    }
    return {
        "prompt": [],
        "completion": [],
        "response": {},
        "tokens": tokens,
        "reward": None,
        "advantage": None,
        "is_truncated": False,
        "trajectory_id": "t",
        "extras": {},
        **more,
    }


def test_a_rollout_of_verifiers_is_a_trajectory(path: Path):
    rollout = {"example_id": 3, "task": "sum", "trajectory": [step(p, c) for p, c in TWO], "reward": 1.0}
    rollout["trajectory"][1]["is_truncated"] = True
    (found,), _, note = read(path, rollout)
    assert pairs(found) == TWO
    assert (found.trajectory.trajectory_id, found.trajectory.example_id) == ("t", "3")
    assert [t.stop_reason for t in found.trajectory.turns] == [StopReason.STOP, StopReason.LENGTH]
    assert note.startswith("verifiers: ")


def test_a_sub_agent_of_verifiers_has_a_name_of_its_own(path: Path):
    steps = [
        step([9], [8], trajectory_id="sub_1", extras={"is_sub_llm_call": True}),
        step([1], [2]),
        step([7], [6], trajectory_id="other"),
        step([5], [4], tokens=None),
    ]
    (found,), *_ = read(path, {"trajectory": steps})
    assert [t.agent for t in found.trajectory.turns] == ["sub_1", "main", "other"]


def test_a_rollout_without_any_ids_is_named(path: Path):
    _, file, _ = read(path, {"trajectory": [step([1], [2])]}, {"trajectory": [step([1], [2], tokens=None)]})
    assert [p.line for p in file.problems.kept] == [2]
    assert "no step has tokens" in file.problems.kept[0].why


# ---- what cannot be read


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "not JSON"),
        ("[1, 2]", "expected a JSON object, found a list"),
        ('{"a": 1}', "not the same format as the lines before; its keys are 'a'"),
        (chat([], [1]), "prompt_ids: empty"),
        (chat([1, -2], [1]), "prompt_ids: id -2 at position 1 is not a token id"),
        (chat("text", [1]), "prompt_token_ids"),
        ("[" * 100_000, "not JSON"),
        ("\ufeff\x00", "not JSON"),
    ],
    ids=["no JSON", "a list", "other keys", "no prompt", "a negative id", "a text", "bottomless", "no text"],
)
def test_an_unreadable_line_is_named_and_the_rest_is_read(path: Path, line, why: str):
    good = chat([1, 2], [3], conversation_id="a")
    if isinstance(line, dict):
        line["conversation_id"] = "bad"
    found, file, _ = read(path, good, line, chat([1, 2, 3, 4], [5], conversation_id="a"))
    assert [pairs(f) for f in found if f.trajectory.trajectory_id == "a"] == [TWO]
    (problem,) = file.problems.kept
    assert problem.line == 2
    assert why in problem.why


@pytest.mark.parametrize("record", [{"turns": 3}, {"turns": [{}]}, {"turns": [1]}, {"example_id": "x", "turns": None}])
def test_a_damaged_trajectory_of_ours_is_named(path: Path, record):
    TrajectoryLog(path).write(1, Trajectory(example_id="x", turns=[Turn(prompt_ids=[1], completion_ids=[2])]))
    good = path.read_text().strip()
    found, file, _ = read(path, good, {"format": 1, "step": 1, "trajectory": record}, good)
    assert [f.line for f in found] == [1, 3]
    assert [p.line for p in file.problems.kept] == [2]


def test_a_torn_last_line_is_said_to_be_torn(path: Path):
    path.write_text(json.dumps(chat([1], [2])) + "\n" + '{"choices": [')
    file = LogFile(path)
    found = list(detect_format(file, known_formats()).read(file))
    assert len(found) == 1
    assert file.problems.kept[0].line == 2
    assert "torn" in file.problems.kept[0].why


def test_unreadable_lines_are_counted_beyond_those_that_are_kept(path: Path):
    _, file, _ = read(path, chat([1], [2]), *["{"] * 70)
    assert (file.problems.count, len(file.problems.kept)) == (70, 50)


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ("", "it is empty"),
        ("{}\n", "keys are none"),
        ('{"a": 1, "b": 2}\n', "line 1 is an object whose keys are 'a', 'b'"),
        ("[\n", "line 1: not JSON"),
    ],
)
def test_a_file_of_another_kind_is_refused_with_what_is_expected(path: Path, content: str, found: str):
    path.write_text(content)
    with pytest.raises(UsageError) as error:
        detect_format(LogFile(path), known_formats())
    message = str(error.value)
    assert found in message
    for name in ("verbatim: {", "verifiers: {", "vllm: {", "prompt_token_ids", "completion_ids"):
        assert name in message
