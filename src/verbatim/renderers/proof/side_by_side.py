"""Two runs of a chat template in step, statement by statement, on messages that are not known; their texts compared."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any

from jinja2 import nodes

from verbatim.renderers.proof.expressions import GLOBALS
from verbatim.renderers.proof.names import Uses, markers, uses
from verbatim.renderers.proof.rounds import Case, Changes, any_number
from verbatim.renderers.proof.situation import Situation
from verbatim.renderers.proof.symbolic import (
    UNDEFINED,
    Impossible,
    Linear,
    Oracle,
    Symbol,
    Term,
    explore,
    linear,
    minus,
    smallest,
)
from verbatim.renderers.proof.values import (
    Break,
    Entry,
    Here,
    Loop,
    Messages,
    NotUnderstood,
    Place,
    Positions,
    Raises,
    Space,
)
from verbatim.renderers.proof.world import World


@dataclass(frozen=True)
class Refusal:
    """Why a template is not continued."""

    line: int
    """Of the template, counted from 1."""
    reason: str


class Differs(Exception):
    """What two runs write is not the same."""

    def __init__(self, line: int, reason: str) -> None:
        super().__init__(reason)
        self.refusal = Refusal(line, reason)


class _Cut(Exception):
    """What is appended begins to be written here."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Program:
    """A chat template as the runs execute it."""

    statements: Sequence[tuple[nodes.Node, Uses]]
    """Each statement at the top, and what is still read after it."""
    variables: tuple[str, ...]
    """The special tokens that it is given."""
    markers: frozenset[str]
    """What a history's texts must not hold to be plain."""

    @classmethod
    def of(cls, template: nodes.Template, variables: Sequence[str]) -> Program:
        """Of a parsed template."""
        in_macros = uses(list(template.find_all(nodes.Macro)))
        statements = [(node, uses(template.body[i + 1 :]) | in_macros) for i, node in enumerate(template.body)]
        return cls(statements=statements, variables=tuple(variables), markers=markers(template))


