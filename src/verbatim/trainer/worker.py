"""Executes requests to the trainer: train a batch and publish weights, save state, compute the probes' logprobs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from verbatim.errors import RunStopped, VerbatimError
from verbatim.machine_faults import describe, is_out_of_memory
from verbatim.trainer.logprobs import whole_sample
from verbatim.trainer.trainer import Trainer
from verbatim.transport import StepReport, WeightFolders
from verbatim.transport.canary import Probes, probe_sequences
from verbatim.transport.weights import folder_bytes
from verbatim.types import TrainingSample


class TrainerWorker:
    """A `Trainer` and what it publishes; knows which policy version it holds.

    Args:
        trainer: Holds the weights of `version`.
        version: Steps done before.
        weights: Where versions are published.
        states: Where its parts of checkpoints wait to be taken away.
        probe_length: Most tokens of a probe.
    """

    def __init__(
        self, trainer: Trainer, *, version: int, weights: WeightFolders, states: Path, probe_length: int
    ) -> None:
        self.version = version
        """The policy version it holds and has published (or began with)."""
        self._trainer = trainer
        self._weights = weights
        self._states = states
        self._probe_samples = [whole_sample(ids) for ids in probe_sequences(trainer.lm.vocab_size, probe_length)]
        self._optimizer_steps = trainer.num_optimizer_steps
        self._failure: str | None = None

    def train(self, samples: Sequence[TrainingSample], version: int, *, checkpoint: bool = False) -> StepReport:
        """Train on one batch and publish the weights.

        Raises:
            RunStopped: no finite loss or gradient, no memory, or the weights could not be written; also for every
                batch after such a one, because they may be handed over before the failure is known.
        """
        if self._failure is not None:
            raise RunStopped(f"batch {version - 1} was not trained, because an earlier one failed: {self._failure}")
        assert version == self.version + 1, f"version {version} was asked for, version {self.version} is held"
        state = self._states / f"v{version:06d}" if checkpoint else None
        try:
            metrics = self._trainer.train_batch(samples)
            folder = self._weights.publish(version, self._trainer.save_weights)
            if state is not None:
                shutil.rmtree(state, ignore_errors=True)
                state.mkdir(parents=True)
                self._write(state, folder)
        except VerbatimError as error:
            self._failure = str(error)
            raise
        except OSError as error:
            self._failure = (f"what was trained on batch {version - 1} could not be written: "
                             f"{describe(error, self._states.parent)}")  # fmt: skip
            raise RunStopped(self._failure) from error
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            self._failure = f"batch {version - 1} could not be trained: {describe(error)}"
            raise RunStopped(self._failure) from error
        self.version = version
        self._optimizer_steps = self._trainer.num_optimizer_steps
        return StepReport(
            version=version,
            weights=folder,
            num_trained_tokens=int(metrics["trained_tokens"]),
            metrics={**metrics, "weights/bytes": folder_bytes(folder)},
            probes=self.probe(),
            state=state,
        )

    def save(self, folder: Path, version: int) -> None:
        """Write weights, optimizer and schedule into an existing folder.

        Raises:
            RunStopped: this is not the version it holds, or a batch failed after some of its optimizer steps.
        """
        if version != self.version or self._trainer.num_optimizer_steps != self._optimizer_steps:
            raise RunStopped(
                f"the state after step {version} is gone: {self._trainer.num_optimizer_steps} optimizer steps are "
                f"done, {self._optimizer_steps} of them for the {self.version} steps that were published"
            )
        self._write(folder, None)

    def probe(self) -> Probes:
        """Its weights' logprobs of the fixed probes."""
        logprobs = self._trainer.logprobs(self._probe_samples)
        return Probes(
            token_ids=tuple(sample.token_ids for sample in self._probe_samples),
            logprobs=tuple(values[1:] for values in logprobs),
        )

    def _write(self, folder: Path, published: Path | None) -> None:
        if published is None:
            self._trainer.save_weights(folder / "weights")
        else:
            shutil.copytree(published, folder / "weights", copy_function=_link_or_copy)
        self._trainer.save_state(folder / "trainer")


def _link_or_copy(source: str, target: str) -> None:
    """Published files are never written to again, so a second name is as good as a copy, where the system has it."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
