"""Adapts the games of the package `textarena`: uses its rules and rewards with our sampler and recorder."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from verbatim.core.errors import NoDemonstrations, UsageError
from verbatim.core.types import Example, Message, Trajectory
from verbatim.environments.environment import Agent, AgentScores, Demonstration, Episode, Score, check_split
from verbatim.rollouts.games.game import Game, fewest_players
from verbatim.rollouts.games.opponents import Opponent, Plays, PolicyPlays, read_opponent
from verbatim.rollouts.games.package import GameSpec, find_game, games
from verbatim.rollouts.games.random_moves import MOVES, random_move


@dataclass(frozen=True, kw_only=True)
class TextArena:
    """A game of textarena (0.7) for one or several players. The package decides each player's reward.

    The policy plays one player ("main") or, with `opponent = "self"`, all players ("player_0", "player_1", ...). If the
    policy plays all players, each player is trained with its own reward, which is compared with the rewards of the same
    player in the group's other games.

    Raises:
        UsageError: the package is not installed, the game does not exist or needs something that is missing (a word
            list, a key, a newer Python), or the opponent or the seat is invalid.
        ComponentError: the package refuses the options or the number of players.
    """

    game: str
    """The game's id in the package, such as "TicTacToe-v0". `verbatim env list textarena` lists the ids."""
    opponent: str | Mapping[str, Any] = "self"
    """The opponent: "self" (the policy plays all players and is trained for all of them), "policy" (the policy plays
    all players and is trained only for its own seat), "random", `{ frozen = "path" }` or
    `{ model = "name", base_url = "url" }`. Ignored in games for one player."""
    seat: int | Literal["alternate"] = "alternate"
    """Index of the policy's player, counting from 0. With "alternate" the index changes from example to example."""
    num_players: int | None = None
    """Number of players; None for the smallest number that the game allows."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the game's class in the package, such as `{ max_rounds = 3 }`."""
    seed: int = 0
    """The first seed: example i is the game that the package creates with the seed `seed + i`."""
    num_train: int = 500
    """Number of training games."""
    num_eval: int = 100
    """Number of evaluation games. Their seeds follow the seeds of the training games."""
    system_prompt: str = ""
    """System prompt of every player that a model plays; "" for none."""
    unfinished_reward: float = -1.0
    """Reward of each trained player if the run's limits cut the game off, because the package then gives no reward."""
    _spec: GameSpec = field(init=False, repr=False, compare=False)
    _plays: Plays = field(init=False, repr=False, compare=False)
    _num_players: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        spec = find_game(self.game)
        if self.num_train < 1 or self.num_eval < 1:
            raise UsageError(
                f"textarena: num_train = {self.num_train}, num_eval = {self.num_eval}; expected at least 1 of each"
            )
        count = self.num_players if self.num_players is not None else fewest_players(spec, self.options)
        Game(spec, self.options, count, self.seed)
        if self.seat != "alternate" and not 0 <= self.seat < count:
            raise UsageError(f'textarena: seat = {self.seat}; expected 0 to {count - 1}, or "alternate"')
        for name, value in ("_spec", spec), ("_plays", read_opponent(self.opponent, spec)), ("_num_players", count):
            object.__setattr__(self, name, value)

    @staticmethod
    def listing() -> list[tuple[str, str]]:
        """Return (name, description) of every game. The description says what the game needs in addition to the
        package. Empty if the package is not installed."""
        return [(name, _about(spec)) for name, spec in games().items()]

    def examples(self, split: str) -> Sequence[Example]:
        """Return the games of a split as examples. Training and evaluation games have different seeds."""
        check_split("textarena", split)
        size = self.num_train + self.num_eval
        indices = range(self.num_train) if split == "train" else range(self.num_train, size)
        return [Example(id=f"{self._spec.id}-{index}", payload=self._payload(index)) for index in indices]

    def _payload(self, index: int) -> dict[str, int]:
        seat = index % self._num_players if self.seat == "alternate" else int(self.seat)
        return {"seed": self.seed + index, "seat": seat}

    async def start(self, example: Example, seed: int) -> Play:
        """Start the example's game. The episode's seed determines the opponents' moves."""
        game = Game(self._spec, self.options, self._num_players, int(example.payload["seed"]))
        return Play(self, game, seat=int(example.payload["seat"]), plays=self._plays, seed=seed)

    def demonstrations(self, count: int, seed: int) -> list[Demonstration]:
        """Return games of players that move at random. They teach the format of moves, not good play.

        Raises:
            NoDemonstrations: the game does not support random moves.
        """
        if self._spec.kind not in MOVES:
            raise NoDemonstrations(
                f"textarena: {self._spec.id} does not support random moves, so there is nothing to demonstrate; "
                "for a warm start set warm_start.data"
            )
        rng = random.Random(seed)
        return [self._demonstration(rng) for _ in range(count)]

    def _demonstration(self, rng: random.Random) -> Demonstration:
        payload = self._payload(rng.randrange(self.num_train))
        game = Game(self._spec, self.options, self._num_players, payload["seed"])
        talks: dict[int, list[Message]] = {}
        while not game.done:
            player, shown = game.observe()
            talk = talks.setdefault(player, self.opening())
            talk.append({"role": "user", "content": shown})
            talk.append({"role": "assistant", "content": random_move(game, rng)})
            game.act(talk[-1]["content"])
        return Demonstration(messages=talks.get(payload["seat"]) or next(iter(talks.values())))

    def opening(self) -> list[Message]:
        """Return the messages with which a player's conversation begins: the system prompt, or no message if the system
        prompt is empty."""
        return [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []


class Play(Episode):
    """An episode that is one game, from the first action to the rewards. It has its own control flow, because several
    players take turns."""

    def __init__(self, rules: TextArena, game: Game, *, seat: int, plays: Plays, seed: int) -> None:
        self._rules, self._game, self._seat, self._plays, self._seed = rules, game, seat, plays, seed
        self._both = isinstance(plays, PolicyPlays) and plays.trained and game.num_players > 1
        self._opponents: dict[int, Opponent] = {}
        self.messages = rules.opening()

    async def run(self, agent: Agent) -> None:
        """Let the players act in turn until the game has ended."""
        talks: dict[int, list[Message]] = {}
        self._note()
        while not self._game.done:
            player, shown = self._game.observe()
            talk = talks.setdefault(player, self._rules.opening())
            talk.append({"role": "user", "content": shown})
            talk.append(await self._said(agent, player, talk))
            self._game.act(talk[-1]["content"])
            self._note()

    async def _said(self, agent: Agent, player: int, talk: Sequence[Message]) -> Message:
        if self._both:
            return await agent.sample(talk, agent=self._name(player))
        if player == self._seat:
            return await agent.sample(talk)
        if isinstance(self._plays, PolicyPlays):
            return await agent.sample(talk, agent=self._name(player), trained=False)
        if player not in self._opponents:
            # On a thread, because the first game with a frozen checkpoint loads the checkpoint here.
            self._opponents[player] = await asyncio.to_thread(self._plays.make, self._seed, player)
        return {"role": "assistant", "content": await self._opponents[player].say(talk, self._game)}

    def random_move(self, rng: random.Random) -> str | None:
        """Return a random legal move of the player to act, or None if the game does not support random moves."""
        return random_move(self._game, rng) if self._game.spec.kind in MOVES else None

    async def score(self, trajectory: Trajectory) -> Score:
        """Return the rewards of the trained players, as the package gives them."""
        rewards = self._game.rewards()
        if rewards is None:
            rewards = dict.fromkeys(range(self._game.num_players), self._rules.unfinished_reward)
        if self._both:
            return AgentScores(agents={self._name(player): reward for player, reward in rewards.items()})
        return rewards[self._seat]

    async def close(self) -> None:
        """Close the connections of opponents."""
        for opponent in self._opponents.values():
            await opponent.close()

    @staticmethod
    def _name(player: int) -> str:
        return f"player_{player}"

    def _note(self) -> None:
        """Update `info`. This is done in every turn, because a limit may end the episode at any turn."""
        game = self._game
        facts: dict[str, Any] = {"game": game.spec.id, "ended": game.why() if game.done else "cut off"}
        if game.num_players > 1 and not self._both:
            facts["seat"] = self._seat
        told = {self._name(player): dict(opponent.info) for player, opponent in self._opponents.items()}
        self.info = {**facts, **({"opponents": told} if any(told.values()) else {})}


def _about(spec: GameSpec) -> str:
    needs = spec.needs
    if needs is not None:
        return f"cannot be played here: it needs {needs}"
    return "random moves" if spec.kind in MOVES else "plays"
