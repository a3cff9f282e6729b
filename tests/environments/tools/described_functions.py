"""Functions with Google docstrings, for the comparison with transformers' schemas. Annotations are postponed."""
# ruff: noqa: UP006, UP007, UP035, UP045, E741, B006

from __future__ import annotations

import functools
from collections.abc import Callable
from enum import Enum, IntEnum
from typing import Annotated, Any, Dict, List, Literal, Optional, Tuple, Union

from pydantic import Field


class Unit(Enum):
    """How warm it is."""

    CELSIUS = "C"
    FAHRENHEIT = "F"


class Level(IntEnum):
    LOW = 1
    HIGH = 2


class Mixed(Enum):
    NOTHING = None
    SOME = 2.5
    MANY = "many"


def plain(place: str, days: int, share: float, is_dry: bool) -> str:
    """Look at the sky over a town.

    Args:
        place: The town.
        days: How many days ahead.
        share: Of clouds.
        is_dry: Whether it rains.

    Returns:
        What there is to see.
    """


def unions(
    a: int | None,
    b: Optional[str],
    c: int | str,
    d: Union[str, float, None],
    e: int | list[int],
    f: Optional[Any],
    g: None,
    h: Union[bool, int, str],
    i: list | tuple,
) -> None:
    """Unions of all kinds.

    Args:
        a: One.
        b: Two.
        c: Three.
        d: Four.
        e: Five.
        f: Six.
        g: Seven.
        h: Eight.
        i: Nine.
    """


def containers(
    a: list,
    b: list[int],
    c: List[str],
    d: dict,
    e: dict[str, float],
    f: Dict[str, list[int]],
    g: tuple,
    h: tuple[int, str],
    i: Tuple[float, list[bool]],
    j: list[Any],
    k: dict[str, Any],
    l: List,
    m: list[dict[str, int | None]],
    n: Dict,
    o: list[list[list[int]]],
    p: Tuple,
    q: dict[int, str],
    r: dict[Literal["x"], int],
) -> dict[str, list]:
    """Containers in containers.

    Args:
        a: a
        b: b
        c: c
        d: d
        e: e
        f: f
        g: g
        h: h
        i: i
        j: j
        k: k
        l: l
        m: m
        n: n
        o: o
        p: p
        q: q
        r: r

    Returns:
        Lists.
    """


def choices(
    unit: Unit,
    level: Level,
    mixed: Mixed | None,
    word: Literal["a", "b"],
    single: Literal[3],
    various: Literal["x", 1, True, None],
    units: list[Unit],
    either: Literal["a"] | int,
    nested: dict[str, Unit | None],
) -> Unit:
    """Choices.

    Args:
        unit: Of the answer.
        level: How loud.
        mixed: Perhaps.
        word: One of two.
        single: The only one.
        various: All kinds.
        units: Several.
        either: A letter or a number.
        nested: By town.

    Returns:
        The unit.
    """


def choices_in_words(drink: str, size: int, price: float) -> str:
    """Order.

    Args:
        drink: What to drink (choices: ["tea", " coffee "])
        size: In
            litres (Choices: [1, 2])
        price: At most (in euros)
    """


def long_words(place: str, days: int) -> str:
    """Look at the sky
    over a town.

    There may be clouds:
      - white ones
      - grey ones

    Args:
        place: The town. It may be
            large: Bonn, say, or
              larger.

            Or small.
        days: How many days
        ahead of today, which is the
        first.

    Raises:
        ValueError: no such town.
    """


def sections_after(place: str) -> Callable[[], int]:
    """Look.

    Args:
        place: The town: a name.

    Returns:
        A function.

    Example:
        >>> sections_after("Bonn")
    """


def note_after(place: str, days: int):
    """Look.

    Example:
        look("Bonn", 1)

    Args:
        place: The town.
        days: Ahead.

    Note:
        Slow: it asks a satellite.
    """


def no_arguments() -> Annotated[list[int], "numbers"]:
    """Roll two dice.

    They are fair.

    Returns:
        Both numbers,
            each from 1 to 6.
    """


def annotated(place: Annotated[str, "a town"], days: Annotated[Optional[int], Field(description="Not this.")]) -> int:
    """Look.

    Args:
        place: The town.
        days: Ahead.
    """


def wrapped(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


@wrapped
def decorated(place: str) -> str:
    """Look.

    Args:
        place: The town.
    """


async def on_the_loop(place: str) -> str:
    """Look.

    Args:
        place: The town.
    """


def by_position(place: str, /, days: int, *, unit: str) -> str:
    """Look.

    Args:
        place: The town.
        days: Ahead.
        unit: C or F.
    """
    return f"{place} {days} {unit}"


class Sky:
    def bound(self, place: str) -> str:
        """Look.

        Args:
            place: The town.
        """

    @staticmethod
    def static(place: str) -> str:
        """Look.

        Args:
            place: The town.
        """

    @classmethod
    def of_class(cls, place: str) -> str:
        """Look.

        Args:
            place: The town.
        """


class Night(Sky):
    def bound(self, place: str) -> str:
        return place


FUNCTIONS = (
    plain, unions, containers, choices, choices_in_words, long_words, sections_after, note_after, no_arguments,
    annotated, decorated, on_the_loop, Sky().bound, Sky.static, Sky().static, Sky.of_class, Night().bound,
)  # fmt: skip


def with_defaults(
    place: str, days: int = 1, unit: Unit = Unit.CELSIUS, note: str | None = None, levels: list[int] = [1, 2]
) -> str:
    """Look.

    Args:
        place: The town.
        days: Ahead.
        unit: Of the answer.
        note: To remember.
        levels: How high.
    """
