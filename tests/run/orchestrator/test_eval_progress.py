"""Which evaluation is the best, when a run ends early, and what is kept of it."""

from __future__ import annotations

import asyncio
import doctest
import json
import math
from types import SimpleNamespace

import pytest

from run.orchestrator.loop_runs import GROUP, GROUPS, FakeTrainer, GatedTrainer, Notes, make, nothing_left_behind, until
from run.orchestrator.test_difficulty_pools import RULES, Uneven
from verbatim import Example
from verbatim.config.orchestrator import EVAL_METRICS, CriterionConfig, EarlyStoppingConfig
from verbatim.rollouts import EpisodeStats
from verbatim.run.orchestrator import eval_progress, loop
from verbatim.run.orchestrator.eval_progress import BestEvaluation, EarlyStopping, EvalProgress, measured
from verbatim.run.orchestrator.evaluate import Evaluation, plan


def evaluation(value: float | None, *, env: str = "coins", episodes: int = 10, failed: int = 0) -> Evaluation:
    metrics = {} if value is None else {"success": value}
    return Evaluation(env=env, num_episodes=episodes, num_failed=failed, metrics=metrics, trajectories=())


def watched(*, best: bool = True, patience: int | None = None, min_delta: float = 0.0, **criterion) -> EvalProgress:
    stopping = None
    if patience is not None:
        stopping = EarlyStopping(rule=EarlyStoppingConfig(patience=patience, min_delta=min_delta, **criterion))
    return EvalProgress(
        best=BestEvaluation(criterion=CriterionConfig(**criterion)) if best else None, early_stopping=stopping
    )


def test_the_examples_of_the_docstrings_hold():
    failed, tried = doctest.testmod(eval_progress)
    assert (failed, tried) == (0, 6)


# ---- the figure


@pytest.mark.parametrize(
    ("env", "evaluations", "value"),
    [
        (None, {"a": evaluation(0.25), "b": evaluation(0.75)}, 0.5),
        ("b", {"a": evaluation(0.25), "b": evaluation(0.75)}, 0.75),
        (None, {"a": evaluation(0.25), "b": evaluation(math.nan)}, None),
        ("a", {"a": evaluation(0.25), "b": evaluation(math.nan)}, 0.25),
        (None, {"a": evaluation(None)}, None),
        (None, {"a": evaluation(math.inf)}, None),
        (None, {"a": evaluation(math.nan, episodes=0)}, None),
    ],
)
def test_a_figure_that_one_environment_did_not_measure_is_no_figure(env, evaluations, value):
    assert measured(CriterionConfig(metric="success", env=env), evaluations) == value


def test_of_equal_evaluations_the_first_is_the_best_and_less_is_better_where_that_is_asked():
    more, less = (BestEvaluation(criterion=CriterionConfig(metric="turns", mode=mode)) for mode in ("max", "min"))
    values = [(0, 3.0), (5, 3.0), (10, 2.0), (15, 4.0), (20, 2.0)]
    assert [more.observe(*value) for value in values] == [True, False, False, True, False]
    assert [less.observe(*value) for value in values] == [True, False, True, False, False]
    assert (more.step, less.step) == (15, 10)


def test_an_improvement_of_just_min_delta_is_none_and_many_small_ones_add_up():
    stopping = EarlyStopping(rule=EarlyStoppingConfig(patience=3, min_delta=0.25))
    for step, value in ((0, 0.0), (1, 0.25), (2, 0.25), (3, 0.375)):
        stopping.observe(step, value)
    assert (stopping.best_step, stopping.since, stopping.reason) == (3, [], None)


def test_what_comes_after_the_end_does_not_take_it_back():
    stopping = EarlyStopping(rule=EarlyStoppingConfig(patience=1))
    for step, value in ((0, 0.5), (1, 0.5), (2, 1.0)):
        stopping.observe(step, value)
    assert stopping.reason == "success did not rise above 0.500 (step 0) in the evaluation after step 1"


