"""Every trained token reaches the trainer with the logprob of each model that scores it, at its own temperature."""

import numpy as np
import pytest

from run.orchestrator.loop_runs import Coins, FakeTrainer, make
from verbatim.core.errors import RunStopped
from verbatim.core.types import Group, TrainingSample
from verbatim.run.orchestrator.assemble import AssembledGroup
from verbatim.run.orchestrator.logprob_streams import add_logprob_streams


class Counting:
    """Gives token i of value v the logprob -v / temperature - i - shift."""

    def __init__(self, fails=False, shift=0):
        self.fails, self.shift, self.asked = fails, shift, []

    async def logprobs(self, token_ids, temperature, kept_sets=None):
        if self.fails:
            raise RunStopped("the teacher is away")
        self.asked.append((token_ids.tolist(), temperature))
        scored = -token_ids / temperature - np.arange(len(token_ids)) - self.shift
        scored[0] = np.nan
        return scored.astype(np.float32)

    async def close(self):
        pass


def sample(token_ids, mask, temperatures):
    length = len(token_ids)
    return TrainingSample(
        token_ids=np.array(token_ids, dtype=np.int32),
        loss_mask=np.array(mask),
        logprobs=np.zeros(length, np.float32),
        advantages=np.zeros(length, np.float32),
        chunk_ids=np.zeros(length, np.int32),
        policy_versions=np.zeros(length, np.int32),
        temperatures=np.array(temperatures, dtype=np.float32),
    )


async def test_each_trained_token_is_scored_at_its_own_temperature_and_no_other():
    one = sample([5, 6, 7, 8], [False, True, False, True], [1, 0.5, 1, 2])
    group = AssembledGroup(
        group=Group(group_id="g", example_id="x", env="e", trajectories=()), samples=(one,), outcomes=()
    )
    teacher = Counting()
    (scored,) = await add_logprob_streams([group], {"teacher": teacher})
    np.testing.assert_array_equal(
        scored.samples[0].teacher_logprobs, np.float32([np.nan, -6 / 0.5 - 1, np.nan, -8 / 2 - 3])
    )
    assert sorted(teacher.asked, key=lambda a: a[1]) == [([5, 6, 7, 8], 0.5), ([5, 6, 7, 8], 2.0)]


@pytest.mark.parametrize("level", [0, 1])
async def test_the_trainer_is_given_the_logprobs_of_each_model_for_every_batch(tmp_path, level):
    trainer = FakeTrainer(tmp_path)
    models = {"teacher": Counting(), "reference": Counting(shift=1)}
    orchestrator, _, _ = make(tmp_path, level=level, steps=3, trainer=trainer, logprob_models=models)
    assert await orchestrator.run()
    assert len(trainer.batches) == 3
    for samples in trainer.batches:
        for one in samples:
            expected = (-one.token_ids - np.arange(len(one)))[one.loss_mask]
            assert one.logprob_streams.keys() == {"teacher", "reference"}
            np.testing.assert_array_equal(one.teacher_logprobs[one.loss_mask], expected)
            np.testing.assert_array_equal(one.logprob_streams["reference"][one.loss_mask], expected - 1)


async def test_a_teacher_that_fails_stops_the_run_with_what_was_trained_settled(tmp_path):
    models = {"teacher": Counting(fails=True)}
    orchestrator, notes, _ = make(tmp_path, steps=3, environment=Coins(), logprob_models=models)
    with pytest.raises(RunStopped, match="the teacher is away"):
        await orchestrator.run()
    assert notes.steps == []
    assert max(notes.saved) == 0
