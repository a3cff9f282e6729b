"""Trains on batches of samples in optimizer steps; saves weights and state."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from verbatim.config.schema import TrainerConfig
from verbatim.errors import CheckpointError, ModelError, RunStopped, UsageError
from verbatim.losses import Loss
from verbatim.machine_faults import naming
from verbatim.models.adapters import fingerprint
from verbatim.models.head import CausalLM
from verbatim.models.loading import load_model, resolve_device, save_model
from verbatim.models.positions import refuse_moving_positions
from verbatim.packing import find_packer, num_tokens
from verbatim.trainer.device_batch import DeviceBatch
from verbatim.trainer.frozen import base_under_adapters, load_frozen
from verbatim.trainer.linear import use_onednn
from verbatim.trainer.logprobs import TargetLogprobs
from verbatim.trainer.lora import Adapters
from verbatim.trainer.metrics import MetricSums
from verbatim.trainer.model_check import packing_for
from verbatim.trainer.optim import build_optimizer, learning_rate, load_optimizer, save_optimizer
from verbatim.trainer.split import split_batch
from verbatim.trainer.step import GradientPass
from verbatim.trainer.tree_check import trees_are_right
from verbatim.types import Float32, MicroBatch, TrainingSample

STATE_FILE = "trainer.json"
OPTIMIZER_FILE = "optimizer.safetensors"
MICRO_BATCH_TOKENS = 16_384
"""Most tokens of one forward pass, where the configuration does not say."""
CPU_MICRO_BATCH_TOKENS = 8192
"""On a CPU: activations of more tokens leave its caches, and with fewer a tree is cut more often."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _TrainedPart:
    """One optimizer step: the part of the batch that it was taken on, and what came of it."""

    micro_batches: Sequence[MicroBatch]
    num_trained: int
    denominator: int
    loss_sum: float
    grad_norm: float
    lr: float


