"""The environment `Program`: a program gets an example, a base URL and a key, and the model's answers are trained."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shlex
import time
import weakref
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from verbatim.core.errors import EnvironmentFault, NoDemonstrations, ProgramFault, UsageError
from verbatim.core.imports import find_file
from verbatim.core.types import Example, StopReason, Trajectory
from verbatim.environments.environment import Demonstration, Episode, Score
from verbatim.environments.resolve import create_environment, demonstrations_of
from verbatim.environments.rows import read_splits
from verbatim.environments.sources import read_json_lines
from verbatim.environments.tools.isolation import SandboxLimits
from verbatim.environments.tools.variables import EnvFrom, further_variables
from verbatim.inference.chat.protocol import UNENFORCEABLE, Options
from verbatim.rollouts.agent_loop import AgentLoop
from verbatim.rollouts.gateway.gateway import stop_reason_of
from verbatim.rollouts.gateway.program.launch import Launch
from verbatim.rollouts.gateway.program.process import SCORE_SECONDS, ProgramEnd, ProgramProcess
from verbatim.rollouts.gateway.program.reused import ReusedPrograms
from verbatim.rollouts.gateway.service import Service, ServiceLimits
from verbatim.rollouts.gateway.session import INFO, Session
from verbatim.rollouts.gateway.session_settings import AnswerWatch, SessionSettings
from verbatim.rollouts.loop import EpisodeOver
from verbatim.rollouts.rewards import read_score

HARMLESS = (
    "tool_choice",
    "tool_grammar",
    "reasoning_effort",
    "verbosity",
    "thinking",
    "context_management",
    "truncation",
)
"""Default of `unenforced`: request fields that agents send by default and that can be ignored without harm."""
_STARTING = 8
"""Maximum number of programs that start at the same time: each start takes seconds of CPU time."""
_RESERVE = 5.0
"""A program times out this many seconds before its episode does, so that its failure can still be recorded and
scored."""
_SERVING: set[asyncio.Task[None]] = set()


@dataclass(frozen=True, kw_only=True)
class _Played:
    """The result of one program run."""

    reward: Any
    """The program's reward, not yet checked, or None."""
    fault: ProgramFault | None
    """The reason why the program failed, or None if it did not fail."""
    info: Mapping[str, Any]
    """Exit status and times of the program, for the trajectory's `info`."""


@dataclass(frozen=True)
class _TimeLimit:
    """The time limits of a program."""

    own: float | None
    """Timeout of the program itself in seconds, or None if only the episode's time limits it."""
    end: float
    """The time at which the episode's timeout expires, by `time.monotonic`."""

    @property
    def left(self) -> float:
        """Seconds left until `end`."""
        return max(0.0, self.end - time.monotonic())

    @property
    def seconds(self) -> float:
        """Timeout, in seconds, for a program that starts now."""
        return self.left if self.own is None else min(self.own, self.left)

    @contextlib.asynccontextmanager
    async def of_waiting(self, why: str) -> AsyncIterator[None]:
        """Context manager in which to wait for a free place. `why` names the limit that causes the wait. Raises
        EnvironmentFault if the episode's time runs out first."""
        seconds = self.left
        try:
            async with asyncio.timeout(seconds):
                yield
        except TimeoutError:
            raise EnvironmentFault(
                f"program: no place became free for it within {seconds:.3g} s ({why}); raise this limit, or "
                "the episode_timeout of the environment"
            ) from None


