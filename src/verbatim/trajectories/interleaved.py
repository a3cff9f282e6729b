"""The `interleaved` strategy: a turn joins the sample that its prompt extends exactly, or opens a new one."""

from __future__ import annotations

from collections.abc import Iterable

from verbatim.trajectories.extension import OpenSample, find_extension
from verbatim.types import Turn


def interleaved(turns: Iterable[tuple[int, Turn]], max_length: int | None) -> tuple[list[OpenSample], list[int]]:
    """Merge turns at their exact prefixes.

    All open samples stay candidates, so interleaved agents and returning parents merge again. A turn that
    would make its sample longer than `max_length` is left out whole: cuts fall on turn boundaries.

    Returns:
        The samples, and the indices of the turns that were left out.

    Example: turns `([1], [2])`, `([1, 2, 3], [4])` and `([1, 9], [5])`, written (prompt, completion), become the
    samples `[1, 2, 3, 4]`, where 2 and 4 are trained, and `[1, 9, 5]`, where 5 is trained.
    """
    samples: list[OpenSample] = []
    too_long: list[int] = []
    for index, turn in turns:
        prompt = turn.prompt_ids
        if max_length is not None and len(prompt) + len(turn.completion_ids) > max_length:
            too_long.append(index)
            continue
        extension = find_extension(samples, prompt)
        if extension.sample is None:
            sample = OpenSample()
            samples.append(sample)
            sample.append(prompt)
        else:
            sample = samples[extension.sample]
            sample.append(prompt[extension.shared :])
        start, end = sample.append(turn.completion_ids)
        sample.spans.append((start, end, index))
    return samples, too_long
