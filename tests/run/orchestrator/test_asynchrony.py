"""`max_async_level` and `max_off_policy_steps` at their boundaries: who may start when, who waits, who is too old."""

import asyncio
from dataclasses import replace

import pytest
from loop_runs import (
    GROUP,
    GROUPS,
    FakeTrainer,
    GatedTrainer,
    HeldInTheMiddle,
    make,
    nothing_left_behind,
    until,
    versions,
)

from byte_renderer import VOCAB_SIZE, say
from verbatim.core.trajectories import build, first_version
from verbatim.inference.scripted import ScriptedSampler

BATCH = GROUP * GROUPS


def first_versions(groups):
    return {first_version(t) for g in groups for t in g.trajectories}


@pytest.mark.parametrize("level", [0, 1, 3])
async def test_with_a_slow_trainer_batch_n_is_sampled_with_version_n_minus_k_and_with_no_older_one(tmp_path, level):
    """Each version is let into the world only when nobody samples any more: whoever may start has started."""
    trainer = GatedTrainer(tmp_path)
    orchestrator, notes, sampler = make(tmp_path, level=level, steps=6, trainer=trainer)
    running = asyncio.ensure_future(orchestrator.run())
    for step in range(1, 7):
        launched = min(6, step + level) * BATCH  # batches 0 to (step - 1) + k
        await until(lambda launched=launched: len(sampler.requests) == launched and not sampler.num_in_flight)
        trainer.let(1)
        await until(lambda step=step: len(notes.steps) == step)
    assert await running
    assert [first_versions(groups) for _, _, groups in notes.steps] == [{max(0, n - level)} for n in range(6)]
    assert [metrics["staleness/max"] for _, metrics, _ in notes.steps] == [min(n, level) for n in range(6)]


@pytest.mark.parametrize("oversampling", [1.0, 2.0, 10.0])
@pytest.mark.parametrize("level", [0, 1, 3])
async def test_the_trainer_has_at_most_k_plus_1_batches_and_nobody_samples_for_a_later_one(
    tmp_path, level, oversampling
):
    trainer = GatedTrainer(tmp_path)
    orchestrator, notes, sampler = make(tmp_path, level=level, steps=8, trainer=trainer, oversampling=oversampling)
    running = asyncio.ensure_future(orchestrator.run())
    for step in range(5):
        expected = list(range(step + 1, min(8, step + level + 1) + 1))
        await until(lambda expected=expected: trainer.held == expected)
        await asyncio.sleep(1.0)  # all others have done what they can: nothing more happens
        assert trainer.held == expected
        assert len(sampler.requests) == expected[-1] * BATCH
        assert sampler.num_in_flight == 0
        trainer.let(1)
        await until(lambda step=step: len(notes.steps) == step + 1)
    trainer.let(8)
    assert await running
    assert max(metrics["queue/batches_submitted"] for _, metrics, _ in notes.steps) <= level


@pytest.mark.parametrize("level", [0, 1, 3])
async def test_a_batch_is_handed_over_before_the_report_of_the_one_before_only_where_k_allows_it(tmp_path, level):
    trainer = GatedTrainer(tmp_path)
    orchestrator, _, _ = make(tmp_path, level=level, steps=5, trainer=trainer)
    running = asyncio.ensure_future(orchestrator.run())
    for version in range(1, 6):
        await until(lambda version=version: len(trainer.held) == min(level, 5 - version) + 1)
        trainer.let(1)
        await until(lambda version=version: ("reported", version) in trainer.events)
    assert await running
    at = {event: place for place, event in enumerate(trainer.events)}
    early = [at["handed", n + 1] < at["reported", n] for n in range(1, 5)]
    assert early == [level > 0] * 4
    if level == 1:
        assert at["handed", 3] > at["reported", 1]  # two ahead would be one too many


async def test_queue_time_makes_old_and_what_is_too_old_is_dropped_and_counted(tmp_path):
    """With k = 3 all four batches are sampled with version 0 while the trainer does nothing. At training their ages
    are 0, 1, 2, 3: of these 1 is the oldest that is trained. The trainer's door checks that by itself: here the
    dispatcher is told another bound."""
    trainer = GatedTrainer(tmp_path)
    orchestrator, notes, sampler = make(tmp_path, level=3, steps=4, trainer=trainer, max_off_policy_steps=1)
    running = asyncio.ensure_future(orchestrator.run())
    await until(lambda: len(sampler.requests) == 4 * BATCH and not sampler.num_in_flight)
    trainer.let(4)
    assert await running
    assert [versions(groups) for _, _, groups in notes.steps] == [{0}] * 4
    assert [metrics.get("staleness/max") for _, metrics, _ in notes.steps] == [0, 1, None, None]
    assert [metrics.get("staleness/mean") for _, metrics, _ in notes.steps] == [0, 1, None, None]
    ages = [[metrics[f"staleness/age/{a}"] for a in (0, 1)] for _, metrics, _ in notes.steps]
    assert ages == [[BATCH, 0], [0, BATCH], [0, 0], [0, 0]]
    assert all("staleness/age/2" not in metrics for _, metrics, _ in notes.steps)
    assert [metrics["staleness/dropped"] for _, metrics, _ in notes.steps] == [0, 0, BATCH, BATCH]
    tokens = [sum(t.num_sampled_tokens for g in groups for t in g.trajectories) for _, _, groups in notes.steps]
    ledger = orchestrator.ledger_for_tests
    assert dict(ledger.dropped) == {"stale": tokens[2] + tokens[3]}
    assert ledger.trained == tokens[0] + tokens[1]
    assert ledger.sampled == sum(tokens)
    assert notes.steps[-1][1]["ledger/dropped/stale"] == tokens[2] + tokens[3]
    assert [len(samples) > 0 for samples in trainer.batches] == [True, True, False, False]  # the trainer saw no stale


