"""Hostile requests against a real server process: each is refused by name, and nobody else notices any of them."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from campaigns import sized
from e2e.tiny_runs import build_tiny_model
from faults.hostile_exchange import exchange, verdict
from faults.hostile_requests import CHAT, Case, all_cases
from verbatim.inference.http import protocol
from waiting import HANGS

pytestmark = pytest.mark.realtime


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`verbatim serve` on a free port; at the end it still stops as it should, and has logged no traceback."""
    folder: Path = tmp_path_factory.mktemp("server")
    model = build_tiny_model(folder / "tiny")
    (folder / "weights").mkdir()
    with (folder / "stderr").open("w+") as said:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "verbatim.cli",
                "serve",
                str(model),
                "--port",
                "0",
                "--name",
                "tiny",
                "--seed",
                "0",
                "--device",
                "cpu",
                "--deterministic",
                "--max-batch-size",
                "16",
                "--weights-folder",
                str(folder / "weights"),
            ],
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        try:
            assert process.stdout is not None
            found = re.search(r"tiny at (http://\S+)", process.stdout.readline())
            assert found, (folder / "stderr").read_text()
            yield found[1]
            process.send_signal(signal.SIGTERM)
            assert process.wait(HANGS) == 0
            assert "Traceback" not in (folder / "stderr").read_text()
        finally:
            process.kill()
            process.wait()


def test_answers_that_a_server_should_not_give_are_seen():
    case = Case(name="c", path=CHAT, data=b"{", names=("top_p",))
    assert verdict(case, 400, "top_p: expected a number") is None
    assert verdict(case, 200, "x" * 30_000) is None
    assert verdict(case, 500, "top_p: KeyError") == "c: 500 top_p: KeyError"
    assert verdict(case, 0, "") == "c: 0 "
    assert verdict(case, 400, "expected a number") == "c: the message names none of ('top_p',): expected a number"
    assert verdict(case, 400, "top_p" + "x" * 30_000) == "c: a message of 30005 characters"


def healthy_body(number: int) -> dict[str, Any]:
    return {"token_ids": [5 + number, 6, 7], "sampling_params": {"max_tokens": 12, "seed": number, "logprobs": 1}}


async def healthy(client: httpx.AsyncClient, number: int) -> Any:
    answer = await client.post(protocol.GENERATE, json=healthy_body(number), timeout=HANGS)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    return choice["token_ids"], choice["logprobs"]


@pytest.mark.slow
@pytest.mark.campaign
async def test_hostile_requests_are_refused_by_name_and_change_nothing_for_others(server, campaign):
    cases = all_cases()[:: sized(12, 1)]
    row = campaign("hostile requests")
    wrong: list[str] = []
    async with httpx.AsyncClient(base_url=server) as client:
        alone = [await healthy(client, number) for number in range(8)]
        places, compared = asyncio.Semaphore(8), itertools.count()

        async def play(number: int, case: Case) -> None:
            async with places:
                try:
                    found = verdict(case, *await exchange(server, case))
                except TimeoutError:
                    found = f"{case.name}: no answer"
                row.add(wrong=found is not None)
                wrong.extend([] if found is None else [found])

                if number % 4 == 0:  # seven other places have hostile requests meanwhile
                    same = next(compared) % 8
                    assert await healthy(client, same) == alone[same]

        await asyncio.gather(*itertools.starmap(play, enumerate(cases)))
        count = next(compared)
        began = time.perf_counter()
        assert (await client.get("/health", timeout=HANGS)).status_code == 200
        seconds = time.perf_counter() - began  # reported only
        row.note = f"{count} healthy requests beside them, tokens and logprobs as alone; then /health {seconds:.3f} s"
        chat = await client.post(CHAT, json={"messages": [{"role": "user", "content": "hi"}]}, timeout=HANGS)
        assert chat.status_code == 200
        assert (await client.get(protocol.SAMPLER)).json()["policy_version"] == 0
    assert len(cases) >= 100
    assert wrong == []


@pytest.mark.slow
@pytest.mark.campaign
async def test_thousands_of_requests_and_half_open_connections_leave_the_health_check(server, campaign):
    """2,000 and 1,100; an eighth of them in the short part of the campaign. How long the longest health check took is
    reported."""
    share = sized(8, 1)
    row = campaign("many connections")
    parts = urlsplit(server)
    held = [await asyncio.open_connection(parts.hostname, parts.port) for _ in range(1100 // share)]
    for _, writer in held[::2]:
        writer.write(b"POST /inference/v1/generate HTTP/1.1\r\nHost: localhost\r\n")
    probe = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROBE, f"{server}/health", stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    async with httpx.AsyncClient(base_url=server, timeout=HANGS, limits=httpx.Limits(max_connections=None)) as many:
        body = {"token_ids": [1, 2], "sampling_params": {"max_tokens": 4}}
        calls = [asyncio.create_task(many.post(protocol.GENERATE, json=body)) for _ in range(2000 // share)]
        statuses = [(await call).status_code for call in calls]
    told, _ = await probe.communicate(b"\n")
    for _, writer in held:
        writer.close()
    row.cases += len(held) + len(calls)
    row.wrong += sum(status != 200 for status in statuses)
    row.note = f"/health at most {float(told):.2f} s"
    assert set(statuses) == {200}
    assert probe.returncode == 0, "every health check was answered with 200"


PROBE = """
import select, sys, time, urllib.request
longest, is_over = 0.0, False
while not is_over:
    is_over = select.select([sys.stdin], [], [], 0.05)[0]
    began = time.perf_counter()
    assert urllib.request.urlopen(sys.argv[1], timeout=300).status == 200
    longest = max(longest, time.perf_counter() - began)
print(longest)
"""
"""The longest health check until a line comes, each over a connection of its own, from a process of its own."""
