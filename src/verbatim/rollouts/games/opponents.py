"""Opponents that play a game against the policy: random moves, a frozen checkpoint, or a model behind an API."""

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
"""Maximum number of moves of one opponent per game. In effect there is no limit: every game ends after far fewer
moves."""
FORMS = (
    '"self", "policy", "random", { frozen = "path/to/weights" } or { model = "name", base_url = '
    '"http://localhost:8000/v1" }'
)
"""The valid values of `opponent`, for messages."""


@dataclass(frozen=True, kw_only=True)
class PolicyPlays:
    """The setting in which the policy plays all players."""

    trained: bool
    """True to train the turns of all players; False to train only the turns of the player in the policy's seat."""


@dataclass(frozen=True, kw_only=True)
class RandomPlays:
    """An opponent that makes random legal moves."""

    def make(self, seed: int, player: int) -> Opponent:
        """Create an opponent with its own random generator, derived from `seed` and `player`."""
        return _RandomOpponent(random.Random(derive_seed(seed, "opponent", player)))


@dataclass(frozen=True, kw_only=True)
class FrozenPlays:
    """An opponent that is a checkpoint on its own engine in this process. It is not trained, and its tokens are in no
    trajectory."""

    frozen: str
    """A model folder in Hugging Face format, an adapter folder, or a hub id."""
    temperature: float = 1.0
    max_tokens: int = 256
    """Maximum number of tokens per action."""
    seq_len: int = 2048
    """Maximum number of tokens in the opponent's context during a game."""
    device: str = "auto"
    dtype: Literal["float32", "bfloat16"] = "float32"

    def make(self, seed: int, player: int) -> Opponent:
        """Create an opponent on the checkpoint's engine, which all games in this process share."""
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
    """An opponent that is a model behind a chat endpoint. Its tokens are in no trajectory; the token counts that the
    server reports are in `info`."""

    model: str
    """The model's name on the server."""
    base_url: str = "https://api.openai.com/v1"
    api_key_env: str | None = None
    """Environment variable with the API key. If None, no key is sent, except that OpenAI's own server gets
    OPENAI_API_KEY."""
    temperature: float = 1.0
    max_tokens: int = 256
    """Maximum number of tokens per action."""
    max_retries: int = 5
    request_timeout: float = 120.0
    """Timeout of one attempt of a request, in seconds."""

    def __post_init__(self) -> None:
        self.api()

    def api(self) -> OpenAI:
        """Return the settings of the connection. Raises UsageError if they are invalid."""
        return OpenAI(
            model=self.model,
            base_url=self.base_url,
            api_key_env=self.api_key_env,
            max_retries=self.max_retries,
            request_timeout=self.request_timeout,
        )

    def make(self, seed: int, player: int) -> Opponent:
        """Create an opponent with its own connection, which is opened at the first action."""
        return _ApiPlayer(self, derive_seed(seed, "opponent", player))


Plays = PolicyPlays | RandomPlays | FrozenPlays | ApiPlays
"""The setting that says who plays against the policy."""


def read_opponent(given: str | Mapping[str, Any], spec: GameSpec) -> Plays:
    """Read the setting `opponent` of a game.

    Example: `read_opponent("self", spec)` is `PolicyPlays(trained=True)`.

    Raises:
        UsageError: the value is invalid, or it is "random" and the game does not support random moves.
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
            f"textarena: {spec.id} does not support random moves, only {', '.join(MOVES)} do; "
            f"expected another opponent: {FORMS}"
        )
    return RandomPlays()


class _RandomOpponent:
    info: Mapping[str, Any] = {}

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    async def say(self, talk: Sequence[Message], game: Game) -> str:
        return random_move(game, self._rng)

    async def close(self) -> None:
        """Do nothing, since there is nothing to release."""


class _Speaker:
    """An opponent that acts through an episode loop. The turns that the loop records are discarded."""

    def __init__(self, loop: EpisodeLoop | None, open_things: contextlib.AsyncExitStack, name: str) -> None:
        self._loop, self._open, self._name = loop, open_things, name

    @property
    def info(self) -> Mapping[str, Any]:
        """The `info` of the loop, such as the server's token counts."""
        return self._loop.info if self._loop is not None else {}

    async def say(self, talk: Sequence[Message], game: Game) -> str:
        """Return the opponent's next action. Raises EnvironmentFault if the opponent's loop can take no more turns."""
        assert self._loop is not None
        try:
            message = await self._loop.sample(talk)
        except EpisodeOver as over:
            if over.message is None:
                raise EnvironmentFault(
                    f"{self._name} cannot continue: {over.stop_reason}; set a larger seq_len in the opponent's "
                    "table, or fewer turns for the game"
                ) from over
            # Only this action was cut off, and the game decides what a truncated action is worth. Reset the loop,
            # because it would otherwise refuse the opponent's next action.
            self._loop.stop_reason = None
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
                recorder=Recorder(2**31 - 1),  # any id: the server's vocabulary is unknown, and the record is discarded
                params=SamplingParams(temperature=plays.temperature, max_tokens=plays.max_tokens),
                limits=EpisodeLimits(max_turns=MOST_MOVES),
                seed_of=lambda number: None,
            )
        return await super().say(talk, game)


Opponent: TypeAlias = _RandomOpponent | _Speaker
"""An opponent of one player in one game."""

_LOADING = threading.Lock()
"""Held while a checkpoint is loaded. Without it, each of several concurrent first calls would load the checkpoint,
because `functools.cache` does not prevent this."""


def _engine(frozen: str, seq_len: int, device: str, dtype: Literal["float32", "bfloat16"]) -> Any:
    """Return the engine and the renderer of a checkpoint, which is loaded once per process."""
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
