"""Speaks for the players of a game that are not the policy: at random, a frozen checkpoint, a model behind an API."""

from __future__ import annotations

import contextlib
import functools
import random
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from verbatim.config.parameters import check_parameters
from verbatim.core.episode_limits import EpisodeLimits
from verbatim.core.errors import EnvironmentFault, RolloutError, UsageError
from verbatim.core.sampling import SamplingParams
from verbatim.core.types import Message
from verbatim.inference.chat.client import OpenAI
from verbatim.rollouts.agent_loop import AgentLoop
from verbatim.rollouts.chat_loop import ChatLoop
from verbatim.rollouts.games.game import Game
from verbatim.rollouts.games.package import GameSpec
from verbatim.rollouts.games.random_moves import MOVES, random_move
from verbatim.rollouts.loop import EpisodeLoop, EpisodeOver
from verbatim.rollouts.recorder import Recorder
from verbatim.rollouts.seeds import derive_seed

MOST_MOVES = 100_000
"""Moves of one opponent in one game; the game itself ends long before."""
FORMS = (
    '"self", "policy", "random", { frozen = "path/to/weights" } or { model = "name", base_url = '
    '"http://localhost:8000/v1" }'
)
"""What `opponent` may be."""


@dataclass(frozen=True, kw_only=True)
class PolicyPlays:
    """The policy speaks for every player."""

    trained: bool
    """Whether every player is trained, or one of them."""


@dataclass(frozen=True, kw_only=True)
class RandomPlays:
    """Legal moves are drawn at random."""

    def make(self, seed: int, player: int) -> Opponent:
        """A player with random numbers of its own."""
        return _RandomOpponent(random.Random(derive_seed(seed, "opponent", player)))


@dataclass(frozen=True, kw_only=True)
class FrozenPlays:
    """A checkpoint that stays as it is, on an engine of its own in this process. Its tokens are in no trajectory."""

    frozen: str
    """A folder in Hugging Face format, an adapter's, or a hub id."""
    temperature: float = 1.0
    max_tokens: int = 256
    """Most tokens of one action."""
    seq_len: int = 2048
    """Most tokens of its side of a game."""
    device: str = "auto"
    dtype: Literal["float32", "bfloat16"] = "float32"

    def make(self, seed: int, player: int) -> Opponent:
        """A player on the engine that all games of this process share."""
        sampler, renderer = _engine(self.frozen, self.seq_len, self.device, self.dtype)
        loop = AgentLoop(
            sampler=sampler,
            renderer=renderer,
            recorder=Recorder(sampler.vocab_size),
            params=SamplingParams(temperature=self.temperature, max_tokens=self.max_tokens),
            limits=EpisodeLimits(max_turns=MOST_MOVES, max_context=self.seq_len),
            seed=derive_seed(seed, "opponent", player),
        )
        return _Speaker(loop, contextlib.AsyncExitStack(), f"the frozen checkpoint {self.frozen}")


@dataclass(frozen=True, kw_only=True)
class ApiPlays:
    """A model behind a chat endpoint. Its tokens are in no trajectory; what the server counted is in `info`."""

    model: str
    """Its name on the server."""
    base_url: str = "https://api.openai.com/v1"
    api_key_env: str | None = None
    """The environment variable that holds the key; OPENAI_API_KEY for OpenAI's own server only."""
    temperature: float = 1.0
    max_tokens: int = 256
    """Most tokens of one action."""
    max_retries: int = 5
    request_timeout: float = 120.0
    """Seconds for one try."""

    def __post_init__(self) -> None:
        self.api()

    def api(self) -> OpenAI:
        """The connection's settings; a UsageError if there can be none."""
        return OpenAI(
            model=self.model,
            base_url=self.base_url,
            api_key_env=self.api_key_env,
            max_retries=self.max_retries,
            request_timeout=self.request_timeout,
        )

    def make(self, seed: int, player: int) -> Opponent:
        """A player with a connection of its own, opened with its first action."""
        return _ApiPlayer(self, derive_seed(seed, "opponent", player))


Plays = PolicyPlays | RandomPlays | FrozenPlays | ApiPlays
"""Who plays the other side."""


