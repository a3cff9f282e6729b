"""Games of textarena: the package's texts and rewards, players trained or not, and every token accounted for."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from itertools import zip_longest

import pytest

from byte_renderer import VOCAB_SIZE, ByteRenderer, say
from campaigns import sized
from e2e.tiny_runs import SIZES
from rollouts.chat_server import Raw, chat_server
from verbatim.algorithms.credit.baselines import default_advantage
from verbatim.cli.main import main
from verbatim.core.errors import ComponentError, NoDemonstrations, UsageError
from verbatim.core.trajectories import Ledger
from verbatim.core.types import RolloutIdentity
from verbatim.environments.global_random import OwnRandom
from verbatim.environments.resolve import create_environment
from verbatim.inference import SamplingParams
from verbatim.inference.scripted import ScriptedSampler
from verbatim.models.build import build_model
from verbatim.models.trained_tokenizer import chat_text
from verbatim.rollouts import AgentLoop, EpisodeLimits, GroupRun, Recorder, RolloutSetup, run_episode
from verbatim.rollouts.games import game as game_module
from verbatim.rollouts.games import package
from verbatim.rollouts.games.environment import TextArena
from verbatim.rollouts.games.game import Game
from verbatim.rollouts.games.random_moves import MOVES, random_move
from verbatim.run.orchestrator.assemble import GroupRules, assemble_group
from waiting import HANGS

pytestmark = pytest.mark.extras

ALONE = [
    "2048-v0-ultra-easy",
    "Bandit-v0",
    "Blackjack-v0",
    "FrozenLake-v0-random",
    "GuessTheNumber-v0",
    "LightsOut-v0",
    "TowerOfHanoi-v0",
]
AGAINST = [
    "ConnectFour-v0",
    "IteratedMatchingPennies-v0",
    "IteratedPrisonersDilemma-v0",
    "IteratedRockPaperScissors-v0",
    "KuhnPoker-v0-short",
    "LiarsDice-v0-small",
    "Nim-v0",
    "PigDice-v0-50",
    "SimpleTak-v0",
    "ThreePlayerTicTacToe-v0",
    "TicTacToe-v0",
]
PLAYER_0_WINS = ["[0]", "[3]", "[1]", "[4]", "[2]"]
"""Tic-tac-toe: the first player fills the upper row."""
PLAYER_1_WINS = ["[0]", "[3]", "[1]", "[4]", "[8]", "[5]"]


def sampler_of(said, **options):
    """A model that says these things, one after the other."""
    left = iter(said)
    options = {"vocab_size": VOCAB_SIZE, "context_length": 50_000, **options}
    return ScriptedSampler(script=lambda request: say(next(left)), **options)


async def play(environment, said, *, index=0, seed=0, **limits):
    example = environment.examples("train")[index]
    loop = AgentLoop(
        sampler=sampler_of(said),
        renderer=ByteRenderer(),
        params=SamplingParams(max_tokens=1000),
        limits=EpisodeLimits(**{"max_turns": 1000, "max_context": 50_000, **limits}),
        recorder=Recorder(VOCAB_SIZE),
        seed=0,
    )
    return await run_episode(
        environment=environment, example=example, seed=seed, loop=loop, identity=RolloutIdentity(example_id=example.id)
    )


def played_directly(name: str, seed: int, num_players: int):
    """The package's own game, played with the moves of a random player: moves, players, final texts and rewards."""
    import textarena

    rng, own = random.Random(seed), OwnRandom(seed)
    with own.lent():
        env = textarena.make(name)
        env.reset(num_players=num_players, seed=seed)
    ours = Game(package.find_game(name), {}, num_players, seed)
    moves, players, texts, done = [], [], {}, False
    while not done:
        with own.lent():
            player, text = env.get_observation()
        texts.setdefault(player, []).append(text)
        assert ours.observe()[0] == player
        move = random_move(ours, rng)
        ours.act(move)
        moves.append(move)
        players.append(player)
        with own.lent():
            done, _ = env.step(action=move)
    with own.lent():
        rewards, _ = env.close()
    return moves, players, texts, rewards


