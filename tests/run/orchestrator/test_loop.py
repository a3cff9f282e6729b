"""The loop: every batch from whole groups, versions as the staleness rule says, nothing lost over a stop."""

import asyncio
from collections import Counter

import pytest
from loop_runs import GROUP, GROUPS, Coins, FakeTrainer, make, until, versions

from verbatim.algorithms.credit.baselines import default_advantage
from verbatim.algorithms.filters.zero_advantage import ZeroAdvantage
from verbatim.core.errors import RunStopped
from verbatim.run.orchestrator.assemble import GroupRules, assemble_group


async def test_a_synchronous_run_samples_every_batch_with_the_newest_weights(tmp_path):
    orchestrator, notes, sampler = make(tmp_path, level=0, steps=4)
    assert await orchestrator.run()
    assert [versions(groups) for _, _, groups in notes.steps] == [{0}, {1}, {2}, {3}]
    assert sampler.policy_version == 4
    ledger = orchestrator.ledger_for_tests
    assert (
        ledger.sampled
        == ledger.trained
        == sum(t.num_sampled_tokens for _, _, groups in notes.steps for g in groups for t in g.trajectories)
    )


@pytest.mark.parametrize("level", [1, 3])
async def test_an_asynchronous_run_starts_no_rollout_with_weights_that_are_too_old(tmp_path, level):
    trainer = FakeTrainer(tmp_path, delay=0.01)
    orchestrator, notes, _ = make(tmp_path, level=level, steps=6, trainer=trainer, token_seconds=0.001)
    await orchestrator.run()
    for _, _, groups in notes.steps:
        for group in groups:
            batch = int(group.group_id.removeprefix("train-")) // GROUPS  # that it was launched for
            assert min(versions([group])) >= max(0, batch - level)
    assert any(min(versions(groups)) < batch for batch, (_, _, groups) in enumerate(notes.steps))


@pytest.mark.parametrize("level", [0, 1, 5])
async def test_a_run_ends_with_nothing_pending_and_launches_nothing_that_no_batch_will_use(tmp_path, level):
    orchestrator, _, sampler = make(tmp_path, level=level, steps=3, token_seconds=0.001)
    await orchestrator.run()
    ledger = orchestrator.ledger_for_tests
    ledger.check(pending=0)
    assert ledger.sampled == ledger.trained
    assert len(sampler.requests) == 3 * GROUPS * GROUP


async def test_tokens_that_the_trainer_loses_stop_the_run(tmp_path):
    orchestrator, _, _ = make(tmp_path, trainer=FakeTrainer(tmp_path, loses=1))
    with pytest.raises(AssertionError, match="was given"):
        await orchestrator.run()


async def test_failing_rollouts_are_counted_and_their_groups_trained_without_them(tmp_path):
    environment = Coins(fails=lambda example, seed: seed % 2 == 0)
    orchestrator, notes, _ = make(tmp_path, environment=environment)
    await orchestrator.run()
    everything = [t for _, _, groups in notes.steps for g in groups for t in g.trajectories]
    failed = [t for t in everything if t.error]
    assert 0 < len(failed) < len(everything)
    ledger = orchestrator.ledger_for_tests
    assert ledger.dropped["error"] == sum(t.num_sampled_tokens for t in failed)
    assert sum(m["errors/environment"] for _, m, _ in notes.steps if "errors/environment" in m) == len(failed)


async def test_a_run_in_which_everything_fails_stops_and_says_why(tmp_path):
    orchestrator, _, _ = make(tmp_path, steps=50, environment=Coins(fails=lambda example, seed: True))
    with pytest.raises(RunStopped, match="score raised RuntimeError: no score"):
        await orchestrator.run()


async def test_filtered_rollouts_stay_in_the_metrics_and_their_tokens_under_the_filters_name(tmp_path):
    orchestrator, notes, _ = make(tmp_path, filters={"zero_advantage": ZeroAdvantage()}, steps=6)
    await orchestrator.run()
    flat = [
        t
        for _, _, groups in notes.steps
        for g in groups
        for t in g.trajectories
        if len({u.reward for u in g.trajectories}) == 1
    ]
    assert orchestrator.ledger_for_tests.dropped["filter:zero_advantage"] == sum(t.num_sampled_tokens for t in flat)
    assert sum(m.get("filters/zero_advantage/dropped", 0) for _, m, _ in notes.steps) == len(flat) > 0
    assert all(m["rollouts"] == GROUP * GROUPS for _, m, _ in notes.steps)


async def test_evaluation_runs_before_during_and_after_the_same_number_for_each_example(tmp_path):
    orchestrator, notes, _ = make(tmp_path, steps=4, evaluate=True)
    await orchestrator.run()
    assert [step for step, _ in notes.evals] == [0, 2, 4]
    for _, evaluation in notes.evals:
        assert evaluation.num_episodes == 7  # at most 10, 7 examples
        assert set(Counter(t.example_id for t in evaluation.trajectories).values()) == {1}
    first, last = (notes.evals[place][1].metrics["success"] for place in (0, 2))
    assert first == last  # the same seeds: a coin does not learn


def drawn(notes):
    groups = [group for _, _, groups in notes.steps for group in groups]
    return [(group.group_id, group.example_id, [t.seed for t in group.trajectories]) for group in groups]


async def stop_at(orchestrator, notes, step):
    running = asyncio.ensure_future(orchestrator.run())
    await until(lambda: len(notes.steps) >= step or running.done())
    orchestrator.request_stop()
    return await running


@pytest.mark.parametrize("level", [0, 1])
async def test_after_a_stop_no_example_is_skipped_or_trained_twice(tmp_path, level):
    straight, expected, _ = make(tmp_path, level=level, steps=6)
    await straight.run()
    first, notes, _ = make(tmp_path, level=level, steps=6, token_seconds=0.0005)
    assert not await stop_at(first, notes, 3)
    (state,) = [notes.saved[max(notes.saved)]]
    second, notes, sampler = make(tmp_path, level=level, steps=6, notes=notes)
    second.load_state_dict(state)
    await sampler.update_weights(tmp_path, second.step)
    assert await second.run()
    assert [step for step, _, _ in notes.steps] == [1, 2, 3, 4, 5, 6]
    trained = Counter(g.group_id for _, _, groups in notes.steps for g in groups)
    assert set(trained.values()) == {1}
    if level == 0:
        assert drawn(notes) == drawn(expected)
    ledger = second.ledger_for_tests
    ledger.check(pending=0)


async def test_checkpoints_come_at_the_start_at_the_interval_and_at_the_end(tmp_path):
    orchestrator, notes, _ = make(tmp_path, steps=5, interval=2)
    await orchestrator.run()
    assert sorted(notes.saved) == [0, 2, 4, 5]


async def test_what_is_too_old_at_the_trainers_door_is_dropped_and_counted(tmp_path):
    orchestrator, notes, _ = make(tmp_path, level=0, steps=1)
    await orchestrator.run()
    group = notes.steps[0][2][0]
    rules = GroupRules(
        advantage=default_advantage, filters={}, strategy="interleaved", max_length=100, max_off_policy_steps=8
    )
    on_time, late = assemble_group(group, rules, step=8), assemble_group(group, rules, step=9)
    tokens = sum(t.num_sampled_tokens for t in group.trajectories)
    assert (on_time.num_trained_tokens, on_time.dropped) == (tokens, {})
    assert (late.num_trained_tokens, late.dropped) == (0, {"stale": tokens})
