"""Says which texts can be stop strings: of the configuration, of sampling parameters and of requests."""

from __future__ import annotations

MOST_STOPS = 16
"""Stop strings of one completion."""
LONGEST_STOP = 256
"""Characters of one."""
_NOT_TEXT = "\ufffd"


def stop_problem(stop: object) -> str | None:
    """Why this can be no stop string, as the end of a sentence; None if it can.

    >>> stop_problem("</answer>"), stop_problem("")
    (None, 'is empty, which every text holds')
    """
    if not isinstance(stop, str):
        return "is no text"
    if not stop:
        return "is empty, which every text holds"
    if len(stop) > LONGEST_STOP:
        return f"has {len(stop)} characters; at most {LONGEST_STOP} are taken"
    if _NOT_TEXT in stop or any("\ud800" <= character <= "\udfff" for character in stop):
        return "holds a character that stands for bytes that are no text"
    return None


def stop_strings(stops: object) -> tuple[str, ...]:
    """One text or several as stop strings, each once.

    Raises:
        ValueError: one that can be none, or too many.
    """
    given = (stops,) if isinstance(stops, str) else stops
    if not isinstance(given, (list, tuple)):
        raise ValueError(f"found {str(stops)[:80]!r}, expected a text or a list of texts")
    for stop in given:
        if (problem := stop_problem(stop)) is not None:
            raise ValueError(f"found {str(stop)[:80]!r}, which {problem}")
    if len(given) > MOST_STOPS:
        raise ValueError(f"found {len(given)} texts, expected at most {MOST_STOPS}")
    return tuple(dict.fromkeys(given))