@pytest.mark.parametrize("name", [*ALONE, *AGAINST])
async def test_texts_and_rewards_are_the_packages(name: str):
    """Scripted players, two seeds each; what the package shows is all in the conversation, in its order."""
    environment = TextArena(game=name, seed=11)
    count = environment.examples("train")[1].payload["seat"] + 1 if name in AGAINST else 1
    count = 3 if name.startswith("ThreePlayer") else count
    for index in (0, 1):
        moves, players, texts, rewards = played_directly(name, 11 + index, count)
        trajectory = await play(environment, moves, index=index)
        assert trajectory.error is None
        if count == 1:
            assert (trajectory.reward, trajectory.agent_rewards) == (rewards[0], {})
        else:
            assert trajectory.agent_rewards == {f"player_{player}": reward for player, reward in rewards.items()}
            assert [turn.agent for turn in trajectory.turns] == [f"player_{player}" for player in players]
        shown = [m["content"] for m in trajectory.messages if m["role"] == "user"]
        first = texts[players[0]]
        own = [move for move, player in zip(moves, players, strict=True) if player == players[0]]
        assert len(shown) == len(first)
        for before, now, ours, said in zip(["", *first], first, shown, ["", *own], strict=False):
            assert now.startswith(before)
            new = Counter(line for line in now.removeprefix(before).splitlines() if line)
            told = Counter(line for line in ours.splitlines() if line and line != "It is your turn.")
            assert told <= new
            # left out is what the player itself has said, which stands in the conversation already
            assert all(said and line.endswith(said) for line in new - told), new - told


async def test_the_same_seed_is_the_same_game_and_another_seed_another():
    environment = TextArena(game="KuhnPoker-v0-short", opponent="random")
    said = ["[check]", "[bet]", "[call]", "[fold]"] * 20
    one, again = [await play(environment, said, seed=5) for _ in range(2)]
    assert (one.messages, one.reward) == (again.messages, again.reward)
    others = [(await play(environment, said, index=2 * i, seed=5)).messages[0] for i in range(6)]
    assert len({message["content"] for message in others}) > 1
    seeds = [(await play(environment, said, seed=seed)).messages for seed in range(6)]
    assert len({json.dumps(messages) for messages in seeds}) > 1  # the opponent's moves


async def test_games_side_by_side_do_not_share_random_numbers():
    environment = TextArena(game="2048-v0-ultra-easy")
    moves = ["[up]", "[left]", "[down]", "[right]"] * 100
    alone = [await play(environment, moves, index=index) for index in range(4)]
    before = random.getstate()
    together = await asyncio.gather(*(play(environment, moves, index=index) for index in range(4)))
    assert [t.messages for t in together] == [t.messages for t in alone]
    assert random.getstate() == before


# ---- who is trained, and what becomes of every token


RULES = GroupRules(
    advantage=default_advantage, filters={}, strategy="interleaved", max_length=50_000, max_off_policy_steps=8
)


async def group_of(environment, games, *, index=0):
    """A group whose games are played with these moves; assembled, with a ledger that adds up."""
    ledger, left = Ledger(), [iter(moves) for moves in games]
    seeds: dict[str, int] = {}

    def script(request):
        session = request.session.split("/")[0]
        return say(next(left[seeds.setdefault(session, len(seeds))]))

    setup = RolloutSetup(
        env="game",
        environment=environment,
        limits=EpisodeLimits(max_turns=100, max_context=50_000),
        params=SamplingParams(max_tokens=1000),
        renderer=ByteRenderer(),
        sampler=ScriptedSampler(script=script, vocab_size=VOCAB_SIZE, context_length=50_000),
        slots=asyncio.Semaphore(1),
    )
    example = environment.examples("train")[index]
    run = GroupRun(
        setup, example, index=0, size=len(games), run_seed=0, on_sampled=ledger.sampled_tokens, on_dropped=ledger.drop
    )
    group = await run.run()
    assert [t.error for t in group.trajectories] == [None] * len(games)
    assembled = assemble_group(group, RULES, 0)
    ledger.settle_group(0, trained=assembled.num_trained_tokens, dropped=assembled.dropped)
    ledger.check(pending=0)
    return assembled, ledger


def advantages_of(assembled):
    """The advantage of each agent's trained tokens, by trajectory."""
    found = []
    for trajectory in assembled.group.trajectories:
        found.append(
            {
                turn.agent: turn.advantage if turn.advantage is not None else trajectory.advantage
                for turn in trajectory.turns
                if turn.trained
            }
        )
    return found


