"""Any number of rounds of a loop, from single ones: what they may assign, whatever came before them.

Rounds are run from every state that earlier rounds may have left: each namespace attribute that a round assigns is
what it was before the loop, or something unknown. Three things are assumed of it at first and dropped once a round
contradicts them, until a pass over all rounds contradicts nothing: then they hold after every number of rounds.

- *together*: attributes that are assigned in the same rounds (`found` and `role`, say) are all assigned or none;
- *even*: when several worlds run in step, all assign it, or none;
- *shared*: and they assign the same value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from verbatim.renderers.proof.symbolic import UNDEFINED, Linear, Oracle, Symbol, Term, explore, linear
from verbatim.renderers.proof.values import Break, NotUnderstood, Perhaps, Place
from verbatim.renderers.proof.world import World

Case = tuple[str, Callable[[World], None]]
"""The role of a round's message, and the round."""
Together = Callable[[Sequence[World], Callable[[World], None]], None]
"""Do the same in each world, and compare them."""


@dataclass
class Changes:
    """What rounds may do to the namespaces, and what is assumed of it."""

    loop: tuple[Any, ...]
    """Which loop, and which part of its rounds."""
    shared: frozenset[Place]
    even: frozenset[Place]
    together: Mapping[Place, frozenset[Place]]
    """Every place that is assigned, and those that go with it."""
    values: dict[Place, dict[int, set[Any]]] = field(default_factory=dict)
    """Place to world to the values assigned."""
    by: dict[Place, set[str]] = field(default_factory=dict)
    """Place to the roles whose messages assign it."""
    missed: set[tuple[int, Place]] = field(default_factory=set)
    """(world, place) that a user's message may leave alone, though nothing was assigned before it."""
    broke: bool = False
    """A round may end the loop."""
    wrote: bool = False
    """A round may write."""

    def question(self, what: str, place: Place, world: World) -> Term:
        """Whether a place was assigned."""
        group = self.together[place]
        return Term(what, (*self.loop, *sorted(group), -1 if group <= self.even else world.number))

    def unknown(self, what: str, place: Place, world: World) -> Term:
        """What it was assigned."""
        return Term(what, (*self.loop, place, -1 if place in self.shared else world.number))

    def record(self, worlds: Sequence[World], role: str, fresh: bool) -> None:
        """Add one round in all worlds; `fresh`: nothing was assigned before it."""
        for world in worlds:
            for place in world.assigned:
                self.values.setdefault(place, {}).setdefault(world.number, set()).add(world.spaces[place])
                self.by.setdefault(place, set()).add(role)
            if fresh and role == "user":
                self.missed |= {(world.number, place) for place in self.together.keys() - world.assigned}
            self.wrote = self.wrote or bool(world.out)

    def without(self, worlds: Sequence[World]) -> Changes:
        """The same assumptions, less those that a round contradicts."""
        first, shared, even, together = worlds[0], set(self.shared), set(self.even), dict(self.together)
        for world in worlds:
            uneven = world.assigned ^ first.assigned
            even -= uneven
            shared -= uneven | {p for p in world.assigned & first.assigned if world.spaces[p] != first.spaces[p]}
            together = {
                place: group & world.assigned if place in world.assigned else group - world.assigned
                for place, group in together.items()
            }
        return Changes(self.loop, frozenset(shared), frozenset(even), together)

    def assumes(self, other: Changes) -> bool:
        """Whether two passes assumed the same."""
        return (self.shared, self.even, self.together) == (other.shared, other.even, other.together)

    def before(self, world: World) -> None:
        """Put a world into any state that rounds may have left before this one."""
        for place in self.together:
            unknown, value = self.unknown("during", place, world), world.spaces.get(place, UNDEFINED)
            world.spaces[place] = Perhaps(self.question("assigned", place, world), unknown, value)

    def after(self, world: World, certain: bool, within: tuple[Linear | int, Linear | int]) -> None:
        """Put a world into any state that all rounds may leave; `certain`: a fresh round of a user is among them.

        Indices that are assigned are `within` these bounds.
        """
        by_users = certain and not self.broke and all(roles == {"user"} for roles in self.by.values())
        for place in sorted(self.values):
            if values := self.values[place].get(world.number):
                value = _one_of(values, self.unknown("after", place, world), world, within)
                if not (by_users and (world.number, place) not in self.missed):
                    question, before = self.question("left", place, world), world.spaces.get(place, UNDEFINED)
                    value = Perhaps(question, value, before)
                world.spaces[place] = value


def any_number(
    loop: tuple[Any, ...], worlds: Sequence[World], cases: Callable[[Changes], Iterable[Case]],
    told: Mapping[Term, bool], in_step: bool, together: Together,
) -> Changes:  # fmt: skip
    """What rounds may assign; `cases` are all rounds there are, `told` what is already known.

    `in_step`: the worlds' rounds are about the same messages. Otherwise nothing is shared.
    """
    places: frozenset[Place] = frozenset()
    while True:
        alike = places if in_step else frozenset()
        changes = Changes(loop, alike, alike, dict.fromkeys(places, places))
        while True:
            left = [changes]
            for role, act in cases(changes):
                explore(partial(_round, worlds, changes, left, role, act, together), told)
            if changes.values.keys() - places or left[0].assumes(changes):
                break
            changes = left[0]
        if not changes.values.keys() - places:
            return changes
        places |= changes.values.keys()


def _round(
    before: Sequence[World], changes: Changes, left: list[Changes], role: str, act: Callable[[World], None],
    together: Together, oracle: Oracle,
) -> None:  # fmt: skip
    worlds = [world.copy(oracle) for world in before]
    for world in worlds:
        changes.before(world)

    ended: set[int] = set()

    def step(world: World) -> None:
        try:
            act(world)
        except Break:
            ended.add(world.number)

    together(worlds, step)
    if ended:
        changes.broke = True
        if len(ended) < len(worlds):
            raise NotUnderstood(worlds[0].line, "a loop over messages that may end earlier in one case")
    fresh = not any(answer for question, answer in oracle.answers.items() if question.op == "assigned")
    changes.record(worlds, role, fresh)
    left[0] = _both(left[0], changes.without(worlds))


def _both(a: Changes, b: Changes) -> Changes:
    """What both assume."""
    joint = {place: group & b.together[place] for place, group in a.together.items()}
    return Changes(a.loop, a.shared & b.shared, a.even & b.even, joint)


def _one_of(values: set[Any], unknown: Term, world: World, within: tuple[Linear | int, Linear | int]) -> Any:
    """Any of the values that rounds assign; of what they have in common, as much as is useful."""
    value = next(iter(values))
    if len(values) == 1 and (value is None or isinstance(value, (str, int))):
        return value
    numbers = [value for value in values if isinstance(value, int) and not isinstance(value, bool)]
    indices = [*(value for value in values if isinstance(value, Linear)), *(Linear(number, ()) for number in numbers)]
    counted = {symbol for index in indices for symbol, _ in index.parts if symbol.rank}
    bases = {(index.constant, tuple(part for part in index.parts if not part[0].rank)) for index in indices}
    if len(indices) == len(values) and len(bases) == len(counted) == 1:
        # The index of some message of the loop, not of the one that a round is at.
        constant, parts = bases.pop()
        copy = Symbol(f"{counted.pop().name}{unknown.args}", 1)
        world.bounds = {**world.bounds, copy: within}
        return linear(constant, {**dict(parts), copy: 1})
    return unknown
