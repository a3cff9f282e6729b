"""Whatever goes wrong in a run, every token that its engine drew is in the ledger, once.

`benchmarks/ledger_campaign.py` runs many more.
"""

import shutil

import pytest

from orchestrator.faulty_runs import Tally, faulty_run, tiny_model


@pytest.fixture(scope="module")
def model():
    folder = tiny_model()
    yield folder
    shutil.rmtree(folder)


@pytest.mark.slow
async def test_no_token_of_a_faulty_run_is_outside_the_ledger(tmp_path):
    total = Tally()
    for seed in range(1000, 1030):
        total.add(await faulty_run(seed, None, tmp_path))
    assert (total.outside, total.runs) == (0, 30)
    assert total.drawn == sum(total.fates.values()) + total.rolled_back > 1000
    assert {"trained", "error", "cancelled"} <= total.fates.keys()


async def test_no_token_of_a_faulty_run_of_the_embedded_engine_is_outside_the_ledger(tmp_path, model):
    total = Tally()
    for seed in range(2000, 2006):
        total.add(await faulty_run(seed, model, tmp_path))
    assert (total.outside, total.runs) == (0, 6)
    assert total.fates["error"] and total.fates["cancelled"]