def test_what_was_measured_by_another_criterion_is_not_compared_with(caplog):
    before = watched(patience=2)
    before.observe(0, {"coins": evaluation(0.5)})
    state = json.loads(json.dumps(before.state_dict()))
    same, other, none = watched(patience=2), watched(patience=2, mode="min"), EvalProgress()
    for progress in (same, other, none):
        progress.load_state_dict(state)
    assert same.state_dict() == before.state_dict()
    assert (other.best.step, other.early_stopping.best) == (None, None)
    assert none.state_dict() == {"best": None, "early_stopping": None, "played": {}}
    assert caplog.text.count("has changed") == 2


@pytest.mark.parametrize(
    ("env", "failed", "most", "is_compared"),
    [
        (None, {"a": 1, "b": 0}, 0.1, True),
        (None, {"a": 2, "b": 0}, 0.1, False),
        ("b", {"a": 2, "b": 0}, 0.1, True),  # the other one counts
        (None, {"a": 1, "b": 0}, 0.0, False),
        (None, {"a": 9, "b": 9}, 1.0, True),
        (None, {"a": 10, "b": 0}, 1.0, False),  # nothing is left
    ],
)
def test_an_evaluation_of_survivors_is_not_compared_and_says_so(env, failed, most, is_compared, caplog):
    progress = watched(patience=1, env=env)
    progress.max_failed = most
    evaluations = {name: evaluation(0.6, env=name, failed=number) for name, number in failed.items()}
    assert progress.observe(5, evaluations) is is_compared
    assert (progress.early_stopping.best is not None) is is_compared
    said = "the evaluation after step 5 counts neither as the best nor for early stopping: "
    assert (said in caplog.text) is not is_compared
    if not is_compared:
        assert f"{failed['a']} of 10 episodes failed in a" in caplog.text
        caplog.clear()
        progress.observe(10, evaluations)
        assert "after step 10" in caplog.text  # each of them is said, not the first alone


# ---- in a run


@pytest.fixture
def scripted(monkeypatch):
    """`play(values)`: what the evaluations measure, one after the other; None = nothing."""

    def play(values):
        left = iter(values)

        async def evaluate(setup, planned, *, seed):
            await asyncio.sleep(0)
            value = next(left)
            return evaluation(math.nan if value is None else value)

        monkeypatch.setattr(loop, "evaluate", evaluate)

    return play


@pytest.mark.parametrize("level", [0, 1, 3])
async def test_the_best_evaluation_has_a_checkpoint_of_its_own_step_and_the_others_leave_nothing(
    tmp_path, scripted, level
):
    #        step 0    2    4    6    8   10
    scripted([0.1, 0.5, 0.25, 0.5, 0.75, 0.5])
    trainer = FakeTrainer(tmp_path)
    run, notes, _ = make(tmp_path, level=level, steps=10, evaluate=True, progress=watched(), trainer=trainer)
    assert await run.run()
    assert sorted(notes.saved) == [0, 2, 8, 10]
    assert notes.marked == [(0, 0)]
    for step in (2, 8, 10):
        assert notes.saved[step]["step"] == step
        assert notes.saved[step]["evaluations"]["best"]["step"] == min(step, 8)
    assert run.ending()["best"] == {"step": 8, "value": 0.75, "metric": "success", "mode": "max", "env": None}
    assert list((tmp_path / "states").iterdir()) == []


async def test_checkpoints_that_are_due_anyway_are_written_whatever_is_measured(tmp_path, scripted):
    scripted([1.0, 0.5, 0.5, 0.5])
    run, notes, _ = make(tmp_path, level=1, steps=6, evaluate=True, interval=3, progress=watched())
    assert await run.run()
    assert sorted(notes.saved) == [0, 3, 6]
    assert notes.saved[3]["evaluations"]["best"]["step"] == 0


