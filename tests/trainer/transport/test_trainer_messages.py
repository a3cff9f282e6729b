"""What one process orders is what the other one gets: every bit of it."""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
from transport_samples import assert_same_sample, make_sample

from verbatim import TrainingSample, Trajectory, Turn, build_samples
from verbatim.core.errors import RunStopped
from verbatim.core.records.spans import Span
from verbatim.inference.sending import SendOrder, WeightStore
from verbatim.trainer.transport import StepReport, TrainerReady
from verbatim.trainer.transport.canary import Probes
from verbatim.trainer.transport.files import publish_bytes
from verbatim.trainer.transport.trainer_messages import (
    TrainerMessage,
    message_to_bytes,
    read_message,
    read_message_bytes,
    ready_from_json,
    report_from_json,
    to_json,
)


def travelled(order, tmp_path):
    """What arrives as a file, which must equal what arrives as bytes."""
    publish_bytes(tmp_path / "order", message_to_bytes(order))
    found, also = read_message(tmp_path / "order"), read_message_bytes(memoryview(message_to_bytes(order)))
    assert message_to_bytes(also) == message_to_bytes(found) == message_to_bytes(order)
    return found


@pytest.mark.parametrize("teacher", [False, True])
def test_every_bit_of_a_batch_survives_the_trip(tmp_path, teacher):
    sent = tuple(make_sample(length, teacher=teacher, seed=i) for i, length in enumerate([9, 1, 300, 2, 9]))
    found = travelled(TrainerMessage(kind="train", version=7, samples=sent, checkpoint=True), tmp_path)
    assert (found.kind, found.version, found.checkpoint) == ("train", 7, True)
    assert len(found.samples) == len(sent)
    for mine, theirs in zip(found.samples, sent, strict=True):
        assert_same_sample(mine, theirs)


def sample_of_spans(*, teacher: bool = False, name: str = "s") -> TrainingSample:
    """A turn of two versions, one of an unknown version, one without logprobs, one at the default of everything."""
    rng = np.random.default_rng(7)
    odd = np.array([-0.0, -1e-45], dtype=np.float32)
    sample = TrainingSample.of_spans(
        rng.integers(0, 2**31 - 1, 40, dtype=np.int32),
        [
            Span(3, 5, 0, 8, -1.25, 0.7, odd),
            Span(5, 9, 0, 9, -1.25, 0.7, -rng.random(4, dtype=np.float32)),
            Span(9, 10, 2, -1, 1 / 3, 1.0, -rng.random(1, dtype=np.float32)),
            Span(20, 30, 3, 9, 0.0, 1.0, None),
            Span(38, 40, 5, 0, 0.0, 1.0, -rng.random(2, dtype=np.float32)),
        ],
        trajectory_id=f"{name}-1",
        group_id="g",
        env="e",
        part=4,
    )
    return (
        sample.with_streams(
            {"teacher": -rng.random(40, dtype=np.float32), "reference": -rng.random(40, dtype=np.float32)}
        )
        if teacher
        else sample
    )


ARRAYS = ("token_ids", "loss_mask", "logprobs", "advantages", "chunk_ids", "policy_versions", "temperatures")


def bits(sample: TrainingSample) -> dict[str, object]:
    arrays = {name: getattr(sample, name) for name in ARRAYS} | dict(sample.logprob_streams)
    texts = {name: getattr(sample, name) for name in ("trajectory_id", "group_id", "env", "part")}
    return {name: (array.dtype, array.tobytes()) for name, array in arrays.items()} | texts


@pytest.mark.parametrize("teacher", [False, True])
def test_samples_of_spans_and_of_arrays_travel_together_with_every_bit(tmp_path, teacher):
    sent = (
        sample_of_spans(teacher=teacher),
        make_sample(9, teacher=teacher),
        make_sample(0, teacher=teacher),
        sample_of_spans(teacher=teacher, name="t"),
    )
    found = travelled(TrainerMessage(kind="train", version=7, samples=sent), tmp_path).samples
    assert [bits(sample) for sample in found] == [bits(sample) for sample in sent]
    assert [sample.spans is None for sample in found] == [False, True, True, False]
    assert_same_sample(found[1], sent[1])  # with its experts


