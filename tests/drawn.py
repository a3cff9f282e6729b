"""Campaigns whose cases hypothesis draws: few with all tests, many in a whole campaign.

    @given(batch=batches())
    @drawn("random batches", 20, 2000)
    def test_a_batch_is_packed_once(batch): ...

They are the same in every run, but with `--hypothesis-profile=searching`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import HypothesisException
from hypothesis.strategies import SearchStrategy, tuples

from campaigns import Campaign, sized

CHECKS = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture)
"""Not made: how quick the machine is, and that the fixture which counts is one for all cases of a test."""


def drawn(name: str, small: int, whole: int) -> Callable[[Callable[..., object]], Callable[..., None]]:
    """The test is a campaign; under `@given`.

    Args:
        name: The row of the table at the end.
        small: Cases with all tests, for each of the test's parameters.
        whole: Cases in a whole campaign.
    """

    def decorate(test: Callable[..., object]) -> Callable[..., None]:
        given_to_it = inspect.signature(test)
        fixture = inspect.Parameter("campaign", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        # First, because `given` fills the parameters from the last one on.
        signature = given_to_it.replace(parameters=[fixture, *given_to_it.parameters.values()])

        @functools.wraps(test)
        def tried(*args: Any, **kwargs: Any) -> None:
            values = signature.bind(*args, **kwargs).arguments
            campaign: Callable[[str], Campaign] = values.pop("campaign")
            with counted(campaign(name)):
                test(**values)

        tried.__signature__ = signature  # type: ignore[attr-defined]
        limits = settings(max_examples=sized(small, whole), print_blob=True, suppress_health_check=CHECKS)
        return pytest.mark.campaign(limits(tried))

    return decorate


@contextlib.contextmanager
def counted(row: Campaign) -> Iterator[None]:
    """One more case, wrong where this raises; none where hypothesis gives up what it draws."""
    try:
        yield
    except HypothesisException:
        raise
    except Exception:
        row.add(wrong=True)
        raise
    row.add()


def is_found(case: Callable[..., object], *strategies: SearchStrategy[Any], cases: int = 20) -> bool:
    """Whether one of so many cases raises an AssertionError: that of a planted fault."""

    @settings(max_examples=cases, phases=[Phase.generate], database=None, suppress_health_check=CHECKS)
    @given(tuples(*strategies))
    def look(drawn: tuple[Any, ...]) -> None:
        case(*drawn)

    try:
        look()
    except AssertionError:
        return True
    return False
