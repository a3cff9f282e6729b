"""The orchestrator's side of a trainer whose ranks are Ray actors. Lost ranks are replaced."""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from verbatim.core.errors import RunStopped
from verbatim.core.types import TrainingSample
from verbatim.inference.sending import SendOrder, SendReport
from verbatim.logs.checkpoints import CheckpointStore
from verbatim.rollouts.ray.cluster import said_by_ray
from verbatim.run.cluster.folders import ShippedFolder, write
from verbatim.run.cluster.ray_ranks import RanksLost, RayRanks
from verbatim.trainer.transport import StepReport, TrainerReady, WeightFolders
from verbatim.trainer.transport.trainer_messages import (
    TrainerMessage,
    message_parts,
    report_from_json,
)

T = TypeVar("T")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class _Batch:
    """A batch in the object store."""

    version: int
    content: Any
    """Reference to the bytes of its message."""
    checkpoint: bool


class RayTrainer:
    """A `TrainerLink` to ranks on a Ray cluster.

    Batches are kept in the object store until a checkpoint covers them. If a rank is lost, all ranks restart from the
    newest checkpoint, train again on the kept batches in order, and then on the batch that was interrupted. The ledger
    counts a batch once, because only its last report reaches the orchestrator.

    Args:
        ranks: The ranks, started.
        ready: Their state.
        keep: Number of newest versions of the weights to keep in the run folder.
    """

    def __init__(self, ranks: RayRanks, ready: TrainerReady, *, keep: int) -> None:
        self._ranks = ranks
        self._kept: dict[int, _Batch] = {}
        self._digests: dict[int, str] = {}
        self._folder = ranks.folder
        # A replay may publish an older version again, while the samplers read newer ones.
        self._weights = WeightFolders(ranks.folder / "weights", keep=keep, keeps_newer=True)
        _remove_newer(ranks.folder / "weights", ready.version)
        self._turn = asyncio.Lock()

    async def train(self, samples: Sequence[TrainingSample], version: int, *, checkpoint: bool = False) -> StepReport:
        """Same as `TrainerLink.train`."""
        async with self._turn:  # first come, first served
            message = TrainerMessage(kind="train", version=version, samples=tuple(samples), checkpoint=checkpoint)
            return await _to_its_end(self._train, message)

    def _train(self, message: TrainerMessage) -> StepReport:
        content = self._ranks.ray.put(_joined(message))
        batch = _Batch(version=message.version, content=content, checkpoint=message.checkpoint)
        self._forget_covered()
        self._kept[batch.version] = batch
        replayed = 0
        while True:
            try:
                answer = self._ranks.call("train", batch.content)
                report = self._take(answer, batch)
                break
            except RanksLost as lost:
                replayed += self._restart(lost, batch.version)
        more = {"trainer/restarts": float(self._ranks.restarts), "trainer/replayed_batches": float(replayed)}
        return replace(report, metrics={**report.metrics, **more})

    def _take(self, answer: dict[str, Any], batch: _Batch) -> StepReport:
        """Bring the new weights, and the state of a checkpoint, into the run folder."""
        report, shipped = report_from_json(answer["result"], self._folder), answer["weights"]
        if shipped is not None:
            self._publish(batch.version, shipped)
        if batch.checkpoint:
            weights = report.weights if shipped is not None else None
            report = replace(report, state=self._ranks.fetch_state(batch.version, weights))
        return report

    def _publish(self, version: int, shipped: ShippedFolder) -> None:
        folder, ranks = self._folder, self._ranks
        try:
            path = self._weights.publish(version, lambda partial: write(ranks.ray, shipped, partial, folder))
        except ranks.ray.exceptions.ObjectLostError as error:
            raise RanksLost(said_by_ray(error)) from error
        ranks.shipments.note(path, shipped)
        self._digests[version] = shipped.digest

    def _restart(self, lost: RanksLost, version: int) -> int:
        """Start all ranks again, and train them on the kept batches before this version; return their number.

        Raises:
            RunStopped: too many restarts.
        """
        while True:
            if self._ranks.config.inference.backend == "vllm" and self._sends:
                raise RunStopped(f"the trainer lost ranks ({lost}), and with them the weight broadcast; resume the run")
            began = time.monotonic()
            self._ranks.prepare_restart(lost)
            try:
                ready = self._ranks.start()
                again = self._batches_after(ready.version, version)
                for batch in again:
                    self._replay(batch)
            except RanksLost as again_lost:
                lost = again_lost
                continue
            logger.warning(
                "the trainer is back after %.0f s, with version %d and %d batches trained again",
                time.monotonic() - began,
                ready.version,
                len(again),
            )
            return len(again)

    def _batches_after(self, held: int, version: int) -> list[_Batch]:
        """The kept batches that lead from the version that the ranks hold to the one before `version`.

        Raises:
            RunStopped: a batch is gone: the newest checkpoint, which covered it, is damaged.
        """
        needed = range(held + 1, version)
        if missing := [number for number in needed if number not in self._kept]:
            raise RunStopped(
                f"the trainer restarted with version {held}, but batch {missing[0] - 1} is no longer kept, because a "
                "newer checkpoint covered it; that checkpoint is damaged. Resume the run"
            )
        return [self._kept[number] for number in needed]

    @property
    def _sends(self) -> bool:
        from verbatim.run.rollouts import inference_settings

        return inference_settings(self._ranks.config).broadcast is not None

    def _replay(self, batch: _Batch) -> None:
        """Train again on a batch whose report was delivered. If the weights differ from those that were published, the
        new ones are published in their place; the samplers load the version after them next."""
        answer = self._ranks.call("train", batch.content, True)
        shipped = answer["weights"]
        if shipped is None or self._digests.get(batch.version) in (None, shipped.digest):
            return
        logger.warning(
            "training again on batch %d gave other weights than before; version %d is published again",
            batch.version - 1,
            batch.version,
        )
        self._publish(batch.version, shipped)

    def _forget_covered(self) -> None:
        """Drop the batches that the newest checkpoint covers."""
        covered = max(CheckpointStore(self._folder / "checkpoints", read_only=True).steps(), default=0)
        for version in [version for version in self._kept if version <= covered]:
            del self._kept[version]
            self._digests.pop(version, None)

    async def save(self, folder: Path, version: int) -> None:
        """Same as `TrainerLink.save`."""
        async with self._turn:
            await _to_its_end(self._save, folder, version)

    def _save(self, folder: Path, version: int) -> None:
        while True:
            try:
                self._ranks.call("save", version)
                state = self._ranks.fetch_state(version, None)
                break
            except RanksLost as lost:
                self._restart(lost, version + 1)
        for part in state.iterdir():
            part.rename(folder / part.name)
        state.rmdir()

    async def send(self, order: SendOrder) -> SendReport:
        """Same as `TrainerLink.send`."""
        async with self._turn:
            return await _to_its_end(self._send, order)

    def _send(self, order: SendOrder) -> SendReport:
        try:
            return SendReport(**self._ranks.call("send", order)["result"])
        except RanksLost as lost:
            raise RunStopped(f"the trainer lost ranks ({lost}) while it sent weights; resume the run") from lost

    async def watch(self) -> None:
        """Never returns: the next call notices lost ranks, and replaces them."""
        await asyncio.Event().wait()

    async def close(self) -> None:
        """End the ranks, after a request that is still being executed."""
        async with self._turn:
            await asyncio.to_thread(self._ranks.end, in_order=True)


async def _to_its_end(work: Callable[..., T], *arguments: Any) -> T:
    """Run blocking work on a thread. If the caller is cancelled, the work still ends before this returns, so that the
    next request does not overtake it."""
    working = asyncio.ensure_future(asyncio.to_thread(work, *arguments))
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        await asyncio.wait({working})
        raise


def _joined(message: TrainerMessage) -> Any:
    """The bytes of a message: uint8 [N]."""
    parts = list(message_parts(message))
    joined = np.empty(sum(part.nbytes for part in parts), np.uint8)
    end = 0
    for part in parts:
        start, end = end, end + part.nbytes
        joined[start:end] = np.frombuffer(part, np.uint8)
    return joined


def _remove_newer(folder: Path, version: int) -> None:
    """Remove the versions of the weights that a killed process published after its last checkpoint."""
    for path in folder.glob("v[0-9]*"):
        if int(path.name[1:]) > version:
            shutil.rmtree(path)
