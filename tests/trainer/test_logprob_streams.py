"""Logprobs of other models come from a sample to the loss under their names."""

import dataclasses

import numpy as np
import pytest
import torch

from verbatim.algorithms.losses import LossInputs
from verbatim.core.types import TrainingSample
from verbatim.trainer.device_batch import DeviceBatch, whole_trajectory
from verbatim.trainer.packing import pack_rows


def sample(teacher, trajectory_id, **streams):
    """Three tokens, of which the last two are trained."""
    mask = np.array([False, True, True])
    return TrainingSample(
        token_ids=np.array([1, 2, 3], np.int32),
        loss_mask=mask,
        logprobs=np.float32([np.nan, -1, -1]),
        advantages=np.float32(mask),
        chunk_ids=np.int32([-1, 0, 0]),
        policy_versions=np.int32([-1, 0, 0]),
        temperatures=np.ones(3, np.float32),
        teacher_logprobs=np.float32(teacher),
        trajectory_id=trajectory_id,
        logprob_streams={name: np.float32(stream) for name, stream in streams.items()},
    )


def test_a_reference_model_s_logprobs_reach_the_loss_beside_the_teacher_s():
    samples = [sample([0, -2, -3], "a", reference=[0, -4, -5]), sample([0, -6, -7], "b", reference=[0, -8, -9])]
    (batch,) = pack_rows(samples, micro_batch_tokens=6, keep_whole=False)
    inputs = DeviceBatch(batch, torch.device("cpu")).inputs(torch.zeros(4), slice(None))
    assert inputs.teacher_logprobs.tolist() == inputs.logprob_streams["teacher"].tolist() == [-2, -3, -6, -7]
    assert inputs.logprob_streams["reference"].tolist() == [-4, -5, -8, -9]
    whole = whole_trajectory([inputs], torch.tensor([1, 2, 4, 5]), 6)
    assert whole.logprob_streams["reference"].tolist() == [0, -4, -5, 0, -8, -9]
    assert whole.teacher_logprobs.tolist() == [0, -2, -3, 0, -6, -7]


def test_a_stream_that_some_samples_of_a_batch_lack_stops_the_run():
    with pytest.raises(AssertionError, match=r"different logprob streams: .*\['reference', 'teacher'\]"):
        pack_rows(
            [sample([0, 0, 0], "a", reference=[0, 0, 0]), sample([0, 0, 0], "b")],
            micro_batch_tokens=6,
            keep_whole=False,
        )


def test_the_teacher_s_logprobs_are_an_argument_and_a_property_of_samples_and_of_loss_inputs():
    one = sample([0, -2, -3], "a", reference=[0, -4, -5])
    assert one.logprob_streams.keys() == {"teacher", "reference"}
    changed = dataclasses.replace(one, teacher_logprobs=np.float32([0, -1, -1]), part=3)
    assert (changed.teacher_logprobs.tolist(), changed.part) == ([0, -1, -1], 3)
    assert changed.logprob_streams["reference"] is one.logprob_streams["reference"]
    with pytest.raises(ValueError, match="read-only"):
        changed.teacher_logprobs[0] = 1

    ones, mask = torch.ones(2), torch.tensor([True, True])
    inputs = LossInputs(ones, -ones, -2 * ones, ones, mask)
    assert inputs.teacher_logprobs.tolist() == [-2, -2]
    assert dataclasses.replace(inputs, advantages=-ones).teacher_logprobs is inputs.teacher_logprobs
    assert LossInputs(ones, -ones, None, ones, mask).teacher_logprobs is None
    with pytest.raises(TypeError, match="needs advantages and loss_mask"):
        LossInputs(ones, -ones, loss_mask=mask)