class SideBySide:
    """Two runs of one template in step, as an oracle answers what they ask."""

    reason = ""
    """What it means if they differ."""

    def __init__(
        self, program: Program, situation: Situation, cuts: set[int], seen: dict[Any, Any], appends: bool,
        oracle: Oracle,
    ) -> None:  # fmt: skip
        self._statements = program.statements
        self._situation = situation
        self._cuts = cuts  # loops that write what is appended
        self._seen = seen  # what came of runs from the same state
        self._appends = appends
        self._oracle = oracle
        self._past_cut = False
        self._worlds = [self._world(program, number) for number in (0, 1)]

    @classmethod
    def check(cls, *arguments: Any) -> None:
        """One run of both.

        Raises:
            Differs: they do not agree.
            Impossible: these answers need not be looked at.
        """
        with suppress(_Cut):
            cls(*arguments)._run()

    # What the two claims do differently

    def _in_step(self) -> bool:
        """Whether both runs are on the same history."""
        raise NotImplementedError

    def _continued(self, number: int) -> bool:
        """Whether a run goes on after its history."""
        raise NotImplementedError

    def _alone(self, tag: str) -> bool:
        """Whether the history is one message."""
        raise NotImplementedError

    def _compares(self, in_future: bool) -> bool:
        """Whether what is written has to be the same."""
        raise NotImplementedError

    def _raised(self, worlds: Sequence[World], raised: Sequence[bool], in_future: bool) -> None:
        """Deal with refusals of the template itself, of which there is at least one."""
        raise NotImplementedError

    # Statements

    def _world(self, program: Program, number: int) -> World:
        tag = "" if self._in_step() else "LR"[number]
        n, f = Symbol(f"n{tag}"), Symbol("f")
        alone = self._alone(tag)
        known = 1 if alone else linear(0, {n: 1})
        first = self._situation.past(f"h{tag}", self._situation.last) if alone else Entry(f"first{tag}", ())
        scope: dict[str, Any] = {name: Term("global", (name,)) for name in GLOBALS}
        scope |= {name: Term("variable", (name,)) for name in (*program.variables, "tools")}
        scope |= {"messages": Messages(), "documents": None, "add_generation_prompt": True}
        scope |= {"messages:first": first, "messages:known": known}
        length = minus(known, minus(0, linear(0, {f: 1}))) if self._continued(number) else known
        return World(
            number=number, tag=tag, oracle=self._oracle, length=length, bounds={n: (2, None), f: (2, None)},
            markers=program.markers, scopes=[scope],
        )  # fmt: skip

    def _run(self) -> None:
        waiting: list[tuple[nodes.Node, Uses]] = []
        for node, live in self._statements:
            if isinstance(node, nodes.For):
                self._straight(waiting)
                waiting = []
                found = [world.value(node.iter) for world in self._worlds]
                if all(isinstance(items, (Messages, Positions)) for items in found):
                    self._loop(node, found)
                    continue
            waiting.append((node, live))
        self._straight(waiting)

    def _straight(self, statements: Sequence[tuple[nodes.Node, Uses]]) -> None:
        """Run statements one after the other; each comes with what is still read after it."""
        if not statements:
            return
        # Before the cut, what was asked on the way here is asked anew: that way it is asked once for all ways.
        told = self._oracle.answers if self._past_cut else {}
        for numbers in [[0, 1]] if self._compares(in_future=False) else [[0], [1]]:
            worlds = [self._worlds[number] for number in numbers]
            key = (id(statements[0][0]), *map(_state, worlds), self._past_cut and frozenset(told.items()))
            if key not in self._seen:
                ways: list[_Way] = [(worlds, {})]
                for node, live in statements:
                    ways = self._ways(ways, partial(_run_one, node, live), told, in_future=False)
                self._seen[key] = ways
            self._go_on(self._seen[key], ("straight", id(statements[0][0]), *numbers))

    def _ways(
        self, ways: Sequence[_Way], act: Callable[[World], None], told: Mapping[Term, bool], in_future: bool
    ) -> list[_Way]:
        """The states in which these worlds can be left. Ways that come out alike are one from there on."""
        ends: dict[Any, _Way] = {}

        def aside(before: Sequence[World], oracle: Oracle) -> None:
            worlds = [world.copy(oracle) for world in before]
            self._together(worlds, act, in_future)
            facts = {question: answer for question, answer in oracle.answers.items() if question.op in _LASTING}
            ends.setdefault((*map(_state, worlds), frozenset(facts.items())), (worlds, facts))

        for worlds, facts in ways:
            explore(partial(aside, worlds), {**told, **facts})
        return list(ends.values())

    def _go_on(self, ways: Sequence[_Way], place: tuple[Any, ...]) -> None:
        """Go on from any of these states."""
        if not ways:
            raise Impossible
        *others, last = ways
        chosen = (way for i, way in enumerate(others) if self._oracle.decide(Term("way", (*place, i))))
        worlds, facts = next(chosen, last)
        if any(self._oracle.answers.get(question, answer) != answer for question, answer in facts.items()):
            raise Impossible
        self._oracle.answers.update(facts)
        for world in worlds:
            self._worlds[world.number] = world.copy(self._oracle)

    def _together(self, worlds: Sequence[World], act: Callable[[World], None], in_future: bool) -> None:
        """Do the same in each world, and compare what they write."""
        raised = []
        for world in worlds:
            try:
                act(world)
                raised.append(False)
            except Raises:
                raised.append(True)
        if any(raised):
            self._raised(worlds, raised, in_future)
        if self._compares(in_future) and len(worlds) == 2:
            _compare(worlds, self.reason)

    # Loops over messages

    def _loop(self, node: nodes.For, found: list[Any]) -> None:
        if node.test is not None or node.else_:
            raise NotUnderstood(node.lineno, "a loop over messages with a filter or an else")
        if any(self._may_begin_late(world, found[world.number].start) for world in self._worlds):
            raise NotUnderstood(node.lineno, "a loop that may leave out the sampled turn")
        if _backwards(found[0]) != _backwards(found[1]) or (self._in_step() and found[0] != found[1]):
            raise Differs(node.lineno, self.reason)
        if _backwards(found[0]):
            self._future(node, found, (0, 1))
            self._past(node, found)
        else:
            broke = self._past(node, found)
            self._future(node, found, [number for number in (0, 1) if not self._ended(node, number, broke[number])])
        self._past_cut = self._past_cut or id(node) in self._cuts

    def _may_begin_late(self, world: World, start: int) -> bool:
        """Whether a loop from there on may begin behind the sampled turn."""
        least = smallest(minus(world.scopes[0]["messages:known"], start), world.bounds)
        return least is None or least < 0

    def _ended(self, node: nodes.For, number: int, broke: bool) -> bool:
        """Whether a round of the history ended the loop; of the same history, in both runs or in none."""
        return broke and self._oracle.decide(Term("broke", (id(node), 0 if self._in_step() else number)))

    def _past(self, node: nodes.For, found: list[Any]) -> list[bool]:
        """The rounds for the history's messages; whether one of them may end the loop, in each run."""
        end_apart = not self._in_step() and not _backwards(found[0])
        certain = "user" in self._situation.roles and not (end_apart and self._situation.last == "user")
        broke = [False, False]
        for numbers in [[0, 1]] if self._in_step() else [[0], [1]]:
            worlds = [self._worlds[number] for number in numbers]
            for world in worlds:
                world.settle(world.places(uses([node])))
            changes = self._all_rounds(node, found, worlds)
            if changes.wrote and self._past_cut:
                raise Differs(node.lineno, self.reason)
            for world in worlds:
                changes.after(world, certain, (0, minus(world.scopes[0]["messages:known"], 1)))
            for number in numbers:
                broke[number] = changes.broke
            if end_apart and _has_round(worlds[0], found, end=True):
                # What the last message leaves behind is known better than what any number of them do.
                end = partial(self._past_round, node, found, self._situation.last, True, False)
                ways = self._ways([(worlds, {})], end, self._oracle.answers, in_future=False)
                self._go_on(ways, ("end", id(node), *numbers))
        return broke

    def _all_rounds(self, node: nodes.For, found: list[Any], worlds: Sequence[World]) -> Changes:
        key = (id(node), *((found[world.number], _state(world)) for world in worlds))
        if key not in self._seen:
            situation = self._situation
            cases: list[Case] = [
                (role, partial(self._past_round, node, found, role, end, True))
                for role in sorted(situation.roles) for end in (False, True)
                if (role == situation.last or not end) and _has_round(worlds[0], found, end)
            ]  # fmt: skip
            self._seen[key] = any_number(
                (id(node), "past"), worlds, lambda _: cases, {}, self._in_step(),
                partial(self._together, in_future=False),
            )  # fmt: skip
        changes: Changes = self._seen[key]
        return changes

    def _past_round(self, node: nodes.For, found: list[Any], role: str, end: bool, any_: bool, world: World) -> None:
        """The round for any message of that role in the middle of the history, or for the last one."""
        start: int = found[world.number].start
        last = minus(world.scopes[0]["messages:known"], 1)
        index: Linear | int = last
        if any_:
            symbol = Symbol(f"i{id(node)}{world.tag}", 1)
            world.bounds = {**world.bounds, symbol: (last if end else start, last if end else minus(last, 1))}
            index = linear(0, {symbol: 1})
        first = world.compare("eq", minus(index, start), 0)
        before: Any = Entry(f"before{world.tag}", ())
        if first:
            before = world.scopes[0]["messages:first"] if start else UNDEFINED
        ends = end and not self._continued(world.number)
        after: Any = Entry(f"after{world.tag}", ())
        if end:
            after = UNDEFINED if ends else self._situation.reply()
        here = Here(index, before, self._situation.past(f"h{world.tag}", role), after)
        _round(node, found[world.number], world, here, first, ends)

    def _future(self, node: nodes.For, found: list[Any], going_on: Sequence[int]) -> None:
        """The rounds for the sampled turn and for what is appended."""
        numbers = [number for number in going_on if self._continued(number)]
        if not numbers:
            return
        next_role = _choose(self._oracle, "first appended", self._situation.appended)
        wrote = [False]

        def reply(world: World) -> None:
            index, items = world.scopes[0]["messages:known"], found[world.number]
            before = self._situation.past(f"h{world.tag}", self._situation.last)
            here = Here(index, before, self._situation.reply(), self._situation.new("new", next_role))
            first = world.compare("eq", minus(index, items.start), 0)
            with _no_break(node):
                _round(node, items, world, here, first, False)
            wrote[0] = wrote[0] or bool(world.out)

        def sampled() -> None:
            worlds = [self._worlds[number] for number in numbers]
            self._go_on(self._ways([(worlds, {})], reply, self._oracle.answers, in_future=True), ("reply", id(node)))

        backwards = _backwards(found[0])
        if not backwards:
            sampled()
        changes = self._all_new_rounds(node, found, [self._worlds[number] for number in numbers])
        if len(numbers) == 1 and not backwards and (wrote[0] or changes.wrote):
            if not self._in_step():
                raise Differs(node.lineno, self.reason)
            self._cuts.add(id(node))
            raise _Cut
        for number in numbers:
            changes.after(self._worlds[number], False, (0, minus(linear(0, {Symbol("f"): 1}), 2)))
        if backwards:
            sampled()
            if len(numbers) == 1 and (wrote[0] or changes.wrote):
                raise Differs(node.lineno, "writes the last messages first")

    def _all_new_rounds(self, node: nodes.For, found: list[Any], worlds: Sequence[World]) -> Changes:
        told = {question: answer for question, answer in self._oracle.answers.items() if question.op in _LASTING}
        key = (id(node), "new", *((found[w.number], _state(w)) for w in worlds), frozenset(told.items()))
        if key not in self._seen:
            entering = {world.number: dict(world.spaces) for world in worlds}

            def cases(changes: Changes) -> Iterable[Case]:
                return [("appended", partial(self._new_round, node, found, entering, changes))]

            self._seen[key] = any_number(
                (id(node), "new"), worlds, cases, told, True, partial(self._together, in_future=True)
            )
        changes: Changes = self._seen[key]
        return changes

    def _new_round(
        self, node: nodes.For, found: list[Any], entering: Mapping[int, Mapping[Place, Any]], changes: Changes,
        world: World,
    ) -> None:  # fmt: skip
        """The round for any of the appended messages."""
        situation, roles, oracle = self._situation, self._situation.appended, world.oracle
        first = oracle.decide(Term("first of the appended", ()))
        last = oracle.decide(Term("last of the appended", ()))
        # How far it is from the sampled turn is the same in both worlds.
        symbol = Symbol(f"k{id(node)}", 1)
        world.bounds = {**world.bounds, symbol: (1, minus(linear(0, {Symbol("f"): 1}), 2))}
        here = Here(
            index=minus(world.scopes[0]["messages:known"], -1 if first else minus(-1, linear(0, {symbol: 1}))),
            before=situation.reply() if first else situation.new("earlier", _choose(oracle, "earlier", roles)),
            current=situation.new("new", _choose(oracle, "appended", roles)),
            after=UNDEFINED if last else situation.new("later", _choose(oracle, "later", roles)),
        )
        if last if _backwards(found[0]) else first:  # the round that is run before all others of them
            world.spaces |= {place: entering[world.number].get(place, UNDEFINED) for place in changes.together}
        with _no_break(node):
            _round(node, found[world.number], world, here, False, last)


