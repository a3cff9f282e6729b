"""Whatever fails, and whenever a run is stopped: what was trained is kept, and nothing is lost or counted twice."""

import asyncio

import numpy as np
import pytest
from loop_runs import (
    GROUP,
    GROUPS,
    Coins,
    FailingTrainer,
    FakeTrainer,
    GatedTrainer,
    HeldInTheMiddle,
    Notes,
    go_on_and_check,
    make,
    nothing_left_behind,
    until,
)

from byte_renderer import VOCAB_SIZE, say
from verbatim.core.errors import CheckpointNotWritten, EngineDead, ModelError, RunStopped, SamplerFault
from verbatim.inference.scripted import ScriptedSampler, default_logprob
from verbatim.trainer.transport import StepReport
from verbatim.trainer.transport.canary import Probes

BATCH = GROUP * GROUPS


def steps_of(notes):
    return [step for step, _, _ in notes.steps]


# ---- the trainer


@pytest.mark.slow
@pytest.mark.parametrize("level", [0, 1, 3])
async def test_a_batch_that_fails_ends_the_run_and_those_handed_over_after_it_are_sampled_again(tmp_path, level):
    trainer = FailingTrainer(tmp_path, at=3, ahead=level)
    orchestrator, notes, _ = make(tmp_path, level=level, steps=6, trainer=trainer)
    async with nothing_left_behind():
        with pytest.raises(RunStopped, match=r"^the trainer: no finite loss for version 3$"):
            await orchestrator.run()
    assert trainer.handed == list(range(1, 3 + level + 1))
    assert steps_of(notes) == [1, 2]
    assert max(notes.saved) == 2
    await go_on_and_check(notes, tmp_path, level=level)


async def test_a_trainer_that_cannot_save_after_its_failure_leaves_the_checkpoint_before(tmp_path, caplog):
    """Some optimizer steps of the failed batch were taken: what it holds is no state between two batches."""
    trainer = FailingTrainer(tmp_path, at=4, can_save=False)
    orchestrator, notes, _ = make(tmp_path, level=1, steps=6, trainer=trainer, interval=2, notes=SavesTheFirst())
    async with nothing_left_behind():
        with pytest.raises(RunStopped, match="no finite loss for version 4"):
            await orchestrator.run()
    assert steps_of(notes) == [1, 2, 3]
    assert sorted(notes.saved) == [0, 2]
    assert "no checkpoint of the state after 3 steps could be written: the state is gone" in caplog.text
    await go_on_and_check(notes, tmp_path, step=2, level=1)


class SavesTheFirst(Notes):
    """The trainer is well until it has failed."""

    async def save(self, step, trainer, state, trainer_state=None):
        await super().save(step, trainer, state, trainer_state or ("there" if step == 0 else None))


class DyingTrainer(FakeTrainer):
    """Trains until it dies; then it answers nobody, and whoever watches it is told."""

    def __init__(self, tmp_path):
        super().__init__(tmp_path)
        self.dead = asyncio.Event()

    async def train(self, samples, version, *, checkpoint=False):
        if self.dead.is_set():
            raise RunStopped("the trainer was ended by SIGKILL")
        return await super().train(samples, version, checkpoint=checkpoint)

    async def save(self, folder, version):
        if self.dead.is_set():
            raise RunStopped("the trainer was ended by SIGKILL")

    async def watch(self):
        await self.dead.wait()
        raise RunStopped("the trainer was ended by SIGKILL")


@pytest.mark.parametrize("level", [0, 1])
async def test_a_trainer_that_dies_while_rollouts_are_awaited_ends_the_run_at_once(tmp_path, level):
    """The rollouts of the third batch never end."""
    trainer = DyingTrainer(tmp_path)
    sampler = ScriptedSampler(
        script=lambda r: say("x" * (1 + r.seed % 5)),
        vocab_size=VOCAB_SIZE,
        context_length=100,
        trouble=lambda index, request: "hang" if index >= 2 * BATCH else None,
    )
    orchestrator, notes, _ = make(tmp_path, level=level, steps=6, trainer=trainer, sampler=sampler, interval=2)
    async with nothing_left_behind():
        running = asyncio.ensure_future(orchestrator.run())
        await until(lambda: steps_of(notes) == [1, 2] and 2 in notes.saved and sampler.num_in_flight == BATCH)
        trainer.dead.set()
        with pytest.raises(RunStopped, match="the trainer was ended by SIGKILL"):
            await running  # the rollouts would take for ever
    assert sampler.num_in_flight == 0
    await go_on_and_check(notes, tmp_path, level=level)


# ---- the sampler


class DyingEngine(ScriptedSampler):
    """Answers nothing any more once `why` says so."""

    why = None

    @property
    def failure(self):
        return self.why


