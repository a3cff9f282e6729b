"""Holds one game of `textarena` under way: what players are shown, what they do, what they earned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verbatim.core.errors import ComponentError, EnvironmentFault
from verbatim.core.texts import error_text
from verbatim.environments.global_random import OwnRandom
from verbatim.rollouts.games.package import GameSpec, make_game

MOST_PLAYERS = 15
"""The package's games have at most so many."""
YOUR_TURN = "It is your turn."
"""What a player is shown where the game has nothing to show."""


class Game:
    """A game and its random numbers, which are drawn from its seed alone.

    Args:
        spec: Which game.
        options: Arguments of the package's class.
        num_players: How many play.
        seed: Decides everything that is random in it.

    Raises:
        ComponentError: the package refuses the options or the number of players.
    """

    def __init__(self, spec: GameSpec, options: Mapping[str, Any], num_players: int, seed: int) -> None:
        self._random = OwnRandom(seed)
        self.spec, self.num_players, self.done = spec, num_players, False
        with self._random.lent():
            self.env, self._changes = make_game(spec, options)  # the package's own game, without wrappers
            try:
                self.env.reset(num_players=num_players, seed=seed)
            except Exception as error:  # games check their arguments in ways of their own
                raise ComponentError(
                    f"textarena: {spec.id} does not begin with {num_players} players: {error_text(error)}"
                ) from error
        if spec.kind in SWAPPED:
            _swap_back(self.state)

    @property
    def state(self) -> Any:
        """The package's own state."""
        return self.env.state

    def observe(self) -> tuple[int, str]:
        """Who is to act, and everything that this player has been shown since it acted last. What the player itself has
        said is left out: it stands in the conversation."""
        import textarena

        with self._random.lent():
            player, shown = self.env.get_observation()
        lines = [
            f"[{self._name(sender)}] {text}"
            for sender, text, kind in shown
            if not (sender == player and kind is textarena.ObservationType.PLAYER_ACTION)
        ]
        return player, "\n".join(lines) or YOUR_TURN

    def act(self, text: str) -> None:
        """The player to act says this; an EnvironmentFault if the game raises."""
        for change in self._changes:
            text = change(text)
        with self._random.lent():
            try:
                self.done, _ = self.env.step(action=text)
            except Exception as error:  # a game reads in its own way what a model wrote
                raise EnvironmentFault(
                    f"textarena: {self.spec.id} raised {error_text(error)} on the action {text[:200]!r}"
                ) from error

    def rewards(self) -> dict[int, float] | None:
        """What each player earned, as the package says; None where the game did not end. An EnvironmentFault if it says
        something else than numbers."""
        if not self.done:
            return None
        with self._random.lent():
            rewards, _ = self.env.close()
        try:
            return {int(player): float(reward) for player, reward in sorted(rewards.items())}
        except (TypeError, ValueError, AttributeError) as error:
            raise EnvironmentFault(
                f"textarena: {self.spec.id} gave the rewards {rewards!r:.200}; expected a number for each player"
            ) from error

    def why(self) -> str:
        """Why it ended, in the package's words."""
        return next((str(info["reason"]) for info in self.state.game_info.values() if info.get("reason")), "")

    def _name(self, sender: int) -> str:
        import textarena

        return "GAME" if sender == textarena.GAME_ID else self.state.role_mapping.get(sender, f"Player {sender}")


SWAPPED = ("Countdown", "Cryptarithm", "Slitherlink", "ThreeCardMonte")
"""Games of textarena 0.7 that say an invalid move's reward where its reason belongs, and the reason as the reward."""


def _swap_back(state: Any) -> None:
    """Let the state take both in either order, so that the game earns what it means and the player reads why."""
    set_invalid_move = state.set_invalid_move

    def in_order(reason: Any, reward: Any) -> None:
        if isinstance(reward, str):
            reason, reward = reward, reason
        set_invalid_move(reason, reward)

    state.set_invalid_move = in_order


FEWEST = {"MarketEntryGame": 2, "PublicGoodsGame": 2, "QuantumTicTacToe": 2, "SpiteAndMalice": 2}
"""Games that begin with fewer players than they can be played by."""


def fewest_players(spec: GameSpec, options: Mapping[str, Any]) -> int:
    """The smallest number of players that the game begins with.

    Raises:
        ComponentError: it begins with none of 1 to 15 players; says what the game said last.
    """
    for num_players in range(FEWEST.get(spec.kind, 1), MOST_PLAYERS + 1):
        try:
            Game(spec, options, num_players, seed=0)
        except ComponentError as error:
            refused = error
        else:
            return num_players
    raise refused
