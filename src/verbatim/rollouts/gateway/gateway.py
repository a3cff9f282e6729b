"""The gateway as a Python API: each episode gets a base URL and a key, and becomes a trajectory when it ends."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from verbatim.core.episode_limits import EpisodeLimits
from verbatim.core.errors import UsageError
from verbatim.core.sampling import SamplingParams
from verbatim.core.types import Example, RolloutIdentity, StopReason, Trajectory
from verbatim.inference.chat.protocol import Options
from verbatim.inference.sampler import Sampler
from verbatim.models.renderers.renderer import Renderer
from verbatim.rollouts.agent_loop import AgentLoop
from verbatim.rollouts.episode_stats import NO_TURNS
from verbatim.rollouts.gateway.service import Service, ServiceLimits
from verbatim.rollouts.gateway.session import INFO, Session
from verbatim.rollouts.gateway.session_settings import SessionSettings
from verbatim.rollouts.loop import TOOLS_OFFERED
from verbatim.rollouts.recorder import Recorder
from verbatim.rollouts.rewards import read_agent_scores
from verbatim.rollouts.seeds import derive_seed


class Gateway:
    """Serves a sampler to agents over chat protocols, and records their turns.

    Example:
        >>> async with Gateway(sampler, renderer) as gateway:
        ...     episode = gateway.episode({"id": "emma", "answer": "Austen"})
        ...     client = AsyncOpenAI(base_url=episode.base_url, api_key=episode.api_key)
        ...     answer = await client.chat.completions.create(
        ...         model="policy", messages=[{"role": "user", "content": "Who wrote Emma?"}]
        ...     )
        ...     trajectory = await episode.finish(reward=float("Austen" in answer.choices[0].message.content))

    Args:
        sampler: A token-in, token-out sampler. The gateway does not close it.
        renderer: The renderer of the sampler's model.
        params: Sampling parameters of all turns; the parameters in requests are then ignored. If None, each request
            sets its own parameters, including the seed.
        limits: Limits of each episode. By default 1000 turns and the sampler's whole context.
        host: Address to listen on. By default the loopback address.
        port: Port to listen on; 0 picks a free port.
        seed: Seed of the sampling. Each episode derives its own seed from it.
        restores_reasoning: True to treat an answer that a client sends back without its reasoning as the original
            answer; None means True if the renderer keeps earlier answers exactly as they were sampled, else False.
        train_undelivered: True to train also the answers that no client received in full.
        patience: Seconds for which generation continues after a client has disconnected, since the client may return.
        options: Request fields that are accepted but have no effect.
        service_limits: Limits on connections and request bodies.
    """

    def __init__(
        self,
        sampler: Sampler,
        renderer: Renderer,
        *,
        params: SamplingParams | None = None,
        limits: EpisodeLimits | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        seed: int = 0,
        restores_reasoning: bool | None = None,
        train_undelivered: bool = False,
        patience: float = 2.0,
        options: Options | None = None,
        service_limits: ServiceLimits | None = None,
    ) -> None:
        self._sampler, self._renderer, self._seed = sampler, renderer, seed
        self._params = params or SamplingParams(max_tokens=sampler.context_length)
        self._limits = limits or EpisodeLimits(max_turns=1000, max_context=sampler.context_length)
        self._settings = SessionSettings(
            sampling="client" if params is None else "run",
            restores_reasoning=restores_reasoning,
            patience=patience,
            train_undelivered=train_undelivered,
        )
        self.service = Service(
            host=host, port=port, options=options or Options(), limits=service_limits or ServiceLimits()
        )
        self._numbers = itertools.count()
        self._open: set[GatewayEpisode] = set()

    async def __aenter__(self) -> Self:
        await self.service.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for episode in list(self._open):
            await episode.cancel()
        await self.service.close()

    @property
    def url(self) -> str:
        """The service's URL without a path."""
        return self.service.url

    def episode(
        self, example: Example | Mapping[str, Any] | str | None = None, *, seed: int | None = None
    ) -> GatewayEpisode:
        """Open an episode. It is served until its `finish` or `cancel` is called.

        Args:
            example: The example, as an `Example`, as a mapping with an "id", or as the id alone.
            seed: Seed of the episode's sampling. By default it is derived from the gateway's seed and the episode's
                number.
        """
        number = next(self._numbers)
        example_id = _example_id(example, number)
        own = derive_seed(self._seed, number) if seed is None else seed
        identity = RolloutIdentity(example_id=example_id, trajectory_id=f"episode-{number}", seed=own)
        recorder = Recorder(self._sampler.vocab_size, trajectory_id=identity.trajectory_id)
        loop = AgentLoop(
            sampler=self._sampler,
            renderer=self._renderer,
            params=self._params,
            limits=self._limits,
            recorder=recorder,
            seed=own,
            session=identity.trajectory_id,
        )
        episode = GatewayEpisode(self.service, Session(loop, self._settings), identity)
        self._open.add(episode)
        episode.on_end = lambda: self._open.discard(episode)
        return episode