@pytest.mark.parametrize("level", [0, 1])
async def test_an_engine_that_dies_ends_the_run_at_once_with_its_reason(tmp_path, level):
    """The rollouts of the third batch never end."""
    sampler = DyingEngine(
        script=lambda r: say("x" * (1 + r.seed % 5)),
        vocab_size=VOCAB_SIZE,
        context_length=100,
        trouble=lambda index, request: "hang" if index >= 2 * BATCH else None,
    )
    orchestrator, notes, _ = make(tmp_path, level=level, steps=6, sampler=sampler, interval=2)
    async with nothing_left_behind():
        running = asyncio.ensure_future(orchestrator.run())
        await until(lambda: steps_of(notes) == [1, 2] and 2 in notes.saved and sampler.num_in_flight == BATCH)
        sampler.why = "the sampler's thread failed: ZeroDivisionError"
        with pytest.raises(EngineDead, match="thread failed: ZeroDivisionError"):
            await running  # the rollouts would take for ever
    assert sampler.num_in_flight == 0
    await go_on_and_check(notes, tmp_path, level=level)


class ThreadFails(ScriptedSampler):
    """Its engine dies while it loads version 2: the folder is gone."""

    async def update_weights(self, path, version):
        if version == 2:
            raise SamplerFault("the sampler's thread failed: FileNotFoundError: model.safetensors")
        await super().update_weights(path, version)


def scripted(kind=ScriptedSampler, **arguments):
    script = {"script": lambda r: say("x" * (1 + r.seed % 5)), "vocab_size": VOCAB_SIZE, "context_length": 100}
    return kind(**script, **arguments)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "arguments", "error"),
    [
        (ScriptedSampler, {"failing_updates": frozenset({2})}, ModelError),
        (ThreadFails, {}, SamplerFault),
    ],
)
@pytest.mark.parametrize("level", [0, 1])
async def test_weights_that_cannot_be_loaded_end_the_run_with_everything_trained_settled_once(
    tmp_path, level, kind, arguments, error
):
    orchestrator, notes, sampler = make(tmp_path, level=level, steps=6, sampler=scripted(kind, **arguments))
    async with nothing_left_behind():
        with pytest.raises(error):
            await orchestrator.run()
    assert steps_of(notes) == list(range(1, orchestrator.step + 1))
    assert 2 <= orchestrator.step <= 2 + level
    assert max(notes.saved) == orchestrator.step
    assert sampler.policy_version == 1
    await go_on_and_check(notes, tmp_path, level=level)


PROBE_IDS = (np.array([5, 9], np.int32), np.array([7, 3], np.int32))


def probes(shift=0.0):
    """What the scripted sampler says of the probes, and how far a trainer is from it."""
    logprobs = tuple(np.array([default_logprob(int(ids[1])) + shift], np.float32) for ids in PROBE_IDS)
    return Probes(token_ids=PROBE_IDS, logprobs=logprobs)


class ProbingTrainer(FakeTrainer):
    """From version 2 on the sampler is wrong by 0.5."""

    def report(self, samples, version, checkpoint):
        report = super().report(samples, version, checkpoint)
        fields = {**vars(report), "probes": probes(0.0 if version < 2 else 0.5)}
        return StepReport(**fields)


class SamplesMeanwhile(HeldInTheMiddle):
    """While the canary looks at version 2, the rollouts that began with version 1 go on to their end."""

    async def prompt_logprobs(self, token_ids, temperature=1.0):
        if self.policy_version == 2:
            self.go_on.set()
            await asyncio.sleep(1.0)  # all others do what they can: make a batch of them, and hand it over
        return await super().prompt_logprobs(token_ids, temperature)


@pytest.mark.slow
@pytest.mark.parametrize("level", [0, 1, 3])
async def test_a_sampler_that_holds_other_weights_samples_nothing_that_is_trained(tmp_path, level):
    trainer = ProbingTrainer(tmp_path, delay=0.002)
    sampler = SamplesMeanwhile(first=2 * BATCH)
    orchestrator, notes, _ = make(tmp_path, level=level, steps=6, trainer=trainer, sampler=sampler, probes=probes())
    async with nothing_left_behind():
        with pytest.raises(
            RunStopped,
            match=(
                r"the sampler does not hold policy version 2, which it was told to load: its logprobs differ by 0\.5 "
                r"on average, more than 0\.0001\. Sampling has stopped"
            ),
        ):
            await orchestrator.run()
    assert steps_of(notes) == list(range(1, orchestrator.step + 1))
    assert 2 <= orchestrator.step <= 2 + level
    assert max(notes.saved) == orchestrator.step
    trained = {int(v) for samples in trainer.batches for s in samples for v in s.policy_versions[s.loss_mask]}
    assert max(trained) < 2
    await go_on_and_check(notes, tmp_path, level=level)


async def test_a_sampler_that_holds_other_weights_from_the_start_samples_nothing_at_all(tmp_path):
    orchestrator, notes, sampler = make(tmp_path, probes=probes(0.5))
    async with nothing_left_behind():
        with pytest.raises(RunStopped, match="does not hold policy version 0"):
            await orchestrator.run()
    assert (sampler.requests, notes.steps) == ([], [])


# ---- a stop


