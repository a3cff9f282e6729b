"""Environments that are played in this process, on processes of this machine and on Ray actors, with the same setup."""

import asyncio
import atexit
import contextlib
import multiprocessing
import os
import sys
import threading
import time
from dataclasses import fields
from pathlib import Path

import numpy as np

from byte_renderer import VOCAB_SIZE, ByteRenderer, call, say
from rollouts.clocks import set_forward
from verbatim import Example
from verbatim.core.token_tree import TokenPath
from verbatim.environments.environment import Episode, Reply
from verbatim.environments.tools import FunctionTool
from verbatim.inference import SamplingParams
from verbatim.inference.scripted import ScriptedSampler
from verbatim.rollouts import EpisodeLimits, GroupRun, LocalRunner, RolloutSetup
from verbatim.rollouts.backends import RunnerInputs
from verbatim.rollouts.processes.runner import ProcessSettings, process_runner
from verbatim.rollouts.ray.runner import ray_runner
from verbatim.rollouts.workers.episodes import RemoteSetup
from waiting import HANGS


def double(number: int) -> int:
    """Twice as much."""
    return 2 * number


def _wait(says_so):
    os.write(says_so, b"x")
    threading.Event().wait()


def _linger(while_it_is_there):
    end = time.monotonic() + 2 * HANGS
    while while_it_is_there.exists() and time.monotonic() < end:
        time.sleep(0.01)


class Doubling(Episode):
    """Asks for a number's double; there is a tool. Earns its seed's last digit."""

    tools = (FunctionTool(double),)

    def __init__(self, example, seed, trouble, folder):
        self.messages = ({"role": "user", "content": example.id},)
        self.seed, self.trouble, self.folder = seed, trouble, folder

    async def reply(self, message):
        if self.trouble == "lock":
            self.info = {"lock": threading.Lock()}
        if self.trouble == "exit":  # its worker, not only its episode
            os._exit(1)
        if self.trouble == "print":
            print("\x1b[31mred\x1b[0m")
            os.write(2, b"\x1b]0;title\x07\n")
        if self.trouble == "memory":
            self.hoard = b"x" * 400 * 2**20
            await asyncio.Event().wait()
        if self.trouble == "threads":
            for _ in range(60):
                threading.Thread(target=threading.Event().wait, daemon=True).start()
            await asyncio.Event().wait()
        if self.trouble == "files":
            self.files = [os.open(os.devnull, os.O_RDONLY) for _ in range(100)]
            await asyncio.Event().wait()
        if self.trouble == "programs":
            program = await asyncio.create_subprocess_exec("sleep", "infinity")
            (self.folder / f"program-{program.pid}").touch()
        if self.trouble == "fork":
            ready, says_so = os.pipe()
            waits = multiprocessing.get_context("fork").Process(target=_wait, args=(says_so,))
            waits.start()
            os.read(ready, 1)  # it is a process like any other
            waits.terminate()
            waits.join()
            copy = os.fork()
            if copy == 0:
                raise RuntimeError("a copy of the worker goes on")
            ended = os.waitpid(copy, 0)[1]  # noqa: ASYNC222  (it holds up everybody)
            self.info = {"ended with": waits.exitcode, "copy": ended != 0}
            await asyncio.to_thread(int)  # its end wakes this loop, and not the copy's
        if self.trouble == "interpreter":
            sys.path.clear()
            sys.modules.clear()
        if self.trouble == "block":
            if self.folder is not None:
                (self.folder / f"blocks-{os.getpid()}").touch()
            threading.Event().wait()  # it holds up everybody
        if self.trouble == "wait":
            (self.folder / f"waits-{os.getpid()}-{self.seed}").touch()
            await asyncio.Event().wait()
        if self.trouble == "over":  # its deadline passes here
            set_forward(10_000)
            await asyncio.Event().wait()
        return Reply(done=True)

    async def score(self, trajectory):
        if self.trouble == "score":
            raise RuntimeError("no score")
        return {"digit": self.seed % 10, "half": 0.5}

    async def close(self):
        if self.folder is not None:
            (self.folder / f"closed-{self.messages[0]['content']}-{self.seed}").touch()