async def test_in_self_play_both_sides_are_trained_each_with_its_own_reward():
    environment = TextArena(game="TicTacToe-v0", opponent="self")
    assembled, ledger = await group_of(environment, [PLAYER_0_WINS, PLAYER_0_WINS, PLAYER_1_WINS, PLAYER_0_WINS])
    # player 0 earns 1, 1, -1, 1 around 0.5; player 1 the opposite around -0.5
    won, lost = {"player_0": 0.5, "player_1": -0.5}, {"player_0": -1.5, "player_1": 1.5}
    assert advantages_of(assembled) == [won, won, lost, won]
    assert [t.reward for t in assembled.group.trajectories] == [0.0] * 4
    assert len(assembled.samples) == 8  # one for each player of each game
    # each move is three letters and END
    assert (ledger.sampled, ledger.trained, dict(ledger.dropped)) == (21 * 4, 21 * 4, {})
    by_player = Counter()
    for sample in assembled.samples:
        (advantage,) = set(sample.advantages[sample.loss_mask].tolist())
        by_player[advantage] += sample.num_trained_tokens
    assert by_player == {0.5: 36, -0.5: 24, -1.5: 12, 1.5: 12}


async def test_against_an_untrained_policy_only_its_own_seat_is_trained():
    environment = TextArena(game="TicTacToe-v0", opponent="policy", seat=1)
    assembled, ledger = await group_of(environment, [PLAYER_0_WINS, PLAYER_1_WINS])
    assert [t.reward for t in assembled.group.trajectories] == [-1.0, 1.0]
    assert advantages_of(assembled) == [{"main": -1.0}, {"main": 1.0}]
    assert (ledger.sampled, ledger.trained, dict(ledger.dropped)) == (44, 20, {"untrained": 24})
    assert [turn.agent for turn in assembled.group.trajectories[0].turns] == [
        "player_0",
        "main",
        "player_0",
        "main",
        "player_0",
    ]


async def test_a_random_opponent_is_in_no_trajectory():
    environment = TextArena(game="Nim-v0", opponent="random", seat=0)
    said = ["[0 3]", "[1 4]", "[2 5]", "[0 1]", "[1 1]", "[2 1]", "[0 1]"]
    assembled, ledger = await group_of(environment, [said, said])
    assert ledger.trained == ledger.sampled == sum(t.num_sampled_tokens for t in assembled.group.trajectories)
    assert {turn.agent for t in assembled.group.trajectories for turn in t.turns} == {"main"}
    assert {t.reward for t in assembled.group.trajectories} <= {1.0, -1.0}


@pytest.mark.realtime
async def test_an_opponent_behind_an_api_is_in_no_trajectory_and_its_cost_is_counted():
    replies = iter(["[3]", "[4]"] * 2)
    with chat_server(script=lambda body: {"content": next(replies)}) as server:
        environment = TextArena(game="TicTacToe-v0", seat=0, opponent={"model": "big", "base_url": server.url})
        assembled, ledger = await group_of(environment, [["[0]", "[1]", "[2]"]] * 2)
    for trajectory in assembled.group.trajectories:
        assert (trajectory.reward, trajectory.agent_rewards) == (1.0, {})
        assert [turn.agent for turn in trajectory.turns] == ["main"] * 3
        facts = trajectory.info["opponents"]["player_1"]
        assert (facts["model"], facts["usage"]["completion_tokens"]) == ("big", 8)
    assert (ledger.sampled, ledger.trained, dict(ledger.dropped)) == (24, 24, {})
    asked = server.requests[1]["messages"]
    assert [message["role"] for message in asked] == ["user", "assistant", "user"]
    assert asked[0]["content"].startswith("[GAME] You are Player 1 in Tic Tac Toe.")
    assert asked[1]["content"] == "[3]"


@pytest.mark.realtime
async def test_an_opponent_that_does_not_answer_fails_the_game_alone():
    with chat_server(fault=lambda body, tries: Raw(status=400, body="no")) as server:
        environment = TextArena(game="TicTacToe-v0", seat=0, opponent={"model": "big", "base_url": server.url})
        trajectory = await play(environment, PLAYER_0_WINS)
    assert trajectory.error.startswith(f"environment: the opponent big at {server.url} failed: ")
    assert trajectory.num_sampled_tokens == 4


