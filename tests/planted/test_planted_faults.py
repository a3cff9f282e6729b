"""Faults planted in the core are found by the tests that are named beside them.

Each is a mistake that a change of the code may well make; many were made elsewhere. `pytest tests/planted --whole`
plants all of them. What a list misses is run against the quick suite: if that misses it too, a test is missing.
"""

import ast

import pytest
from faults_of_bridges import BRIDGES
from faults_of_learning import CREDIT, LOSSES, PACKING, STEP
from faults_of_reading import MESSAGES, READING
from faults_of_runs import GATEWAY, LIMITS, RESUME, WEIGHT_SYNC
from faults_of_tokens import LEDGER, RECORDS, SAMPLES
from planted_copy import ROOT, Fault, PlantedCopy

from campaigns import sized

AREAS = {
    "reading": READING,
    "messages": MESSAGES,
    "bridges": BRIDGES,
    "records": RECORDS,
    "samples": SAMPLES,
    "ledger": LEDGER,
    "credit": CREDIT,
    "losses": LOSSES,
    "packing": PACKING,
    "step": STEP,
    "weight sync": WEIGHT_SYNC,
    "gateway": GATEWAY,
    "limits": LIMITS,
    "resume": RESUME,
}
FAULTS = {fault.name: fault for faults in AREAS.values() for fault in faults}
SMALL = [
    "keys that the form does not have are left out",
    "the result of a call may stand behind what the user says",
    "a logprob that is NaN becomes 0",
    "(d) the tools are compared by their number",
    "the stop token is outside of the mask",
    "a state forgets the groups that were settled out of order",
    "the baseline is over rollouts that failed too",
    "the KL term drives the policy away",
    "a target is predicted from itself",
    "the temperature is not applied",
    "the canary compares a version with itself",
    "a request continues the first answer that it has, not the last",
    "bodies are not counted for their session",
    "a resumed run begins its pass again",
]
"""One of each area, which plants and finds in a second."""
QUICK = "not slow and not extras and not vllm and not fake_cuda and not clients"

REWORDED = Fault(
    name="a comment",
    file="algorithms/credit/baselines.py",
    old="    size = len(inputs.rollouts)\n",
    new="    size = len(inputs.rollouts)  # of the group\n",
    harm="None.",
    tests=("algorithms/credit/test_baselines.py",),
)
UNREADABLE = Fault(
    name="no Python",
    file="algorithms/credit/baselines.py",
    old="    size = len(inputs.rollouts)\n",
    new="    size = len(\n",
    harm="Everything stops at once.",
    tests=("algorithms/credit/test_baselines.py",),
)


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    copy = PlantedCopy(tmp_path_factory.mktemp("planted"))
    yield copy
    copy.close()


@pytest.fixture(scope="module")
def clean_outcome(copy, whole):
    """The outcome of a fault's tests without the fault. Those of the small part run once, all in one process; where
    they do not pass, each fault's by themselves say why."""
    together = tuple(dict.fromkeys(test for name in SMALL for test in FAULTS[name].tests))

    def of(fault):
        if not whole and (outcome := copy.clean(together)).is_clean:
            return outcome
        return copy.clean(fault.tests)

    return of


@pytest.mark.slow
@pytest.mark.realtime
@pytest.mark.campaign
@pytest.mark.parametrize("name", sized(SMALL, list(FAULTS)))
def test_a_planted_fault_is_found_by_its_tests(name, copy, clean_outcome, campaign, whole):
    fault = FAULTS[name]
    clean = clean_outcome(fault)
    if not clean.is_clean:
        pytest.fail(f"{fault.tests} do not pass without a fault: {_why(clean)}", pytrace=False)
    outcome = copy.planted(fault)
    campaign("planted faults").add(wrong=not outcome.found)
    if not outcome.found:
        quick = _by_the_quick_suite(copy, fault) if whole and outcome.is_clean else ""
        pytest.fail(f"{fault.tests} miss it: {_why(outcome)}. {quick}", pytrace=False)


def _why(outcome):
    if outcome.failed or outcome.broken:
        return f"{(*outcome.failed, *outcome.broken)[:3]}\n{outcome.said}"
    return f"all {outcome.passed} pass" if outcome.loaded else "they do not import the file"


def _by_the_quick_suite(copy, fault):
    found = copy.found_by(fault, QUICK, seconds=4 * 3600)
    return f"Of the quick suite {found[:3]} find it" if found else "The quick suite misses it too: write a test"


@pytest.mark.slow
@pytest.mark.realtime
def test_a_change_that_changes_nothing_is_missed(copy):
    outcome = copy.planted(REWORDED)
    assert outcome.is_clean
    assert not outcome.found


@pytest.mark.slow
@pytest.mark.realtime
def test_a_file_that_cannot_be_imported_proves_nothing(copy):
    outcome = copy.planted(UNREADABLE)
    assert outcome.broken
    assert not outcome.found
    assert copy.planted(REWORDED).is_clean  # the copy is whole again


def test_a_fault_whose_old_text_is_gone_is_named():
    with pytest.raises(
        AssertionError, match=r"'a comment' is stale: its old text stands 0 times in algorithms/credit/baselines\.py"
    ):
        REWORDED.planted("")
    with pytest.raises(AssertionError, match="stands 2 times"):
        REWORDED.planted(2 * REWORDED.old)


def test_every_fault_can_be_planted_and_its_tests_are_there():
    for fault in FAULTS.values():
        ast.parse(fault.planted((ROOT / "src" / "verbatim" / fault.file).read_text(encoding="utf-8")))
        missing = [test for test in fault.tests if not (ROOT / "tests" / test.partition("::")[0]).exists()]
        assert missing == [], fault.name


def test_every_area_has_faults_and_every_fault_a_name():
    assert all(len(faults) >= 3 for faults in AREAS.values())
    assert sum(map(len, AREAS.values())) == len(FAULTS) >= 40
    assert [sum(fault.name in SMALL for fault in faults) for faults in AREAS.values()] == [1] * len(AREAS)
