"""Executes requests to the trainer: train a batch and publish its weights, save state, send weights, score probes."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from verbatim.core.disk import link_or_copy
from verbatim.core.errors import RunStopped, VerbatimError
from verbatim.core.machine_faults import describe, is_out_of_memory
from verbatim.core.records.trained_tokens import TrainedTokens
from verbatim.core.types import TrainingSample
from verbatim.inference.sending import SendOrder, SendReport
from verbatim.models.native.cores import CoreShare
from verbatim.models.tiny import decoder_layers
from verbatim.trainer.device_memory import DeviceMemory
from verbatim.trainer.logprobs import whole_sample
from verbatim.trainer.trainer import Trainer
from verbatim.trainer.transport import StepReport, WeightFolders
from verbatim.trainer.transport.canary import NUM_PROBES, Probes, probe_sequences
from verbatim.trainer.transport.weights import folder_bytes
from verbatim.trainer.weight_sender import WeightBroadcaster


@dataclass(eq=False)
class TrainerWorker:
    """A `Trainer` with the folders to which it publishes, and the policy version that it holds."""

    trainer: Trainer
    _: KW_ONLY
    version: int
    """The policy version that the trainer holds: the last published version, or the version with which it started."""
    weights: WeightFolders
    """The folders in which policy versions are published."""
    states: Path
    """The folder in which the trainer's parts of checkpoints are left for the orchestrator to collect."""
    context_length: int
    """The sampler's maximum sequence length in tokens, which bounds the length of probes."""
    keeps_tokens: bool = False
    """True if reports include the logprob and gradient of each trained token."""
    memory: DeviceMemory | None = None
    """Set if the trainer shares its device with a sampler. The trainer then occupies the device only while it
    trains."""
    measures_rounding: bool = False
    """True if probes include the effect of rounding to bfloat16. Set if trainer or sampler computes in bfloat16."""
    broadcaster: WeightBroadcaster | None = None
    """Sends weights to the sampler's servers; None if the servers load the published folders."""
    _failure: str | None = None
    """Why a batch failed. Once this is set, every later batch is refused."""
    _cores: CoreShare | None = None

    def __post_init__(self) -> None:
        probes = probe_sequences(self.trainer.lm.vocab_size, self.context_length)
        self._probe_samples = [whole_sample(ids) for ids in probes]
        self._optimizer_steps = self.trainer.schedule.num_done

    def share(self, cores: CoreShare) -> None:
        """Limit threads to the cores that the sampler leaves free, checked before each layer, forward and backward. A
        micro-batch of a large model takes many seconds, in which the sampler may become idle, or need its cores."""
        self._cores = cores
        self.trainer.before_pass = self._take_cores
        for layer in decoder_layers(self.trainer.model):
            layer.register_forward_pre_hook(lambda *_: self._take_cores())
            layer.register_forward_hook(self._before_backward)

    def _before_backward(self, layer: nn.Module, given: object, output: Any) -> None:
        """Check the free cores before the backward pass of a layer too."""
        hidden = output[0] if isinstance(output, tuple) else output
        if hidden.requires_grad:
            hidden.register_hook(lambda grad: self._take_cores())

    def _take_cores(self) -> None:
        """If the number of cores that the sampler leaves free has changed, set torch's number of threads to that
        number."""
        assert self._cores is not None
        if torch.get_num_threads() != (free := self._cores.threads_for_pass()):
            torch.set_num_threads(free)

    def train(self, samples: Sequence[TrainingSample], version: int, *, checkpoint: bool = False) -> StepReport:
        """Train on one batch and publish the weights.

        Raises:
            RunStopped: the loss or gradient is not finite, memory ran out, or the weights could not be written. Every
                later batch is refused too: the orchestrator may have handed over a later batch before it knew of the
                failure.
        """
        if self._failure is not None:
            raise RunStopped(f"batch {version - 1} was not trained, because an earlier one failed: {self._failure}")
        assert version == self.version + 1, f"asked to train version {version}, but the trainer holds {self.version}"
        state = self._state(version) if checkpoint else None
        moving = 0.0
        try:
            if self._cores is not None:
                self._cores.compute(True)  # tells the sampler in the other process that the trainer uses cores
            moving += self.memory.come_back() if self.memory is not None else 0.0
            tokens: list[TrainedTokens] = []
            metrics = self.trainer.train_batch(samples, tokens.append if self.keeps_tokens else None)
            folder = self.weights.publish(version, self.trainer.save_weights)
            if state is not None:
                _make_empty(state)
                self._write(state, folder)
            probes = self.probe()  # this comes before the trainer leaves the device
            moving += self.memory.leave() if self.memory is not None else 0.0
        except VerbatimError as error:
            self._failure = str(error)
            raise
        except OSError as error:
            self._failure = (
                f"the results of training on batch {version - 1} could not be written: "
                f"{describe(error, self.states.parent)}"
            )
            raise RunStopped(self._failure) from error
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            self._failure = f"batch {version - 1} could not be trained: {describe(error)}"
            raise RunStopped(self._failure) from error
        finally:
            if self._cores is not None:
                self._cores.compute(False)
        # This is set only on success, so that `_check_held` notices optimizer steps whose weights were never published.
        self.version = version
        self._optimizer_steps = self.trainer.schedule.num_done
        if self.memory is not None:
            metrics["time/trainer_moving"] = moving
        return StepReport(
            version=version,
            weights=folder,
            num_trained_tokens=int(metrics["trained_tokens"]),
            metrics={**metrics, "weights/bytes": folder_bytes(folder)},
            probes=probes,
            state=state,
            tokens=tokens[0] if tokens else None,
        )

    def send(self, order: SendOrder) -> SendReport:
        """Send the weights of the current version to the sampler's servers.

        Raises:
            RunStopped: the order is for another version, or a rank of the trainer failed.
        """
        assert self.broadcaster is not None, "the trainer was started without a broadcaster: it publishes folders"
        self._check_held(order.version)
        return self.broadcaster.send(order)

    def save(self, folder: Path, version: int) -> None:
        """Write weights, optimizer and schedule into an existing folder.

        Raises:
            RunStopped: the trainer holds another version, or a batch failed after some of its optimizer steps.
        """
        self._check_held(version)
        self._write(folder, None)

    def leave_state(self, version: int) -> Path:
        """Write the same as `save` into a new folder under `states`, as `train` does for a checkpoint. Returns the
        folder.

        Raises:
            RunStopped: as for `save`.
        """
        self._check_held(version)
        folder = self._state(version)
        _make_empty(folder)
        self._write(folder, None)
        return folder

    def _state(self, version: int) -> Path:
        """The folder for the trainer's part of this version's checkpoint."""
        return self.states / f"v{version:06d}"

    def _check_held(self, version: int) -> None:
        """Refuse a request for a version whose weights and optimizer state the trainer does not hold, or no longer
        holds.

        Raises:
            RunStopped: the trainer holds another version, or optimizer steps were taken since this version was
                published.
        """
        if version != self.version or self.trainer.schedule.num_done != self._optimizer_steps:
            raise RunStopped(
                f"the state after step {version} is gone: {self.trainer.schedule.num_done} optimizer steps are "
                f"done, {self._optimizer_steps} of them for the {self.version} steps that were published"
            )

    def probe(self) -> Probes:
        """The current weights' logprobs of the fixed probes."""
        logprobs = [values[1:] for values in self.trainer.logprobs(self._probe_samples)]
        rounding = None
        if self.measures_rounding:
            short = self._probe_samples[:NUM_PROBES]  # no long probe: short probes are enough for a mean
            rounded = np.concatenate([values[1:] for values in self.trainer.logprobs(short, rounded=True)])
            rounding = float(np.abs(rounded - np.concatenate(logprobs[:NUM_PROBES])).mean())
        return Probes(
            token_ids=tuple(sample.token_ids for sample in self._probe_samples),
            logprobs=tuple(logprobs),
            rounding=rounding,
        )

    def _write(self, folder: Path, published: Path | None) -> None:
        """Write weights and state into a folder; `published` is the folder of the same weights, if there is one."""
        if published is None:
            self.trainer.save_weights(folder / "weights")
        else:  # the same weights are on disk already: hard links take no time and no space
            shutil.copytree(published, folder / "weights", copy_function=link_or_copy)
        self.trainer.save_state(folder / "trainer")


def _make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
