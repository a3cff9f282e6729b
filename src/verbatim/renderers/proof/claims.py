"""Whether a chat template can be continued: appended messages change nothing before them, and nothing before them
changes how they are written.

Let H be any history that ends where a turn is sampled, A the sampled turn and N what is appended. Two claims, each
about two runs of the template side by side, statement by statement, on unknown messages (`world.World`):

- *kept*: what is written before A is the same for H and for H + A + N;
- *follows*: what is written from A on is the same after any two histories of one `Situation`. So a short history
  of that situation shows what comes after a long one.

A loop over messages is not run once per message: `rounds` shows what any number of rounds may leave behind, by
induction, from single rounds for each role, in the middle of H and at its end. Both runs have to write the same in
every such round. Only loops at the top of the template are taken apart like this; a loop over messages inside another
statement is refused.

Example, Qwen3, a tool's answer appended. The loop that looks for the last user message assigns nothing for the roles
assistant and tool, so `last_query_index` is the same in both runs; `loop.last` is true at the end of H in one run only,
but `loop.last or messages[loop.index0 + 1].role != "tool"` is true in both, since A is what follows. *Kept* holds. A
user message instead is assigned, `loop.index0 > ns.last_query_index` may differ, and with it whether thinking is
written: refused at that line, unless nothing has been thought.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial

from jinja2 import nodes

from verbatim.renderers.metering.meter import Meter, Overrun
from verbatim.renderers.proof.side_by_side import Differs, Program, Refusal, SideBySide, last_line
from verbatim.renderers.proof.situation import Situation
from verbatim.renderers.proof.symbolic import ALLOWED, Impossible, Term, TooManyPaths, explore
from verbatim.renderers.proof.values import NotUnderstood
from verbatim.renderers.proof.world import World

MOST_STEPS = 1_000_000
"""Steps of one proof, by the size of what each looks at: some ten seconds. No template of the tests needs more
than 900,000."""
TOO_MANY = "too many different ways through the template"


class Prover:
    """Answers for one template; each situation is looked at once. `variables` are the special tokens it is given."""

    def __init__(self, template: nodes.Template, variables: Sequence[str]) -> None:
        self._program = Program.of(template, variables)
        self.markers = self._program.markers
        """What a history's texts must not hold to be plain."""
        self.refusal: Callable[[Situation], Refusal | None] = lru_cache(maxsize=1024)(self._refusal)

    def _refusal(self, situation: Situation) -> Refusal | None:
        """Why not; None: proven."""
        cuts: set[int] = set()
        ALLOWED.set(Meter(steps=MOST_STEPS, seconds=math.inf))
        try:
            explore(partial(_Kept.check, self._program, situation, cuts, {}, True), {})
            if not cuts:
                return Refusal(1, "nothing that is appended is ever written")
            for appends in (True, False):
                explore(partial(_Follows.check, self._program, situation, cuts, {}, appends), {})
        except Differs as difference:
            return difference.refusal
        except NotUnderstood as error:
            return Refusal(error.line, f"{error.what}, which the proof does not cover")
        except (TooManyPaths, Overrun, RecursionError, MemoryError):
            return Refusal(1, TOO_MANY)
        return None


class _Kept(SideBySide):
    """The history alone, and the same history continued."""

    reason = "what is written for the history may change when messages are appended"

    def _in_step(self) -> bool:
        return True

    def _continued(self, number: int) -> bool:
        return number == 1

    def _alone(self, tag: str) -> bool:
        return len(self._situation.roles) == 1 and self._oracle.decide(Term("alone", ()))

    def _compares(self, in_future: bool) -> bool:
        return not in_future

    def _raised(self, worlds: Sequence[World], raised: Sequence[bool], in_future: bool) -> None:
        if raised[0] or in_future:
            # The prompt was rendered, so this was not it; and what is appended is rendered before it is used.
            raise Impossible
        raise Differs(last_line(worlds), "refuses what is appended")


class _Follows(SideBySide):
    """Two histories of one situation, both continued, or both not."""

    reason = "what is written for appended messages may depend on more of the history than is looked at"

    def _in_step(self) -> bool:
        return False

    def _continued(self, number: int) -> bool:
        return self._appends

    def _alone(self, tag: str) -> bool:
        return self._situation.may_be_shown_by_one and self._oracle.decide(Term("alone", (tag,)))

    def _compares(self, in_future: bool) -> bool:
        return in_future or self._past_cut

    def _raised(self, worlds: Sequence[World], raised: Sequence[bool], in_future: bool) -> None:
        if all(raised) or not self._compares(in_future):
            raise Impossible
        raise Differs(last_line(worlds), self.reason)
