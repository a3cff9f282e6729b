"""The ledger adds up, or the step stops."""

import pytest

from verbatim.core.trajectories import Ledger


def test_sampled_is_trained_plus_dropped_plus_pending():
    ledger = Ledger()
    ledger.sampled_tokens(100)
    ledger.settle_group(0, trained=60, dropped={"stale": 10, "filter:zero_advantage": 5})
    ledger.check(pending=25)
    with pytest.raises(AssertionError, match="difference 25"):
        ledger.check(pending=0)


def test_a_group_trained_twice_is_a_crash():
    ledger = Ledger()
    ledger.settle_group(3, trained=0, dropped={})
    ledger.settle_group(0, trained=0, dropped={})
    with pytest.raises(AssertionError, match="trained twice"):
        ledger.settle_group(3, trained=0, dropped={})
    with pytest.raises(AssertionError, match="trained twice"):
        ledger.settle_group(0, trained=0, dropped={})
    assert not ledger.is_settled(1)


def test_a_reason_nobody_knows_is_a_crash():
    with pytest.raises(AssertionError, match="'lost'"):
        Ledger().drop({"lost": 1})


def test_it_continues_from_its_state():
    ledger = Ledger()
    ledger.sampled_tokens(10)
    ledger.settle_group(0, trained=4, dropped={"error": 1})
    ledger.settle_group(2, trained=0, dropped={})
    again = Ledger()
    again.load_state_dict(ledger.state_dict())
    again.check(pending=5)
    assert again.is_settled(2)
    assert not again.is_settled(1)
    assert again.metrics(5) == ledger.metrics(5)
    assert again.metrics(5)["ledger/dropped/error"] == 1