class GatewayEpisode:
    """One episode. All requests with its key become one trajectory."""

    def __init__(self, service: Service, session: Session, identity: RolloutIdentity) -> None:
        self.session, self.service, self._identity = session, service, identity
        self.api_key = service.open(session)
        """The API key of this episode."""
        self.on_end: Any = None

    @property
    def base_url(self) -> str:
        """The base URL for OpenAI's SDKs, to use together with `api_key`."""
        return f"{self.service.url}/v1"

    @property
    def anthropic_base_url(self) -> str:
        """The base URL for Anthropic's SDKs. It has no "/v1", because these SDKs add it themselves."""
        return self.service.url

    @property
    def keyed_url(self) -> str:
        """A base URL that contains the key, for programs whose API key cannot be set. A key in the headers of their
        requests is ignored."""
        return f"{self.service.url}/s/{self.api_key}/v1"

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables from which SDKs read the base URL and the key."""
        return variables(self.service.url, self.api_key)

    async def finish(self, reward: Any = None, *, error: str | None = None) -> Trajectory:
        """Close the episode, cancel its requests in flight, and return its trajectory.

        If the policy sampled nothing in the episode, the episode has failed (`no_turns`) and gets no reward.

        Args:
            reward: A number, named parts, or `AgentScores`. If None, the episode gets the reward that was posted to
                `/v1/reward`, if any.
            error: The reason why the episode failed, or None if it did not fail. A failed episode is not trained.

        Raises:
            EnvironmentFault: the reward is neither a finite number nor a mapping of finite numbers.
        """
        session, loop = self.session, self.session.loop
        # Checked before `cancel`, so that the caller may correct a bad reward and call again.
        scores = read_agent_scores(session.reward if reward is None else reward, "finish")
        await self.cancel()
        loop.recorder.close()
        if error is None and session.fault is not None:
            error = f"sampler: {session.fault}"
        if error is None and (why := loop.why_nothing_sampled(stop_reason_of(session))) is not None:
            error, scores = f"{NO_TURNS}: {why}", (None, {}, {})
        shown = "main" if "main" in loop.agents else next(iter(loop.agents), "main")
        return Trajectory.of(
            self._identity,
            turns=tuple(loop.recorder.turns),
            messages=loop.messages(shown),
            reward=scores[0],
            reward_parts=scores[1],
            agent_rewards=scores[2],
            stop_reason=stop_reason_of(session),
            truncated=stop_reason_of(session).truncated,
            error=error,
            num_unrecorded_tokens=loop.recorder.num_unrecorded_tokens,
            info={INFO: session.info, **loop.info, **({TOOLS_OFFERED: True} if loop.offers_tools else {})},
        )

    async def cancel(self) -> None:
        """Close the episode without a trajectory. May be called more than once."""
        self.service.forget(self.api_key)
        await self.session.end()
        await self.session.loop.end()
        if self.on_end is not None:
            self.on_end()


def stop_reason_of(session: Session) -> StopReason:
    """Return why an episode behind the gateway ended. Agents do not report why they end, so the reason is "stop" unless
    the last reply was cut off or refused."""
    return session.loop.stop_reason or session.last_stop


def variables(url: str, key: str) -> dict[str, str]:
    """Return the environment variables that SDKs and agents read, for a program behind a gateway.

    Args:
        url: The service's URL without a path.
        key: The session's key.
    """
    return {
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_BASE": f"{url}/v1",
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": key,
        "VERBATIM_BASE_URL": f"{url}/v1",
        "VERBATIM_API_KEY": key,
        "VERBATIM_REWARD_URL": f"{url}/v1/reward",
    }


def _example_id(example: Example | Mapping[str, Any] | str | None, number: int) -> str:
    if isinstance(example, Example):
        return example.id
    if isinstance(example, str):
        return example
    if example is None:
        return str(number)
    if not isinstance(example, Mapping):
        raise UsageError(
            f'gateway.episode: found {example!r:.80}, expected an Example, a mapping such as {{"id": "emma"}}, or an id'
        )
    return str(example.get("id", number))
