"""One running game of `textarena`: observations, actions and rewards of its players."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verbatim.core.errors import ComponentError, EnvironmentFault
from verbatim.core.texts import error_text
from verbatim.environments.global_random import OwnRandom
from verbatim.rollouts.games.package import GameSpec, make_game

MOST_PLAYERS = 15
"""Maximum number of players in any game of the package."""
YOUR_TURN = "It is your turn."
"""What a player observes if the game has nothing new to show."""


class Game:
    """A game whose random state depends on its seed only. The package draws from the global random generators, so
    their states are replaced by the game's own state during each call (`OwnRandom`).

    Args:
        spec: The game.
        options: Arguments of the game's class in the package.
        num_players: Number of players.
        seed: Seed of all randomness in the game.

    Raises:
        ComponentError: the package refuses the options or the number of players.
    """

    def __init__(self, spec: GameSpec, options: Mapping[str, Any], num_players: int, seed: int) -> None:
        self._random = OwnRandom(seed)
        self.spec, self.num_players, self.done = spec, num_players, False
        with self._random.lent():
            # Without wrappers, because they put the whole game into each observation; here each player has a
            # conversation.
            self.env, self._changes = make_game(spec, options)
            try:
                self.env.reset(num_players=num_players, seed=seed)
            except Exception as error:  # each game rejects arguments with exceptions of its own
                raise ComponentError(
                    f"textarena: {spec.id} does not start with {num_players} players: {error_text(error)}"
                ) from error
        if spec.kind in SWAPPED:
            _swap_back(self.state)

    @property
    def state(self) -> Any:
        """The state object of `textarena` for this game."""
        return self.env.state

    def observe(self) -> tuple[int, str]:
        """Return (player, text): the player to act, and everything that the game has shown to the player since the
        player's last action. The player's own actions are left out, because they are already in the player's
        conversation."""
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
        """Perform the current player's action. Raises EnvironmentFault if the game raises an exception."""
        for change in self._changes:
            text = change(text)
        with self._random.lent():
            try:
                self.done, _ = self.env.step(action=text)
            except Exception as error:  # a game's parser may raise anything on a model's text
                raise EnvironmentFault(
                    f"textarena: {self.spec.id} raised {error_text(error)} on the action {text[:200]!r}"
                ) from error

    def rewards(self) -> dict[int, float] | None:
        """Return the package's reward for each player, or None if the game has not ended. Raises EnvironmentFault if a
        reward is not a number."""
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
        """Return the reason that the package gives for the end of the game, or ""."""
        return next((str(info["reason"]) for info in self.state.game_info.values() if info.get("reason")), "")

    def _name(self, sender: int) -> str:
        import textarena

        return "GAME" if sender == textarena.GAME_ID else self.state.role_mapping.get(sender, f"Player {sender}")


SWAPPED = ("Countdown", "Cryptarithm", "Slitherlink", "ThreeCardMonte")
"""Games of textarena 0.7 that have a bug: for an invalid move, they pass the arguments reward and reason in the wrong
order."""


def _swap_back(state: Any) -> None:
    """Work around the bug of the games in `SWAPPED`: make the state's method accept reward and reason in both
    orders."""
    set_invalid_move = state.set_invalid_move

    def in_order(reason: Any, reward: Any) -> None:
        if isinstance(reward, str):
            reason, reward = reward, reason
        set_invalid_move(reason, reward)

    state.set_invalid_move = in_order


FEWEST = {"MarketEntryGame": 2, "PublicGoodsGame": 2, "QuantumTicTacToe": 2, "SpiteAndMalice": 2}
"""Minimum number of players by game, for the games that start with fewer players but then cannot be played."""


def fewest_players(spec: GameSpec, options: Mapping[str, Any]) -> int:
    """Find the smallest number of players with which the game starts, by trying to start it.

    Raises:
        ComponentError: the game does not start, whatever the number of players from 1 to 15; the message is the game's
            last error.
    """
    for num_players in range(FEWEST.get(spec.kind, 1), MOST_PLAYERS + 1):
        try:
            Game(spec, options, num_players, seed=0)
        except ComponentError as error:
            refused = error
        else:
            return num_players
    raise refused
