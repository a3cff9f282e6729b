"""Adds low-rank adapters (LoRA) to a model with `peft`, saves the adapters in the format of `peft`, and loads them
again.

The base weights stay frozen: only the adapters have gradients, optimizer state, checkpoints and policy versions.
"""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from verbatim.config.schema import LoraConfig
from verbatim.core.errors import CheckpointError, ModelError
from verbatim.core.formats import stamped
from verbatim.core.imports import refuse_without
from verbatim.core.machine_faults import naming, rust_errors_as_oserror
from verbatim.models.adapters import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    BASE_FILE,
    BASE_FINGERPRINT,
    PREFIX,
    ROUNDED_FINGERPRINT,
    fingerprint,
    is_adapter,
    merged_weight,
    read_adapter,
)
from verbatim.models.own_attention import LENGTH, TOLERANCE
from verbatim.models.refusal import refusing
from verbatim.models.shards import copy_rows, whole
from verbatim.models.tiny import NoTinyCopy, tiny_copy
from verbatim.trainer.parallel.ranks import Ranks

logger = logging.getLogger(__name__)

_MOST_NAMED = 12
"""Maximum number of layer names to list in a message."""
_TINY_RANK = 8
"""Rank of the adapters in the check on a tiny copy of the model."""


class Adapters:
    """The adapters of a model in training. At the start they change nothing: A is random, B is 0.

    A single process loads the model and then calls `begin`. With several ranks the model is sharded first: `inject`
    adds the adapters to a model on the meta device, and `hide` takes them out again until `begin`, so that the model is
    loaded and checked without the adapters.

    Args:
        config: The `[trainer.lora]` table.
        base: The folder or hub id that the model is loaded from; saved adapters refer to it.
        seed: Seed for the random values of A.
        ranks: The processes that train together, each of which holds some rows of A and B; None for one process.

    Raises:
        UsageError: `peft` is not installed.
    """

    def __init__(self, config: LoraConfig, *, base: str | Path, seed: int, ranks: Ranks | None = None) -> None:
        refuse_without("peft", extra="lora", what="[trainer.lora]")
        self._config = config
        self._base = str(Path(base).absolute()) if Path(base).is_dir() else str(base)
        self._seed, self._ranks = seed, ranks
        self._model: Any = None
        self._peft_config: Any = None
        self._hidden: list[tuple[nn.Module, str, nn.Module]] = []
        self._rounded_fingerprint = ""
        self.base_fingerprint = ""
        """Fingerprint of the base weights, which do not change."""
        self.num_base_parameters = 0
        """Number of base parameters, which are not trained."""

    def inject(self, model: Any) -> None:
        """Add adapters to the layers of a `transformers` model, and freeze its base weights.

        Raises:
            ModelError: no layer matches `target_modules`, a matching layer cannot be adapted, or adapted layers do not
                compute what merged weights do.
        """
        _refuse_other_when_merged(model, self._config)
        self._model, self._peft_config = model, _inject(model, self._config)

    def hide(self) -> None:
        """Replace the adapted layers by the original layers until `begin` is called."""
        from peft.tuners.lora import LoraLayer

        for parent in list(self._model.modules()):
            for name, module in list(parent.named_children()):
                if isinstance(module, LoraLayer):
                    self._hidden.append((parent, name, module))
                    setattr(parent, name, module.get_base_layer())

    def begin(self, model: Any) -> None:
        """Add the adapters to a model whose weights are loaded, and set their initial values. All ranks call it.

        Raises:
            ModelError: as for `inject`.
        """
        total = self._ranks.total if self._ranks is not None else lambda sums: sums
        self.base_fingerprint = fingerprint(model.named_parameters(), total)
        self._rounded_fingerprint = fingerprint(model.named_parameters(), total, torch.bfloat16)
        self.num_base_parameters = sum(p.numel() for p in model.parameters())
        if self._model is None:
            self.inject(model)
        for parent, name, module in self._hidden:
            setattr(parent, name, module)
        self._hidden = []
        self._draw()

    def _draw(self) -> None:
        """Initialise A uniformly in +-1/sqrt(I), like `peft` and the paper's own code, and B to 0.

        Every rank generates all of A from the same seed and keeps its own rows, so the values do not depend on the
        number of ranks."""
        generator = torch.Generator().manual_seed(self._seed)
        for name, parameter in self._parameters():
            value = torch.zeros(parameter.shape, device="cpu")
            if ".lora_A." in name:
                value.uniform_(-(parameter.shape[1] ** -0.5), parameter.shape[1] ** -0.5, generator=generator)
            copy_rows(parameter, value)

    @property
    def num_parameters(self) -> int:
        """Number of trained parameters."""
        return sum(parameter.numel() for _, parameter in self._parameters())

    @property
    def num_layers(self) -> int:
        """Number of adapted layers."""
        return sum(name.endswith("lora_A.weight") for name, _ in self._parameters())

    def __str__(self) -> str:
        share = self.num_parameters / self.num_base_parameters
        return (
            f"{self.num_parameters:,} parameters are trained ({share:.2%} of {self.num_base_parameters:,}): rank "
            f"{self._config.r} on {self.num_layers} layers"
        )

    def save(self, tokenizer: Any, folder: Path) -> None:
        """Write adapters and tokenizer as a folder that `peft` loads. All ranks call it; rank 0 writes.

        Raises:
            OSError: the system refused to write (disk full, no permission). With several ranks, all ranks raise
                RunStopped instead.
        """
        tensors = {PREFIX + name: whole(value.detach()).cpu().contiguous() for name, value in self._parameters()}
        if self._ranks is None:
            self._write(tensors, tokenizer, folder)
        else:
            leads = self._ranks.leads
            self._ranks.agree(lambda: self._write(tensors, tokenizer, folder) if leads else None)

    def _write(self, tensors: Mapping[str, Tensor], tokenizer: Any, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        with rust_errors_as_oserror(folder / ADAPTER_WEIGHTS):
            save_file(dict(tensors), folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
        described = {
            key: sorted(value) if isinstance(value, set) else value
            for key, value in self._peft_config.to_dict().items()
        }
        described |= {"base_model_name_or_path": self._base, "inference_mode": True}
        fingerprints = {BASE_FINGERPRINT: self.base_fingerprint, ROUNDED_FINGERPRINT: self._rounded_fingerprint}
        base = stamped(BASE_FILE, fingerprints)
        for name, content in ((ADAPTER_CONFIG, described), (BASE_FILE, base)):
            with naming(folder / name):
                text = json.dumps(content, indent=2, sort_keys=True, default=str)
                (folder / name).write_text(text + "\n", encoding="utf-8")
        if tokenizer is not None:
            with rust_errors_as_oserror(folder):
                tokenizer.save_pretrained(folder)

    def load(self, folder: Path) -> None:
        """Load what `save` wrote. All ranks call it.

        Raises:
            CheckpointError: the folder holds full weights, or an adapter of another shape or base model; the message
                says what to set instead. The adapters are then unchanged.
            ModelError: the folder is damaged.
        """
        if not is_adapter(folder):
            raise CheckpointError(
                f"{folder} holds full weights, not an adapter: its run was full fine-tuning; resume "
                "it without [trainer.lora], or start a new run"
            )
        found = read_adapter(folder)
        own = dict(self._parameters())
        saved = {
            f"{name}.lora_{half}.weight": tensor
            for name, pair in found.pairs.items()
            for half, tensor in zip("AB", pair, strict=True)
        }
        if found.r != self._config.r or found.scale != self._config.alpha / self._config.r:
            raise CheckpointError(
                f"{folder} holds an adapter with r = {found.r}, alpha = {found.scale * found.r:g}; expected r = "
                f"{self._config.r}, alpha = {self._config.alpha:g}: resume with trainer.lora.r = {found.r} and "
                f"trainer.lora.alpha = {found.scale * found.r:g}"
            )
        other = sorted(
            name
            for name in own.keys() | saved.keys()
            if name not in own or name not in saved or own[name].shape != saved[name].shape
        )
        if other:
            layers = sorted({name.rpartition(".lora_")[0].rpartition(".")[2] for name in saved})
            raise CheckpointError(
                f"the adapter in {folder} and trainer.lora.target_modules name different layers, for example "
                f"{other[0]}; resume with trainer.lora.target_modules = {json.dumps(layers)}"
            )
        if found.base_fingerprint not in (None, self.base_fingerprint):
            raise CheckpointError(
                f"the adapter in {folder} was trained on weights that differ from those in {self._base}; restore "
                "the base model that the run was started with, or start a new run"
            )
        for name, parameter in own.items():
            copy_rows(parameter, saved[name])

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """A and B of each layer, by the names that they have in a saved folder, without the prefix."""
        for name, parameter in self._model.named_parameters():
            if ".default.weight" in name:
                yield name.replace(".default.weight", ".weight"), parameter


def check_adapters(model_config: Any, config: LoraConfig) -> None:
    """Refuse what `Adapters` would refuse, without loading weights. A run calls it before its warm start, so that the
    warm start's work is not lost to a mistake in the configuration.

    Args:
        model_config: The model's `transformers` configuration.
        config: The `[trainer.lora]` table.

    Raises:
        UsageError, ModelError: as for `Adapters`.
    """
    from transformers import AutoModelForCausalLM

    refuse_without("peft", extra="lora", what="[trainer.lora]")
    with refusing(f"a model of {type(model_config).__name__} cannot be made"), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config)
    _refuse_other_when_merged(model, config)
    _inject(model, config)


def _inject(model: Any, config: LoraConfig) -> Any:
    """Add the adapters, with deterministic values. Returns the `peft` configuration of the adapters.

    Raises:
        ModelError: as for `Adapters`.
    """
    import peft
    from peft.tuners.lora import LoraLayer
    from transformers.pytorch_utils import Conv1D

    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)}
    head = model.get_output_embeddings()
    usable = sorted({name.rpartition(".")[2] for name, module in linear.items() if module is not head})
    there = f"its linear layers are {', '.join(usable[:_MOST_NAMED])}" if usable else "it has no linear layers"
    targets = config.target_modules
    wanted = peft.LoraConfig(
        r=config.r,
        lora_alpha=int(config.alpha) if config.alpha.is_integer() else config.alpha,
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
        target_modules=targets if isinstance(targets, str) else list(targets),
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in linear.values()),  # Conv1D weights are transposed
    )
    said = json.dumps(targets)
    if not usable:
        raise ModelError(f"{type(model).__name__} cannot be trained with [trainer.lora]: {there}; leave the table out")
    try:
        # `peft` draws from the global generator: a fork leaves the caller's random state untouched.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            peft.inject_adapter_in_model(wanted, model)
    except ValueError as error:
        raise ModelError(
            f"trainer.lora.target_modules = {said} does not fit {type(model).__name__} "
            f"({str(error).partition('. ')[0]}); {there}"
        ) from error
    adapted = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    refused = [
        name
        for name, module in adapted.items()
        if name not in linear or linear[name] is head or module.fan_in_fan_out != wanted.fan_in_fan_out
    ]
    if refused or not adapted:
        raise ModelError(
            f"trainer.lora.target_modules = {said} selects {refused[0] if refused else 'no layer'} in "
            f"{type(model).__name__}{', which cannot be adapted' if refused else ''}; {there}"
        )
    return wanted


