"""The answers of a session that are on their way: what has been sampled of each, and which no client has received."""

from __future__ import annotations

from collections.abc import Sequence

from verbatim.core.records.turn import Turn
from verbatim.inference.chat.live import LiveAnswer
from verbatim.inference.chat.protocol import Stamp
from verbatim.rollouts.recorder import Recorder


class AnswerProgress(LiveAnswer):
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


class Delivery:
    """The turns whose answers are on their way.

    An answer has arrived where it was sent to its end, or where a later request goes on from it.
    """

    def __init__(self) -> None:
        self._under_way: set[int] = set()

    def sends(self, turn: int, progress: AnswerProgress | None) -> None:
        """A turn is recorded, whose answer is sent now; without progress it is returned to the caller."""
        if progress is not None:
            progress.turns.append(turn)
            self._under_way.add(turn)

    def arrived(self, *turns: int) -> None:
        """A client has the answers of these turns."""
        self._under_way.difference_update(turns)

    def went_on(self, turns: Sequence[Turn]) -> None:
        """The prompt of the last turn is there: a client has the answers of the turns that it extends."""
        self.arrived(*[turn for turn in self._under_way if turns[-1].extends(turns[turn])])

    def settle(self, recorder: Recorder, *, trained: bool) -> dict[str, int]:
        """The session is over: what is still under way is lost.

        Args:
            recorder: Has the turns; they are context from now on.
            trained: Whether they stay as they are.

        Returns:
            "undelivered" answers and "undelivered_tokens".
        """
        lost = sorted(self._under_way)
        self._under_way.clear()
        tokens = sum(len(recorder.turns[turn].completion_ids) for turn in lost)
        for turn in lost if not trained else ():
            recorder.amend(turn, trained=False)
        return {"undelivered": len(lost), "undelivered_tokens": tokens}