_Way = tuple[Sequence[World], Mapping[Term, bool]]
"""Where worlds can be left, and what is known there that questions later on are about."""
_LASTING = frozenset({"odd", "left", "first appended"})
"""Questions about more than the round in which they are asked; others are asked anew, so that a round is run once."""


def _run_one(node: nodes.Node, live: Uses, world: World) -> None:
    """Run a statement, and forget what nothing reads any more."""
    world.run([node])
    known = world.scopes[0]
    world.scopes[0] = {name: known[name] for name in known if name in live.names or ":" in name}
    spaces = {value.number for value in world.scopes[0].values() if isinstance(value, Space)}
    world.spaces = {p: value for p, value in world.spaces.items() if p[0] in spaces and p[1] in live.read}


def _round(node: nodes.For, items: Any, world: World, here: Here, first: bool, last: bool) -> None:
    """One round of a loop over messages, or over their positions."""
    at = minus(here.index, items.start)
    fields: list[tuple[str, Any]] = []
    if _backwards(items):
        at = minus(minus(world.length, 1), here.index)
    else:
        fields = [("first", first), ("last", last)]
        if isinstance(items, Messages):
            neighbours = UNDEFINED if first else here.before, UNDEFINED if last else here.after
            fields += zip(("previtem", "nextitem"), neighbours, strict=True)
    loop = Loop((("index0", at), ("index", minus(at, -1)), *fields))
    world.iterate(node, here.current if isinstance(items, Messages) else at, loop, here)