class Trainer:
    """Owns the model being trained, its optimizer and the count of optimizer steps.

    It draws no random numbers: the same weights, state and batch give the same optimizer step.
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
    ) -> None:
        """Load a model and make its optimizer.

        Args:
            model_path: A folder or hub id in Hugging Face format.
            config: The `[trainer]` table; its loss and packing are names, `loss` is what the former resolved to.
            loss: What is minimised.
            total_optimizer_steps: Optimizer steps of the whole run, over which the schedule is stretched.
            tokenizer: Saved beside the weights, with its chat template.
            seq_len: Most tokens of a sample, if that is known: a model that cannot take so many is refused here.
            dtype: The type of the master weights. float64 is for tests of the gradient.
            seed: Of the first values of low-rank adapters.
            frozen: Folders or hub ids of models that are not trained, by the name of the logprob stream that they give
                to the loss. With low-rank adapters, their base takes no memory.

        Raises:
            ModelError: the model cannot be loaded, or cannot be trained as asked.
        """
        self.config = config
        self.loss = loss
        self.total_optimizer_steps = total_optimizer_steps
        self.tokenizer = tokenizer
        self.device = resolve_device(config.device)
        self.model: Any = load_model(
            model_path, dtype=dtype, device=self.device, only_attention=config.packing == "tree"
        )
        if config.gradient_checkpointing:
            checkpoint_layers(self.model)
        self.lm = CausalLM(self.model)
        self._targets = TargetLogprobs(self.lm, config.logprob_chunk, self._autocast)
        refuse_moving_positions(self.lm, seq_len)
        self.packing: str = packing_for(self.lm, config.packing)
        """The packer: "rows" where the model can take no other, or where this process found trees to be wrong."""
        self.adapters = Adapters(self.model, config.lora, base=model_path, seed=seed) if config.lora else None
        """What is trained instead of the model's own weights; None = these are."""
        use_onednn(self.model)
        self.optimizer = build_optimizer(self.model, config.optim)
        self.num_optimizer_steps = 0
        """Optimizer steps done: what the schedule counts."""
        self._trees_are_right: bool | None = None
        """None = not tried yet."""
        self._load_frozen(frozen or {}, model_path, dtype, seq_len)

    def _load_frozen(self, frozen: Mapping[str, str | Path], model_path: str | Path, dtype: str, seq_len: int) -> None:
        """The models that are not trained; under low-rank adapters, the one in training is its own first model."""
        only_attention = self.config.packing == "tree"
        self._frozen = {
            name: base_under_adapters(self._targets) if self.adapters is not None and Path(source) == Path(model_path)
            else load_frozen(source, name, self._targets, dtype=dtype, seq_len=seq_len, only_attention=only_attention)
            for name, source in frozen.items()
        }  # fmt: skip
        self._fingerprints = {
            name: fingerprint(lm.model.model.named_parameters())
            for name, lm in self._frozen.items()
            if lm.model is not self.lm  # adapters know their base
        }
        self.models = nn.ModuleList(dict.fromkeys([self.model, *(lm.model.model for lm in self._frozen.values())]))
        """Everything that has weights on its device."""
        if any(lm.model.rows_alone for lm in self._frozen.values()):
            self.packing = "rows"

    # ---- training

    def train_batch(self, samples: Sequence[TrainingSample]) -> dict[str, float]:
        """Take `optimizer_steps_per_batch` optimizer steps on disjoint parts of a batch.

        Fewer optimizer steps are taken where there are fewer trajectories. A batch without a trained token takes none:
        weights, optimizer and schedule stay as they are, because the schedule counts optimizer steps, not batches.

        Returns:
            `loss`, `grad_norm` (before clipping; mean over the optimizer steps), `lr` (of the last one), `entropy`,
            `mismatch_kl`, `ref_kl` (with a reference), `trained_tokens` (targets whose gradient was taken),
            `num_tokens` (computed), `num_micro_batches`, `num_optimizer_steps`, `packing/sample_tokens` (of the
            samples: what rows compute), `packing/repeated_tokens` (computed more than once because a tree was cut),
            `packing/tree` (share of the computed tokens that lay in trees), `packing/fallback` (1, where trees were
            found to be wrong and rows are taken instead), `seconds`, `tokens_per_second`, and the loss's own metrics
            under other names than these.
            Means are over the trained tokens of the whole batch, or its trajectories (metrics of losses that see
            them whole). Without a trained token there is nothing to average, and those means are left out.

        Raises:
            RunStopped: the loss or a gradient is not finite; names optimizer step and trajectories. The weights are
                those of the last good optimizer step.
            UsageError: samples that this loss cannot be computed on.
        """
        began = time.perf_counter()
        self._check(samples)
        metrics = MetricSums()
        split = split_batch(samples, self.config.optimizer_steps_per_batch)
        parts = [self._train_part(part, metrics) for part in split]
        packed = [micro_batch for part in parts for micro_batch in part.micro_batches]
        num_trained = sum(part.num_trained for part in parts)
        expected = sum(sample.num_trained_tokens for sample in samples)
        assert num_trained == expected, f"trained {num_trained} of {expected} tokens"
        seconds = time.perf_counter() - began
        computed = num_tokens(packed)
        return {
            **metrics.result(),
            "loss": sum(part.loss_sum for part in parts) / max(1, sum(part.denominator for part in parts)),
            "grad_norm": sum(part.grad_norm for part in parts) / max(1, len(parts)),
            "lr": parts[-1].lr if parts else 0.0,
            "trained_tokens": num_trained,
            "num_tokens": computed,
            "num_micro_batches": len(packed),
            "num_optimizer_steps": len(parts),
            "packing/sample_tokens": sum(len(sample) for sample in samples if sample.num_trained_tokens),
            "packing/repeated_tokens": sum(micro_batch.num_repeated_tokens for micro_batch in packed),
            "packing/tree": num_tokens([m for m in packed if not m.is_rows]) / max(1, computed),
            **({"packing/fallback": 1.0} if self._trees_are_right is False else {}),
            "seconds": seconds,
            "tokens_per_second": computed / seconds,
        }

    def _train_part(self, samples: Sequence[TrainingSample], metrics: MetricSums) -> _TrainedPart:
        """One optimizer step on these samples.

        Raises:
            RunStopped: the loss or the gradient is not finite; no weight was touched.
        """
        micro_batches = self._pack_checked(samples)
        gradients = GradientPass(
            lm=self._targets, loss=self.loss, denominator=self._denominator(micro_batches), metrics=metrics,
            frozen=self._frozen,
        )  # fmt: skip
        try:
            loss_sum = gradients.run(micro_batches)
            grad_norm, lr = self._step()
        except RunStopped as error:
            raise RunStopped(f"optimizer step {self.num_optimizer_steps}: {error}. No weight was touched by this "
                             "optimizer step") from error  # fmt: skip
        finally:
            self.optimizer.zero_grad(set_to_none=True)
        return _TrainedPart(
            micro_batches=micro_batches, num_trained=gradients.num_trained, denominator=gradients.denominator,
            loss_sum=loss_sum, grad_norm=grad_norm, lr=lr,
        )  # fmt: skip

    @torch.no_grad()
    def logprobs(self, samples: Sequence[TrainingSample]) -> list[Float32]:
        """The current policy's logprobs of the trained tokens: float32 [L] per sample, NaN outside its mask."""
        out = [np.full(len(sample), np.nan, dtype=np.float32) for sample in samples]
        numbered = [dataclasses.replace(sample, trajectory_id=str(i)) for i, sample in enumerate(samples)]
        for micro_batch in self.pack(numbered):
            batch, targets = DeviceBatch(micro_batch, self.device), micro_batch.targets
            logprobs = self._targets.forward(self._targets.hidden(batch), batch.target_ids_M, batch.temperatures_M)
            found = logprobs.logprobs_M.cpu().numpy()
            for number, trajectory_id in enumerate(micro_batch.trajectory_ids):
                mine = targets.trajectories == number
                out[int(trajectory_id)][targets.offsets[mine]] = found[mine]
        return out

    def pack(self, samples: Sequence[TrainingSample]) -> list[MicroBatch]:
        """The micro-batches of one optimizer step.

        Raises:
            ModelError: a sample is so long that it would change the positions of the others.
        """
        refuse_moving_positions(self.lm, max(map(len, samples), default=0))
        keep_whole = self.loss.level != "token"
        default = CPU_MICRO_BATCH_TOKENS if self.device.type == "cpu" and not keep_whole else MICRO_BATCH_TOKENS
        budget = self.config.micro_batch_tokens or default
        return find_packer(self.packing)(samples, micro_batch_tokens=budget, keep_whole=keep_whole)

    def _pack_checked(self, samples: Sequence[TrainingSample]) -> list[MicroBatch]:
        """`pack`; before the first trees of this process are trained on, a few of their samples are tried both ways."""
        micro_batches = self.pack(samples)
        if self._trees_are_right is not None or all(micro_batch.is_rows for micro_batch in micro_batches):
            return micro_batches
        self._trees_are_right = trees_are_right(self._targets, samples, tolerance=self._rounding())
        if self._trees_are_right:
            return micro_batches
        self.packing = "rows"
        return self.pack(samples)

    def _rounding(self) -> float:
        """The largest relative difference between two ways to compute one gradient."""
        if self.config.dtype == "bfloat16":
            return 5e-2
        return 1e-10 if self.lm.output.weight.dtype == torch.float64 else 1e-4

    def _denominator(self, micro_batches: Sequence[MicroBatch]) -> int:
        if self.loss.normalizer == "tokens":
            count = sum(len(micro_batch.targets) for micro_batch in micro_batches)
        else:
            count = len({name for micro_batch in micro_batches for name in micro_batch.trajectory_ids})
        return max(1, count)

    def _step(self) -> tuple[float, float]:
        """Clip, and take the optimizer step; the gradient's norm before clipping, and the learning rate."""
        assert self.num_optimizer_steps < self.total_optimizer_steps, (
            f"all {self.total_optimizer_steps} optimizer steps of the schedule are done"
        )
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters])
        if not torch.isfinite(norm):
            bad = [n for n, p in self.model.named_parameters() if p.grad is not None and not p.grad.isfinite().all()]
            raise RunStopped(f"the gradient's norm is {norm.item()} although the loss is finite; not finite in "
                             f"{len(bad)} parameters: {', '.join(bad[:3])}")  # fmt: skip
        torch.nn.utils.clip_grads_with_norm_(parameters, self.config.optim.max_grad_norm, norm)
        lr = learning_rate(self.config.optim, self.num_optimizer_steps, self.total_optimizer_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        # Counted first: memory may run out in the middle, and such weights are between two optimizer steps.
        self.num_optimizer_steps += 1
        self.optimizer.step()
        return float(norm), lr

    def _check(self, samples: Sequence[TrainingSample]) -> None:
        for sample in samples:
            missing = sample.loss_mask & np.isnan(sample.logprobs)
            assert not (self.loss.needs_inference_logprobs and missing.any()), (
                f"trajectory {sample.trajectory_id!r}: {int(missing.sum())} trained tokens have no inference logprob, "
                f"which the loss {self.loss.name} needs; they must be dropped and counted before training"
            )
        by_trajectory = self.loss.level != "token" or self.loss.normalizer == "trajectories"
        if by_trajectory and len(samples) > 1 and any(not sample.trajectory_id for sample in samples):
            raise UsageError(
                f"a training sample has no trajectory_id, but the loss {self.loss.name} works on whole "
                "trajectories; set trajectory_id on every Trajectory before build_samples"
            )

    def _autocast(self) -> AbstractContextManager[object]:
        if self.config.dtype == "bfloat16":
            return torch.autocast(self.device.type, dtype=torch.bfloat16)
        return nullcontext()

    # ---- weights and state

    def save_weights(self, folder: Path) -> None:
        """Write what is trained, and the tokenizer if there is one: the master weights as a folder that
        `from_pretrained` loads, or the adapters as one that `peft` loads."""
        if self.adapters is not None:
            self.adapters.save(self.tokenizer, folder)
        else:
            save_model(self.model, self.tokenizer, folder)

    def save_state(self, folder: Path) -> None:
        """Write optimizer and schedule; with `save_weights`, all that a resumed run needs to go on bit for bit."""
        folder.mkdir(parents=True, exist_ok=True)
        save_optimizer(self.optimizer, self.model, folder / OPTIMIZER_FILE)
        state = {"num_optimizer_steps": self.num_optimizer_steps, "total_optimizer_steps": self.total_optimizer_steps,
                 "frozen": self._fingerprints}  # fmt: skip
        with naming(folder / STATE_FILE):
            (folder / STATE_FILE).write_text(json.dumps(state) + "\n", encoding="utf-8")

    def load_state(self, folder: Path) -> None:
        """Take over what `save_state` wrote; the weights come from the constructor's `model_path`, adapters from
        `Adapters.load`.

        The schedule is stretched over this trainer's `total_optimizer_steps`, so a run may be made longer.

        Raises:
            CheckpointError: the state is missing, damaged, or of another model or a longer run.
        """
        path = folder / STATE_FILE
        try:
            state = json.loads(path.read_text(encoding="utf-8"))
            done, scored = state["num_optimizer_steps"], dict(state.get("frozen", {}))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path} is no trainer state: {error!r}; expected a folder that save_state "
                                  "wrote") from error  # fmt: skip
        if not isinstance(done, int) or not 0 <= done <= self.total_optimizer_steps:
            raise CheckpointError(f"{path}: {done!r} optimizer steps are done, this run has "
                                  f"{self.total_optimizer_steps} in all; raise max_steps to go on")  # fmt: skip
        for name, digest in self._fingerprints.items():
            if scored.get(name, digest) != digest:
                raise CheckpointError(f"{path}: the {name} model of this run had other weights; put back the model "
                                      "that it was started with, or start a new run")  # fmt: skip
        load_optimizer(self.optimizer, self.model, folder / OPTIMIZER_FILE)
        self.num_optimizer_steps = done


def checkpoint_layers(model: Any) -> None:
    """Recompute each layer's activations in the backward pass, with dropout still off.

    Raises:
        ModelError: a model without such layers, or with dropout.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ModelError(f"{type(model).__name__} has no layers that can be checkpointed; set "
                         "trainer.gradient_checkpointing = false")  # fmt: skip
    dropouts = {k: v for k, v in model.config.get_text_config().to_dict().items()
                if ("dropout" in k or "pdrop" in k) and isinstance(v, int | float) and v}  # fmt: skip
    if dropouts:
        raise ModelError(
            f"{type(model).__name__} has {dropouts}: checkpointed layers would apply it, and train another policy than "
            "the one that sampled; set these to 0 in the model's config.json"
        )
    for layer in layers:
        layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
        layer.gradient_checkpointing = True
        layer.training = True  # the layer alone, not the modules in it: transformers asks for it here
