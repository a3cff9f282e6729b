"""The learning curve as text: points where their values are, in any terminal's width."""

import math

import pytest

from verbatim.logs.monitors.learning_curve import Curve
from verbatim.logs.monitors.text_curve import ASCII, text_curve

EVALS = {"game": [(0, 0.0), (50, 0.5), (100, 1.0)]}
RISING = Curve(rewards=[(step, step / 100) for step in range(1, 101)], evals=EVALS)


def rows(text: str) -> list[str]:
    """The rows of the plot, without labels."""
    lines = text.splitlines()
    corner = next(number for number, line in enumerate(lines) if "+--" in line or "└─" in line)
    return [line.partition("│")[2] or line.partition("┤")[2] or line[7:] for line in lines[:corner]]


def test_marks_stand_at_their_step_and_value():
    plot = rows(text_curve(RISING, width=58, height=11))  # 51 columns: 2 steps each; 11 rows: 0.1 each
    marks = [(row, column) for row, line in enumerate(plot) for column, mark in enumerate(line) if mark == "●"]
    assert marks == [(0, 50), (5, 25), (10, 0)]


def test_rewards_are_a_line_through_the_mean_of_each_column():
    noisy = Curve(rewards=[(step, 0.25 + 0.25 * (step % 2)) for step in range(1000)])
    plot = rows(text_curve(noisy, marks=ASCII, width=47, height=9))  # 40 columns of 25 steps: each mean is near 0.375
    assert [row for row, line in enumerate(plot) if line.strip()] == [5]  # 1 - 5/8 = 0.375
    assert set(plot[5]) == {"."} and len(plot[5]) == 40


def test_braille_dots_are_four_to_a_row_with_the_value_at_its_centre():
    steps = (1, 1000)
    high, low = (rows(text_curve(Curve(rewards=[(s, v) for s in steps]), width=47, height=2)) for v in (1.0, 0.0))
    assert [set(line.replace(" ", "")) for line in high] == [{"⠒"}, set()]  # one dot of the second row of four
    assert [set(line.replace(" ", "")) for line in low] == [set(), {"⠒"}]


def test_what_a_constant_policy_reaches_is_a_line_below_the_marks():
    text = text_curve(RISING, best_constant={"game": 0.5, "never evaluated": 0.3}, marks=ASCII, width=58, height=11)
    line = rows(text)[5]
    assert line[:23] == "-" * 23 and line[25] == "O" and line[28:] == "-" * 23
    assert "never evaluated" not in text
    assert "-- game: best constant policy, 0.500" in text


def test_the_legend_says_before_and_after_in_numbers():
    text = text_curve(RISING)
    assert "●  game: success 0.000 after step 0, 1.000 after step 100" in text
    assert "training reward of the steps: first 0.010, last 1.000" in text


@pytest.mark.parametrize("width", [40, 60, 79])
def test_no_line_of_the_plot_is_wider_than_it_may_be(width: int):
    text = text_curve(RISING, best_constant={"game": 0.2}, width=width)
    plot = text.partition("training reward")[0].splitlines()[:-1]
    assert max(map(len, plot)) == width
    assert plot[-1].split() == ["step", "0", "50", "100"]


def test_each_environment_has_its_mark():
    curve = Curve(evals={"b": [(0, 0.1), (9, 0.2)], "a": [(0, 0.9), (9, 0.8)]})
    text = text_curve(curve, height=11)
    assert "●  a: success 0.900" in text and "▲  b: success 0.100" in text
    plot = rows(text)
    assert plot[1][0] == "●" and plot[9][0] == "▲"


def test_rewards_beyond_0_and_1_have_a_plot_and_an_axis_of_their_own():
    text = text_curve(Curve(rewards=[(1, -3.0), (2, 5.0)], evals={"a": [(0, 0.5), (2, 0.5)]}), height=5)
    above, below = text.split("\n\n")
    assert above.splitlines()[0].split()[0] == "5.00" and "-0.33" not in above and "●" not in above
    assert below.splitlines()[0].split()[0] == "1.00" and "●" in below


def test_a_reward_that_is_not_the_success_has_a_plot_with_its_evaluations():
    curve = Curve(
        rewards=[(1, 0.6), (2, 0.7)],
        successes=[(1, 0.1), (2, 0.2)],
        evals={"a": [(0, 0.05), (2, 0.25)]},
        eval_rewards={"a": [(0, 0.5), (2, 0.75)]},
    )
    reward, success = text_curve(curve, best_constant={"a": 0.3}, height=5).split("\n\n")
    assert "training reward of the steps: first 0.600, last 0.700" in reward
    assert "●  a: reward 0.500 after step 0, 0.750 after step 2" in reward and "constant" not in reward
    assert "training success of the steps: first 0.100, last 0.200" in success
    assert "●  a: success 0.050 after step 0, 0.250 after step 2" in success
    assert "┄┄ a: best constant policy, 0.300" in success


def test_ascii_marks_are_ascii():
    assert text_curve(RISING, best_constant={"game": 0.2}, marks=ASCII).isascii()


@pytest.mark.parametrize("curve", [Curve(), Curve(rewards=[(1, math.nan)], evals={"a": [(0, math.inf)]})])
def test_nothing_to_draw_is_an_empty_text(curve: Curve):
    assert text_curve(curve) == ""


def test_one_point_is_drawn():
    assert rows(text_curve(Curve(evals={"a": [(0, 1.0)]}), height=3))[0].startswith("●")
    assert rows(text_curve(Curve(rewards=[(7, 0.5)]), height=3))[1] == "⠂"
