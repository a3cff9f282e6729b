"""Ports that no other process is given while a test may need them."""

from __future__ import annotations

import socket


def held_port() -> socket.socket:
    """A socket that is bound and never listens. Connections to its port are refused, and no other process is given
    the port. A server of the test can listen on it, since servers set SO_REUSEADDR."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held


def number_of(held: socket.socket) -> int:
    return int(held.getsockname()[1])
