"""Defines the sampling parameters, their defaults and their limits, which configuration files, the Python API and
requests to servers share."""

from __future__ import annotations

from dataclasses import dataclass

INT32_END = 2**31
"""Exclusive upper bound for ids, counts and versions."""
COLDEST, HOTTEST = 1e-6, 1e6
"""Lowest and highest temperature above 0; beyond these, divided logits leave the range of float32."""
LEAST_NUCLEUS = 1e-30
"""Minimum `top_p`; float32 may round smaller values to 0, and then no token would be kept."""
TEMPERATURES = f"0, or a number from {COLDEST} to {HOTTEST:.0f}"
"""The temperatures that `is_temperature` accepts, for messages."""
MOST_STOP_IDS = 4096
"""Maximum number of stop ids per request."""
MOST_STOPS = 16
"""Maximum number of stop strings per completion."""
LONGEST_STOP = 256
"""Maximum length of a stop string in characters."""
_NOT_TEXT = "\ufffd"


def stop_problem(stop: object) -> str | None:
    """Why a value cannot be a stop string, as the end of a sentence; None if it can be one.

    >>> stop_problem("</answer>"), stop_problem("")
    (None, 'is empty, which every text contains')
    """
    if not isinstance(stop, str):
        return "is not a text"
    if not stop:
        return "is empty, which every text contains"
    if len(stop) > LONGEST_STOP:
        return f"has {len(stop)} characters; at most {LONGEST_STOP} are allowed"
    if _NOT_TEXT in stop or any("\ud800" <= character <= "\udfff" for character in stop):
        return "contains a character that stands for invalid bytes"
    return None


def stop_strings(stops: object) -> tuple[str, ...]:
    """One string or several strings as stop strings, without duplicates.

    Raises:
        ValueError: a value cannot be a stop string, or there are too many values.
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
    """True if tokens can be sampled at this temperature; 0 means greedy."""
    return value == 0 or COLDEST <= value <= HOTTEST


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters. Logprobs always refer to the distribution that these parameters define."""

    temperature: float = 1.0
    """Divisor of the logits, from 1e-6 to 1e6; 0 takes the most likely token (for evaluation only: training refuses
    it)."""
    max_tokens: int = 512
    """Maximum number of tokens in one completion, including the stop token."""
    top_p: float = 1.0
    """Nucleus sampling: keep the smallest set of tokens with this total probability (1e-30 or more); 1 to keep all."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 to keep all."""
    min_p: float = 0.0
    """Keep tokens with at least this share of the most likely token's probability; 0 to keep all."""
    stop_token_ids: tuple[int, ...] = ()
    """A completion ends with the first of these ids, which is part of the completion. At most 4096 ids."""
    stop: tuple[str, ...] = ()
    """Stop strings: a turn ends with the token that completes a stop string. Samplers see only ids and refuse stop
    strings; turns are ended by the code that has the tokenizer (`AgentLoop`), or by a chat server. At most 16
    strings."""
    return_kept_sets: bool = False
    """Return the kept set of each token, if `top_p`, `top_k` or `min_p` cut the distribution."""

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
        """True if top-p, top-k or min-p cut the distribution; a trainer then needs the kept sets to reproduce it."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    @property
    def needs_kept_sets(self) -> bool:
        """True if a completion must include its kept sets; greedy tokens are not sampled from a set."""
        return self.return_kept_sets and self.truncates and self.temperature > 0
