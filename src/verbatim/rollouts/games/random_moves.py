"""Makes random legal moves, for the weakest opponent and for demonstrations that show a game's format."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

from verbatim.rollouts.games.game import Game

Moves = Callable[[Game], list[str]]
"""Function that returns the legal moves of the player to act, in the game's format."""


def random_move(game: Game, rng: random.Random) -> str:
    """Return a legal move of the player to act, sampled uniformly."""
    return rng.choice(MOVES[game.spec.kind](game))


def _free_cells(game: Game) -> list[str]:
    board = game.state.game_state["board"]
    cells = [cell for row in board for cell in row]
    return [f"[{number}]" for number, cell in enumerate(cells) if cell == ""]


def _columns(game: Game) -> list[str]:
    return [f"[col {number}]" for number, top in enumerate(game.state.game_state["board"][0]) if top == "."]


def _from_piles(game: Game) -> list[str]:
    piles = game.state.game_state["piles"]
    return [f"[{pile} {count}]" for pile, size in enumerate(piles) for count in range(1, size + 1)]


def _in_kuhn_poker(game: Game) -> list[str]:
    return [f"[{action}]" for action in game.state.game_state["current_legal_action_tree"]]


def _in_liars_dice(game: Game) -> list[str]:
    state = game.state.game_state
    quantity, face = state["current_bid"]["quantity"], state["current_bid"]["face_value"]
    if quantity == 0:
        return [f"[Bid: 1, {number}]" for number in range(1, 7)]
    higher = [
        f"[Bid: {quantity + more}, {number}]" for more in (0, 1) for number in range(face, 7) if more or number > face
    ]
    return ["[Call]", *(higher if quantity < sum(state["remaining_dice"].values()) else [])]


def _disks(game: Game) -> list[str]:
    towers = game.state.game_state["towers"]
    return [
        f"[{a} {b}]"
        for a in towers
        for b in towers
        if towers[a] and a != b and (not towers[b] or towers[a][-1] < towers[b][-1])
    ]


def _in_prisoners_dilemma(game: Game) -> list[str]:
    talks = game.state.game_state["phase"] == "conversation"
    return ["Hello."] if talks else ["[Cooperate]", "[Defect]"]


def _numbers(game: Game) -> list[str]:
    env = game.env
    return [f"[{number}]" for number in range(env.min_number, env.max_number + 1)]


def _lights(game: Game) -> list[str]:
    return [f"[{row} {column}]" for row in range(game.env.size) for column in range(game.env.size)]


def _buttons(game: Game) -> list[str]:
    return [f"[{button}]" for button in game.env.buttons]


def _one_of(*moves: str) -> Moves:
    return lambda game: list(moves)


MOVES: Mapping[str, Moves] = {
    "Bandit": _buttons,
    "Blackjack": _one_of("[hit]", "[stand]"),
    "ConnectFour": _columns,
    "FrozenLake": _one_of("[up]", "[down]", "[left]", "[right]"),
    "Game2048": _one_of("[up]", "[down]", "[left]", "[right]"),
    "GuessTheNumber": _numbers,
    "IteratedMatchingPennies": _one_of("[heads]", "[tails]"),
    "IteratedPrisonersDilemma": _in_prisoners_dilemma,
    "IteratedRockPaperScissors": _one_of("[rock]", "[paper]", "[scissors]"),
    "KuhnPoker": _in_kuhn_poker,
    "LiarsDice": _in_liars_dice,
    "LightsOut": _lights,
    "Nim": _from_piles,
    "PigDice": _one_of("[roll]", "[hold]"),
    "SimpleTak": _free_cells,
    "ThreePlayerTicTacToe": _free_cells,
    "TicTacToe": _free_cells,
    "TowerOfHanoi": _disks,
}
"""The games that support random moves, keyed by their folder in the package."""
