"""The `Trainer`: trains on batches of samples in optimizer steps, scores samples, and saves weights and state."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from verbatim.algorithms.losses import Loss
from verbatim.config.schema import TrainerConfig
from verbatim.core.errors import RunStopped, UsageError
from verbatim.core.records.trained_tokens import TrainedTokens
from verbatim.core.types import Float32, MicroBatch, TrainingSample
from verbatim.models.experts import find_routers
from verbatim.models.head import CausalLM
from verbatim.models.loading import load_model, resolve_device, save_model
from verbatim.models.native.freed_memory import keep_freed_memory
from verbatim.trainer.compile import choose_kernels, rounds_products, try_compiled
from verbatim.trainer.frozen import FrozenModels
from verbatim.trainer.logprobs import TargetLogprobs
from verbatim.trainer.lora import Adapters
from verbatim.trainer.metrics import MetricSums
from verbatim.trainer.offload import activation_offload
from verbatim.trainer.optim import build_optimizer, clip_gradients
from verbatim.trainer.optimizer_state import load_optimizer, save_optimizer
from verbatim.trainer.packer import StepPacker
from verbatim.trainer.parallel.micro_batches import hand_out, take_in
from verbatim.trainer.parallel.publish import Receivers, save_sharded, send_sharded
from verbatim.trainer.parallel.ranks import Ranks, together
from verbatim.trainer.parallel.sequence import refuse_slices, sequence_group
from verbatim.trainer.parallel.sharding import Sharding, refuse_rows_alone
from verbatim.trainer.progress import read_progress, write_progress
from verbatim.trainer.recompute import checkpoint_layers
from verbatim.trainer.router_loss import router_loss
from verbatim.trainer.router_replay import check_experts
from verbatim.trainer.schedule import Schedule
from verbatim.trainer.scoring import by_sample, numbered, target_logprobs
from verbatim.trainer.split import split_batch
from verbatim.trainer.step import GradientPass
from verbatim.trainer.token_values import TokenValues, in_order, lengths_of
from verbatim.trainer.trained_part import TrainedPart, batch_metrics


class Trainer:
    """Owns the model being trained, its optimizer and the count of optimizer steps.

    Training draws no random numbers: the same weights, state and batch give the same optimizer step.

    In a distributed run (`ranks`), each process constructs a `Trainer` with the same arguments. Call the methods on
    rank 0 only, as if rank 0 were alone: each method sends a command to the other ranks, which execute the command in
    `obey`.
    """

    def __init__(
        self,
        model_path: str | Path,
        config: TrainerConfig,
        *,
        loss: Loss,
        total_optimizer_steps: int,
        tokenizer: Any = None,
        seq_len: int = 0,
        dtype: Literal["float32", "float64"] = "float32",
        seed: int = 0,
        frozen: Mapping[str, str | Path] | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """Load a model and build its optimizer.

        Args:
            model_path: A folder or hub id in Hugging Face format.
            config: The `[trainer]` table. Its `loss` is a name; the `loss` argument is the resolved object.
            loss: The loss to minimise.
            total_optimizer_steps: Number of optimizer steps in the whole run, which is the length of the learning-rate
                schedule.
            tokenizer: Saved next to the weights, with its chat template.
            seq_len: Maximum number of tokens in a sample, 0 if unknown. A model that cannot take that many tokens is
                refused here.
            dtype: Dtype of the master weights. float64 is for gradient tests.
            seed: Seed for the initial values of low-rank adapters.
            frozen: Folders or hub ids of models that are not trained (reference, teacher), by the name of the logprob
                stream that each provides to the loss. A frozen copy of the base model costs no memory under low-rank
                adapters.
            ranks: The processes that train this model together; None if this process trains alone.

        Raises:
            ModelError: the model cannot be loaded, or cannot be trained with this configuration.
        """
        assert config.dtype != "auto", 'trainer.dtype is still "auto": call resolve_dtypes first'
        self.config = config
        self.loss = loss
        self.tokenizer = tokenizer
        self.ranks = ranks
        self.device = resolve_device(config.device) if ranks is None else ranks.device
        if self.device.type == "cpu":
            keep_freed_memory()
        self.adapters = Adapters(config.lora, base=model_path, seed=seed, ranks=ranks) if config.lora else None
        """The low-rank adapters; None for full fine-tuning."""
        self._load_model(model_path, dtype)
        # The packer comes before the adapters, because it checks the model without them.
        self.packer = StepPacker(self._targets, config, loss, seq_len=seq_len, ranks=ranks, sharding=self._sharding)
        if self.adapters is not None:
            self.adapters.begin(self.model)
        # These come after the adapters, because the adapters' layers get kernels too, and the optimizer must only take
        # parameters that still require a gradient.
        choose_kernels(self.model, compiled=config.compile, rounds=self._rounds)
        if config.compile:
            try_compiled(self._targets, self._sharding)
        self.optimizer = build_optimizer(self.model, config.optim)
        self.before_pass: Callable[[], None] = lambda: None
        """Hook that runs before the forward pass of each micro-batch in this process."""
        self.schedule = Schedule(config.optim, total_optimizer_steps)
        """The learning rates and the number of completed optimizer steps."""
        self._frozen = FrozenModels(
            frozen or {},
            self._targets,
            base=model_path,
            adapters=self.adapters,
            ranks=ranks,
            seq_len=seq_len,
            config=config,
            dtype=dtype,
        )
        self._scored = self._frozen.fingerprints
        """Fingerprints of every frozen model that has scored this run, including before a resume, by stream."""
        self.models = nn.ModuleList(dict.fromkeys([self.model, *self._frozen.models]))
        """Every model with weights on the device: the policy and the frozen models, each once."""
        for name, lm in self._frozen.streams.items():
            if Path((frozen or {})[name]) != Path(model_path):  # a frozen model may have another architecture
                self.packer.suit(lm.model, name, (frozen or {})[name])

    def _load_model(self, model_path: str | Path, dtype: str) -> None:
        """Load the model, sharded if there are several processes, and set up its logprobs and router loss."""
        config, ranks = self.config, self.ranks
        self._sharding = None if ranks is None else Sharding(ranks, config.dtype, added=self.adapters)
        sequence = sequence_group(ranks, config.parallel.sequence)
        self.model: Any = load_model(
            model_path, dtype=dtype, device=self.device, only_attention=config.packing == "tree", shards=self._sharding
        )
        routers = find_routers(self.model)
        if config.gradient_checkpointing:
            offload = activation_offload(self.device) if config.activation_offload else None
            checkpoint_layers(self.model, offload, routers)
        self.lm = CausalLM(self.model, self._sharding, routers)
        self._rounds = rounds_products(self.model, config, self.device, sharded=self._sharding is not None)
        refuse_rows_alone(self.lm, ranks)
        if sequence is not None:
            refuse_slices(self.lm, sequence.size)
        self._targets = TargetLogprobs(self.lm, config.logprob_chunk, self._autocast, sequence)
        self._router_loss = router_loss(self._targets, config.router_aux_loss_coef)

    # ---- training

    def train_batch(
        self, samples: Sequence[TrainingSample], on_tokens: Callable[[TrainedTokens], None] | None = None
    ) -> dict[str, float]:
        """Take `optimizer_steps_per_batch` optimizer steps on disjoint parts of a batch.

        A batch with fewer trajectories than that gets fewer steps. On a batch without a trained token, it takes no
        step: weights, optimizer and schedule stay unchanged, because the schedule counts optimizer steps, not batches.

        Args:
            samples: The batch.
            on_tokens: Receives the trainer's logprob and gradient of each trained token in the batch; None to discard
                them.

        Returns:
            `loss`, `grad_norm` (before clipping; mean over the optimizer steps), `lr` (of the last step), `entropy`,
            `mismatch_kl`, `ref_kl` (with a reference), `router/aux_loss`, `router/load_max` and `router/entropy` (with
            the load-balancing loss), `trained_tokens` (targets whose gradient was taken), `num_tokens` (tokens
            computed), `num_micro_batches`, `num_optimizer_steps`, `packing/sample_tokens` (tokens in the samples, which
            is what rows would compute), `packing/repeated_tokens` (computed more than once because a tree was cut),
            `packing/tree` (share of the computed tokens that were packed in trees), `packing/fallback` (1 if the tree
            check failed and rows are used instead), `seconds`, `tokens_per_second`, and the loss's own metrics, whose
            names differ from those listed here. Means are over the trained tokens of the whole batch, or, for losses
            that work on whole trajectories, over the batch's trajectories. Without a trained token these means are
            omitted.

        Raises:
            RunStopped: the loss or a gradient is not finite; the message names the optimizer step and the trajectories.
                The weights are those of the last good optimizer step.
            UsageError: this loss cannot be computed on these samples.
        """
        began = time.perf_counter()
        check_samples(samples, self.loss)
        check_experts(samples, self.lm.routers, type(self.model).__name__)
        metrics = MetricSums()
        split = split_batch(samples, self.config.optimizer_steps_per_batch)
        parts = [self._train_part(part, metrics, keep_tokens=on_tokens is not None) for part in split]  # on all ranks
        self.schedule.batch_is_over(self.config.optimizer_steps_per_batch)
        found = batch_metrics(samples, parts)
        if on_tokens is not None:
            on_tokens(in_order(samples, split, [part.tokens for part in parts]))
        seconds = time.perf_counter() - began
        return {
            **metrics.result(),
            **found,
            **({"packing/fallback": 1.0} if self.packer.trees_are_right is False else {}),
            "seconds": seconds,
            "tokens_per_second": found["num_tokens"] / seconds,
        }

    def _train_part(self, samples: Sequence[TrainingSample], metrics: MetricSums, *, keep_tokens: bool) -> TrainedPart:
        """Take one optimizer step on these samples.

        Raises:
            RunStopped: the loss or the gradient is not finite; no weight has changed.
        """
        dealt = self.packer.deal_checked(samples)
        micro_batches = [micro_batch for part in dealt for micro_batch in part]
        denominator = self.packer.denominator(micro_batches)
        lengths = lengths_of(samples) if keep_tokens else None
        with together(self.ranks, "train", denominator=denominator, lengths=lengths):
            trained = self._take_step(self._hand_out(dealt), denominator, metrics, lengths, samples)
        return dataclasses.replace(trained, micro_batches=micro_batches)

    def _take_step(
        self,
        own: Sequence[MicroBatch],
        denominator: int,
        metrics: MetricSums,
        lengths: dict[str, int] | None,
        samples: Sequence[TrainingSample] = (),
    ) -> TrainedPart:
        """Take one optimizer step together with all ranks, with this rank's micro-batches; result and metrics cover all
        ranks.

        Raises:
            RunStopped: as for `_train_part`.
        """
        mine = metrics if self.ranks is None else MetricSums()  # the parts of all ranks are added to `metrics` later
        tokens = None if lengths is None else TokenValues(lengths)
        gradients = GradientPass(
            lm=self._targets,
            loss=self.loss,
            denominator=denominator,
            metrics=mine,
            frozen=self._frozen.streams,
            ranks=self.ranks,
            router_loss=self._router_loss,
            tokens=tokens,
            before_pass=self.before_pass,
        )
        try:
            gradients.run(own)
            found = (
                [(gradients.loss_sum(), gradients.num_trained)]
                if self.ranks is None
                else self.ranks.agree(lambda: (gradients.loss_sum(), gradients.num_trained, mine.partial()))
            )
            for _, _, *partials in found:
                for partial in partials:
                    metrics.add_partial(partial)
            kept = [] if tokens is None else tokens.read(samples, self.ranks)
            grad_norm, lr = self._step()
        except RunStopped as error:
            raise RunStopped(
                f"optimizer step {self.schedule.num_done}: {error}. This optimizer step changed no weights"
            ) from error
        finally:
            self.optimizer.zero_grad(set_to_none=True)
        return TrainedPart(
            num_trained=sum(number for _, number, *_ in found),
            denominator=denominator,
            loss_sum=sum(loss for loss, *_ in found),
            grad_norm=grad_norm,
            lr=lr,
            tokens=kept,
        )

    def logprobs(self, samples: Sequence[TrainingSample], *, rounded: bool = False) -> list[Float32]:
        """The current policy's logprobs of the trained tokens: float32 [L] per sample, NaN outside the sample's loss
        mask.

        Args:
            samples: Samples to score; the loss mask selects the tokens.
            rounded: Round each layer's output to bfloat16.
        """
        dealt = self.packer.deal(numbered(samples))
        with together(self.ranks, "logprobs", rounded=rounded):
            found = [target_logprobs(self._targets, self._hand_out(dealt), self.ranks, rounded=rounded)]
            if self.ranks is not None:
                found += [self.ranks.receive(rank)[1] for rank in range(1, self.ranks.size)]
        return by_sample(samples, dealt, found)

    def _step(self) -> tuple[float, float]:
        """Clip the gradient and update the weights. Returns the gradient norm before clipping and the learning rate."""
        if self._sharding is not None:
            self._sharding.drop_unused()
        norm = clip_gradients(self.model, self.config.optim.max_grad_norm, self.ranks)
        # Counted before the update: if memory runs out during the update, the weights are half updated, and the count
        # tells the worker that the published version's state is gone.
        lr = self.schedule.take()
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        return norm, lr

    def _autocast(self) -> AbstractContextManager[object]:
        if self.config.dtype == "bfloat16" and not self._rounds:
            return torch.autocast(self.device.type, dtype=torch.bfloat16)
        return nullcontext()

    # ---- other ranks

    def _hand_out(self, dealt: list[list[MicroBatch]]) -> list[MicroBatch]:
        """Send the other ranks their micro-batches; return this rank's."""
        return dealt[0] if self.ranks is None else hand_out(self.ranks, dealt)

    def obey(self, order: Mapping[str, Any]) -> None:
        """On ranks other than 0: execute one order, that is, this rank's part of a method called on rank 0."""
        assert self.ranks is not None
        match order["do"]:
            case "train":
                self._take_step(take_in(self.ranks), order["denominator"], MetricSums(), order["lengths"])
            case "logprobs":
                found = target_logprobs(self._targets, take_in(self.ranks), self.ranks, rounded=order["rounded"])
                self.ranks.send(None, found, 0)
            case "try_trees":
                self.packer.try_trees(take_in(self.ranks), take_in(self.ranks))
            case "save_weights":
                self._save_weights(Path(order["folder"]))
            case "send_weights":
                send_sharded(self.model, None, self.ranks)
            case "save_state":
                self._save_state(Path(order["folder"]))
            case "load_state":
                self._on_all(partial(self._read_state, Path(order["folder"]), order["left"]))
            case "load_adapters":
                assert self.adapters is not None
                self._on_all(partial(self.adapters.load, Path(order["folder"])))
            case unknown:
                raise AssertionError(f"unknown order {unknown!r}")

    # ---- weights and state

    def save_weights(self, folder: Path) -> None:
        """Write the trained weights, and the tokenizer if there is one: the master weights as a folder that
        `from_pretrained` loads, or the adapters as a folder that `peft` loads."""
        with together(self.ranks, "save_weights", folder=folder.resolve()):
            self._save_weights(folder)

    def _save_weights(self, folder: Path) -> None:
        if self.adapters is not None:
            self.adapters.save(self.tokenizer, folder)
        elif self.ranks is not None:
            save_sharded(self.model, self.tokenizer, folder, self.ranks)
        else:
            save_model(self.model, self.tokenizer, folder)

    def send_weights(self, receivers: Receivers) -> None:
        """Send the master weights to processes that hold copies of the model, in the order of `published_layout`.

        Raises:
            SamplerFault: the receivers failed; the trainer can continue.
            RunStopped: another rank failed.
        """
        assert self.adapters is None, "adapters are published as a folder"
        with together(self.ranks, "send_weights"):
            send_sharded(self.model, receivers, self.ranks)

    def load_adapters(self, folder: Path) -> None:
        """Load the adapters that `save_weights` wrote.

        Raises:
            UsageError: as for `Adapters.load`; the adapters are then unchanged.
        """
        assert self.adapters is not None
        with together(self.ranks, "load_adapters", folder=folder.resolve()):
            self._on_all(partial(self.adapters.load, folder))

    def _on_all(self, do: Callable[[], None]) -> None:
        """Call `do` on this rank; if it fails on any rank, all ranks raise the error."""
        if self.ranks is None:
            do()
        else:
            self.ranks.agree(do)

    def save_state(self, folder: Path) -> None:
        """Write optimizer and schedule state. With `save_weights`, a resumed run continues bit for bit."""
        folder.mkdir(parents=True, exist_ok=True)
        with together(self.ranks, "save_state", folder=folder.resolve()):
            self._save_state(folder)

    def _save_state(self, folder: Path) -> None:
        if self.ranks is None:
            save_optimizer(self.optimizer, self.model, folder)
        else:
            rank, size = self.ranks.rank, self.ranks.size
            self.ranks.agree(lambda: save_optimizer(self.optimizer, self.model, folder, rank=rank, size=size))
            if rank:
                return
        write_progress(folder, self.schedule.progress, self._scored)

    def load_state(self, folder: Path, *, left: int | None = None) -> None:
        """Load what `save_state` wrote. Weights come from the constructor's `model_path`, adapters from
        `load_adapters`. If changed config keys make the learning rate jump, a warning is logged.

        Args:
            folder: The folder that `save_state` wrote.
            left: Number of optimizer steps planned for the remaining batches; None to keep the constructor's total.

        Raises:
            CheckpointError: the state is missing or damaged, or belongs to another model or a longer run.
        """
        with together(self.ranks, "load_state", folder=folder.resolve(), left=left):
            self._on_all(partial(self._read_state, folder, left))

    def _read_state(self, folder: Path, left: int | None) -> None:
        progress, self._scored = read_progress(folder, self._frozen.fingerprints)
        load_optimizer(self.optimizer, self.model, folder)
        self.schedule.go_on(progress, left)


def check_samples(samples: Sequence[TrainingSample], loss: Loss) -> None:
    """Refuse samples that the loss cannot be computed on.

    Raises:
        UsageError: a sample has no trajectory id, but the loss works on whole trajectories.
    """
    for sample in samples:
        missing = sample.loss_mask & np.isnan(sample.logprobs)
        assert not (loss.needs_inference_logprobs and missing.any()), (
            f"trajectory {sample.trajectory_id!r}: {int(missing.sum())} trained tokens have no inference logprob, "
            f"which the loss {loss.name} needs; they must be dropped and counted before training"
        )
    by_trajectory = loss.level != "token" or loss.normalizer == "trajectories"
    if by_trajectory and len(samples) > 1 and any(not sample.trajectory_id for sample in samples):
        raise UsageError(
            f"a training sample has no trajectory_id, but the loss {loss.name} works on whole "
            "trajectories; set trajectory_id on every Trajectory before build_samples"
        )
