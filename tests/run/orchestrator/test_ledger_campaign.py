"""Whatever goes wrong in a run, every token that its engine drew is in the ledger, once."""

import shutil

import pytest

from campaigns import Campaign, sized
from run.orchestrator.faulty_runs import CampaignCounts, faulty_run, tiny_model
from verbatim.rollouts import draws

pytestmark = pytest.mark.campaign


@pytest.fixture(scope="module")
def model():
    folder = tiny_model()
    yield folder
    shutil.rmtree(folder)


async def total_of(seeds, model, folder, row):
    """What the runs came to; each is a case."""
    total = CampaignCounts()
    for seed in seeds:
        found = await faulty_run(seed, model, folder)
        row.add(wrong=found.outside > 0)
        total.add(found)
    return total


async def test_no_token_of_a_faulty_run_is_outside_the_ledger(tmp_path, campaign):
    row = campaign("faulty runs, scripted engine")
    total = await total_of(range(1000, 1000 + sized(30, 1000)), None, tmp_path, row)
    assert (total.outside, row.wrong) == (0, 0)
    assert total.drawn == sum(total.outcomes.values()) + total.rolled_back > 1000
    assert {"trained", "error", "cancelled"} <= total.outcomes.keys()
    assert {"finished", "stopped", "RunStopped"} <= total.ends.keys()


@pytest.mark.slow
@pytest.mark.realtime
async def test_no_token_of_a_faulty_run_of_the_embedded_engine_is_outside_the_ledger(tmp_path, model, campaign):
    """The engine draws on a thread of its own; how much of a run its deadlines cut off depends on the machine."""
    row = campaign("faulty runs, embedded engine")
    total = await total_of(range(2000, 2000 + sized(20, 120)), model, tmp_path, row)
    assert (total.outside, row.wrong) == (0, 0)
    assert total.drawn == sum(total.outcomes.values()) + total.rolled_back > 0
    assert total.outcomes["cancelled"] > 0


async def test_cut_off_tokens_that_are_not_counted_are_found_by_the_first_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(draws, "num_tokens_drawn", lambda end: 0)
    assert (await total_of(range(1000, 1003), None, tmp_path, Campaign("planted"))).outside > 0
