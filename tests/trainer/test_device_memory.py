"""A trainer that leaves its device between two batches: it goes on bit for bit, and leaves nothing behind."""

import pytest
import torch
from test_trainer_steps import make_trainer, weights
from trainer_helpers import make_batch

from verbatim.core.errors import RunStopped
from verbatim.trainer.device_memory import HOST, DeviceMemory
from verbatim.trainer.transport import WeightFolders
from verbatim.trainer.worker import TrainerWorker

DEVICE = torch.device("cuda:0")


class Places:
    """Moves tensors between an imaginary device and host memory: a copy is a new storage, whose place is known."""

    def __init__(self):
        self.of = {}

    def move(self, tensor, place):
        moved = tensor.clone()
        self.of[moved.data_ptr()] = (place, moved)  # kept, so that no address is used twice
        return moved

    def found(self, trainer):
        """The places of everything that outlives a step."""
        state = [value for values in trainer.optimizer.state.values() for value in values.values()]
        tensors = [*trainer.model.parameters(), *trainer.model.buffers(), *state]
        return {self.of[tensor.data_ptr()][0] if tensor.data_ptr() in self.of else "never moved" for tensor in tensors}


def make_worker(model, folder, places):
    trainer = make_trainer(model, total=4)
    memory = DeviceMemory(trainer.model, trainer.optimizer, DEVICE, move=places.move) if places is not None else None
    return trainer, TrainerWorker(
        trainer,
        version=0,
        weights=WeightFolders(folder / "weights"),
        states=folder / "states",
        context_length=20,
        memory=memory,
    )


@pytest.fixture
def no_cuda(monkeypatch):
    emptied = []
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: emptied.append(True))
    return emptied


@pytest.mark.slow
def test_all_of_it_is_in_host_memory_between_two_batches_and_it_trains_as_one_that_stays(qwen, tmp_path, no_cuda):
    places = Places()
    moving, worker = make_worker(qwen, tmp_path / "moving", places)
    staying, other = make_worker(qwen, tmp_path / "staying", None)
    on_device = []
    train = moving.train_batch
    moving.train_batch = lambda *args: on_device.append(places.found(moving)) or train(*args)
    worker.memory.leave()
    assert places.found(moving) == {HOST}
    for version in (1, 2):
        batch = make_batch(version)
        report, expected = worker.train(batch, version), other.train(batch, version)
        assert places.found(moving) == {HOST}
        assert report.metrics["loss"] == expected.metrics["loss"]
        assert report.metrics["time/trainer_moving"] >= 0
        assert "time/trainer_moving" not in expected.metrics
        for found, told in zip(report.probes.logprobs, expected.probes.logprobs, strict=True):
            assert (found == told).all()
    assert on_device[0] == {DEVICE}
    assert on_device[1] == {DEVICE}
    assert len(no_cuda) == 3
    for name, value in weights(staying).items():
        assert torch.equal(weights(moving)[name], value)


@pytest.mark.slow
def test_what_it_saves_in_host_memory_is_what_one_that_stays_saves(qwen, tmp_path, no_cuda):
    saved = []
    for places, name in ((Places(), "moving"), (None, "staying")):
        _, worker = make_worker(qwen, tmp_path / name, places)
        worker.train(make_batch(1), 1)
        (folder := tmp_path / name / "saved").mkdir()
        worker.save(folder, 1)
        saved.append({p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()})
    assert saved[0] == saved[1]


@pytest.mark.slow
def test_tied_weights_stay_tied_and_parameters_the_same_objects(qwen, no_cuda):
    trainer, places = make_trainer(qwen, total=1), Places()
    before = list(trainer.model.parameters())
    memory = DeviceMemory(trainer.model, trainer.optimizer, DEVICE, move=places.move)
    memory.leave()
    memory.come_back()
    assert all(a is b for a, b in zip(before, trainer.model.parameters(), strict=True))
    head, embedding = trainer.model.get_output_embeddings().weight, trainer.model.get_input_embeddings().weight
    assert (head is embedding) == trainer.model.config.tie_word_embeddings
    assert places.found(trainer) == {DEVICE}


def test_on_a_cpu_nothing_is_moved(qwen):
    trainer, places = make_trainer(qwen, total=1), Places()
    memory = DeviceMemory(trainer.model, trainer.optimizer, HOST, move=places.move)
    assert (memory.leave(), memory.come_back(), places.of) == (0.0, 0.0, {})


@pytest.mark.slow
def test_a_device_without_room_for_it_ends_the_run_as_any_lack_of_memory(qwen, tmp_path, no_cuda):
    class SmallDevice(Places):
        def move(self, tensor, place):
            if place == DEVICE:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return super().move(tensor, place)

    _, worker = make_worker(qwen, tmp_path, SmallDevice())
    worker.memory.leave()
    with pytest.raises(RunStopped, match=r"batch 0 could not be trained: .*memory"):
        worker.train(make_batch(1), 1)
