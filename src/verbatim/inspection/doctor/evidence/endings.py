"""Recognises breaks at the beginning or the end of a text: truncated completions, truncated prompts, and changed stop
tokens."""

from __future__ import annotations

from collections.abc import Sequence

from verbatim.core.texts import counted
from verbatim.inspection.doctor.difference import Difference


def truncated(d: Difference) -> str | None:
    """Recognise a truncated completion whose end differs in the prompt, or a prompt whose beginning is cut off."""
    change = d.change
    for span in d.spans:
        if span.truncated and span.start <= d.at <= span.end and (change.end >= span.end or d.at == span.end):
            length = counted(span.end - span.start, "token")
            return (
                f"turn {span.turn}'s completion was cut off after {length}, and its end is written differently in "
                f"turn {d.opening.turn}'s prompt"
            )
    gone = change.end - change.start
    if d.at <= 1 and gone and change.now_start == change.now_end and d.alignment.meets_again:
        inside_a_message = d.earlier[change.end - 1] != d.earlier[0] if d.at else d.prompt[0] != d.earlier[0]
        if inside_a_message:
            return f"the prompt has lost its first {counted(gone, 'token')} and begins inside a message"
    return None


def stop_token(d: Difference) -> str | None:
    """Recognise a turn whose end in the prompt differs from the sampled end: it has different stop tokens, or more or
    fewer of them."""
    stops, earlier, prompt = d.stops, d.earlier, d.prompt
    start = d.at
    while start and earlier[start - 1] in stops:
        start -= 1
    was, is_now = _run(earlier, start, stops), _run(prompt, start, stops)
    span = next((s for s in d.spans if start < s.end <= start + was or s.end == start), None)
    if span is None or not start <= d.at <= start + max(was, is_now):
        return None
    if was == is_now:
        other = d.at < start + was and earlier[d.at] != prompt[d.at]
        return (
            f"turn {span.turn} ended with {_shown(d, earlier[d.at])}, but with {_shown(d, prompt[d.at])} in the prompt"
            if other
            else None
        )
    if not _next_message(d, start + was, start + is_now):
        return None
    kind = "doubled" if max(was, is_now) > 1 else "missing"
    place = "in the prompt" if (is_now > was) == (kind == "doubled") else "in the record"
    token = (earlier if was > is_now else prompt)[start]
    return f"the stop token {_shown(d, token)} after turn {span.turn} is {kind} {place}: {was} before, {is_now} now"


def _run(ids: Sequence[int], start: int, members: frozenset[int]) -> int:
    """The length of the run of ids from `start` on that are all in `members`."""
    return next((n for n, token in enumerate(ids[start:]) if token not in members), len(ids) - start)


def _next_message(d: Difference, after: int, now: int) -> bool:
    """True if both sequences continue with a new message, not with more of the same message."""
    rest, goes_on = d.earlier[after : after + 2], d.prompt[now : now + 2]
    if rest:
        return rest == goes_on
    if d.text is None:
        followers = {b for a, b in zip(d.prompt, d.prompt[1:], strict=False) if a in d.stops}
        return bool(goes_on) and goes_on[0] in followers
    upcoming = d.prompt[now:]
    to_control = next((n for n, token in enumerate(upcoming) if token in d.text.control), len(upcoming))
    return not d.text.decode(upcoming[:to_control]).strip()


def _shown(d: Difference, token: int) -> str:
    return d.text.piece(token) if d.text is not None else str(token)
