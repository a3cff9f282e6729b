"""Runs whose vLLM servers are killed and frozen: every step and group once, every token accounted for, nothing left.

A short part runs with `make test-vllm`, the whole by `make campaigns-vllm`, where a run took 10 to 17 minutes on a busy
machine.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from campaigns import sized
from faults import replica_strikes
from faults.replica_strikes import MOMENTS, SIZES, ReplicaRun, plan
from inference.vllm.double_server import fake_python

RUNS = 10
"""Runs of the whole campaign: two kills and a freeze in each."""
SHORT = 1
"""The one of them whose freeze and first kill are the short part."""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    from verbatim.environments.guess_number import GuessNumber
    from verbatim.models.build import build_model
    from verbatim.models.trained_tokenizer import chat_text

    folder: Path = tmp_path_factory.mktemp("vllm") / "model"
    texts = [chat_text(shown.messages, shown.tools) for shown in GuessNumber().demonstrations(100, seed=0)]
    build_model(folder, SIZES, texts, seed=0)
    return folder


@pytest.mark.campaign
@pytest.mark.realtime
@pytest.mark.vllm
@pytest.mark.parametrize("number", sized([SHORT], list(range(RUNS))))
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
    assert last["replicas/restarts"] >= 1  # each strike waits until the replica before it is back
    largest, num_tokens = run.largest_delta()
    row.note = (
        f"{last['replicas/requests_resent']:.0f} requests sent again, {last['replicas/requests_lost']:.0f} of "
        f"them unknown, {last['replicas/tokens_lost']:.0f} tokens lost; largest |delta logprob| {largest:.2g} "
        f"over {num_tokens} tokens; {run.seconds:.0f} s"
    )
    print(row.note)


def test_the_plans_of_the_whole_are_twenty_kills_and_ten_freezes_at_every_moment():
    strikes = list(itertools.chain(*map(plan, range(RUNS))))
    assert [sum(strike.blow.name == name for strike in strikes) for name in ("SIGKILL", "SIGSTOP")] == [20, 10]
    assert {(strike.moment, strike.part) for strike in strikes} == set(itertools.product(MOMENTS, ("server", "engine")))


def a_step_less(lines: list[Any]) -> None:
    lines.pop()


def a_token_less(lines: list[Any]) -> None:
    lines[-1]["metrics"]["ledger/trained"] -= 1


def another_version(lines: list[Any]) -> None:
    lines[0]["metrics"]["replica/1/policy_version"] = 0


def another_logprob(lines: list[Any]) -> None:
    lines[0]["turns"][0]["logprobs"][0] += 0.001


DAMAGE: dict[str, tuple[str, Callable[[list[Any]], None], str]] = {
    "a step less": ("train_lines", a_step_less, "steps [1, 2]"),
    "a token less in the ledger": ("train_lines", a_token_less, "the ledger does not add up"),
    "a replica with another version": ("train_lines", another_version, "step 1: replica 1 serves 0"),
    "a trajectory less": ("trajectory_lines", a_step_less, "groups {"),
    "another logprob": ("trajectory_lines", another_logprob, "|delta logprob| 0.001"),
}


@pytest.mark.slow
@pytest.mark.realtime
def test_what_is_wrong_with_a_run_is_said(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch):
    """The campaign can fail: a healthy run, over doubles, and what would be said of it if its files were others."""
    run = ReplicaRun(tmp_path / "run", model, python=fake_python(tmp_path, warm=True), steps=3)
    assert run.go([]) == []
    for damage, (name, change, said) in DAMAGE.items():
        lines = getattr(replica_strikes, name)(run.folder)
        change(lines)
        with monkeypatch.context() as patched:
            patched.setattr(replica_strikes, name, lambda _, lines=lines: copy.deepcopy(lines))
            wrong = run.wrong()
        assert any(said in line for line in wrong), (damage, wrong)
    (run.folder / "replica_0.weights").mkdir()
    assert run.wrong() == [f"{run.folder / 'replica_0.weights'} was left"]