def _refuse_other_when_merged(model: Any, config: LoraConfig) -> None:
    """Check on a tiny copy that adapted layers compute what merged weights do.

    The trainer computes with adapters next to the base weights, but a sampler merges them into the weights. If a layer
    reads another layer's weight directly, it bypasses that layer's adapter, and the two policies differ.

    Raises:
        ModelError: the tiny copy computes something else with adapters than with merged weights.
    """
    from peft.tuners.lora import LoraLayer

    try:
        merged = tiny_copy(model)
    except NoTinyCopy as error:
        logger.warning(
            "[trainer.lora]: skipped the check that adapted layers of %s compute the same as the sampler's merged "
            "weights: %s",
            type(model).__name__,
            error,
        )
        return
    adapted = copy.deepcopy(merged)
    _inject(adapted, config.model_copy(update={"r": _TINY_RANK, "alpha": float(_TINY_RANK)}))
    generator = torch.Generator().manual_seed(1)
    # B is initialised to 0, so adapters would change nothing: set it to random values, and merge it into the other
    # copy.
    own = dict(merged.named_parameters(remove_duplicate=False))
    for name, module in adapted.named_modules():
        if isinstance(module, LoraLayer):
            a_RI, b_OR = module.lora_A["default"].weight, module.lora_B["default"].weight
            with torch.no_grad():
                b_OR.copy_(torch.randn(b_OR.shape, generator=generator, device="cpu") * b_OR.shape[0] ** -0.5)
                own[f"{name}.weight"].copy_(
                    merged_weight(own[f"{name}.weight"], a_RI, b_OR, 1.0, transposed=module.fan_in_fan_out)
                )
    ids = torch.randint(merged.get_input_embeddings().weight.shape[0], (1, LENGTH), generator=generator, device="cpu")
    found, expected = (_logprobs(m, ids) for m in (adapted, merged))
    difference = float((found - expected).abs().max())
    if not difference <= TOLERANCE:
        raise ModelError(
            f"{type(model).__name__} cannot be trained with [trainer.lora] and target_modules = "
            f"{json.dumps(config.target_modules)}: in a small copy, logprobs with adapters differ by {difference:.1g} "
            "from those with merged weights, which the sampler uses; select ordinary linear layers only, such as "
            '["q_proj", "v_proj"]'
        )


@torch.no_grad()
def _logprobs(model: Any, ids: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits.float().log_softmax(-1)
