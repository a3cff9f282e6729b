"""The trainer on request: a batch is trained and published whole, or refused with the reason, as are those after."""

import asyncio
import errno
import json
import threading

import numpy as np
import pytest
import torch
from test_trainer_steps import make_trainer, weights
from trainer_helpers import make_batch, num_trained
from transformers import AutoModelForCausalLM

from verbatim.algorithms.losses import LOSSES
from verbatim.config.schema import TrainerConfig
from verbatim.core.errors import RunStopped
from verbatim.models.loading import load_model
from verbatim.models.native.cores import FIRST_PASS, CoreShare
from verbatim.trainer.local import LocalTrainer
from verbatim.trainer.serve import serve
from verbatim.trainer.trainer import Trainer
from verbatim.trainer.transport import WeightFolders
from verbatim.trainer.transport.canary import NUM_PROBES, probe_sequences
from verbatim.trainer.transport.exchange import Exchange
from verbatim.trainer.transport.trainer_messages import TrainerMessage
from verbatim.trainer.worker import TrainerWorker
from waiting import HANGS, until


class Worker:
    """A worker, its trainer and its folders."""

    def __init__(self, model, folder, *, version=0, **settings):
        self.trainer = make_trainer(model, **settings)
        self.published, self.states = folder / "weights", folder / "states"
        self.worker = TrainerWorker(
            self.trainer, version=version, weights=WeightFolders(self.published), states=self.states, context_length=20
        )

    def train(self, version, *, samples=None, checkpoint=False):
        return self.worker.train(make_batch(version) if samples is None else samples, version, checkpoint=checkpoint)


@pytest.fixture
def made(qwen, tmp_path):
    return Worker(qwen, tmp_path, total=4)


def poisoned(seed):
    """A batch with one infinite advantage in its last sample."""
    *good, last = make_batch(seed)
    advantages = np.where(last.loss_mask, np.inf, 0).astype(np.float32)
    return [*good, type(last)(**{**vars(last), "advantages": advantages})]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_probes_tell_what_rounding_between_layers_changes(qwen, tmp_path, dtype):
    """Against transformers, with the numbers between layers cut to 8 bits by hand."""
    made = Worker(qwen, tmp_path)
    config = TrainerConfig(device="cpu", dtype=dtype)
    made.worker.trainer = Trainer(qwen, config, loss=LOSSES["default"], total_optimizer_steps=1)
    before = made.worker.probe()
    assert before.rounding is None
    made.worker.measures_rounding = True
    probes = made.worker.probe()
    own = AutoModelForCausalLM.from_pretrained(qwen).eval()

    def cut(layer, inputs, output):
        bits = output.numpy().view(np.uint32).astype(np.uint64)
        bits = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16
        return torch.from_numpy(bits.astype(np.uint32).view(np.float32))

    @torch.no_grad()
    def logprobs():
        found = []
        for ids in probes.token_ids[:NUM_PROBES]:
            ids = torch.from_numpy(ids.astype(np.int64))
            found.append(own(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0])
        return torch.cat(found)

    exact = logprobs()
    for layer in own.model.layers:
        layer.register_forward_hook(cut)
    expected = float((logprobs() - exact).abs().mean())
    assert expected > 1e-3
    if dtype == "float32":
        assert probes.rounding == pytest.approx(expected, rel=0.01)
    else:  # roundings of products come out differently behind it, which is about as much again
        assert expected < probes.rounding < 4 * expected
    assert all(map(np.array_equal, made.worker.probe().logprobs, before.logprobs)), "afterwards nothing is rounded"


def test_a_batch_becomes_a_version_that_is_published(made):
    batch = make_batch(1)
    report = made.train(1, samples=batch)
    assert (report.version, made.worker.version) == (1, 1)
    assert report.weights == made.published / "v000001"
    assert report.num_trained_tokens == num_trained(batch)
    assert report.state is None
    assert report.metrics["weights/bytes"] == sum(p.stat().st_size for p in report.weights.iterdir())
    published = load_model(report.weights)
    assert all(torch.equal(a, b) for a, b in zip(published.parameters(), made.trainer.model.parameters(), strict=True))


def test_an_empty_batch_becomes_a_version_with_the_same_weights(made):
    before = weights(made.trainer)
    report = made.train(1, samples=[])
    assert (report.version, report.num_trained_tokens) == (1, 0)
    assert report.weights.is_dir()
    assert all(torch.equal(before[name], value) for name, value in weights(made.trainer).items())
    made.train(2)


def test_the_state_that_is_asked_for_is_that_of_the_version(made, qwen, tmp_path):
    """Going on from it is going on."""
    made.train(1)
    state = made.train(2, checkpoint=True).state
    assert state == made.states / "v000002"
    third = made.train(3)
    again = Worker(state / "weights", tmp_path / "again", version=2, total=4)
    again.trainer.load_state(state / "trainer")
    repeated = again.train(3)
    for mine, theirs in zip(repeated.probes.logprobs, third.probes.logprobs, strict=True):
        assert mine.tobytes() == theirs.tobytes()


