"""The episode that is shown before and after training is the same one, and chosen by a rule that is told."""

from __future__ import annotations

import io
import shutil
from pathlib import Path

import pytest

from verbatim import Trajectory
from verbatim.core.plain_console import PlainConsole
from verbatim.core.trajectories import TrajectoryOutcome
from verbatim.core.trajectory_json import NOT_WRITTEN
from verbatim.environments import tool_exchange
from verbatim.environments.guess_number import GuessNumber
from verbatim.logs.monitors.conversation import message_text
from verbatim.logs.outcomes.files import OutcomeFolder
from verbatim.run.before_after import BeforeAfter, compare, print_comparison

OPENING = [{"role": "system", "content": "You play."}, {"role": "user", "content": "Find it."}]


def episode(
    example: str, reward: float | None, *guesses: tuple[int, str], sample: int = 0, **fields: object
) -> Trajectory:
    messages = [*OPENING, *(m for number, reply in guesses for m in tool_exchange("guess", {"number": number}, reply))]
    given = {"env": "game", "seed": 7, "sample_index": sample, "messages": tuple(messages), **fields}
    return Trajectory(example_id=example, trajectory_id=f"{example}-{sample}", reward=reward, **given)  # type: ignore[arg-type]


def compared(tmp_path: Path, *evaluations: tuple[int, list[Trajectory]], known: bool = True) -> list[BeforeAfter]:
    shutil.rmtree(tmp_path / "evaluations", ignore_errors=True)
    for step, trajectories in evaluations:
        OutcomeFolder(tmp_path / "evaluations").write(
            step, [TrajectoryOutcome.of_evaluated(each) for each in trajectories]
        )
    return compare(tmp_path, {"game": GuessNumber()} if known else {})


def printed(comparison: BeforeAfter, width: int = 80) -> list[str]:
    out = io.StringIO()
    print_comparison(comparison, PlainConsole(file=out, width=width))
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_the_first_that_failed_and_then_succeeded_is_shown_and_both_ways_are_counted(tmp_path):
    before = [episode("a", 1.0), episode("b", 0.0, (1, "higher")), episode("c", 0.0), episode("d", 1.0)]
    middle = [episode("b", 0.5)]
    after = [episode("a", 0.0), episode("b", 1.0, (2, "correct")), episode("c", 1.0), episode("d", 1.0)]
    (found,) = compared(tmp_path, (0, before), (5, middle), (9, after))
    pair, why = found.shown
    assert (pair.before.reward, pair.after.reward, found.steps) == (0.0, 1.0, (0, 9))
    assert pair.before.example_id == pair.after.example_id == "b"
    assert why == ("of 4 episodes, 2 failed before and succeeded after (this is the first); 1 went the other way")


def test_without_such_an_episode_the_largest_gain_is_shown_and_without_a_gain_the_first(tmp_path):
    before = [episode("a", 0.5), episode("b", None), episode("c", 0.25)]
    (gained,) = compared(tmp_path, (0, before), (1, [episode("a", 0.5), episode("b", 0.9), episode("c", 0.5)]))
    assert gained.shown[0].before.example_id == "c" and "gained the most reward" in gained.shown[1]
    (none,) = compared(tmp_path, (0, before), (1, [episode("a", 0.5), episode("b", None), episode("c", 0.0)]))
    assert none.shown[0].before.example_id == "a" and "none earned more" in none.shown[1]


def test_episodes_are_paired_by_example_number_and_seed(tmp_path):
    before = [episode("a", 0.0, sample=0), episode("a", 0.1, sample=1), episode("b", 0.0, seed=1)]
    after = [episode("a", 0.3, sample=1), episode("a", 0.2, sample=0), episode("b", 1.0, seed=2)]
    (found,) = compared(tmp_path, (0, before), (4, after))
    assert [(p.before.reward, p.after.reward) for p in found.pairs] == [(0.0, 0.2), (0.1, 0.3)]


@pytest.mark.parametrize(
    "evaluations",
    [
        [(0, [episode("a", 0.0)])],  # one evaluation
        [(0, [episode("a", 0.0)]), (3, [episode("b", 1.0)])],  # nothing in common
        [
            (0, [episode("a", 0.0, messages=(), info={NOT_WRITTEN: "not JSON"})]),
            (3, [episode("a", 1.0)]),
        ],  # none to show
        [],
    ],
)
def test_nothing_is_compared_where_there_is_nothing_to_compare(tmp_path, evaluations):
    assert compared(tmp_path, *evaluations) == []


