"""The link to ranks on a cluster: lost ranks restart from the checkpoint, and train again on what came after it."""

import asyncio
import hashlib
import json

import numpy as np
import pytest

from run.cluster.fake_ray import FakeRay
from verbatim.config import make_config
from verbatim.core.errors import RunStopped
from verbatim.core.types import TrainingSample
from verbatim.run.cluster.folders import ship
from verbatim.run.cluster.ray_ranks import RanksLost, RayRanks
from verbatim.run.cluster.ray_trainer import RayTrainer
from verbatim.run.cluster.shipments import Shipments
from verbatim.trainer.transport import TrainerReady
from verbatim.trainer.transport.trainer_messages import read_message_bytes

LENGTH = 4


def sample(number):
    ids = np.full(LENGTH, number, np.int32)
    return TrainingSample(
        token_ids=ids,
        loss_mask=np.arange(LENGTH) > 0,
        logprobs=np.full(LENGTH, -1.0, np.float32),
        advantages=np.ones(LENGTH, np.float32),
        chunk_ids=np.zeros(LENGTH, np.int32),
        policy_versions=np.zeros(LENGTH, np.int32),
        temperatures=np.ones(LENGTH, np.float32),
    )


class Ranks(RayRanks):
    """Ranks whose "weights" are the sum of the ids that they were trained on. `losses` maps a number of calls of
    `train` to what is lost in that call."""

    def __init__(self, tmp_path, losses=(), restarts=3, drift=0, start_losses=()):
        self.ray, self.folder, self.node = FakeRay(), tmp_path / "run", tmp_path / "node"
        self.folder.mkdir()
        cluster = {"max_trainer_restarts": restarts}
        tables = {"model": {"name": "m"}, "orchestrator": {"train": {"env": [{"id": "guess_number"}]}}}
        self.config = make_config({**tables, "cluster": cluster})
        self.shipments = Shipments(self.ray, self.folder)
        self.start_losses, self.restarts = set(start_losses), 0
        self.losses, self.drift = set(losses), drift
        self.sum = self.checkpoint = self.version = self.starts = 0
        self.trained, self.calls, self.sums, self.again = [], 0, {0: 0}, []

    def start(self):
        self.starts += 1
        if self.starts in self.start_losses:
            raise RanksLost("rank 0 is gone")
        self.version, self.sum = self.checkpoint, self.sums[self.checkpoint] + self.drift
        return TrainerReady(version=self.version, weights=str(self.folder / "m"), checkpoint=None)

    def end(self, *, in_order):
        self.ended = in_order

    def call(self, method, content, again=False):
        assert method == "train"
        self.again.append(again)
        order = read_message_bytes(memoryview(self.ray.get(content)))
        self.calls += 1
        if self.calls in self.losses:
            raise RanksLost("rank 1 is gone")
        assert order.version == self.version + 1
        self.version = order.version
        self.sum += int(order.samples[0].token_ids.sum())
        self.sums = {**self.sums, self.version: self.sum}
        self.trained.append(self.version)
        name = f"weights/v{self.version:06d}"
        (self.node / name).mkdir(parents=True, exist_ok=True)
        (self.node / name / "sum.json").write_text(json.dumps(self.sum))
        report = {"version": self.version, "weights": {"in_run": name}, "num_trained_tokens": LENGTH, "metrics": {}}
        report |= {"probes": None, "state": None, "tokens": None}
        return {"result": report, "weights": ship(self.ray, self.node, name)}

    def fetch_state(self, version, weights):
        assert weights == self.folder / f"weights/v{version:06d}"
        return self.folder / "states" / f"v{version:06d}"

    def write_checkpoint(self, step):
        """What the orchestrator does once it has the trainer's state."""
        folder = self.folder / "checkpoints" / f"step_{step:06d}"
        folder.mkdir(parents=True)
        (folder / "orchestrator.json").write_text("{}")
        from verbatim.logs.checkpoints import write_manifest

        write_manifest(folder, {"step": step})
        self.checkpoint = step


def link_to(ranks):
    return RayTrainer(ranks, ranks.start(), keep=10)


def published(ranks, version):
    return json.loads((ranks.folder / "weights" / f"v{version:06d}" / "sum.json").read_text())


async def train(link, versions):
    return [await link.train([sample(version)], version) for version in versions]


async def test_without_losses_each_batch_is_trained_once_and_its_weights_are_in_the_run_folder(tmp_path):
    ranks = Ranks(tmp_path)
    reports = await train(link_to(ranks), [1, 2, 3])
    assert ranks.trained == [1, 2, 3] and ranks.starts == 1
    assert [published(ranks, version) for version in (1, 2, 3)] == [4, 4 + 8, 4 + 8 + 12]
    assert [report.weights for report in reports] == [ranks.folder / f"weights/v00000{n}" for n in (1, 2, 3)]
    assert [report.metrics["trainer/restarts"] for report in reports] == [0, 0, 0]