def test_the_probes_are_what_the_trainer_makes_of_the_fixed_sequences(made):
    before = made.worker.probe()
    report = made.train(1)
    sequences = probe_sequences(made.trainer.lm.vocab_size, 20)
    for ids, logprobs, expected in zip(report.probes.token_ids, report.probes.logprobs, sequences, strict=True):
        assert ids.tobytes() == expected.tobytes()
        with torch.no_grad():  # as transformers itself runs what was published
            model = AutoModelForCausalLM.from_pretrained(report.weights, attn_implementation="eager")
            logits = model(input_ids=torch.from_numpy(ids.astype(np.int64))[None]).logits[0]
        wanted = logits[:-1].log_softmax(-1).numpy()[np.arange(len(ids) - 1), ids[1:]]
        assert logprobs.shape == (len(ids) - 1,) == (18,)
        assert np.abs(logprobs - wanted).max() < 1e-5
    moved = [np.abs(a - b).max() for a, b in zip(before.logprobs, report.probes.logprobs, strict=True)]
    assert min(moved) > 0


@pytest.mark.parametrize("checkpoint", [False, True])
def test_a_batch_without_a_finite_loss_is_refused_and_all_after_it_name_it(made, checkpoint):
    made.train(1)
    with pytest.raises(RunStopped, match=r"optimizer step 1: .*This optimizer step changed no weights") as first:
        made.train(2, samples=poisoned(2), checkpoint=checkpoint)
    for version in (3, 4):
        with pytest.raises(RunStopped) as later:
            made.train(version)
        assert str(later.value) == f"batch {version - 1} was not trained, because an earlier one failed: {first.value}"
    assert made.worker.version == 1
    assert [p.name for p in made.published.iterdir()] == ["v000001"]
    assert not made.states.exists()


def test_the_version_before_the_failure_can_still_be_saved_where_no_weight_was_touched(made, tmp_path):
    report = made.train(1)
    with pytest.raises(RunStopped):
        made.train(2, samples=poisoned(2))
    (tmp_path / "kept").mkdir()
    made.worker.save(tmp_path / "kept", 1)
    saved = (tmp_path / "kept" / "weights" / "model.safetensors").read_bytes()
    assert saved == (report.weights / "model.safetensors").read_bytes()
    assert json.loads((tmp_path / "kept" / "trainer" / "trainer.json").read_text())["num_optimizer_steps"] == 1


def test_a_state_between_two_versions_is_not_saved(qwen, tmp_path):
    """Two optimizer steps per batch; the second one of the second batch fails."""
    made = Worker(qwen, tmp_path, total=8, optimizer_steps_per_batch=2)
    made.train(1)
    assert made.trainer.schedule.num_done == 2
    with pytest.raises(RunStopped):
        made.train(2, samples=poisoned(2))
    assert made.trainer.schedule.num_done == 3
    with pytest.raises(RunStopped, match="the state after step 1 is gone: 3 optimizer steps are done, 2 of them"):
        made.worker.save(tmp_path, 1)


def test_another_version_than_the_one_it_holds_is_not_saved(made, tmp_path):
    made.train(1)
    with pytest.raises(RunStopped, match="the state after step 2 is gone"):
        made.worker.save(tmp_path, 2)


@pytest.mark.parametrize("where", ["weights", "state"])
def test_a_version_that_cannot_be_written_names_the_disks_reason(made, monkeypatch, where):
    made.train(1)

    def full(folder):
        raise OSError(errno.ENOSPC, "No space left on device", str(folder / "file"))

    monkeypatch.setattr(made.trainer, "save_weights" if where == "weights" else "save_state", full)
    with pytest.raises(
        RunStopped, match=r"the results of training on batch 1 could not be written: No space left on device"
    ):
        made.train(2, checkpoint=True)
    monkeypatch.undo()
    with pytest.raises(RunStopped, match=r"batch 2 was not trained, because an earlier one failed: .*No space left"):
        made.train(3)
    with pytest.raises(RunStopped, match="the state after step 1 is gone"):
        made.worker.save(made.states, 1)  # the weights moved on, and nobody has them