def test_an_environment_may_have_a_key_of_the_name_of_the_mark(tmp_path):
    episodes = [episode("a", reward, info={NOT_WRITTEN: 1}) for reward in (0.0, 1.0)]
    assert len(compared(tmp_path, (0, episodes[:1]), (3, episodes[1:]))) == 1


def test_an_environment_of_an_earlier_configuration_is_left_out(tmp_path):
    assert compared(tmp_path, (0, [episode("a", 0.0)]), (3, [episode("a", 1.0)]), known=False) == []


def test_the_opening_is_printed_once_and_the_rest_side_by_side(tmp_path):
    before = episode("secret-3", 0.0, (9, "lower"), (9, "lower"), (1, "higher"))
    (found,) = compared(tmp_path, (0, [before]), (20, [episode("secret-3", 1.0, (3, "correct"))]))
    lines = printed(found)
    text = "\n".join(lines)
    assert lines[0] == "one episode before and after: game, example secret-3, same seed"
    assert text.count("Find it.") == 1 and text.count("You play.") == 1
    table = lines[next(n for n, line in enumerate(lines) if "before (step 0)" in line) :]
    assert [line.split() for line in table] == [
        ["before", "(step", "0)", "after", "(step", "20)"],
        ["agent", "guess(number=9)", "agent", "guess(number=3)"],
        ["tool", "lower", "tool", "correct"],
        ["agent", "guess(number=9)", "end", "success,", "reward", "1.000"],
        ["tool", "lower"],
        ["agent", "guess(number=1)"],
        ["tool", "higher"],
        ["end", "failure,", "reward", "0.000"],
    ]
    assert len({line.rindex("agent") for line in table[1:2]} | {table[2].rindex("tool"), table[3].rindex("end")}) == 1


def test_long_texts_and_long_episodes_are_cut_and_say_so(tmp_path):
    talk = [{"role": "assistant", "content": f"line {n}"} for n in range(60)]
    before = episode("a", 0.0, messages=(*OPENING, *talk))
    after = episode("a", 1.0, messages=(*OPENING, {"role": "assistant", "content": "y" * 5000}))
    (found,) = compared(tmp_path, (0, [before]), (1, [after]))
    text = "\n".join(printed(found))
    assert "36 more messages" in text and "line 11" in text and "line 12" not in text and "line 48" in text
    assert "[cut: 4,600 of" in text and text.count("y") < 450
    assert max(map(len, printed(found, width=60))) <= 60


def test_what_an_encoding_cannot_write_and_control_characters_do_no_harm(tmp_path):
    said = {"role": "assistant", "content": "\x1b[31m→ é [bold]"}
    pair = [episode("a", reward, messages=(*OPENING, said)) for reward in (0.0, 1.0)]
    (found,) = compared(tmp_path, (0, pair[:1]), (1, pair[1:]))
    out = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    print_comparison(found, PlainConsole(file=out, width=80))
    out.flush()
    assert "\\x1b[31m? é [bold]" in out.buffer.getvalue().decode("latin-1")


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"role": "assistant", "content": None}, "(nothing)"),
        (
            {
                "role": "assistant",
                "content": " so: ",
                "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1'}}],
            },
            'so:\nf({"a": 1)',
        ),
        ({"role": "user", "content": [{"type": "text", "text": "x"}]}, "[{'type': 'text', 'text': 'x'}]"),
    ],
)
def test_messages_of_any_form_have_a_text(message, text):
    assert message_text(message, 400) == text


def test_in_a_file_the_sides_stand_below_each_other_in_whole_lines(tmp_path, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    said = "lower " * 40
    (found,) = compared(
        tmp_path, (0, [episode("secret-3", 0.0, (9, said))]), (20, [episode("secret-3", 1.0, (3, "correct"))])
    )
    console = PlainConsole(file=io.StringIO())
    print_comparison(found, console)
    lines = [line.split(maxsplit=1) for line in map(str.strip, console.file.getvalue().splitlines()) if line]
    assert lines[lines.index(["before", "(step 0)"]) :] == [
        ["before", "(step 0)"],
        ["agent", "guess(number=9)"],
        ["tool", said.strip()],
        ["end", "failure, reward 0.000"],
        ["after", "(step 20)"],
        ["agent", "guess(number=3)"],
        ["tool", "correct"],
        ["end", "success, reward 1.000"],
    ]