class Program:
    """Runs a program for each example. The program needs no knowledge of Verbatim: it calls a chat model with the base
    URL and key from the environment variables that SDKs read, and reports the episode's reward.

    Args:
        command: The command line, as a list or a string. If the first word is `{python}`, it is replaced by the Python
            that runs Verbatim; `{example}` is replaced by the path of the file that has the example.
        data: The examples, as for `single_turn`: rows, a JSONL file, or a dataset. A program gets its row as a JSON
            object on one line, with an "id".
        eval_data: Held-out rows. By default every tenth row of `data` is held out if there are at least 20 rows.
        eval_share: Share of `data` to hold out instead of a tenth.
        cwd: The working directory, read-only in the sandbox (VERBATIM_WORK_DIR is writable). By default it is the
            folder relative to which a file named in the command exists: the folder of the run's TOML file or the
            current directory. If the command names no such file, it is the current directory.
        env: Additional environment variables. Do not put keys or passwords here: the configuration is stored.
        env_from: Environment variables of this process to pass on to the program, because the sandbox hides them: a
            list of names, or `{name in the program = "name in this process"}`.
        example: "stdin" to pass the row on standard input, "file" to pass it in a file whose path is in
            VERBATIM_EXAMPLE.
        reward: Where the reward is read: "last_line" (the last line of the program's output), "file" (`reward.txt` in
            the work folder), "score" (the last line that the command `score` prints) or "post" (the program posts it to
            VERBATIM_REWARD_URL). A posted reward always takes precedence.
        score: With reward = "score", a bash command that runs after the program, in the same folder and sandbox.
        failed_reward: Reward of a program that crashed or timed out after the model had answered at least once. If
            None, the episode fails and counts as `program_crashed` or `program_hung`. If the model never answered, the
            episode always fails; if the program sent no request at all, it counts as `program_silent`.
        timeout: Timeout of the program in seconds, not counting the wait for a place. The default, which is also the
            maximum, is the time left until the episode's timeout, minus 5 seconds.
        memory_mb: Maximum memory in MiB of each process of the program, and of all its processes together. Address
            space that is only reserved does not count.
        processes: Maximum number of processes that the program may have at a time, enforced in the sandbox.
        disk_mb: Maximum size in MiB of the files that the program writes, enforced in the sandbox.
        connections: Maximum number of open connections from the program to the gateway, enforced in the sandbox.
        max_body_mb: Maximum size of one request in MiB. All requests of an episode that are in memory at the same time
            may together have twice that size.
        sandbox: True to run the program in a sandbox that shows only the program's folder and the folders in `visible`,
            and whose only network connection is to the gateway. Otherwise the program runs as you, with your files,
            variables and network.
        visible: Additional folders that the sandbox shows, read-only.
        unsafe_allow: True to run without a sandbox if none works on this machine.
        reuse: True to start a process once and send it many examples, one line each (see the documentation).
        max_processes: Maximum number of processes if `reuse` is True.
        episodes_per_process: Maximum number of concurrent episodes per process if `reuse` is True.
        sampling: Which values of temperature, top_p, top_k and min_p apply: "run" for the values in the run's
            configuration, "client" for the values in the program's requests.
        restores_reasoning: True to treat an answer that the program sends back without its reasoning as the original
            answer; None means True if the renderer keeps earlier answers exactly as they were sampled, else False.
        train_undelivered: True to train also those answers that no client received in full and that no later request
            continued. By default they are only context, counted as `untrained`.
        unenforced: Request fields that are accepted, counted and otherwise ignored.
        demonstrations: Conversations for a warm start: a JSONL file whose lines have the form
            `{"messages": [...], "tools": [...]}`, or the id of a bundled environment.

    Raises:
        UsageError: the program, a folder or the data is not found, or a setting is invalid.
    """

    only_by_sampler: ClassVar[bool] = True
    """True because the program's requests go through the gateway to the run's sampler; a teacher cannot answer them."""

    def __init__(
        self,
        command: str | Sequence[str],
        data: Any,
        *,
        eval_data: Any = None,
        eval_share: float = 0.1,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        env_from: EnvFrom = (),
        example: Literal["stdin", "file"] = "stdin",
        reward: Literal["last_line", "file", "score", "post"] = "last_line",
        score: str | None = None,
        failed_reward: float | None = None,
        timeout: float | None = None,
        memory_mb: int = 4096,
        processes: int = 128,
        disk_mb: int = 64,
        connections: int = 512,
        max_body_mb: int = 32,
        sandbox: bool = True,
        visible: Sequence[str] = (),
        unsafe_allow: bool = False,
        reuse: bool = False,
        max_processes: int = 4,
        episodes_per_process: int = 1,
        sampling: Literal["run", "client"] = "run",
        restores_reasoning: bool | None = None,
        train_undelivered: bool = False,
        unenforced: Sequence[str] = HARMLESS,
        demonstrations: str | None = None,
    ) -> None:
        if (reward == "score") != (score is not None):
            raise UsageError('program: reward = "score" needs score = "COMMAND", and score needs reward = "score"')
        if reuse and (example == "file" or reward in ("file", "score")):
            raise UsageError(
                "program: with reuse = true, examples and answers are lines on standard input and output; "
                'leave out example and reward, or use reward = "post"'
            )
        for name, value in (
            ("max_processes", max_processes),
            ("episodes_per_process", episodes_per_process),
            ("connections", connections),
            ("max_body_mb", max_body_mb),
        ):
            if value < 1:
                raise UsageError(f"program: {name} = {value}; expected at least 1")
        if unknown := sorted(set(unenforced) - UNENFORCEABLE):
            raise UsageError(
                f"program: unenforced has {unknown[0]!r}; the valid fields are {', '.join(sorted(UNENFORCEABLE))}"
            )
        self._examples = read_splits(data, eval_data, eval_share=eval_share)
        folder = _folder_of(command) if cwd is None else str(find_file(cwd) or cwd)
        self.launch = Launch.of(
            command,
            folder=folder,
            variables=further_variables(env, env_from, "program"),
            sandbox=sandbox,
            unsafe_allow=unsafe_allow,
            visible=visible,
            limits=SandboxLimits(
                cpu_seconds=86_400, memory_mb=memory_mb, processes=processes, open_files=4096, disk_mb=disk_mb
            ),
            score='head -c 65536 "{work}/reward.txt"' if reward == "file" else score or "",
            example_in_file=example == "file",
        )
        self.reward, self.failed_reward, self.timeout, self.reuse = reward, failed_reward, timeout, reuse
        self.settings = SessionSettings(
            sampling=sampling, restores_reasoning=restores_reasoning, train_undelivered=train_undelivered
        )
        self._options = Options(unenforced=frozenset(unenforced))
        most = max_body_mb << 20
        self._limits = ServiceLimits(
            max_body=most, session_bytes=2 * most, all_bytes=16 * most, program_connections=connections
        )
        self.most, self.places = max_processes, episodes_per_process
        self._demonstrations = demonstrations
        self.watch: AnswerWatch | None = None
        """Observer of all requests and answers, used by checks; None if there is no observer."""
        self._serving: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, ProgramServing] = (
            weakref.WeakKeyDictionary()
        )

    def examples(self, split: str) -> Sequence[Example]:
        """Return the rows of the split "train" or "eval" as examples."""
        return self._examples[split]

    async def start(self, example: Example, seed: int) -> ProgramEpisode:
        """Create the episode of one row. `seed` is unused: the program gets no seed, and the sampler has its own
        seed."""
        return ProgramEpisode(self, example)

    def demonstrations(self, count: int, seed: int) -> Sequence[Demonstration]:
        """Return `count` conversations to imitate, from the file or environment named in `demonstrations`."""
        named = self._demonstrations
        if named is None:
            raise NoDemonstrations(
                "program: a warm start and [model.build] need conversations to imitate; give "
                'args.demonstrations = "conversations.jsonl", or a pretrained model'
            )
        path = find_file(named)
        if path is None:
            return demonstrations_of(create_environment(named), named, count, seed)
        rows = list(read_json_lines(path, "conversation").values())
        return [
            Demonstration(messages=row["messages"], tools=row.get("tools") or ())
            for row in (rows[n % len(rows)] for n in range(count))
        ]

    async def serving(self) -> ProgramServing:
        """Return the gateway and the reused programs of the running event loop. Both end with the loop."""
        loop = asyncio.get_running_loop()
        if loop not in self._serving:
            service = Service(options=self._options, limits=self._limits)
            self._serving[loop] = ProgramServing(self.launch, service, self.most, self.places)
        serving = self._serving[loop]
        await serving.up()
        return serving