class Doublings:
    """`trouble` maps examples to what goes wrong; where the file `refuse` is, no other one can be made, and
    where `refuse_and_linger` is, the process does not end either while it is there."""

    def __init__(self, trouble: dict[str, str] | None = None, folder: str | None = None):
        self.trouble, self.folder = trouble or {}, Path(folder) if folder else None
        if self.folder is not None and (self.folder / "refuse").exists():
            raise RuntimeError("the game server is down")
        if self.folder is not None and (self.folder / "refuse_and_linger").exists():
            atexit.register(_linger, self.folder / "refuse_and_linger")
            raise RuntimeError("the game server is down")
        in_a_worker = "verbatim.rollouts.processes.child" in sys.modules
        if in_a_worker and self.folder is not None and (self.folder / "leave").exists():
            sys.exit(0)

    def examples(self, split):
        return [Example(id=str(number)) for number in range(5)]

    async def start(self, example, seed):
        return Doubling(example, seed, self.trouble.get(example.id), self.folder)


def two_turns(request):
    """Calls the tool, then says something whose length is the seed's."""
    answered = 259 in request.prompt_ids.tolist()
    return say("x" * (1 + request.seed % 7)) if answered else call("double", number=request.seed % 100)


def scripted(script=two_turns, **more):
    return ScriptedSampler(script=script, vocab_size=VOCAB_SIZE, context_length=500, **more)


class SecondTurnsWait(ScriptedSampler):
    """`two_turns`, but from request `first` on second turns wait for `go_on`."""

    def __init__(self, first=0):
        super().__init__(script=two_turns, vocab_size=VOCAB_SIZE, context_length=500)
        self.first, self.go_on, self.num_waiting = first, asyncio.Event(), 0

    async def generate(self, request):
        if len(self.requests) >= self.first and 259 in request.prompt_ids.tolist():
            self.num_waiting += 1
            try:
                await self.go_on.wait()
            finally:
                self.num_waiting -= 1
        return await super().generate(request)


class Exchanged:
    """The sampler of the test that is under way, for a pool that several tests share."""

    def __init__(self):
        self.now = scripted()

    def __getattr__(self, name):
        return getattr(self.now, name)


TROUBLES = ("block", "exit", "files", "fork", "interpreter", "lock", "memory", "over", "print", "score", "threads",
            "wait")  # fmt: skip


def sharing_players(folder):
    """For a pool that several tests share: the example of a trouble's name has this trouble."""
    return Players(Exchanged(), trouble={trouble: trouble for trouble in TROUBLES}, folder=str(folder))


class Players:
    """The same setup for a pool of workers and for this process."""

    def __init__(self, sampler=None, *, timeout=600.0, **args):
        self.sampler = sampler or scripted()
        self.args, self.limits = args, EpisodeLimits(timeout=timeout)
        self.environment = Doublings(**args)
        self.folder = self.environment.folder

    def remote(self, name="rollouts.players.Doublings"):
        setup = RemoteSetup(env="doubles", name=name, args=self.args, params=SamplingParams(), limits=self.limits)
        return {("train", "doubles"): setup}

    def pool(self, workers=2, **name):
        """Of Ray actors."""
        inputs = RunnerInputs(
            setups=self.remote(**name), sampler=self.sampler, renderer=ByteRenderer(), workers=workers
        )
        return ray_runner(inputs)

    @contextlib.asynccontextmanager
    async def processes(self, workers=2, *, name="rollouts.players.Doublings", settings=None, logs=None):
        """A pool of processes of this machine."""
        inputs = RunnerInputs(
            setups=self.remote(name), sampler=self.sampler, renderer=ByteRenderer(), workers=workers, logs=logs
        )
        async with process_runner(inputs, settings or ProcessSettings()) as player:
            yield player.pools["train", "doubles"]

    def setup(self, player):
        return RolloutSetup(
            env="doubles",
            environment=self.environment,
            sampler=self.sampler,
            renderer=ByteRenderer(),
            params=SamplingParams(),
            limits=self.limits,
            slots=asyncio.Semaphore(64),
            runner=player,
        )

    def group(self, player, example="3", index=0, size=4, **listeners):
        return GroupRun(self.setup(player), Example(id=example), index=index, size=size, run_seed=7, **listeners)

    async def here(self, example="3", index=0, size=4):
        return await self.group(LocalRunner(), example, index, size).run()


def contents(trajectory):
    """Everything that a trajectory says, in values that can be compared; only seconds are left out."""
    plain = {f.name: getattr(trajectory, f.name) for f in fields(trajectory) if f.name not in ("turns", "info")}
    plain["info"] = {name: value for name, value in trajectory.info.items() if name != "timeline"}
    plain["turns"] = [
        {f.name: _plain(getattr(turn, f.name)) for f in fields(turn) if f.name != "timing"} for turn in trajectory.turns
    ]
    return plain


def _plain(value):
    if isinstance(value, TokenPath):
        value = value.ids()
    return (value.dtype.str, value.tolist()) if isinstance(value, np.ndarray) else value
