"""Resolves `dtype = "auto"` of trainer and embedded sampler, before a run has a folder: what is faster here, measured.

```
stored in the run (a resume, a fork)                          -> as it was
CUDA                                                          -> bfloat16 where the device computes in it
a tiny model, autocast, no instructions for bfloat16          -> float32, without measuring
else                                                          -> bfloat16 where it is FASTER times as fast
```
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from verbatim.config.schema import RunConfig
from verbatim.config.sections import table_of
from verbatim.core.errors import CheckpointError, FormatError, UsageError
from verbatim.inference.embedded.settings import TorchSettings
from verbatim.logs.checkpoints.json_files import read_record, write_record
from verbatim.logs.checkpoints.run_folder import PRECISION
from verbatim.models.source import base_of, find_source, is_adapter
from verbatim.run.machine import Dtype, Kernel, Layers, Machine, Side
from verbatim.run.rollouts import inference_settings

logger = logging.getLogger(__name__)

FASTER = 1.25
"""How many times as fast bfloat16 has to be: all else in a pass stays as it is, and rounding is not free."""
TINY = 100_000
"""Numbers in a layer's matrices, in the mean, below which a model is tiny: rounding costs what the product saves."""
TRAINER_ROWS = 1024
"""Tokens of a product that is measured for the trainer: with more of them the ratio changes little."""
MOST_SAMPLER_ROWS = 64
"""Sequences that are decoded together while the sampler is measured, at most."""
TRAINER, SAMPLER = "trainer.dtype", "inference.torch.dtype"
_KEPT = "as the run has it"


@dataclass(frozen=True, kw_only=True)
class PrecisionChoice:
    """What `dtype = "auto"` became."""

    key: str
    """The key of the configuration: "trainer.dtype"."""
    dtype: Dtype
    reason: str
    """A sentence part, with what was measured."""

    def __str__(self) -> str:
        return f"{self.key} = {self.dtype}: {self.reason}"


def resolve_dtypes(
    config: RunConfig,
    *,
    stored: Mapping[str, Any] | None = None,
    machine: Machine | None = None,
    model: str | Path | None = None,
    keys: Collection[str] = (TRAINER, SAMPLER),
) -> tuple[RunConfig, list[PrecisionChoice]]:
    """The configuration without "auto", and what was chosen.

    Args:
        config: With its keys `trainer.dtype` and `inference.torch.dtype`.
        stored: The tables of the run that goes on, or is forked: what they say is taken.
        machine: That computes; None: this one.
        model: The model's folder or hub id, where it is another one than `model.name`.
        keys: Which ones.

    Raises:
        UsageError: servers of the sampler are elsewhere.
        ModelError: no such model.
    """
    asked = [key for key in unresolved(config) if key in keys]
    if not asked:
        return config, []
    settings = inference_settings(config)
    if SAMPLER in asked and isinstance(settings, TorchSettings) and settings.urls:
        raise UsageError(
            'inference.torch.dtype = "auto" with urls: the servers have a dtype already; give '
            'the one that they say when they start, "float32" or "bfloat16"'
        )
    choices: list[PrecisionChoice] = []
    found: list[Layers] = []
    for key in asked:
        if (kept := _stored(stored, key, config)) is not None:
            choices.append(PrecisionChoice(key=key, dtype=kept, reason=_KEPT))
            continue
        found = found or [read_layers(config, model)]
        choices.append(_choose(key, config, found[0], machine or _this_machine()))
    for choice in choices:
        config = _with_dtype(config, choice.key, choice.dtype)
    return config, choices


def unresolved(config: RunConfig) -> list[str]:
    """The keys that are "auto"."""
    settings = inference_settings(config)
    in_torch = isinstance(settings, TorchSettings) and settings.dtype == "auto"
    return [TRAINER] * (config.trainer.dtype == "auto") + [SAMPLER] * in_torch


