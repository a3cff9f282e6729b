"""How tokens are drawn: the one record of it, with its defaults and limits. The run's file, Python and the requests of
servers all give these."""

from __future__ import annotations

from dataclasses import dataclass

INT32_END = 2**31
"""Ids, counts and versions are below this."""
COLDEST, HOTTEST = 1e-6, 1e6
"""The lowest and the highest temperature above 0: beyond, logits divided by it leave float32."""
LEAST_NUCLEUS = 1e-30
"""The smallest `top_p`: below, float32 may round it to 0, which leaves no token."""
TEMPERATURES = f"0, or a number from {COLDEST} to {HOTTEST:.0f}"
"""What `is_temperature` is true of, for people."""
MOST_STOP_IDS = 4096
"""Most stop ids of one request."""
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


def is_temperature(value: float) -> bool:
    """Whether tokens can be drawn at this temperature: at 0 it is the most likely one."""
    return value == 0 or COLDEST <= value <= HOTTEST


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters. Logprobs are always those of the distribution that they define."""

    temperature: float = 1.0
    """Divides the logits; 0 takes the most likely token (evaluation only: training refuses it), else from 1e-6 to
    1e6."""
    max_tokens: int = 512
    """Most tokens of one completion, the stop token included."""
    top_p: float = 1.0
    """Nucleus: the smallest set of tokens with this much probability, at least 1e-30. 1: off."""
    top_k: int = 0
    """The k most likely tokens. 0: off."""
    min_p: float = 0.0
    """Tokens with at least this share of the most likely one's probability. 0: off."""
    stop_token_ids: tuple[int, ...] = ()
    """A completion ends with the first of these; it is part of the completion. At most 4096."""
    stop: tuple[str, ...] = ()
    """Stop strings: a turn ends with the token that completes one of them. Samplers know ids alone and refuse them; who
    has the tokenizer ends turns with them (`AgentLoop`), or a chat server does. At most 16."""
    return_kept_sets: bool = False
    """Return the ids among which each token was drawn, where `top_p`, `top_k` or `min_p` cut the others off."""

    def __post_init__(self) -> None:
        for name, ok, expected in (
            ("temperature", is_temperature(self.temperature), TEMPERATURES),
            ("max_tokens", self.max_tokens >= 1, ">= 1"),
            ("top_p", LEAST_NUCLEUS <= self.top_p <= 1, f"in [{LEAST_NUCLEUS}, 1]"),
            ("top_k", 0 <= self.top_k < INT32_END, "in [0, 2**31)"),
            ("min_p", 0 <= self.min_p < 1, "in [0, 1)"),
            (
                "stop_token_ids",
                len(self.stop_token_ids) <= MOST_STOP_IDS,
                f"at most {MOST_STOP_IDS} ids, found {len(self.stop_token_ids)}",
            ),
            ("stop_token_ids", all(0 <= token < INT32_END for token in self.stop_token_ids), "ids in [0, 2**31)"),
        ):
            if not ok:
                raise ValueError(f"sampling: {name} = {str(getattr(self, name))[:80]}; expected {expected}")
        if self.stop:
            try:
                stop_strings(self.stop)
            except ValueError as error:
                raise ValueError(f"sampling: stop: {error}") from None

    @property
    def truncates(self) -> bool:
        """Whether top-p, top-k or min-p cut the distribution (a trainer needs the kept sets to reproduce that)."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    @property
    def needs_kept_sets(self) -> bool:
        """Whether a completion has to come with its kept sets; greedy tokens are drawn from none."""
        return self.return_kept_sets and self.truncates and self.temperature > 0
