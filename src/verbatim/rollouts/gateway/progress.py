"""Keeps what has been sampled of an answer so far, for every stream that shows it."""

from __future__ import annotations

from verbatim.inference.chat.live import LiveAnswer
from verbatim.inference.chat.protocol import Stamp


class Progress(LiveAnswer):
    """One answer, for every client that asks for it.

    Args:
        stamp: Identifies the answer, in each of its streams.
        num_replies: Replies of the answer.
    """

    def __init__(self, stamp: Stamp, num_replies: int = 1) -> None:
        super().__init__(num_replies)
        self.stamp = stamp
        self.turns: list[int] = []
        """The turns of the replies, as they are recorded."""
        self.num_waiting = 0
        """Clients that wait for the answer."""
