"""Keeps programs running for many examples, because importing an SDK takes seconds.

The program reads one line of JSON for each example, and answers each example with one line, in any order:

    {"id": "7", "example": {"id": "emma", ...}, "base_url": "http://127.0.0.1:40123/v1", "api_key": "vb-..."}
    {"id": "7", "reward": 1.0}

Other lines of its output are ignored. If an episode failed, the program may answer `{"id": "7", "error": "..."}`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from verbatim.core.errors import ProgramFault
from verbatim.rollouts.gateway.program.launch import Launch
from verbatim.rollouts.gateway.program.process import ProgramProcess
from verbatim.rollouts.gateway.service import Service


class Reused:
    """One process of a reused program, and the episodes that it is playing."""

    def __init__(self, launch: Launch, service: Service) -> None:
        self.process = ProgramProcess(launch, service, self._hear)
        self.waiting: dict[str, asyncio.Future[Mapping[str, Any]]] = {}
        self.num_running = 0
        self.is_dead = False
        self.watching: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self.process.start()
        await self.process.go()
        self.watching = asyncio.create_task(self._watch(), name="program-end")

    async def play(self, number: int, example: Mapping[str, Any], key: str) -> Mapping[str, Any]:
        """Play one example, and return the program's answer. Raises ProgramFault if the process ends first."""
        if self.is_dead:  # it ended after `take` had chosen it
            raise ProgramFault("program_crashed", f"the program ended with {self.process.outcome().told()}")
        name = str(number)
        future: asyncio.Future[Mapping[str, Any]] = asyncio.get_running_loop().create_future()
        self.waiting[name] = future
        url = self.process.url
        line = {
            "id": name,
            "example": example,
            "base_url": f"{url}/v1",
            "anthropic_base_url": url,
            "api_key": key,
            "reward_url": f"{url}/v1/reward",
        }
        try:
            await self.process.send(json.dumps(line).encode() + b"\n")
            return await future
        finally:
            self.waiting.pop(name, None)

    def _hear(self, line: str) -> None:
        if not line.lstrip().startswith("{"):
            return
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError):
            return
        future = self.waiting.get(str(answer.get("id"))) if isinstance(answer, dict) else None
        if future is not None and not future.done():
            future.set_result(answer)

    async def _watch(self) -> None:
        outcome = await self.process.ended()
        self.is_dead = True
        for future in self.waiting.values():
            if not future.done():
                future.set_exception(ProgramFault("program_crashed", f"the program ended with {outcome.told()}"))

    async def close(self) -> None:
        self.is_dead = True
        if self.watching is not None:
            self.watching.cancel()
        await self.process.close()
        for future in self.waiting.values():
            if not future.done():
                future.set_exception(
                    ProgramFault("program_crashed", "the program was ended, because another of its episodes hung")
                )


class ReusedPrograms:
    """Assigns each episode to a process with a free place, and starts another process if no process has a free place.

    Args:
        launch: The settings with which a process is started.
        service: The gateway's HTTP service.
        most: Maximum number of processes.
        places: Maximum number of concurrent episodes per process.
    """

    def __init__(self, launch: Launch, service: Service, most: int, places: int) -> None:
        self._launch, self._service, self._most, self._places = launch, service, most, places
        self._running: list[Reused] = []
        self._changed = asyncio.Condition()
        self._num_episodes = 0
        self.num_started = 0
        """Number of processes started so far."""

    async def play(self, program: Reused, example: Mapping[str, Any], key: str, seconds: float) -> Mapping[str, Any]:
        """Play one example, and return the program's answer.

        Args:
            program: The process, which `take` has returned. Its place is free again afterwards.
            example: The example, as JSON values.
            key: The session's key.
            seconds: Timeout in seconds.

        Raises:
            ProgramFault: the program hung and was killed, or it ended.
        """
        self._num_episodes += 1
        hung = False
        try:
            async with asyncio.timeout(seconds):
                return await program.play(self._num_episodes, example, key)
        except TimeoutError:
            hung = True
            so_far = program.process.outcome().words()
            raise ProgramFault("program_hung", f"no answer after {seconds:g} s; so far {so_far}") from None
        except asyncio.CancelledError:
            hung = True  # the protocol has no message that stops one episode, so the process is killed
            raise
        finally:
            program.num_running -= 1
            if hung or program.is_dead:
                await self._remove(program)
            async with self._changed:
                self._changed.notify_all()

    async def close(self) -> None:
        """End all processes."""
        for program in list(self._running):
            await self._remove(program)

    async def take(self) -> Reused:
        """Wait for a free place in a process, and reserve it.

        Raises:
            EnvironmentFault: the program cannot be started.
        """
        async with self._changed:
            await self._changed.wait_for(
                lambda: self._free() is not None or self._ended() is not None or len(self._running) < self._most
            )
            program = self._free()
            if program is not None:
                program.num_running += 1
                return program
            ended = self._ended()
            if ended is not None:
                self._running.remove(ended)
            program = Reused(self._launch, self._service)
            program.num_running = 1
            self._running.append(program)
            self.num_started += 1
        # Done outside the condition, so that others can take free places while this process starts.
        try:
            if ended is not None:
                await ended.close()
            await program.start()
            async with self._changed:
                self._changed.notify_all()
        except BaseException:  # also a cancellation: the place must become free again
            await self._remove(program)
            raise
        return program

    def _free(self) -> Reused | None:
        """Of the processes with a free place, return the process with the fewest episodes. Return None if no process
        has a free place."""
        alive = [p for p in self._running if not p.is_dead and p.watching is not None and p.num_running < self._places]
        return min(alive, key=lambda p: p.num_running, default=None)

    def _ended(self) -> Reused | None:
        """Return a process that ended by itself between two episodes, or None. A new process may replace it."""
        return next((p for p in self._running if p.is_dead and not p.num_running), None)

    async def _remove(self, program: Reused) -> None:
        if program in self._running:
            self._running.remove(program)
        await program.close()
        async with self._changed:
            self._changed.notify_all()