async def test_lost_ranks_train_again_on_all_batches_since_the_start_and_report_only_the_last(tmp_path):
    ranks = Ranks(tmp_path, losses=[3])
    reports = await train(link_to(ranks), [1, 2, 3])
    assert ranks.trained == [1, 2, 1, 2, 3] and ranks.starts == 2
    assert ranks.again == [False, False, False, True, True, False]  # lost in the third
    assert [report.version for report in reports] == [1, 2, 3]
    assert published(ranks, 3) == 4 + 8 + 12
    assert reports[2].metrics["trainer/restarts"] == 1 and reports[2].metrics["trainer/replayed_batches"] == 2


async def test_batches_that_a_checkpoint_covers_are_not_trained_again(tmp_path):
    ranks = Ranks(tmp_path, losses=[4])
    link = link_to(ranks)
    await train(link, [1, 2])
    ranks.write_checkpoint(2)
    reports = await train(link, [3, 4])
    assert ranks.trained == [1, 2, 3, 3, 4]
    assert published(ranks, 4) == 4 + 8 + 12 + 16
    assert reports[1].metrics["trainer/replayed_batches"] == 1


async def test_ranks_lost_while_they_train_again_restart_once_more(tmp_path):
    ranks = Ranks(tmp_path, losses=[3, 5])
    reports = await train(link_to(ranks), [1, 2, 3])
    assert ranks.trained == [1, 2, 1, 1, 2, 3]
    assert reports[2].metrics["trainer/restarts"] == 2


async def test_the_run_stops_after_too_many_restarts(tmp_path):
    ranks = Ranks(tmp_path, losses=[2, 4], restarts=1)
    link = link_to(ranks)
    await train(link, [1])
    with pytest.raises(RunStopped, match=r"rank 1 is gone\), after 1 restarts \(cluster.max_trainer_restarts\)"):
        await train(link, [2])
    assert ranks.starts == 2


async def test_weights_that_differ_the_second_time_are_published_in_place_of_the_first(tmp_path, caplog):
    """The restarted trainer begins with a sum that is off by 100."""
    ranks = Ranks(tmp_path, losses=[3], drift=100)
    ranks.sums = {0: -100}
    link = link_to(ranks)
    ranks.sums = {**ranks.sums, 0: 0}
    await train(link, [1, 2])
    assert (published(ranks, 1), published(ranks, 2)) == (4, 12)
    await train(link, [3])
    assert (published(ranks, 1), published(ranks, 2), published(ranks, 3)) == (104, 112, 124)
    assert "gave other weights than before" in caplog.text
    expected = hashlib.sha256(json.dumps(["sum.json", 3]).encode() + b"112").hexdigest()
    assert ranks.shipments.of(ranks.folder / "weights" / "v000002").digest == expected


async def test_ranks_lost_while_they_start_are_started_again(tmp_path):
    ranks = Ranks(tmp_path, start_losses=[1, 2])
    ready = ranks.start_first()
    assert (ready.version, ranks.starts) == (0, 3)
    (report,) = await train(RayTrainer(ranks, ready, keep=10), [1])
    assert report.metrics["trainer/restarts"] == 2


async def test_while_older_weights_are_published_again_the_newer_ones_stay_for_the_samplers(tmp_path):
    """The third call loses a rank; at the fourth, batch 1 is trained again and gives other weights."""
    ranks = Ranks(tmp_path, losses=[3], drift=100)
    ranks.sums = {0: -100}
    link = link_to(ranks)
    ranks.sums = {**ranks.sums, 0: 0}
    await train(link, [1, 2])
    seen = []
    note = ranks.shipments.note
    ranks.shipments.note = lambda path, shipped: (seen.append((path.name, published(ranks, 2))), note(path, shipped))
    await train(link, [3])
    assert seen == [("v000001", 12), ("v000002", 112), ("v000003", 112)]


def test_versions_that_a_killed_process_published_after_its_checkpoint_are_removed(tmp_path):
    ranks = Ranks(tmp_path)
    for version in (0, 1, 2):
        (ranks.folder / "weights" / f"v00000{version}").mkdir(parents=True)
    link_to(ranks)
    assert [path.name for path in (ranks.folder / "weights").iterdir()] == ["v000000"]


async def test_batches_are_trained_in_the_order_in_which_they_were_handed_over(tmp_path):
    ranks = Ranks(tmp_path)
    link = link_to(ranks)
    reports = await asyncio.gather(*(link.train([sample(n)], n) for n in (1, 2, 3)))
    assert ranks.trained == [1, 2, 3] == [report.version for report in reports]


async def test_a_trainers_own_error_stops_the_run_without_a_restart(tmp_path):
    ranks = Ranks(tmp_path)
    link = link_to(ranks)
    ranks.call = lambda method, content, again=False: (_ for _ in ()).throw(
        RunStopped("the trainer: the loss is not finite")
    )
    with pytest.raises(RunStopped, match="the loss is not finite"):
        await train(link, [1])
    assert ranks.starts == 1


async def test_closing_ends_the_ranks_in_order(tmp_path):
    ranks = Ranks(tmp_path)
    await link_to(ranks).close()
    assert ranks.ended is True
