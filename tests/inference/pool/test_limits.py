"""No limit of the pool ends what a run's settings allow."""

from __future__ import annotations

import pytest

from verbatim.inference.pool.servers import limits_of
from verbatim.inference.pool.settings import ServerSettings


def test_silence_and_stall_are_the_settings():
    limits = limits_of(ServerSettings(health_timeout=7.0, stall_timeout=11.0))
    assert (limits.silence, limits.stall) == (7.0, 11.0)


@pytest.mark.parametrize(("seconds", "update", "start"), [(2.0, 900.0, 1800.0), (1200.0, 3600.0, 2400.0)])
def test_an_update_and_a_start_have_more_time_than_their_parts(seconds, update, start):
    limits = limits_of(ServerSettings(update_timeout=seconds, start_timeout=seconds))
    assert (limits.update, limits.start) == (update, start)
