"""Runs whose vLLM servers are killed and frozen: every step and group once, every token accounted for, nothing left.

A short part runs with `make test-vllm`, the whole by `make faults-vllm`; a run took 10 to 17 minutes on a busy machine.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from faults.replica_strikes import MOMENTS, SIZES, ReplicaRun, plan

RUNS = 10
"""Runs of the whole campaign: two kills and a freeze in each."""
SHORT = 1
"""The one of them whose freeze and first kill are the short part."""


def pytest_generate_tests(metafunc):
    if "number" in metafunc.fixturenames:
        whole = metafunc.config.getoption("--whole", default=False)
        metafunc.parametrize("number", range(RUNS) if whole else [SHORT])


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    from verbatim.environments.guess_number import GuessNumber
    from verbatim.models.build import build_model, chat_text

    folder: Path = tmp_path_factory.mktemp("vllm") / "model"
    texts = [chat_text(shown.messages, shown.tools) for shown in GuessNumber().demonstrations(100, seed=0)]
    build_model(folder, SIZES, texts, seed=0)
    return folder


@pytest.mark.vllm
def test_a_run_whose_replicas_are_killed_and_frozen_loses_nothing_uncounted(
    tmp_path: Path, model: Path, number: int, whole: bool, campaign
):
    strikes = plan(number) if whole else plan(number)[:2]
    run = ReplicaRun(tmp_path / "run", model)
    wrong = run.go(strikes)
    for strike in strikes:
        campaign(f"replicas: {strike.blow.name} of the {strike.part}").add()
    row = campaign(f"run {number} with two replicas")
    row.add(wrong=bool(wrong))
    assert not wrong, "\n".join(wrong)
    last = run.metrics()
    assert last["replicas/lost"] >= len(strikes)  # a machine that is too busy loses some more
    largest, num_tokens = run.largest_delta()
    row.note = (f"{last['replicas/requests_resent']:.0f} requests sent again, {last['replicas/requests_lost']:.0f} of "
                f"them unknown, {last['replicas/tokens_lost']:.0f} tokens lost; largest |delta logprob| {largest:.2g} "
                f"over {num_tokens} tokens; {run.seconds:.0f} s")  # fmt: skip
    print(row.note)


def test_the_plans_of_the_whole_are_twenty_kills_and_ten_freezes_at_every_moment():
    strikes = list(itertools.chain(*map(plan, range(RUNS))))
    assert [sum(strike.blow.name == name for strike in strikes) for name in ("SIGKILL", "SIGSTOP")] == [20, 10]
    assert {(strike.moment, strike.part) for strike in strikes} == set(itertools.product(MOMENTS, ("server", "engine")))