def test_a_trainer_that_serves_answers_every_order_and_tells_whose_fault_it_was(made, tmp_path):
    """A batch, a broken one, one after it, the state, the end: five orders, four answers."""
    exchange = Exchange.open(tmp_path / "exchange")
    exchange.send(1, TrainerMessage(kind="train", version=1, samples=tuple(make_batch(1)), checkpoint=True))
    exchange.send(2, TrainerMessage(kind="train", version=2, samples=tuple(poisoned(2))))
    exchange.send(3, TrainerMessage(kind="train", version=3, samples=tuple(make_batch(3))))
    exchange.send(4, TrainerMessage(kind="save", version=1))
    exchange.send(5, TrainerMessage(kind="stop"))
    told, steps = [], []

    class Told:
        progress = told.append

    serve(made.worker, exchange, Told, look=lambda: None, on_step=lambda version, metrics: steps.append(version))
    answers = [exchange.take_answer(number) for number in range(1, 6)]
    assert answers[0]["result"]["version"] == 1
    assert answers[0]["result"]["metrics"]["time/trainer_idle"] >= 0
    assert "This optimizer step changed no weights" in answers[1]["error"]
    assert answers[2]["error"].startswith("batch 2 was not trained, because an earlier one failed")
    assert answers[3:] == [{"result": {"in_run": "states/v000001"}}, None]
    assert (made.states / "v000001" / "weights" / "model.safetensors").is_file()
    assert (made.states / "v000001" / "trainer" / "trainer.json").is_file()
    assert steps == [1]
    assert told == ["training on batch 0", "training on batch 1", "training on batch 1", "writing its state"]


@pytest.mark.realtime
async def test_a_trainer_on_a_thread_trains_in_order_and_leaves_the_event_loop_free(made, monkeypatch):
    """It does not end before the event loop has turned."""
    began, turned, train = threading.Event(), threading.Event(), made.trainer.train_batch

    def held(*arguments):
        began.set()
        assert turned.wait(HANGS)
        return train(*arguments)

    monkeypatch.setattr(made.trainer, "train_batch", held)
    link = LocalTrainer(made.worker, num_threads=1)
    training = asyncio.gather(*(link.train(make_batch(v), v) for v in (1, 2, 3)))
    await until(began.is_set)
    turned.set()
    assert [report.version for report in await training] == [1, 2, 3]
    await link.close()


def test_memory_that_runs_out_after_the_batch_stops_the_run_by_name(made, monkeypatch):
    """While the probes are computed; a device that is shared can be full then."""

    def full(samples):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(made.trainer, "logprobs", full)
    with pytest.raises(RunStopped, match="batch 0 could not be trained"):
        made.train(1)
    assert made.worker.version == 0
    with pytest.raises(RunStopped, match="an earlier one failed"):
        made.train(1)


def test_cores_that_the_sampler_leaves_free_are_taken(made, tmp_path, monkeypatch):
    mine, sampler = (CoreShare(tmp_path / "cores", side, 2) for side in ("trainer", "sampler"))
    before, seen, others = torch.get_num_threads(), [], []
    monkeypatch.setattr(torch, "set_num_threads", seen.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: seen[-1] if seen else before)
    clock = [1000.0]
    monkeypatch.setattr("verbatim.models.native.cores.time.monotonic", lambda: clock[0])
    train = made.trainer.train_batch
    monkeypatch.setattr(
        made.trainer, "train_batch", lambda *x: (others.append(sampler.threads_for_pass()), train(*x))[1]
    )
    made.worker.share(mine)
    sampler.compute(True)
    made.train(1)
    assert [*seen, before][0] == 1
    sampler.compute(False)
    clock[0] += 60
    made.train(2)
    assert seen[-1] == 2
    assert others == [1, 1], "while it trains the sampler has its share"
    clock[0] += 60
    assert sampler.threads_for_pass() == 2


@pytest.mark.parametrize("in_backward", [False, True])
def test_cores_are_taken_within_a_micro_batch(made, tmp_path, monkeypatch, in_backward):
    """The sampler becomes idle when the first layer has computed, forward or backward."""
    mine, sampler = (CoreShare(tmp_path / "cores", side, 2) for side in ("trainer", "sampler"))
    seen, clock, marks = [2], [1000.0], []
    monkeypatch.setattr(torch, "set_num_threads", seen.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: seen[-1])
    monkeypatch.setattr("verbatim.models.native.cores.time.monotonic", lambda: clock[0])

    def becomes_idle(*_):
        if not marks:
            marks.append(seen[-1])
            sampler.compute(False)
            clock[0] += 60

    (first, last) = made.trainer.model.model.layers[0], made.trainer.model.model.layers[-1]
    if in_backward:
        last.register_full_backward_hook(becomes_idle)
    else:
        first.register_forward_hook(becomes_idle)
    made.worker.share(mine)
    sampler.compute(True)
    made.train(1)
    assert marks == [1]
    assert seen[-1] == 2


def test_a_batch_that_fails_gives_the_cores_back(made, tmp_path, monkeypatch):
    clock = [1000.0]
    monkeypatch.setattr("verbatim.models.native.cores.time.monotonic", lambda: clock[0])
    mine, sampler = (CoreShare(tmp_path / "cores", side, 2) for side in ("trainer", "sampler"))
    made.worker.share(mine)
    with pytest.raises(RunStopped):
        made.train(1, samples=poisoned(0))
    clock[0] += 2 * FIRST_PASS
    assert sampler.threads_for_pass() == 2