@pytest.mark.slow
async def test_a_frozen_checkpoint_plays_the_other_side_and_is_in_no_trajectory(tmp_path):
    shown = TextArena(game="IteratedPrisonersDilemma-v0").demonstrations(9, 0)
    texts = [chat_text(one.messages, ()) for one in shown]
    build_model(tmp_path / "model", SIZES.model_copy(update={"context_length": 2048}), texts, seed=0)
    opponent = {"frozen": str(tmp_path / "model"), "max_tokens": 4}
    environment = TextArena(
        game="IteratedPrisonersDilemma-v0",
        seat=0,
        opponent=opponent,
        options={"num_rounds": 1, "communication_turns": 1},
    )
    trajectories = [await play(environment, ["[Cooperate]"] * 4, seed=seed) for seed in (1, 1)]
    first, again = trajectories
    assert (first.error, again.error) == (None, None)
    assert {turn.agent for turn in first.turns} == {"main"}
    assert first.num_sampled_tokens == len(say("[Cooperate]")) * len(first.turns)
    assert first.messages == again.messages  # its tokens follow from the seed
    assert "[Player 1]" in "".join(message["content"] for message in first.messages)


async def test_a_game_that_is_cut_off_has_the_reward_for_that():
    lost = await play(TextArena(game="TicTacToe-v0"), PLAYER_0_WINS, max_turns=3)
    assert (lost.stop_reason, lost.agent_rewards) == ("max_turns", {"player_0": -1.0, "player_1": -1.0})
    alone = await play(TextArena(game="TowerOfHanoi-v0", unfinished_reward=0.25), ["[A B]"] * 3, max_turns=1)
    assert (alone.reward, alone.info["ended"]) == (0.25, "cut off")


async def test_an_illegal_move_is_told_to_the_player_and_then_loses():
    trajectory = await play(TextArena(game="TicTacToe-v0", opponent="policy", seat=0), ["[0]", "[3]", "[3]", "[0]"])
    shown = [m["content"] for m in trajectory.messages if m["role"] == "user"]
    assert "Player 0 attempted an invalid move. Reason: cell 3 is already occupied." in shown[-1]
    assert (trajectory.reward, trajectory.info["ended"]) == (-1.0, "cell 0 is already occupied.")


async def test_a_game_that_gives_no_numbers_fails_its_episode(monkeypatch):
    """The package hands the reason over as the reward, and nothing puts it right."""
    monkeypatch.setattr(game_module, "SWAPPED", ())
    trajectory = await play(TextArena(game="Countdown-v0"), ["no"] * 3)
    assert "Countdown-v0 gave the rewards {0: 'Invalid action format." in trajectory.error


# ---- what is refused, and what is listed


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Countdown-v0", "Invalid action format"),
        ("Cryptarithm-v0", "Bad action format"),
        ("Slitherlink-v0", "Bad action format"),
        ("ThreeCardMonte-v0", "Bad action."),
    ],
)
def test_an_invalid_move_earns_a_number_and_is_told_why_where_the_package_mixes_both_up(name: str, reason: str):
    game = Game(package.find_game(name), {}, 1, seed=3)
    for _ in range(20):
        game.observe()
        game.act("no move")
        if game.done:
            break
        assert f"Reason: {reason}" in game.observe()[1]
    rewards = game.rewards()
    assert rewards is not None and 0 <= rewards[0] < 1
    assert game.why().startswith(f"Invalid Move: {reason}")


@pytest.mark.parametrize(
    ("args", "kind", "said"),
    [
        ({"game": "TicTakToe-v0"}, UsageError, "no game 'TicTakToe-v0'; did you mean \"TicTacToe-v0\"?"),
        ({"game": "Debate-v0"}, UsageError, "Debate-v0 needs models on OpenRouter"),
        ({"game": "Klondike-v0"}, UsageError, "the code in the package is not valid Python"),
        ({"game": "UsedCarNegotiation-v0"}, UsageError, "files that are missing from the published package"),
        ({"game": "TicTacToe-v0", "options": {"rows": 4}}, ComponentError, "unexpected keyword argument 'rows'"),
        ({"game": "TicTacToe-v0", "num_players": 3}, ComponentError, "does not start with 3 players"),
        ({"game": "TicTacToe-v0", "seat": 2}, UsageError, 'seat = 2; expected 0 to 1, or "alternate"'),
        ({"game": "TicTacToe-v0", "opponent": "me"}, UsageError, 'opponent = \'me\'; expected "self", "policy"'),
        ({"game": "Stratego-v0", "opponent": "random"}, UsageError, "Stratego-v0 does not support random moves"),
        ({"game": "Nim-v0", "opponent": {"frozen": "no/such/folder"}}, UsageError, "no/such/folder"),
        ({"game": "Nim-v0", "opponent": {"model": "a", "tokens": 3}}, UsageError, 'unknown parameter "tokens"'),
        ({"game": "Nim-v0", "opponent": {"model": "a", "base_url": "here"}}, UsageError, "base_url"),
    ],
)
def test_what_cannot_be_played_is_refused_early(args, kind, said, monkeypatch):
    monkeypatch.delenv("OPENROUTER_API_KEY", raising=False)
    with pytest.raises(kind) as raised:
        create_environment("textarena", args)
    assert said in str(raised.value)