def test_a_logprob_stream_may_have_any_name(tmp_path):
    """Also one that is like the names of the tensors of spans."""
    names = ("span", "teacher", "span_numbers", "")
    sent = [
        sample.with_streams({name: np.full(len(sample), -1.0 - i, np.float32) for i, name in enumerate(names)})
        for sample in (sample_of_spans(), make_sample(9))
    ]
    found = travelled(TrainerMessage(kind="train", version=1, samples=tuple(sent)), tmp_path).samples
    assert [bits(sample) for sample in found] == [bits(sample) for sample in sent]
    assert set(names) < bits(found[0]).keys()


def test_a_token_takes_at_most_14_bytes_of_an_order():
    """A long episode whose every second token was sampled, as ids and logprobs: 4 + 4 / 2 bytes, and a little more."""
    turns, prompt = [], []
    for turn in range(16):
        prompt = prompt + [turn] * 128
        turns.append(
            Turn(prompt_ids=prompt, completion_ids=[7] * 128, logprobs=[-0.5] * 128, policy_versions=[3] * 128)
        )
        prompt = prompt + [7] * 128
    batch = [Trajectory(example_id="x", turns=turns, advantage=0.5, trajectory_id=str(i)) for i in range(8)]
    samples = tuple(sample for trajectory in batch for sample in build_samples(trajectory))
    size = len(message_to_bytes(TrainerMessage(kind="train", version=1, samples=samples)))
    assert 6 < size / (8 * 16 * 256) < 7


@pytest.mark.parametrize("name", ["", "лот-№1 🎲", 'quotes " and \\ and \n', "nul \0 and lone \ud800", "x" * 10_000])
def test_ids_may_be_any_text(tmp_path, name):
    sample = make_sample(3, name=name)
    (found,) = travelled(TrainerMessage(kind="train", samples=(sample,)), tmp_path).samples
    assert (found.trajectory_id, found.group_id, found.env) == (f"{name}-3", f"group-{name}", f"env-{name}")


def test_a_batch_of_which_everything_was_dropped_survives_the_trip(tmp_path):
    found = travelled(TrainerMessage(kind="train", version=3), tmp_path)
    assert (found.kind, found.version, found.samples) == ("train", 3, ())


def test_the_other_kinds_of_order_survive_the_trip(tmp_path):
    assert travelled(TrainerMessage(kind="stop"), tmp_path).kind == "stop"
    save = travelled(TrainerMessage(kind="save", version=12), tmp_path)
    assert (save.kind, save.version) == ("save", 12)


def test_the_samples_of_these_tests_have_no_field_at_its_default():
    """Else a field that is added to the record and forgotten in the file would go unnoticed."""
    sample = make_sample(3, teacher=True)
    defaults = [field for field in dataclasses.fields(sample) if field.default is not dataclasses.MISSING]
    assert {field.name for field in defaults} >= {"trajectory_id", "group_id", "env"}
    assert [field.name for field in defaults if getattr(sample, field.name) is field.default] == []
    assert sample.logprob_streams.keys() == {"teacher", "reference"}


PROBES = Probes(
    token_ids=(np.array([5, 2**31 - 1], np.int32), np.array([1, 2, 3], np.int32)),
    logprobs=(np.array([-0.1], np.float32), np.array([np.nan, -1e-45], np.float32)),
    rounding=1 / 3,
)


RUN = Path("/run")


def assert_same_probes(found, sent):
    assert found.rounding == sent.rounding
    for name in ("token_ids", "logprobs"):
        for mine, theirs in zip(getattr(found, name), getattr(sent, name), strict=True):
            assert (mine.dtype, mine.tobytes()) == (theirs.dtype, theirs.tobytes())