def _folder_of(command: str | Sequence[str]) -> str | None:
    """Return the folder relative to which the first relative file path in the command exists, or None."""
    words = shlex.split(command) if isinstance(command, str) else command
    for word in words:
        found = None if Path(word).is_absolute() else find_file(word)
        if found is not None and found.is_file():
            parents = len(Path(word).parts)
            return str(found.resolve().parents[parents - 1])
    return None


class ProgramServing:
    """The gateway and the reused programs of one event loop. They run until the loop ends."""

    def __init__(self, launch: Launch, service: Service, most: int, places: int) -> None:
        self.service = service
        self.reused = ReusedPrograms(launch, service, most, places)
        self.starting = asyncio.Semaphore(_STARTING)
        self._up = asyncio.create_task(service.start())
        task = asyncio.create_task(self._serve(), name="program-gateway")
        _SERVING.add(task)  # the event loop only holds weak references to tasks
        task.add_done_callback(_SERVING.discard)

    async def up(self) -> None:
        """Wait until the gateway listens."""
        await asyncio.shield(self._up)

    async def _serve(self) -> None:
        try:
            await self._up
            await asyncio.Event().wait()  # never set: the end of the loop cancels this task
        finally:
            await self.reused.close()
            await self.service.close()


class ProgramEpisode(Episode):
    """An episode that runs the program once."""

    def __init__(self, environment: Program, example: Example) -> None:
        self._environment, self._example = environment, example
        self._reward: Score = None

    async def run(self, agent: Any) -> None:
        """Run the program to its end.

        Raises:
            ProgramFault: the program crashed, hung, or never called the model, and `failed_reward` does not apply.
            EnvironmentFault: the program reported no valid reward.
            EpisodeOver: the program's last request was cut off, or refused because no turns or tokens were left.
        """
        if not isinstance(agent, AgentLoop):
            raise EnvironmentFault("programs need the run's sampler; a teacher cannot answer them")
        environment = self._environment
        serving = await environment.serving()
        session = Session(agent, environment.settings)
        session.watch = environment.watch
        key = serving.service.open(session)
        limit = agent.limits.timeout
        time_limit = _TimeLimit(environment.timeout, time.monotonic() + max(limit - _RESERVE, 0.8 * limit))
        try:
            played = await (self._reuse if environment.reuse else self._launch)(serving, session, key, time_limit)
        finally:
            serving.service.forget(key)
            await session.end()
        self.info = {INFO: session.info, "program": dict(played.info)}
        self._settle(session, played)
        if (reason := stop_reason_of(session)) is not StopReason.STOP:
            raise EpisodeOver(reason)

    async def score(self, trajectory: Trajectory) -> Score:
        """Return the reward that the program reported."""
        return self._reward

    def _settle(self, session: Session, played: _Played) -> None:
        """Set the reward, or raise the fault of the episode. A fault of the sampler takes precedence over a fault of
        the program, because the sampler's fault may have caused the program's failure."""
        if session.fault is not None:
            raise session.fault
        fault = played.fault
        if fault is None and not session.loop.turns and not session.num_requests:
            fault = ProgramFault("program_silent", "the program ended without a request to the model")
        if session.loop.why_nothing_sampled(session.last_stop) is not None:
            # The policy sampled nothing, so it has earned neither the program's reward nor `failed_reward`.
            if fault is None or session.loop.no_room is not None:
                return
            raise fault
        if session.reward is not None:
            self._reward = session.reward
        elif fault is not None:
            if self._environment.failed_reward is None:
                raise fault
            self._reward = self._environment.failed_reward
        elif self._environment.reward == "post":
            raise EnvironmentFault("program: nothing was posted to VERBATIM_REWARD_URL")
        else:
            places = {"file": "reward.txt", "score": "the scoring command"}
            where = places.get(self._environment.reward, "the last line")
            self._reward = read_reward(str(played.reward), where) if isinstance(played.reward, str) else played.reward
        if fault is not None:
            self.info = {**self.info, "program": {**self.info["program"], "end": fault.kind, "said": str(fault)[:1000]}}

    async def _launch(self, serving: ProgramServing, session: Session, key: str, time_limit: _TimeLimit) -> _Played:
        """Play the episode in a new process, which plays only this episode."""
        process = ProgramProcess(self._environment.launch, serving.service)
        try:
            async with time_limit.of_waiting(f"{_STARTING} programs start at a time"), serving.starting:
                began = time.monotonic()
                await process.start(key)
            fault: ProgramFault | None = None
            seconds = time_limit.seconds
            try:
                async with asyncio.timeout(seconds):
                    await process.go()
                    await process.send(json.dumps(self._row()).encode() + b"\n", last=True)
                    outcome = await process.ended()
            except TimeoutError:
                outcome = process.outcome()
                fault = ProgramFault("program_hung", f"it did not end within {seconds:g} s; so far {outcome.words()}")
            if fault is None and outcome.status is not None and self._environment.launch.score:
                outcome = await process.scored(min(SCORE_SECONDS, time_limit.left + _RESERVE / 2))
            if fault is None and not outcome.is_well:
                fault = ProgramFault("program_crashed", f"the program ended with {outcome.told()}")
            first = session.first_request
            info = {
                "status": outcome.status,
                "seconds": time.monotonic() - process.started,
                "seconds_to_start": process.started - began,
                "seconds_to_first_request": None if first is None else first - process.started,
            }
            return _Played(reward=self._line(outcome), fault=fault, info=info)
        finally:
            await process.close()

    def _line(self, outcome: ProgramEnd) -> str:
        """Return the last non-empty line of the program's output or, with reward = "score", of the scoring command's
        output. Return "" if every line is empty."""
        text = outcome.stdout if self._environment.reward == "last_line" else outcome.score
        return next((line for line in reversed(text.splitlines()) if line.strip()), "")

    async def _reuse(self, serving: ProgramServing, session: Session, key: str, time_limit: _TimeLimit) -> _Played:
        """Play the episode in a process that also plays other episodes."""
        began = time.monotonic()
        fault: ProgramFault | None = None
        answer: Mapping[str, Any] = {}
        try:
            async with time_limit.of_waiting(
                f"max_processes = {self._environment.most} with episodes_per_process = {self._environment.places}"
            ):
                place = await serving.reused.take()
            answer = await serving.reused.play(place, self._row(), key, time_limit.seconds)
        except ProgramFault as raised:
            fault = raised
        if "error" in answer:
            fault = ProgramFault("program_crashed", f"the program reported: {str(answer['error'])[:600]}")
        info = {"seconds": time.monotonic() - began, "processes_started": serving.reused.num_started}
        reward = None if fault is not None else json.dumps({"reward": answer.get("reward")})
        return _Played(reward=reward, fault=fault, info=info)

    def _row(self) -> dict[str, Any]:
        """Return the example as the JSON object that is sent to the program."""
        example = self._example
        row = {"id": example.id, **example.payload}
        if example.messages:
            row["messages"] = list(example.messages)
        if example.tools:
            row["tools"] = list(example.tools)
        return row


def read_reward(line: str, where: str) -> float | Mapping[str, float]:
    """Read the reward from a line of JSON: a number, `{"reward": number}`, or `{"reward": {part: number}}`. Other keys
    are ignored.

    Raises:
        EnvironmentFault: the line has no valid reward.

    >>> read_reward('{"reward": {"right": 1, "short": 0.5}, "guesses": 3}', "the last line")
    {'right': 1.0, 'short': 0.5}
    """
    try:
        value: Any = json.loads(line)
    except (ValueError, RecursionError):
        value = line
    if isinstance(value, Mapping):
        value = value.get("reward")
    if value is None or value == {} or isinstance(value, bool | str | list):
        raise EnvironmentFault(
            f"program: {where} has no reward: found {line[-200:]!r}, expected a number, "
            '{"reward": number} or {"reward": {part: number}}'
        )
    reward, parts = read_score(value, f"program: {where}")
    assert reward is not None
    return parts or reward
