"""Runs each episode in its own asyncio task; `gateway` records the turns of agent programs written with any SDK.

In: an example, an environment, a sampler, a renderer. Out: a trajectory. Read first: `episode.py`, then `loop.py`,
which makes the turns. Imports `core`, `config`, `models`, `environments`, `inference`.
"""

from verbatim.core.episode_limits import EpisodeLimits
from verbatim.rollouts.agent_loop import AgentLoop
from verbatim.rollouts.demonstrations import trajectory_from_messages
from verbatim.rollouts.episode import run_episode
from verbatim.rollouts.episode_stats import EpisodeStats
from verbatim.rollouts.group import GroupRun
from verbatim.rollouts.loop import EpisodeOver
from verbatim.rollouts.multi_turn import APIMultiTurnRollout, MultiTurnRollout
from verbatim.rollouts.recorder import Recorder
from verbatim.rollouts.rollout import Rollout
from verbatim.rollouts.runner import EpisodeRunner, EpisodeTask, LocalRunner, RolloutSetup
from verbatim.rollouts.seeds import derive_seed
from verbatim.rollouts.traces import TraceFolder
from verbatim.rollouts.user_simulator import UserSimulator

__all__ = [
    "APIMultiTurnRollout",
    "AgentLoop",
    "EpisodeLimits",
    "EpisodeOver",
    "EpisodeRunner",
    "EpisodeStats",
    "EpisodeTask",
    "GroupRun",
    "LocalRunner",
    "MultiTurnRollout",
    "Recorder",
    "Rollout",
    "RolloutSetup",
    "TraceFolder",
    "UserSimulator",
    "derive_seed",
    "run_episode",
    "trajectory_from_messages",
]