@pytest.mark.slow
@pytest.mark.parametrize("level", [1, 3])
async def test_a_stop_settles_every_batch_that_the_trainer_has(tmp_path, level):
    trainer = GatedTrainer(tmp_path)
    orchestrator, notes, _ = make(tmp_path, level=level, steps=6, trainer=trainer)
    async with nothing_left_behind():
        running = asyncio.ensure_future(orchestrator.run())
        await until(lambda: len(trainer.held) == level + 1)
        orchestrator.request_stop()
        await asyncio.sleep(1.0)  # all others have done what they can
        assert not running.done()
        trainer.let(level + 1)
        assert not await running
    assert trainer.events[-1] == ("reported", level + 1)
    assert steps_of(notes) == list(range(1, level + 2))
    assert max(notes.saved) == level + 1
    await go_on_and_check(notes, tmp_path, level=level)


@pytest.mark.slow
@pytest.mark.parametrize("level", [0, 1])
async def test_a_stop_while_rollouts_are_in_flight_samples_them_again_later(tmp_path, level):
    sampler = scripted(trouble=lambda index, request: "hang" if index >= BATCH + 2 else None)
    in_flight = BATCH if level else BATCH - 2  # with k = 1 one more group may start
    orchestrator, notes, _ = make(tmp_path, level=level, steps=6, sampler=sampler)
    async with nothing_left_behind():
        running = asyncio.ensure_future(orchestrator.run())
        await until(lambda: steps_of(notes) == [1] and sampler.num_in_flight == in_flight)
        orchestrator.request_stop()
        assert not await running
    assert sampler.num_in_flight == 0
    assert notes.saved[1]["pending_tokens"] > 0  # the two that had ended
    await go_on_and_check(notes, tmp_path, level=level)


@pytest.mark.slow
@pytest.mark.parametrize("at", [0, 2])
async def test_a_stop_during_an_evaluation_ends_it_and_reports_nothing_of_it(tmp_path, at):
    """Evaluations come before the first step and after the second; their episodes never end here."""
    evaluating = asyncio.Event()

    class HangsInEvaluation(Coins):
        async def start(self, example, seed):
            if len(notes.steps) == at and (at == 0 or orchestrator.step == at):
                evaluating.set()
                await asyncio.Event().wait()
            return await super().start(example, seed)

    orchestrator, notes, _ = make(tmp_path, steps=6, evaluate=True, environment=HangsInEvaluation())
    async with nothing_left_behind():
        running = asyncio.ensure_future(orchestrator.run())
        await evaluating.wait()
        orchestrator.request_stop()
        assert not await running
    assert [step for step, _ in notes.evals] == list(range(0, at, 2))
    assert at <= orchestrator.step <= at + (at > 0)  # the next batch may be with the trainer already
    assert steps_of(notes) == list(range(1, orchestrator.step + 1))
    assert max(notes.saved) == orchestrator.step
    await go_on_and_check(notes, tmp_path)


# ---- a checkpoint


class FullDisk(Notes):
    """Checkpoints of these steps cannot be written."""

    def __init__(self, *steps):
        super().__init__()
        self.full = steps

    async def save(self, step, trainer, state, trainer_state=None):
        if step in self.full:
            raise CheckpointNotWritten(f"checkpoint {step} could not be written: No space left on device")
        await super().save(step, trainer, state, trainer_state)


@pytest.mark.slow
@pytest.mark.parametrize("level", [0, 1])
async def test_a_checkpoint_that_cannot_be_written_ends_the_run_and_the_ones_before_stay(tmp_path, level):
    orchestrator, notes, _ = make(tmp_path, level=level, steps=6, interval=2, notes=FullDisk(4, 5))
    async with nothing_left_behind():
        with pytest.raises(CheckpointNotWritten, match="checkpoint 4 could not be written: No space left"):
            await orchestrator.run()
    assert steps_of(notes) == list(range(1, orchestrator.step + 1))
    assert sorted(notes.saved) == [0, 2]
    notes.full = ()
    await go_on_and_check(notes, tmp_path, step=2, level=level)


async def test_the_first_checkpoint_that_cannot_be_written_ends_the_run_before_anything_is_sampled(tmp_path):
    orchestrator, notes, sampler = make(tmp_path, notes=FullDisk(0))
    async with nothing_left_behind():
        with pytest.raises(CheckpointNotWritten, match="No space left"):
            await orchestrator.run()
    assert (sampler.requests, notes.saved) == ([], {})


@pytest.mark.slow
@pytest.mark.parametrize("level", [0, 1, 3])
async def test_every_checkpoint_of_a_run_can_be_gone_on_from(tmp_path, level):
    """Killed after any of them: the newest counts."""
    trainer = FakeTrainer(tmp_path, delay=0.001)
    orchestrator, notes, _ = make(tmp_path, level=level, steps=6, interval=1, trainer=trainer, token_seconds=0.0002)
    async with nothing_left_behind():
        assert await orchestrator.run()
    everything = list(notes.steps)
    for step in range(6):
        again = Notes()
        again.steps, again.saved = list(everything), dict(notes.saved)
        await go_on_and_check(again, tmp_path, step=step, level=level)