@pytest.mark.slow
async def test_a_run_whose_evaluations_get_no_better_ends_finished_and_says_why(tmp_path, scripted, caplog):
    #        step 0    2    4    6
    scripted([0.25, 0.5, 0.5, 0.375])
    run, notes, _ = make(tmp_path, steps=40, evaluate=True, progress=watched(patience=2))
    async with nothing_left_behind():
        assert await run.run()
    reason = "success did not rise above 0.500 (step 2) in the evaluations after steps 4, 6"
    assert (run.step, run.ending()["stopped_early"]) == (6, reason)
    assert f"the run ends after 6 of 40 steps: {reason}" in caplog.text
    assert max(notes.saved) == 6
    run.ledger_for_tests.check(pending=0)


async def test_batches_that_the_trainer_has_are_trained_and_what_the_run_ends_with_is_evaluated(tmp_path, scripted):
    scripted([0.5, 0.25, 0.75, 0.75])
    trainer = GatedTrainer(tmp_path)
    run, notes, _ = make(tmp_path, level=3, steps=40, evaluate=True, progress=watched(patience=1), trainer=trainer)
    running = asyncio.create_task(run.run())
    await until(lambda: len(trainer.held) >= 4)  # the first evaluation will find the trainer at work
    trainer.let(40)
    assert await running
    assert run.step > 2
    assert [step for step, _ in notes.evals][:2] == [0, 2]
    assert notes.evals[-1][0] == run.step
    assert "in the evaluation after step 2" in run.ending()["stopped_early"]
    run.ledger_for_tests.check(pending=0)
    assert [step for step, *_ in notes.steps] == list(range(1, run.step + 1))


async def test_what_was_not_measured_counts_for_nothing(tmp_path, scripted, caplog):
    scripted([0.5, None, None, 0.25, None, 0.25])
    run, notes, _ = make(tmp_path, steps=10, evaluate=True, progress=watched(patience=2))
    assert await run.run()
    assert run.step == 10  # the second one without an improvement came after the last step
    assert "stopped_early" not in run.ending()
    assert sorted(notes.saved) == [0, 10]
    assert caplog.text.count("success was not measured in the evaluation after step 2") == 1
    assert caplog.text.count("was not measured") == 1


async def stopped_and_resumed(tmp_path, scripted, values, stop_after, progress, later=None, steps=40):
    """The run that is asked to end after this step, resumed; the resumed one and what it logged."""
    scripted(values)
    notes = Notes()
    first, _, _ = make(tmp_path, steps=steps, evaluate=True, progress=progress(), notes=notes)
    tell = notes.on_step

    def on_step(step, *rest):
        tell(step, *rest)
        if step == stop_after:
            first.request_stop()

    notes.on_step = on_step
    await first.run()
    notes.on_step = tell
    second, _, sampler = make(tmp_path, steps=steps, evaluate=True, progress=(later or progress)(), notes=notes)
    second.load_state_dict(notes.saved[max(notes.saved)])
    await sampler.update_weights(tmp_path, second.step)
    assert await second.run()
    return second, notes


async def test_a_resumed_run_remembers_its_patience_and_its_best(tmp_path, scripted):
    """Evaluations after the steps 0, 2, 4; the run ends in order after step 5; then 6 and 8."""
    second, notes = await stopped_and_resumed(
        tmp_path, scripted, [0.25, 0.5, 0.375, 0.5, 0.25], 5, lambda: watched(patience=3)
    )
    assert [step for step, _ in notes.evals] == [0, 2, 4, 6, 8]
    assert second.step == 8
    assert second.ending()["stopped_early"].endswith("above 0.500 (step 2) in the evaluations after steps 4, 6, 8")
    assert second.ending()["best"]["step"] == 2


async def test_a_run_that_ended_early_ends_at_once_when_it_is_resumed_and_goes_on_with_more_patience(
    tmp_path, scripted
):
    def three():
        return watched(patience=3)

    scripted([0.5, 0.25, 0.25, 0.25, 0.25, 0.75, 0.5, 0.5, 0.5])
    first, notes, _ = make(tmp_path, steps=40, evaluate=True, progress=three())
    assert await first.run()
    again, _, sampler = make(tmp_path, steps=40, evaluate=True, progress=three(), notes=notes)
    again.load_state_dict(notes.saved[6])
    assert await again.run()
    assert (again.step, again.stopped_early, sampler.requests) == (6, first.stopped_early, [])
    assert [step for step, _ in notes.evals] == [0, 2, 4, 6]

    more, _, sampler = make(tmp_path, steps=40, evaluate=True, progress=watched(patience=4), notes=notes)
    more.load_state_dict(notes.saved[6])
    await sampler.update_weights(tmp_path, 6)
    assert await more.run()
    assert more.step == 8  # the fourth
    more.ledger_for_tests.check(pending=0)


