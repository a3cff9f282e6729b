"""Resolves `dtype = "auto"` of the trainer and the embedded sampler, before the run folder is created.

```
stored in the run (a resume, a fork)                           -> as stored
CUDA                                                           -> bfloat16 if the device computes in it
a tiny model, autocast, no bfloat16 instructions               -> float32, without measuring
otherwise                                                      -> bfloat16 if measured FASTER times as fast
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
"""Minimum measured speed-up for choosing bfloat16: the rest of a pass does not get faster, and casting has a cost."""
TINY = 100_000
"""Mean number of elements of a weight matrix below which a model is tiny: for such a model, casting costs as much as
the faster product saves."""
TRAINER_ROWS = 1024
"""Number of tokens per measured product of the trainer; with more tokens the ratio hardly changes."""
MOST_SAMPLER_ROWS = 64
"""Maximum number of sequences decoded together while the sampler is measured."""
TRAINER, SAMPLER = "trainer.dtype", "inference.torch.dtype"
_KEPT = "as stored with the run"


@dataclass(frozen=True, kw_only=True)
class PrecisionChoice:
    """The dtype chosen for one key that was "auto"."""

    key: str
    """The configuration key, such as "trainer.dtype"."""
    dtype: Dtype
    reason: str
    """The reason as a clause, with the measurements."""

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
    """Replace each "auto" by a dtype. Returns the new configuration and the choices.

    Args:
        config: The configuration, with the keys `trainer.dtype` and `inference.torch.dtype`.
        stored: The tables of the run that is resumed or forked; their dtypes take precedence.
        machine: Answers for the machines that will compute; None for this machine.
        model: The model's folder or hub id, if it differs from `model.name`.
        keys: The keys to resolve.

    Raises:
        UsageError: the sampler's servers are remote, so their dtype cannot be chosen here.
        ModelError: the model does not exist.
    """
    asked = [key for key in unresolved(config) if key in keys]
    if not asked:
        return config, []
    settings = inference_settings(config)
    if SAMPLER in asked and isinstance(settings, TorchSettings) and settings.urls:
        raise UsageError(
            'inference.torch.dtype cannot be "auto" if urls is set, because the servers have chosen a dtype already; '
            'set it to theirs, "float32" or "bfloat16", which they log when they start'
        )
    choices: list[PrecisionChoice] = []
    found: list[Layers] = []
    for key in asked:
        if (kept := _stored(stored, key, config)) is not None:
            choices.append(PrecisionChoice(key=key, dtype=kept, reason=_KEPT))
            continue
        found = found or [read_layers(config, model)]  # this is read once, and only if something has to be chosen
        choices.append(_choose(key, config, found[0], machine or _this_machine()))
    for choice in choices:
        config = _with_dtype(config, choice.key, choice.dtype)
    return config, choices


def unresolved(config: RunConfig) -> list[str]:
    """The keys whose value is "auto"."""
    settings = inference_settings(config)
    in_torch = isinstance(settings, TorchSettings) and settings.dtype == "auto"
    return [TRAINER] * (config.trainer.dtype == "auto") + [SAMPLER] * in_torch


def resolve_sampler(config: RunConfig, model: str | Path) -> RunConfig:
    """Resolve the dtype of a sampler that is started without a run, for this model, and log the choice.

    Raises:
        UsageError, ModelError: as for `resolve_dtypes`.
    """
    config, choices = resolve_dtypes(config, model=model, keys=(SAMPLER,))
    for choice in choices:
        logger.info("%s", choice)
    return config


def resolve_server(settings: TorchSettings, model: str | Path) -> tuple[TorchSettings, PrecisionChoice]:
    """Resolve the dtype of a server for this model. Returns (1) the server's settings and (2) the choice.

    Raises:
        ModelError: the model does not exist.
    """
    choice = _choose_sampler(settings, _layers(_base(model), str(model)), _this_machine())
    return settings.model_copy(update={"dtype": choice.dtype}), choice


def refuse_auto(config: RunConfig, how: str) -> None:
    """Refuse "auto" if two processes would each choose on their own, perhaps differently.

    Raises:
        UsageError: a key is "auto"; the message names the keys.
    """
    if keys := unresolved(config):
        given = " ".join(f"--{key} bfloat16" for key in keys)
        raise UsageError(
            f'{" and ".join(keys)} = "auto" works only if one command starts the whole run, but here {how}. '
            f'Give both the same, "float32" or "bfloat16": for example, where the processors have '
            f"instructions for bfloat16 and the model is not tiny, {given}"
        )


def tell(choices: list[PrecisionChoice], console: Console, folder: Path) -> None:
    """Print the choices, and store them in the run folder. Choices stored earlier are kept unless they were made
    again."""
    for choice in choices:
        console.print(f"precision   {choice}", soft_wrap=True)
    if any(choice.reason != _KEPT for choice in choices):
        found = {choice.key: choice for choice in choices}
        for before in read_choices(folder):
            if before.key not in found or found[before.key].reason == _KEPT:
                found[before.key] = before
        write_choices(folder, list(found.values()))


def write_choices(folder: Path, choices: list[PrecisionChoice]) -> None:
    """Store the choices in the run folder."""
    write_record(folder / PRECISION, {"choices": [asdict(choice) for choice in choices]})


def read_choices(folder: Path, config: RunConfig | None = None) -> list[PrecisionChoice]:
    """The choices stored in a run folder. Empty if the file is missing or damaged; only the reasons are lost in this
    case, because the dtypes are in the configuration too.

    Args:
        folder: The run folder.
        config: A fork's configuration: choices that it overrides are left out; None to return all choices.

    Raises:
        FormatError: a different version of Verbatim wrote the file.
    """
    if not (folder / PRECISION).exists():
        return []
    try:
        found = [PrecisionChoice(**fields) for fields in read_record(folder / PRECISION)["choices"]]
    except FormatError:
        raise
    except (CheckpointError, KeyError, TypeError) as error:
        logger.warning(
            "%s cannot be read; the reasons for the choice of dtypes are lost: %s", folder / PRECISION, error
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
    """Choose the dtype of one side. `casts` is True if a bfloat16 trainer on a CPU would run under autocast."""
    key = TRAINER if side == "trainer" else SAMPLER

    def chosen(dtype: Dtype, reason: str) -> PrecisionChoice:
        return PrecisionChoice(key=key, dtype=dtype, reason=reason)

    if layers.mean_size < TINY:
        return chosen("float32", f"a tiny model, {layers.mean_size:,.0f} elements per weight matrix")
    rounds = machine.cuda_rounds(side, device)  # None on a CPU
    if rounds is not None:
        return chosen(
            "bfloat16" if rounds else "float32",
            f"the CUDA device {'supports' if rounds else 'does not support'} bfloat16",
        )
    if not layers.linear_alone:
        return chosen("float32", "the model has matrix products outside its linear layers")
    if casts:
        return chosen("float32", "it is autocast on a CPU where torch compiles the layers or several processes train")
    if not machine.has_instructions(side):
        return chosen("float32", "the processor has no instructions for bfloat16 (avx512_bf16, amx_bf16)")
    seconds = machine.measure(side, layers, rows, kernel)
    ratio = seconds.float32 / seconds.bfloat16
    return chosen(
        "bfloat16" if ratio >= FASTER else "float32",
        f"bfloat16 is {ratio:.2f} times as fast as float32 {machine.place(side)}, {FASTER} required "
        f"({1e3 * seconds.bfloat16:.2f} and {1e3 * seconds.float32:.2f} ms, {seconds.of})",
    )


def read_layers(config: RunConfig, model: str | Path | None = None) -> Layers:
    """The linear layers of a run's model, derived from its configuration without loading weights.

    Raises:
        ModelError: the model does not exist, or its configuration cannot be read.
    """
    from verbatim.models.build import build_config

    name = model if model is not None else config.model.name
    if name is not None:
        return _layers(_base(name), str(name))
    build = config.model.build
    assert build is not None
    return _layers(lambda: build_config(build, build.vocab_size), "None")


def _base(model: str | Path) -> Callable[[], Any]:
    """A function that reads the model's configuration; for an adapter, it reads the base model's configuration."""

    def read() -> Any:
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(find_source(base_of(model) if is_adapter(model) else str(model)))

    return read


def _layers(read: Callable[[], Any], name: str) -> Layers:
    """The linear layers of the model whose configuration `read` returns; `name` is for messages."""
    from collections import Counter

    import torch
    from torch import nn
    from transformers import AutoModelForCausalLM

    from verbatim.models.refusal import refusing
    from verbatim.models.tiny import decoder_layers
    from verbatim.trainer.bfloat16 import can_round

    # The model is built on the meta device: layers get shapes but no memory, so a model of any size can be inspected.
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
    """The dtype in a stored configuration; None if the stored run used a different inference backend or did not set the
    key."""
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
