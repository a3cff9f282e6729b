"""Runs an agent program against a scripted model, without a real model, and reports what the gateway recorded."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from verbatim.core.episode_limits import EpisodeLimits
from verbatim.core.sampling import SamplingParams
from verbatim.core.trajectories.samples import build_samples
from verbatim.core.types import Trajectory
from verbatim.inference.sampler import SampleRequest
from verbatim.inspection.envcheck.arguments import random_arguments
from verbatim.inspection.envcheck.byte_chat import VOCAB_SIZE, ByteChat, read_prompt, written
from verbatim.inspection.envcheck.exactness import TellingSampler, num_differences
from verbatim.inspection.envcheck.play import SilentStats
from verbatim.inspection.envcheck.rewritten import Rewritten
from verbatim.rollouts.gateway.program.environment import Program
from verbatim.rollouts.gateway.session import INFO
from verbatim.rollouts.group import GroupRun
from verbatim.rollouts.runner import RolloutSetup

_LAST = ("final", "finish", "submit", "complete", "done", "answer")
"""If the name of a tool contains one of these strings, the tool is considered to end the agent's work."""
_MOST_CALLS = 3
"""Maximum number of tools that the scripted model calls before it ends the work."""
_CONTEXT = 1_000_000
"""The scripted model's context length, which is so large that programs do not reach it."""


@dataclass(frozen=True, kw_only=True)
class ProgramReport:
    """The report on one run of a program."""

    error: str | None
    """The error with which a training run would count this episode as failed; None if nothing went wrong."""
    reward: float | None
    counts: Mapping[str, int]
    """Numbers of requests and of repeated requests, of branches by reason, and of request fields that the gateway
    refused, overrode or did not enforce."""
    branches: Sequence[Mapping[str, Any]]
    num_turns: int
    num_samples: int
    """Number of training samples. Each unbroken conversation or branch is one sample."""
    agents: tuple[str, ...]
    num_sampled_tokens: int
    num_trained_tokens: int
    """Number of sampled tokens that would be trained."""
    num_differences: int
    """Number of tokens that break this rule: each token must be trained exactly once, in the same context and with the
    same logprob and policy version as the sampler returned it."""
    rewritten: Mapping[int, Sequence[str]]
    """The answers that the program repeated in a changed form in a later request, as part of the history: the changes
    of each answer, by turn. Includes only answers that the gateway still recognised."""
    seconds: float
    seconds_to_first_request: float | None

    @property
    def is_clean(self) -> bool:
        """True if nothing went wrong, nothing was refused, and all sampled tokens can be trained."""
        refused = any(name.startswith("refused/") for name in self.counts)
        lost = self.num_sampled_tokens - self.num_trained_tokens
        return self.error is None and not refused and not lost and not self.num_differences


def check_program(
    program: Program, said: Sequence[Mapping[str, Any]] = (), *, reasoning: bool = False, seconds: float = 120.0
) -> ProgramReport:
    """Run a program once on its first example.

    Args:
        program: The environment that runs the program.
        said: The model's answers as assistant messages, in order. After the last answer, that answer is repeated. If
            empty, the model calls up to three of the offered tools once each, and then ends its work.
        reasoning: True if the scripted answers contain reasoning.
        seconds: Time limit for the program.
    """
    return asyncio.run(_check(program, said, reasoning, seconds))


async def _check(program: Program, said: Sequence[Mapping[str, Any]], reasoning: bool, seconds: float) -> ProgramReport:
    number = iter(range(10**9))

    def script(request: SampleRequest) -> Any:
        ids = request.prompt_ids.tolist()
        message = said[min(next(number), len(said) - 1)] if said else answer_to(ids, request.seed)
        return np.array(written({**message, "reasoning_content": "I think."} if reasoning else message), dtype=np.int32)

    sampler = TellingSampler(script=script, vocab_size=VOCAB_SIZE, context_length=_CONTEXT)
    program.watch = rewritten = Rewritten()
    setup = RolloutSetup(
        env="program",
        environment=program,
        sampler=sampler,
        renderer=ByteChat(),
        slots=asyncio.Semaphore(1),
        params=SamplingParams(max_tokens=100_000),
        episode_stats=SilentStats(),
        # The gateway ends a program 5 s before the episode's time limit (`_RESERVE`). This limit is larger, so that the
        # program's own limit is reached first.
        limits=EpisodeLimits(max_turns=200, max_context=_CONTEXT, timeout=seconds + 10),
    )
    group = await GroupRun(setup, program.examples("train")[0], index=0, size=1, run_seed=0).run()
    return report_of(group.trajectories[0], sampler, rewritten)


def report_of(trajectory: Trajectory, sampler: TellingSampler, rewritten: Rewritten) -> ProgramReport:
    """Return the report on an episode behind the gateway. The sampler must have played no other episode."""
    ours, about = trajectory.info.get(INFO, {}), trajectory.info.get("program", {})
    # A failed episode has no samples, but the report counts which of its tokens could be trained.
    sound = dataclasses.replace(trajectory, error=None)
    samples = build_samples(sound) if trajectory.turns else []
    return ProgramReport(
        error=trajectory.error,
        reward=trajectory.reward,
        counts=ours.get("counts", {}),
        branches=ours.get("branches", ()),
        num_turns=len(trajectory.turns),
        num_samples=len(samples),
        agents=tuple(dict.fromkeys(turn.agent for turn in trajectory.turns)),
        num_sampled_tokens=trajectory.num_sampled_tokens,
        num_trained_tokens=sum(int(sample.loss_mask.sum()) for sample in samples),
        num_differences=num_differences(sampler.returned, samples, num_cut=ours.get("counts", {}).get("cut_tokens", 0)),
        rewritten=rewritten.found,
        seconds=about.get("seconds", 0.0),
        seconds_to_first_request=about.get("seconds_to_first_request"),
    )


def answer_to(prompt_ids: Sequence[int], seed: int) -> dict[str, Any]:
    """Return the scripted model's answer: a call of the next tool that has not been called, or text after enough calls.

    Tools that end the work are called last.
    """
    prompt = read_prompt(prompt_ids)
    called = {call["function"]["name"] for message in prompt.messages for call in message.get("tool_calls") or ()}
    functions = [tool["function"] for tool in prompt.tools]
    work = [f for f in functions if not _ends(f["name"])]
    left = [f for f in work if f["name"] not in called] if len(called) < _MOST_CALLS else []
    left = left[:1] or [f for f in functions if _ends(f["name"]) and f["name"] not in called][:1]
    if not left:
        return {"role": "assistant", "content": f"This is the scripted model; it has read {len(prompt_ids)} tokens."}
    (function,) = left
    arguments = random_arguments(function.get("parameters") or {}, ["a", "7", "the answer"], random.Random(seed))
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": function["name"], "arguments": arguments}}],
    }


def _ends(name: str) -> bool:
    return any(part in name.lower() for part in _LAST)