async def test_the_evaluation_with_which_drained_examples_end_a_run_may_be_the_best(tmp_path, scripted):
    """The checkpoint of that step was written before it was known, and is written again."""
    scripted([0.25, 0.75])
    run, notes, _ = make(
        tmp_path,
        steps=50,
        environment=Uneven(hopeless=True),
        pool_rules=RULES,
        evaluate=True,
        interval=1,
        eval_interval=100,
        progress=watched(),
    )
    assert await run.run()
    assert 0 < run.step < 10
    assert run.ending()["best"]["step"] == run.step
    kept = notes.saved[run.step]["evaluations"]
    assert (kept["last"], kept["best"]["step"], kept["best"]["value"]) == (run.step, run.step, 0.75)


async def test_a_stop_that_is_asked_for_is_no_early_end(tmp_path, scripted):
    scripted([0.5, 0.25, 0.25])
    run, _, _ = make(tmp_path, steps=40, evaluate=True, progress=watched(patience=3))
    run.request_stop()
    assert not await run.run()
    assert "stopped_early" not in run.ending()


async def test_no_batch_is_handed_over_while_a_synchronous_run_may_end(tmp_path, monkeypatch):
    """The evaluation takes longer than the rollouts of the next batch, and what is logged before it too: a minute, in
    which all others do what they can."""
    values, sampled = iter([0.5, 0.25]), []
    asyncio.get_running_loop().thread_seconds = 1.0

    async def evaluate(setup, planned, *, seed):
        sampled.append(len(sampler.requests))
        await asyncio.sleep(60.0)
        assert len(sampler.requests) == sampled[-1] and sampler.num_in_flight == 0
        return evaluation(next(values))

    monkeypatch.setattr(loop, "evaluate", evaluate)
    trainer = FakeTrainer(tmp_path)
    run, _, sampler = make(tmp_path, steps=40, evaluate=True, progress=watched(patience=1), trainer=trainer)
    assert await run.run()
    assert (run.step, len(trainer.batches)) == (2, 2)
    assert sampled == [0, 3 * GROUP * GROUPS]  # those of the third batch had ended


@pytest.mark.parametrize(
    ("episodes", "most", "played"),
    [(24, None, (24, 1)), (120, None, (120, 1)), (300, None, (120, 2)), (24, 8, (8, 3)), (25, 8, (8, 3))],
)
def test_an_evaluation_plays_at_most_its_episodes(episodes, most, played):
    """Of 120 examples. 24 episodes played all of them, and 300 played 360."""
    environment = SimpleNamespace(examples=lambda split: [Example(id=f"e{i}") for i in range(120)])
    setup = SimpleNamespace(env="e", environment=environment, episode_stats=EpisodeStats())
    examples, each = plan(setup, episodes=episodes, most=most)
    assert (len(examples), each) == played and len(examples) * each <= episodes
    assert [example.id for example in examples] == [f"e{i}" for i in range(played[0])]


async def test_an_evaluation_says_how_many_examples_and_episodes_it_has(tmp_path):
    run, notes, _ = make(tmp_path, steps=1, evaluate=True)
    assert await run.run()
    found = notes.evals[0][1]
    assert (found.metrics["examples"], found.num_episodes) == (7, 7)  # of at most 10


async def test_the_metrics_that_a_criterion_may_name_are_those_of_evaluations(tmp_path):
    run, notes, _ = make(tmp_path, steps=1, evaluate=True)
    assert await run.run()
    counts = {"examples", "episodes", "failed"}  # how many were played says nothing of a policy
    assert {*notes.evals[0][1].metrics, "valid_format"} == {*EVAL_METRICS, *counts}