async def test_what_is_too_old_before_a_batch_takes_it_is_dropped_counted_and_logged(tmp_path):
    """Two of the first three groups are held until they are too old for any batch that comes."""
    sampler = Held({0, 1, 2, 3})
    trainer = GatedTrainer(tmp_path, gates=3)
    orchestrator, notes, _ = make(
        tmp_path, level=1, steps=6, trainer=trainer, sampler=sampler, max_off_policy_steps=1, launch_bound=1
    )
    running = asyncio.ensure_future(orchestrator.run())
    await until(lambda: len(notes.steps) == 3)
    sampler.go_on.set()
    trainer.let(3)
    assert await running
    old = [g for _, _, groups in notes.steps for g in groups if g.group_id in ("train-0", "train-1")]
    assert len(old) == 2
    assert {first_version(t) for g in old for t in g.trajectories} == {0}
    assert sum(metrics["staleness/dropped"] for _, metrics, _ in notes.steps) == 2 * GROUP
    assert [metrics["rollouts"] for _, metrics, _ in notes.steps] == [BATCH] * 6
    assert max(metrics["staleness/max"] for _, metrics, _ in notes.steps) <= 1
    ledger = orchestrator.ledger_for_tests
    assert ledger.dropped["stale"] == sum(t.num_sampled_tokens for g in old for t in g.trajectories)
    ledger.check(pending=0)


class Held(ScriptedSampler):
    """Requests of these numbers are answered when `go_on` is set, as if by the weights of their beginning."""

    def __init__(self, numbers):
        super().__init__(script=lambda request: say("xyz"), vocab_size=VOCAB_SIZE, context_length=100)
        self.numbers, self.go_on = numbers, asyncio.Event()

    async def _answer(self, index, request, versions, watch):
        version = self.policy_version
        if index in self.numbers:
            await self.go_on.wait()
        completion = await super()._answer(index, request, versions, watch)
        return replace(completion, policy_versions=completion.policy_versions * 0 + version)


async def test_the_first_token_sets_the_age_however_new_the_last_one_is(tmp_path):
    """One rollout of batch 1 begins with version 0 and ends with version 1: its age is 1."""
    trainer = GatedTrainer(tmp_path)
    sampler = HeldInTheMiddle(BATCH)
    orchestrator, notes, _ = make(tmp_path, level=1, steps=2, trainer=trainer, sampler=sampler, max_off_policy_steps=0)
    running = asyncio.ensure_future(orchestrator.run())
    await until(lambda: len(sampler.requests) == 2 * BATCH and sampler.num_in_flight == BATCH)
    trainer.let(2)
    await until(lambda: sampler.policy_version == 1)
    sampler.go_on.set()
    assert await running
    last = notes.steps[1]
    assert versions(last[2]) == {0, 1}
    assert last[1]["staleness/age/0"] == 0
    assert last[1]["staleness/dropped"] == BATCH  # 0 steps off policy are allowed


async def test_the_trainer_is_told_the_version_of_every_token_also_where_weights_changed_in_between(tmp_path):
    trainer, sampler = GatedTrainer(tmp_path), HeldInTheMiddle(BATCH)
    orchestrator, notes, _ = make(tmp_path, level=1, steps=2, trainer=trainer, sampler=sampler)
    running = asyncio.ensure_future(orchestrator.run())
    await until(lambda: len(sampler.requests) == 2 * BATCH and sampler.num_in_flight == BATCH)
    trainer.let(2)
    await until(lambda: sampler.policy_version == 1)
    sampler.go_on.set()
    assert await running
    for sample in trainer.batches[1]:
        assert sample.policy_versions[sample.loss_mask].tolist() == [0, 0, 1, 1]  # x y | z end
    in_the_log = [build(t).samples[0].policy_versions.tolist() for g in notes.steps[1][2] for t in g.trajectories]
    assert in_the_log == [sample.policy_versions.tolist() for sample in trainer.batches[1]]


async def test_an_evaluation_of_an_asynchronous_run_is_done_with_one_version(tmp_path):
    """While it runs the trainer publishes the next one, which waits."""
    trainer = FakeTrainer(tmp_path)
    orchestrator, notes, _ = make(tmp_path, level=1, steps=4, trainer=trainer, evaluate=True, token_seconds=0.0005)
    async with nothing_left_behind():
        assert await orchestrator.run()
    assert [(step, versions_of(evaluation)) for step, evaluation in notes.evals] == [(0, {0}), (2, {2}), (4, {4})]
    assert len(trainer.batches) == 4


def versions_of(evaluation):
    return {int(v) for t in evaluation.trajectories for turn in t.turns for v in turn.policy_versions}