def resolve_sampler(config: RunConfig, model: str | Path) -> RunConfig:
    """The configuration of a sampler that no run starts, for this model; what was chosen is logged.

    Raises:
        UsageError, ModelError: as `resolve_dtypes`.
    """
    config, choices = resolve_dtypes(config, model=model, keys=(SAMPLER,))
    for choice in choices:
        logger.info("%s", choice)
    return config


def resolve_server(settings: TorchSettings, model: str | Path) -> tuple[TorchSettings, PrecisionChoice]:
    """The settings of a server without "auto", for this model, and what was chosen.

    Raises:
        ModelError: no such model.
    """
    choice = _choose_sampler(settings, _layers(_base(model), str(model)), _this_machine())
    return settings.model_copy(update={"dtype": choice.dtype}), choice


def refuse_auto(config: RunConfig, how: str) -> None:
    """Refuse "auto" where two processes would each choose for itself.

    Raises:
        UsageError: names the keys.
    """
    if keys := unresolved(config):
        given = " ".join(f"--{key} bfloat16" for key in keys)
        raise UsageError(
            f'{" and ".join(keys)} = "auto" can be chosen only by the one command that starts a run, and '
            f'{how}. Give both the same, "float32" or "bfloat16": for example, where the processors have '
            f"instructions for bfloat16 and the model is not tiny, {given}"
        )


def tell(choices: list[PrecisionChoice], console: Console, folder: Path) -> None:
    """Say what was chosen, and keep it in the folder of a run, whose file stays where nothing was chosen anew."""
    for choice in choices:
        console.print(f"precision   {choice}", soft_wrap=True)
    if any(choice.reason != _KEPT for choice in choices):
        found = {choice.key: choice for choice in choices}
        for before in read_choices(folder):
            if before.key not in found or found[before.key].reason == _KEPT:
                found[before.key] = before
        write_choices(folder, list(found.values()))


def write_choices(folder: Path, choices: list[PrecisionChoice]) -> None:
    """Write what "auto" became into the folder of a run."""
    write_record(folder / PRECISION, {"choices": [asdict(choice) for choice in choices]})


def read_choices(folder: Path, config: RunConfig | None = None) -> list[PrecisionChoice]:
    """What "auto" became in a run; nothing where the file is missing or damaged: the configuration has it too.

    Args:
        folder: Of the run.
        config: That of a fork: keys in which it differs are left out. None: all are taken.

    Raises:
        FormatError: another version wrote the file.
    """
    if not (folder / PRECISION).exists():
        return []
    try:
        found = [PrecisionChoice(**fields) for fields in read_record(folder / PRECISION)["choices"]]
    except FormatError:
        raise
    except (CheckpointError, KeyError, TypeError) as error:
        logger.warning(
            "%s cannot be read, so that it is not known why a number format was chosen: %s", folder / PRECISION, error
        )
        return []
    if config is None:
        return found
    tables = config.model_dump()
    return [choice for choice in found if _stored(tables, choice.key, config) == choice.dtype]


def _choose(key: str, config: RunConfig, layers: Layers, machine: Machine) -> PrecisionChoice:
    if key == SAMPLER:
        settings = inference_settings(config)
        assert isinstance(settings, TorchSettings)
        return _choose_sampler(settings, layers, machine)
    casts = config.trainer.compile or config.trainer.parallel.processes > 1
    return _choose_side("trainer", layers, machine, device=config.trainer.device, rows=TRAINER_ROWS, casts=casts)


def _choose_sampler(settings: TorchSettings, layers: Layers, machine: Machine) -> PrecisionChoice:
    rows = min(MOST_SAMPLER_ROWS, settings.max_batch_size)
    return _choose_side("sampler", layers, machine, device=settings.device, rows=rows, kernel=settings.kernel)


