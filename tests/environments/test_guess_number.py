"""The rules of the guessing game, and what its demonstrated player can and cannot do."""

import pytest

from verbatim.core.errors import UsageError
from verbatim.core.types import ToolCall, Trajectory
from verbatim.environments import Demonstrates, Environment, Episode
from verbatim.environments.guess_number import GuessNumber
from verbatim.environments.tools import ToolManager

EMPTY = Trajectory(example_id="x")


async def play(numbers, secret, **rules):
    environment = GuessNumber(**rules)
    example = next(e for e in environment.examples("train") if e.payload["secret"] == secret)
    game = await environment.start(example, seed=0)
    tools = ToolManager(game.tools)
    outcomes = []
    for number in numbers:
        outcomes.append(await tools.dispatch(ToolCall(name="guess", arguments={"number": number})))
    return game, [(o.message["content"], o.done) for o in outcomes]


async def test_replies_lead_to_the_secret_and_finding_it_ends_the_episode_with_1():
    game, replies = await play([8, 12, 10], secret=10)
    assert replies == [("higher", False), ("lower", False), ("correct", True)]
    assert await game.score(EMPTY) == 1.0


async def test_the_last_guess_ends_the_episode_with_0():
    game, replies = await play([1, 2, 3, 4], secret=10)
    assert replies == [("higher", False)] * 3 + [("higher", True)]
    assert await game.score(EMPTY) == 0.0


async def test_nothing_can_be_won_after_the_end():
    game, replies = await play([1, 2, 3, 4, 10], secret=10)
    assert replies[-1] == ("the game is over", True)
    assert await game.score(EMPTY) == 0.0


async def test_speaking_without_a_guess_ends_the_episode():
    game, _ = await play([], secret=3)
    reply = await game.reply({"role": "assistant", "content": "3?"})
    assert (reply.done, list(reply.messages)) == (True, [])
    assert await game.score(EMPTY) == 0.0


async def test_the_state_is_what_is_still_possible():
    game, _ = await play([4, 12, 13, 99], secret=10)
    assert game.state_key() == "5-11, 0 left"


@pytest.mark.parametrize("secret", range(1, 16))
async def test_halving_always_wins_with_the_defaults(secret):
    low, high, game = 1, 15, await GuessNumber().start(GuessNumber().examples("eval")[secret - 1], 0)
    while not (answer := game.guess((low + high) // 2)).done:
        low, high = ((low + high) // 2 + 1, high) if answer.content == "higher" else (low, (low + high) // 2 - 1)
    assert await game.score(EMPTY) == 1.0


def test_there_is_one_example_per_secret():
    examples = GuessNumber(low=-1, high=2).examples("train")
    assert [e.payload["secret"] for e in examples] == [-1, 0, 1, 2]
    assert len({e.id for e in examples}) == 4
    assert [e.id for e in GuessNumber(low=-1, high=2).examples("eval")] == [e.id for e in examples]


def test_ignoring_the_replies_wins_4_times_in_15():
    assert GuessNumber().best_constant_policy_success() == 4 / 15
    assert GuessNumber(high=3).best_constant_policy_success() == 1.0


def test_it_is_an_environment_that_demonstrates():
    assert isinstance(GuessNumber(), Environment)
    assert isinstance(GuessNumber(), Demonstrates)


def test_demonstrations_talk_well_and_play_badly():
    shown = GuessNumber().demonstrations(4000, seed=1)
    won = 0
    for demonstration in shown:
        roles = [message["role"] for message in demonstration.messages]
        guesses = [m["tool_calls"][0]["function"] for m in demonstration.messages if m["role"] == "assistant"]
        assert roles == ["system", "user"] + ["assistant", "tool"] * len(guesses)
        assert 1 <= len(guesses) <= 4
        assert all(g["name"] == "guess" and 1 <= g["arguments"]["number"] <= 15 for g in guesses)
        won += demonstration.messages[-1]["content"] == "correct"
    # By hand, over states (numbers left, guesses left), with a repeated guess in one of six later turns: 0.655.
    assert 0.63 < won / len(shown) < 0.68
    assert {
        g["arguments"]["number"]
        for d in shown
        for m in d.messages
        if m["role"] == "assistant"
        for g in [m["tool_calls"][0]["function"]]
    } == set(range(1, 16))


async def test_demonstrations_are_what_the_game_says():
    for shown in GuessNumber().demonstrations(20, seed=2):
        guesses = [m["tool_calls"][0]["function"] for m in shown.messages if m["role"] == "assistant"]
        numbers = [guess["arguments"]["number"] for guess in guesses]
        said = [m["content"] for m in shown.messages if m["role"] == "tool"]
        fits = []
        for secret in range(1, 16):
            game, replies = await play(numbers, secret)
            assert isinstance(game, Episode)
            fits.append(said == [content for content, _ in replies])
            if fits[-1]:
                assert list(game.messages) == list(shown.messages[:2])
                assert [tool.schema for tool in game.tools] == list(shown.tools)
        assert any(fits)


def test_the_same_seed_shows_the_same_games():
    assert GuessNumber().demonstrations(5, seed=3) == GuessNumber().demonstrations(5, seed=3)
    assert GuessNumber().demonstrations(5, seed=3) != GuessNumber().demonstrations(5, seed=4)


def test_impossible_rules_and_splits_are_refused():
    with pytest.raises(UsageError, match="low = 3 is above high = 2"):
        GuessNumber(low=3, high=2)
    with pytest.raises(UsageError, match="max_guesses = 0"):
        GuessNumber(max_guesses=0)
    with pytest.raises(UsageError, match="no split 'test'"):
        GuessNumber().examples("test")
