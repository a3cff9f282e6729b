"""What is served for verifiers ends with the last episode, however often that is cancelled. verifiers is not needed."""

import asyncio
import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from verbatim.rollouts.gateway.verifiers.serving import Reception, VerifiersServing
from waiting import HANGS, until

pytestmark = pytest.mark.realtime


class Servers:
    """verifiers' environment: notes when its servers are up."""

    def __init__(self, fails=False):
        self.fails, self.may_end = fails, asyncio.Event()
        self.may_end.set()
        self.log = []

    @contextlib.asynccontextmanager
    async def serving(self):
        if self.fails:
            raise OSError("no port is free")
        self.log.append("up")
        try:
            yield
        finally:
            self.log.append("ending")
            await self.may_end.wait()
            self.log.append("down")


async def use(serving, seconds=60.0):
    async with serving.use(100) as reception:
        await asyncio.sleep(seconds)
        return reception.service.url


async def test_a_second_cancellation_leaves_nothing_open():
    servers = Servers()
    servers.may_end.clear()
    serving = VerifiersServing(servers)
    episode = asyncio.create_task(use(serving, 600))
    await until(lambda: servers.log)
    for _ in range(3):
        episode.cancel()
        await until(lambda: servers.log == ["up", "ending"])
        for _ in range(20):  # turns of the event loop, which it could end in
            await asyncio.sleep(0)
    servers.may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await episode
    assert servers.log == ["up", "ending", "down"]
    await use(serving, 0)
    assert servers.log == ["up", "ending", "down"] * 2


async def test_an_episode_that_comes_while_the_last_one_ends_waits_for_that():
    servers = Servers()
    servers.may_end.clear()
    serving = VerifiersServing(servers)
    first = asyncio.create_task(use(serving, 0))
    await until(lambda: servers.log == ["up", "ending"])
    second = asyncio.create_task(use(serving, 0))
    await asyncio.sleep(0)
    second.cancel()
    third = asyncio.create_task(use(serving, 0))
    await asyncio.sleep(0)
    servers.may_end.set()
    await asyncio.wait([first, second, third])
    assert (first.exception(), second.cancelled(), third.exception()) == (None, True, None)
    assert servers.log.count("up") == servers.log.count("down") >= 2
    assert [log for log in servers.log if log != "ending"] == ["up", "down"] * servers.log.count("up")


def test_each_event_loop_has_a_lock_of_its_own_in_renderers():
    """Two loops at a time, and then a third. In each, two requests of one moment take the lock: the second waits."""
    from renderers import client

    both = threading.Barrier(2)
    log = []

    async def ask(name, meet):
        async with client._max_prompt_len_lock:
            log.append(f"{name} in")
            await asyncio.sleep(0)
            meet()
            log.append(f"{name} out")

    async def episodes(name, meet):
        async with VerifiersServing(Servers()).use(100):
            await asyncio.gather(ask(name, meet), ask(name, meet))

    def run(name, meet):
        asyncio.run(episodes(name, meet))

    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(run, name, lambda: both.wait(HANGS)) for name in "ab"]:
            done.result()
    run("c", lambda: None)
    for name in "abc":
        assert [line for line in log if name in line.split()] == [f"{name} in", f"{name} out"] * 2


async def test_servers_that_do_not_start_are_told_to_all_who_wait_and_tried_again_later():
    serving = VerifiersServing(Servers(fails=True))
    failed = await asyncio.gather(use(serving), use(serving), return_exceptions=True)
    assert [str(error) for error in failed] == ["no port is free"] * 2
    serving.env.fails = False
    await use(serving, 0)
    assert serving.env.log == ["up", "ending", "down"]


async def test_all_sessions_of_an_episode_end_when_it_is_cancelled_meanwhile():
    ended, left = [], []

    class Session:
        fault = None

        def __init__(self, name):
            self.name = name

        async def end(self):
            for _ in range(10):
                await asyncio.sleep(0)
            ended.append(self.name)

    service = SimpleNamespace(leave=lambda key, name: left.append(name))
    reception = Reception(service, "key", {"loop": {name: Session(name) for name in ("a", "b", "c")}})
    leaving = asyncio.create_task(reception.disconnect("loop"))
    for _ in range(2):
        await asyncio.sleep(0)
        leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert (left, ended) == (["a", "b", "c"], ["a", "b", "c"])
