"""Tracks a session's answers on their way to clients: the progress of each answer, and which answers no client
received."""

from __future__ import annotations

from collections.abc import Sequence

from verbatim.core.records.turn import Turn
from verbatim.inference.chat.live import LiveAnswer
from verbatim.inference.chat.protocol import Stamp
from verbatim.rollouts.recorder import Recorder


class AnswerProgress(LiveAnswer):
    """The progress of one answer. All clients that wait for the answer share this object.

    Args:
        stamp: Identifies the answer in each stream that sends it.
        num_replies: Number of replies in the answer.
    """

    def __init__(self, stamp: Stamp, num_replies: int = 1) -> None:
        super().__init__(num_replies)
        self.stamp = stamp
        self.turns: list[int] = []
        """Indices of the turns of the replies, appended as the turns are recorded."""
        self.num_waiting = 0
        """Number of clients that are waiting for the answer."""


class Delivery:
    """Keeps track of the turns whose answers have not arrived yet.

    An answer has arrived when it was sent in full, or when a later request continues it.
    """

    def __init__(self) -> None:
        self._under_way: set[int] = set()

    def sends(self, turn: int, progress: AnswerProgress | None) -> None:
        """Register a recorded turn whose answer is being sent. Without `progress`, the answer is returned to a caller
        in this process, and cannot be lost."""
        if progress is not None:
            progress.turns.append(turn)
            self._under_way.add(turn)

    def arrived(self, *turns: int) -> None:
        """Register that a client has received the answers of these turns."""
        self._under_way.difference_update(turns)

    def went_on(self, turns: Sequence[Turn]) -> None:
        """Register that the last of these turns was recorded. The client that requested this turn must have received
        the answers of the earlier turns that this turn extends."""
        self.arrived(*[turn for turn in self._under_way if turns[-1].extends(turns[turn])])

    def settle(self, recorder: Recorder, *, trained: bool) -> dict[str, int]:
        """End the session. Answers that are still on their way count as undelivered.

        Args:
            recorder: The recorder of the turns. The undelivered turns become untrained context.
            trained: True to leave the undelivered turns trained.

        Returns:
            Under "undelivered" the number of undelivered answers, and under "undelivered_tokens" the number of tokens
            in these answers.
        """
        lost = sorted(self._under_way)
        self._under_way.clear()
        tokens = sum(len(recorder.turns[turn].completion_ids) for turn in lost)
        for turn in lost if not trained else ():
            recorder.amend(turn, trained=False)
        return {"undelivered": len(lost), "undelivered_tokens": tokens}
