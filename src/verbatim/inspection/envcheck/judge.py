"""Derives findings from finished episodes. Each function looks for one kind of fault."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from verbatim.core.records.equality import are_equal
from verbatim.core.types import Message, StopReason
from verbatim.environments.environment import Demonstration, Environment, succeeded
from verbatim.inspection.envcheck.findings import CheckFinding, Earned
from verbatim.inspection.envcheck.play import PlayedEpisode
from verbatim.rollouts.episode_stats import NO_TURNS, TOOL_FAULTS, TRACEBACK, failure_kind
from verbatim.rollouts.openings import Openings

_FEWEST = 4
"""Minimum number of episodes that must have been played before a property that all episodes share is reported."""
_WRONG_REWARD = re.compile(r"expected (a finite number|at most [\d.e+]+, all that float32 holds|a number or \{part)")


def earned(plays: Sequence[PlayedEpisode], environment: Environment) -> dict[str, Earned]:
    """The rewards and successes of each kind of player."""
    result = {}
    for name in dict.fromkeys(play.player for play in plays):
        done = [p.trajectory for p in plays if p.player == name and p.trajectory.error is None]
        rewards = [t.reward for t in done if t.reward is not None]
        result[name] = Earned(
            episodes=len(done),
            mean_reward=sum(rewards) / len(rewards) if rewards else None,
            success=sum(succeeded(environment, t) for t in done) / max(1, len(done)),
        )
    return result


def errors(plays: Sequence[PlayedEpisode]) -> Iterator[CheckFinding]:
    """Report failed episodes, with one finding for each kind of error."""
    by_kind: dict[str, list[PlayedEpisode]] = {}
    for play in plays:
        if play.trajectory.error is not None:
            by_kind.setdefault(failure_kind(play.trajectory.error), []).append(play)
    for failed in by_kind.values():
        trajectory = failed[0].trajectory
        error = str(trajectory.error)
        tail = trajectory.info.get(TRACEBACK)
        found = f"{_about(failed, plays)}: {error}" + (f"\n{tail}" if tail else "")
        if _WRONG_REWARD.search(error):
            yield CheckFinding(
                kind="reward",
                found=found,
                expected="finite numbers as rewards",
                change="return a float that is neither NaN nor infinite; guard divisions and logarithms",
            )
        elif error.startswith("timeout"):
            yield CheckFinding(
                kind="endless",
                found=found,
                expected="an episode that ends within the time limit (--timeout)",
                change="give every wait in `start`, `reply` and tools its own deadline",
            )
        elif error.startswith(NO_TURNS):
            yield CheckFinding(
                kind="no_turns",
                found=found,
                expected="at least one turn of the model in every episode",
                change="in `run`, await agent.sample(...) before the end, without trained=False for the "
                "agent that learns; remove examples that leave the model nothing to do",
            )
        else:
            yield CheckFinding(
                kind="raises",
                found=found,
                expected="no exception, whatever the model says or calls",
                change="fix the error above; if the model made a mistake, answer with a message that says so",
            )


def tool_faults(plays: Sequence[PlayedEpisode]) -> Iterator[CheckFinding]:
    """Report tools that raised an exception, hung, or returned an answer that is too long."""
    said: set[str] = set()
    for play in plays:
        faults = play.trajectory.info.get(TOOL_FAULTS)
        for kind, fault in faults.items() if isinstance(faults, Mapping) else ():
            if kind in said:
                continue
            said.add(kind)
            hangs = "did not answer within" in fault["first"]
            yield CheckFinding(
                kind="endless" if hangs else "tool_raises",
                found=f"{_where(play)}: {fault['first']}",
                expected="an answer in time" if hangs else "an answer to every call whose arguments fit the schema",
                change="give the tool its own deadline"
                if hangs
                else "fix the tool; to tell the model that a call cannot be carried out, raise "
                'verbatim.environments.tools.ToolFailed("why") or return a text',
            )
    cut = [play for play in plays if "oversize" in play.trajectory.info.get("tool_errors", {})]
    if cut:
        yield CheckFinding(
            kind="too_long",
            found=f"{_about(cut, plays)}: a tool's answer was cut because it exceeds the limit",
            expected="answers that the model can read in full",
            change="return less (a page, the first lines), or raise tool_output_limit",
        )


def schemas(plays: Sequence[PlayedEpisode]) -> Iterator[CheckFinding | str]:
    """Report tools without a description as findings, and parameters without a description as notes."""
    tools = {name: tool for play in plays for name, tool in play.tools.items()}
    functions = {name: tool.schema.get("function", {}) for name, tool in tools.items()}
    bare = [
        name
        for name, function in functions.items()
        if not function.get("description") and getattr(tools[name], "lacks_description", True)
    ]
    if bare:
        yield CheckFinding(
            kind="no_description",
            found=f"the model is not told what {', '.join(bare)} does",
            expected="a description in every tool's schema",
            change='write a docstring (the first line is the description, "Args:" describes the arguments), or pass '
            'FunctionTool(..., description="") if the tool needs none',
        )
    parameters = [
        f"{name}.{argument}"
        for name, function in functions.items()
        if name not in bare
        for argument, about in function.get("parameters", {}).get("properties", {}).items()
        if not about.get("description") and argument not in function.get("description", argument)
    ]
    if parameters:
        yield f"arguments without a description: {', '.join(parameters)}"


def prompts(openings: Mapping[str, Openings]) -> Iterator[CheckFinding | str]:
    """For each split, report opening prompts that leave no room for an answer as findings, and prompts that were not
    measured as notes."""
    for split, measured in openings.items():
        if measured.found is not None:
            yield CheckFinding(
                kind="too_long",
                found=f'split "{split}": {measured.found}',
                expected=f"less than seq_len = {measured.seq_len} tokens (--seq-len), with room for the episode",
                change="shorten the opening messages and the tools' descriptions, raise orchestrator.seq_len, or "
                "remove these examples: nothing can be sampled from them",
            )
        if measured.left_out is not None:
            yield f'split "{split}": {measured.left_out}'


def scores(plays: Sequence[PlayedEpisode], environment: Environment) -> Iterator[CheckFinding | str]:
    """Report a score that is uninformative, because it is always the same or because the episode's own solution is not
    a success."""
    done = [play for play in plays if play.trajectory.error is None]
    solved = [play for play in done if play.player == "solution"]
    failed = [play for play in solved if not succeeded(environment, play.trajectory)]
    rewards = [play.trajectory.reward for play in done if play.trajectory.reward is not None]
    if failed:
        first = failed[0]
        parts, messages = first.trajectory.reward_parts, first.trajectory.messages
        of_parts = f"its parts are {dict(parts)}; " if parts else ""
        last = f"{messages[-1]['role']}: {messages[-1].get('content', '')!r:.120}" if messages else "no message"
        yield CheckFinding(
            kind="score_unreached",
            expected="a success: a reward of at least 1, or an `is_success` of the environment that returns True",
            found=f"{_about(failed, solved)}: the episode's own solution earned {first.trajectory.reward}; "
            f"{of_parts}it ended with: {last}",
            change="fix `score` (does it compare text with numbers, or read the wrong message?) or `solution`; if "
            "a success earns less than 1, give the environment an `is_success(trajectory)` method",
        )
    elif len(rewards) in (0, len(done)) and are_equal(rewards) and len(plays) == len(done) >= _FEWEST:
        only = rewards[0] if rewards else None
        who = " and ".join(dict.fromkeys(play.player for play in done))
        yield CheckFinding(
            kind="score_constant",
            found=f"the score was {only} in all {len(done)} episodes ({who} players)",
            expected="rewards that differ between episodes of one example: equal rewards train nothing",
            change="fix `score`; if only good play earns anything, give the episode a `solution()` method that returns "
            "the assistant messages that solve it, and this check will play them",
        )
    elif done and not solved and not any(succeeded(environment, play.trajectory) for play in done):
        yield "no episode was a success; give the episode a `solution()` method to check that success is possible"


def ends(plays: Sequence[PlayedEpisode], max_turns: int) -> Iterator[CheckFinding]:
    """Report that all episodes were ended by the turn limit."""
    done = [play for play in plays if play.trajectory.error is None]
    cut = [play for play in done if play.trajectory.stop_reason is StopReason.MAX_TURNS]
    if len(cut) == len(done) >= _FEWEST:
        yield CheckFinding(
            kind="endless",
            found=f"none of {len(done)} episodes ended on its own within {max_turns} turns",
            expected="an end: a tool's ToolResult(done=True), or Reply(done=True)",
            change="end the episode when its task is done or lost; if it needs more turns, set --max-turns and "
            "max_turns in its table",
        )


def demonstrated_tools(
    plays: Sequence[PlayedEpisode], demonstrations: Sequence[Demonstration]
) -> Iterator[CheckFinding]:
    """Report demonstrations that begin like an episode but have different tools."""
    by_opening = {str(list(play.opening)): play for play in plays if play.trajectory.turns}
    for number, shown in enumerate(demonstrations):
        play = by_opening.get(str(opening_of(shown)))
        if play is None:
            continue
        offered = {name: tool.schema for name, tool in play.tools.items()}
        imitated = {tool.get("function", tool).get("name"): tool for tool in shown.tools}
        different = [name for name in {**offered, **imitated} if offered.get(name) != imitated.get(name)]
        if different:
            yield CheckFinding(
                kind="demonstrations",
                expected="the schemas that an episode offers, unchanged",
                found=f"demonstration {number} begins like an episode of example {play.example.id!r}, but differs in "
                f"the tools {', '.join(map(str, different))}",
                change="take the tools from an episode: tools=[tool.schema for tool in episode.tools]",
            )
            return


def opening_of(demonstration: Demonstration) -> list[Message]:
    """The messages of a demonstration before its first assistant message."""
    messages = list(demonstration.messages)
    return messages[: next(n for n, message in enumerate(messages) if message["role"] == "assistant")]


def _about(some: Sequence[PlayedEpisode], all_of: Sequence[PlayedEpisode]) -> str:
    return f"{len(some)} of {len(all_of)} episodes, first {_where(some[0])}"


def _where(play: PlayedEpisode) -> str:
    return f"example {play.example.id!r} with the {play.player} player"