def test_every_bit_of_a_report_survives_the_trip():
    metrics = {"third": 1 / 3, "tiny": 5e-324, "nan": math.nan, "inf": -math.inf, "count": 3, "zero": -0.0}
    sent = StepReport(
        version=4,
        weights=Path("/w/v000004"),
        num_trained_tokens=10**12,
        metrics=metrics,
        probes=PROBES,
        state=Path("/s/é"),
    )
    found = report_from_json(json.loads(json.dumps(to_json(sent, RUN))), RUN)
    assert (found.version, found.weights, found.num_trained_tokens) == (4, Path("/w/v000004"), 10**12)
    assert found.state == Path("/s/é")
    assert {k: repr(v) for k, v in found.metrics.items()} == {k: repr(v) for k, v in metrics.items()}
    assert_same_probes(found.probes, PROBES)


def test_a_report_without_probes_and_state_survives_the_trip():
    sent = StepReport(version=1, weights=Path("w"), num_trained_tokens=0, metrics={})
    found = report_from_json(json.loads(json.dumps(to_json(sent, RUN))), RUN)
    assert (found.probes, found.state, found.metrics) == (None, None, {})


@pytest.mark.parametrize("checkpoint", [None, Path("/run/checkpoints/step_000003")])
def test_what_a_trainer_that_is_ready_says_survives_the_trip(checkpoint):
    sent = TrainerReady(version=3, weights="some/hub-id", checkpoint=checkpoint, probes=PROBES)
    found = ready_from_json(json.loads(json.dumps(to_json(sent, RUN))), RUN)
    assert (found.version, found.weights, found.checkpoint) == (3, "some/hub-id", checkpoint)
    assert_same_probes(found.probes, PROBES)


def test_an_order_to_send_and_where_to_meet_survive_the_trip(tmp_path):
    order = SendOrder(version=7, group="3", size=5, kind="nccl", seconds=240.0)
    found = travelled(TrainerMessage(kind="send", version=7, order=order), tmp_path)
    assert (found.kind, found.version, found.order, found.samples) == ("send", 7, order, ())
    store = WeightStore(host="10.0.0.7", port=29500, on="a-host", nccl="2.27.5")
    sent = TrainerReady(version=3, weights="some/hub-id", checkpoint=None, store=store)
    assert ready_from_json(json.loads(json.dumps(to_json(sent, RUN))), RUN).store == store


def test_folders_of_the_run_are_those_of_the_host_that_reads_the_answer():
    there, here = Path("/there/run"), Path("/here/run")
    report = StepReport(
        version=1,
        weights=there / "weights/v000001",
        num_trained_tokens=0,
        metrics={},
        state=there / "exchange/a1/states/v000001",
    )
    found = report_from_json(json.loads(json.dumps(to_json(report, there))), here)
    assert (found.weights, found.state) == (here / "weights/v000001", here / "exchange/a1/states/v000001")
    ready = TrainerReady(version=3, weights=str(there / "model"), checkpoint=there / "checkpoints/step_000003")
    begun = ready_from_json(json.loads(json.dumps(to_json(ready, there))), here)
    assert (begun.weights, begun.checkpoint) == (str(here / "model"), here / "checkpoints/step_000003")


@pytest.mark.parametrize("name", ["../other", "/etc", "weights/../../other"])
def test_a_folder_outside_of_the_run_is_not_taken_for_one_of_the_run(name):
    value = to_json(StepReport(version=1, weights=RUN / "w", num_trained_tokens=0, metrics={}), RUN)
    with pytest.raises(RunStopped, match=r"names the folder .*, expected one below /run"):
        report_from_json({**value, "state": {"in_run": name}}, RUN)


@pytest.mark.parametrize("damage", [lambda data: b"", lambda data: data[:50], lambda data: bytes(len(data))])
def test_a_damaged_order_stops_the_run_and_names_the_file(tmp_path, damage):
    (tmp_path / "order").write_bytes(damage(message_to_bytes(TrainerMessage(kind="train", samples=(make_sample(9),)))))
    with pytest.raises(RunStopped, match=r"the message in .*/order is damaged"):
        read_message(tmp_path / "order")