@contextmanager
def _no_break(node: nodes.For) -> Iterator[None]:
    """A round that must not end the loop: the rounds after it are run in any case."""
    try:
        yield
    except Break:
        raise NotUnderstood(node.lineno, "a loop that may end at the sampled turn or behind it") from None


def _has_round(world: World, found: list[Any], end: bool) -> bool:
    """Whether the history has a message in the middle, or at the end, of what a loop runs over."""
    return world.scopes[0]["messages:known"] != 1 or (end and found[world.number].start == 0)


def _compare(worlds: Sequence[World], reason: str) -> None:
    left, right = (_flat(world.out) for world in worlds)
    if [text for text, _ in left] != [text for text, _ in right]:
        # The first test that came out differently says more than the first text.
        for a, b in zip(*(world.trace for world in worlds), strict=False):
            if a != b:
                raise Differs(a[0], reason)
        raise Differs(next(max(a[1], b[1]) for a, b in _pairs(left, right) if a[0] != b[0]), reason)
    for world in worlds:
        world.out, world.trace = [], []


def _pairs(left: list[tuple[Any, int]], right: list[tuple[Any, int]]) -> Iterable[tuple[Any, Any]]:
    return zip_longest(left, right, fillvalue=(None, 0))


def _flat(out: list[tuple[Any, int]]) -> list[tuple[Any, int]]:
    """Pieces in order, known neighbours joined, each with the line where it ends."""
    flat: list[tuple[Any, int]] = []
    for text, line in out:
        for piece in text.args if isinstance(text, Term) and text.op == "cat" else (text,):
            if isinstance(piece, str) and flat and isinstance(flat[-1][0], str):
                flat[-1] = (flat[-1][0] + piece, line)
            else:
                flat.append((piece, line))
    return flat


def _backwards(items: Any) -> bool:
    return isinstance(items, Messages) and items.reverse


def _choose(oracle: Oracle, what: str, options: frozenset[str]) -> str:
    *others, last = sorted(options)
    return next((option for option in others if oracle.decide(Term(what, (option,)))), last)


def last_line(worlds: Sequence[World]) -> int:
    return max((line for world in worlds for line, _ in world.trace[-1:]), default=1)


def _state(world: World) -> Any:
    """Everything that earlier statements left to later ones."""
    return (
        world.number, frozenset(world.spaces.items()), frozenset(world.scopes[0].items()), tuple(world.bounds.items())
    )  # fmt: skip
