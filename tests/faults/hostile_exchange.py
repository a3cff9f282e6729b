"""Sends a hostile request, byte for byte, and judges the answer."""

from __future__ import annotations

import asyncio
import contextlib
import json
from urllib.parse import urlsplit

from faults.hostile_requests import Case
from waiting import HANGS


async def exchange(url: str, case: Case) -> tuple[int, str]:
    """Status and message of the answer; 0 where the server hung up, as it may after a head that is none."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=2**24)
    headers = {
        "host": parts.netloc,
        "content-type": "application/json",
        "content-length": str(len(case.data)),
        "connection": "close",
        **case.headers,
    }
    head = f"{case.method} {case.path} HTTP/1.1\r\n" + "".join(f"{k}: {v}\r\n" for k, v in headers.items()) + "\r\n"
    data = case.data[: len(case.data) // 2] if case.cut else case.data
    try:
        with contextlib.suppress(ConnectionError):  # it may answer before it has read all, and hang up
            writer.write(head.encode())
            size = max(1, len(data) // case.pieces)
            for start in range(0, len(data), size):
                writer.write(data[start : start + size])
                await writer.drain()
                if case.pieces > 1:
                    await asyncio.sleep(0.05)
            if case.cut:
                return 0, ""
        answer = b""
        with contextlib.suppress(ConnectionError):
            while chunk := await asyncio.wait_for(reader.read(2**20), HANGS):
                answer += chunk
    finally:
        writer.close()
    if not answer:
        return 0, ""
    head_of_answer, _, body = answer.partition(b"\r\n\r\n")
    status = int(head_of_answer.split()[1])
    try:
        return status, str(json.loads(body)["error"]["message"])
    except (ValueError, TypeError, KeyError):
        return status, body.decode(errors="replace")


def verdict(case: Case, status: int, message: str) -> str | None:
    """What is wrong with an answer; None where it is as it has to be."""
    if case.cut or (status == 0 and len(case.data) > 1_000_000):
        return None  # the client hung up, or was still sending when it was refused
    if status not in case.statuses:
        return f"{case.name}: {status} {message[:200]}"
    if status == 400 and case.names and not any(name in message for name in case.names):
        return f"{case.name}: the message names none of {case.names}: {message[:200]}"
    return None if len(message) < 20_000 or status == 200 else f"{case.name}: a message of {len(message)} characters"