def read_opponent(given: str | Mapping[str, Any], spec: GameSpec) -> Plays:
    """Who plays the other side, from the setting `opponent`.

    Example: `read_opponent("self", spec)` is `PolicyPlays(trained=True)`.

    Raises:
        UsageError: no such opponent, or a game in which no moves can be drawn.
    """
    if isinstance(given, Mapping):
        kind: Any = FrozenPlays if "frozen" in given else ApiPlays
        values, wrong = check_parameters(kind, given, num_inputs=0, label="opponent")
        if wrong:
            raise UsageError("textarena: opponent: " + "; ".join(f"{key}: {why}" for key, why in wrong.items()))
        plays: Plays = kind(**values)
        if isinstance(plays, FrozenPlays):
            from verbatim.models.source import find_source

            find_source(plays.frozen)
        return plays
    if given in ("self", "policy"):
        return PolicyPlays(trained=given == "self")
    if given != "random":
        raise UsageError(f"textarena: opponent = {given!r}; expected {FORMS}")
    if spec.kind not in MOVES:
        raise UsageError(
            f"textarena: moves of {spec.id} cannot be drawn at random, only those of "
            f"{', '.join(MOVES)}; expected another opponent: {FORMS}"
        )
    return RandomPlays()


class _RandomOpponent:
    info: Mapping[str, Any] = {}

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    async def say(self, talk: Sequence[Message], game: Game) -> str:
        return random_move(game, self._rng)

    async def close(self) -> None:
        """It holds nothing."""


class _Speaker:
    """Speaks through a loop whose record is thrown away."""

    def __init__(self, loop: EpisodeLoop | None, open_things: contextlib.AsyncExitStack, name: str) -> None:
        self._loop, self._open, self._name = loop, open_things, name

    @property
    def info(self) -> Mapping[str, Any]:
        """What it did and cost, for the trajectory's `info`."""
        return self._loop.info if self._loop is not None else {}

    async def say(self, talk: Sequence[Message], game: Game) -> str:
        """The player's next action; an EnvironmentFault where no action is left."""
        assert self._loop is not None
        try:
            message = await self._loop.sample(talk)
        except EpisodeOver as over:
            if over.message is None:
                raise EnvironmentFault(
                    f"{self._name} cannot go on: {over.stop_reason}; give its table a larger "
                    "seq_len, or the game fewer turns"
                ) from over
            self._loop.stop_reason = None  # one action was cut off, which is the opponent's own matter
            message = over.message
        except RolloutError as fault:
            raise EnvironmentFault(f"{self._name} failed: {fault}") from fault
        return str(message.get("content") or "")

    async def close(self) -> None:
        if self._loop is not None:
            await self._loop.end()
        await self._open.aclose()


class _ApiPlayer(_Speaker):
    def __init__(self, plays: ApiPlays, seed: int) -> None:
        super().__init__(None, contextlib.AsyncExitStack(), f"the opponent {plays.model} at {plays.base_url}")
        self._plays, self._seed = plays, seed

    async def say(self, talk: Sequence[Message], game: Game) -> str:
        if self._loop is None:
            plays = self._plays
            connection = await self._open.enter_async_context(plays.api().connect())
            self._loop = ChatLoop(
                connection=connection,
                recorder=Recorder(2**31 - 1),
                params=SamplingParams(temperature=plays.temperature, max_tokens=plays.max_tokens),
                limits=EpisodeLimits(max_turns=MOST_MOVES),
                seed_of=lambda number: None,
            )
        return await super().say(talk, game)


Opponent: TypeAlias = _RandomOpponent | _Speaker
"""Speaks for one player of one game."""

_LOADING = threading.Lock()


def _engine(frozen: str, seq_len: int, device: str, dtype: Literal["float32", "bfloat16"]) -> Any:
    """The engine and renderer of a checkpoint, loaded once for this process."""
    with _LOADING:
        return _load(frozen, seq_len, device, dtype)


@functools.cache
def _load(frozen: str, seq_len: int, device: str, dtype: Literal["float32", "bfloat16"]) -> Any:
    from verbatim.inference.embedded.engine import TorchSampler
    from verbatim.inference.embedded.settings import TorchSettings
    from verbatim.models.loading import load_tokenizer
    from verbatim.models.renderers import create_renderer

    settings = TorchSettings(device=device, dtype=dtype)
    sampler = TorchSampler(frozen, config=settings, context_length=seq_len, num_threads=1)
    return sampler, create_renderer("auto", load_tokenizer(frozen))