def test_word_lists_that_are_not_here_are_named_and_nothing_is_fetched(monkeypatch):
    import nltk

    monkeypatch.setattr(nltk.data, "path", [])
    monkeypatch.setattr(nltk, "download", lambda *args, **kwargs: pytest.fail("fetched"))
    with pytest.raises(UsageError) as raised:
        TextArena(game="Wordle-v0")
    assert "python -m nltk.downloader words averaged_perceptron_tagger_eng" in str(raised.value)


def test_without_the_package_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(package, "games", lambda: {})
    with pytest.raises(UsageError, match=r"pip install 'verbatim-rl\[environments\]'"):
        TextArena(game="Nim-v0")


def test_the_listing_says_what_games_need(monkeypatch, capsys):
    import nltk

    monkeypatch.setattr(nltk.data, "path", [])
    assert main(["env", "list", "textarena", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert {*ALONE, *AGAINST} <= {name for name, about in listed.items() if about == "random moves"}
    assert listed["Stratego-v0"] == "plays"
    assert "nltk" in listed["Hangman-v0"] and "OPENROUTER_API_KEY" in listed["TwentyQuestions-v0"]


def test_games_without_random_moves_have_no_demonstrations():
    with pytest.raises(NoDemonstrations, match="Stratego-v0"):
        TextArena(game="Stratego-v0").demonstrations(1, 0)


def test_demonstrations_end_and_show_the_format():
    shown = TextArena(game="Nim-v0").demonstrations(20, 0)
    again = TextArena(game="Nim-v0").demonstrations(20, 0)
    assert [d.messages for d in shown] == [d.messages for d in again]
    for demonstration in shown:
        for a, b in zip_longest(demonstration.messages[::2], demonstration.messages[1::2]):
            assert (a["role"], b["role"]) == ("user", "assistant")
    assert len(MOVES) >= 18


CHECKED = ["Blackjack-v0", "FrozenLake-v0-random", "KuhnPoker-v0-short", "ThreePlayerTicTacToe-v0"]
"""Alone and against others, by chance and without, two players and three."""


def findings_of(name: str, capsys) -> list[str]:
    args = {"game": name, "opponent": "random"} if name in AGAINST else {"game": name}
    main(
        [
            "env",
            "check",
            "textarena",
            "--args",
            json.dumps(args),
            "--examples",
            "2",
            "--max-turns",
            "200",
            "--seq-len",
            "20000",
            "--timeout",
            f"{HANGS:g}",
            "--json",
        ]
    )
    return [finding["kind"] for finding in json.loads(capsys.readouterr().out)["findings"]]


@pytest.mark.campaign
@pytest.mark.slow
@pytest.mark.realtime
@pytest.mark.parametrize("name", sized(CHECKED, [*ALONE, *AGAINST]))
def test_env_check_finds_nothing_wrong(name: str, capsys, campaign, nothing_blocks: None):
    row = campaign("games of textarena, checked")
    # A dozen games at random may all be lost: nothing else may be found.
    found = [kind for kind in findings_of(name, capsys) if kind != "score_constant"]
    row.add(wrong=found != [])
    assert found == []


def test_env_check_finds_a_game_that_knows_of_the_games_before(monkeypatch, capsys):
    monkeypatch.setattr("verbatim.inspection.envcheck.check.play_elsewhere", lambda *given: "not here")
    games, new = [], Game.__init__

    def counting(self, found, options, num_players, seed):
        games.append(self)
        new(self, found, options, num_players, seed + len(games))

    monkeypatch.setattr(Game, "__init__", counting)
    assert "shared_state" in findings_of("Blackjack-v0", capsys)