def _choose_side(
    side: Side,
    layers: Layers,
    machine: Machine,
    *,
    device: str,
    rows: int,
    kernel: Kernel = "auto",
    casts: bool = False,
) -> PrecisionChoice:
    """`casts`: whether a trainer in bfloat16 would be autocast on a CPU."""
    key = TRAINER if side == "trainer" else SAMPLER

    def chosen(dtype: Dtype, reason: str) -> PrecisionChoice:
        return PrecisionChoice(key=key, dtype=dtype, reason=reason)

    if layers.mean_size < TINY:
        return chosen("float32", f"a tiny model, {layers.mean_size:,.0f} numbers in a matrix")
    rounds = machine.cuda_rounds(device)
    if rounds is not None:
        return chosen(
            "bfloat16" if rounds else "float32", f"the CUDA device computes in {'it' if rounds else 'no bfloat16'}"
        )
    if not layers.linear_alone:
        return chosen("float32", "the model has other products than those of linear layers")
    if casts:
        return chosen("float32", "it is autocast on a CPU where torch compiles the layers or several processes train")
    if not machine.has_instructions():
        return chosen("float32", "the processor has no instructions for bfloat16 (avx512_bf16, amx_bf16)")
    seconds = machine.measure(side, layers, rows, kernel)
    ratio = seconds.float32 / seconds.bfloat16
    return chosen(
        "bfloat16" if ratio >= FASTER else "float32",
        f"bfloat16 is {ratio:.2f} times as fast as float32 here, {FASTER} asked for "
        f"({1e3 * seconds.bfloat16:.2f} and {1e3 * seconds.float32:.2f} ms, {seconds.of})",
    )


def read_layers(config: RunConfig, model: str | Path | None = None) -> Layers:
    """The linear layers of a run's model, from its configuration alone.

    Raises:
        ModelError: no such model, or a configuration that cannot be read.
    """
    from verbatim.models.build import build_config

    name = model if model is not None else config.model.name
    if name is not None:
        return _layers(_base(name), str(name))
    build = config.model.build
    assert build is not None
    return _layers(lambda: build_config(build, build.vocab_size), "None")


def _base(model: str | Path) -> Callable[[], Any]:
    """Reads the configuration of a model, or of that which an adapter belongs to."""

    def read() -> Any:
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(find_source(base_of(model) if is_adapter(model) else str(model)))

    return read


def _layers(read: Callable[[], Any], name: str) -> Layers:
    from collections import Counter

    import torch
    from torch import nn
    from transformers import AutoModelForCausalLM

    from verbatim.models.refusal import refusing
    from verbatim.models.tiny import decoder_layers
    from verbatim.trainer.bfloat16 import can_round

    with refusing(f"the config.json of model {name!r} cannot be read"), torch.device("meta"):
        found = read()
        made = AutoModelForCausalLM.from_config(found, dtype=torch.float32)
    sizes = Counter(
        (module.in_features, module.out_features)
        for layer in decoder_layers(made)
        for module in layer.modules()
        if isinstance(module, nn.Linear)
    )
    return Layers(sizes=sizes, linear_alone=can_round(made), config=found)


def _stored(stored: Mapping[str, Any] | None, key: str, config: RunConfig) -> Dtype | None:
    """What a stored configuration says; None where that run had another sampler, or where the key was taken out."""
    backend = config.inference.backend
    if stored is None or (key == SAMPLER and (stored.get("inference") or {}).get("backend", backend) != backend):
        return None
    table: Any = stored
    *tables, name = key.split(".")
    for part in tables:
        table = table.get(part, {})
    found = table.get(name)
    return found if found in ("float32", "bfloat16") else None


def _with_dtype(config: RunConfig, key: str, dtype: Dtype) -> RunConfig:
    if key == TRAINER:
        return config.model_copy(update={"trainer": config.trainer.model_copy(update={"dtype": dtype})})
    table = {table_of(config.inference.backend): inference_settings(config).model_copy(update={"dtype": dtype})}
    return config.model_copy(update={"inference": config.inference.model_copy(update=table)})


def _this_machine() -> Machine:
    from verbatim.run.measured_precision import ThisMachine

    return ThisMachine()
