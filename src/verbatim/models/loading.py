"""Loads and saves causal language models in Hugging Face format, and replaces the weights of loaded models."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import GENERATION_CONFIG_NAME, cached_file
from transformers.utils import logging as transformers_logging

from verbatim.core.errors import ModelError
from verbatim.core.machine_faults import is_out_of_memory, rust_errors_as_oserror
from verbatim.models.conversion import to_model_tensors
from verbatim.models.float64 import keep_float64
from verbatim.models.head import ModelCalls
from verbatim.models.mixing import plan_attention
from verbatim.models.refusal import refusing
from verbatim.models.shards import empty_model, fill, local_rows, own_tensors, reading
from verbatim.models.source import find_source, is_adapter

logger = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


def resolve_device(device: str) -> torch.device:
    """The torch device with this name; "auto" means CUDA if it is available, else the CPU.

    Raises:
        ModelError: the machine or this build of torch does not have the device.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
    except RuntimeError:
        raise ModelError(f'there is no device {device!r}; expected "auto", "cpu", "cuda" or "cuda:0"') from None
    if found.type == "cuda":
        _check_cuda(device, found.index)
    elif found.type != "cpu":
        try:
            torch.zeros(1, device=found).item()
        except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:
            if is_out_of_memory(error):
                raise
            why = str(error).partition("\n")[0]
            raise ModelError(f'device {device!r} cannot be used here ({why}); take "auto", "cpu" or "cuda"') from None
    return found


def _check_cuda(device: str, index: int | None) -> None:
    """Check a CUDA device's index without initialising CUDA, which takes seconds and memory."""
    if torch.version.cuda is None and torch.version.hip is None:
        raise ModelError(
            f'device {device!r}, but torch {torch.__version__} is a build without CUDA; take "auto" or '
            '"cpu", or install a build of torch for CUDA'
        )
    count = torch.cuda.device_count()
    if not torch.cuda.is_available() or (index or 0) >= count:
        raise ModelError(
            f'device {device!r}, but torch sees {count} CUDA devices here; take "auto" or "cpu", or check '
            "nvidia-smi and CUDA_VISIBLE_DEVICES"
        )


def check_model_config(name: str | Path, *, context_length: int) -> None:
    """Refuse a model that is not a causal LM or has fewer positions than `orchestrator.seq_len`; reads no weights.

    Raises:
        ModelError: no such model, or an unsuitable one.
    """
    source = find_source(name)
    with refusing(f"the config.json of model {str(name)!r} cannot be read"):
        config = AutoConfig.from_pretrained(source)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(
            f"model {str(name)!r} is of type {config.model_type!r}, which is not a causal language model; "
            "expected a folder that AutoModelForCausalLM loads"
        )
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    if longest is not None and context_length > longest:
        raise ModelError(
            f"orchestrator.seq_len = {context_length}, but the positions of model {str(name)!r} end at "
            f"{longest}; use at most that"
        )


def check_weights(name: str | Path) -> None:
    """Refuse a local folder whose weights are missing or truncated. The weights are not loaded.

    Raises:
        ModelError: no such folder, no weights in it, or a damaged or truncated file.
    """
    source = Path(find_source(name))
    if source.is_dir() and not any(source.glob("*.safetensors")):
        raise ModelError(f"model folder {str(name)!r} has no *.safetensors; expected the weights next to config.json")
    for file in sorted(source.glob("*.safetensors")):
        with reading(file), safe_open(file, framework="pt"):
            pass  # opening reads the header and compares it with the file's size


class Shards(ModelCalls, Protocol):
    """Shards a model over processes, and calls functions that use its parameters."""

    def apply(self, model: Any, fill: Callable[[], None]) -> None:
        """Shard a model on the meta device, allocate this process's rows, and call `fill` to load them.

        Raises:
            ModelError: the model cannot be sharded; or `fill` failed on any process, in which case all processes raise.
        """


def load_model(
    name: str | Path,
    *,
    dtype: str = "float32",
    device: str | torch.device = "cpu",
    only_attention: bool = True,
    shards: Shards | None = None,
) -> Any:
    """Load a causal language model in eval mode, with attention that follows an `AttentionPlan`.

    Args:
        name: A folder or hub id in Hugging Face format.
        dtype: Dtype of the weights: float32, bfloat16 or float64.
        device: Device of the weights; "auto" is CUDA if available, else the CPU.
        only_attention: Refuse a model that mixes tokens by more than attention. If False, such a model keeps its own
            attention, and `CausalLM` computes each row separately.
        shards: Shards the weights; None for a model that is not sharded. All processes have to call this function, and
            each process reads and keeps only its own rows.

    Raises:
        ModelError: no such folder or id, not a causal language model, a model of an unsupported kind, or weights that
            are not finite.
    """
    place = resolve_device(str(device))
    source = find_source(name)
    with refusing(f"model {str(name)!r}{_kind(source)} cannot be loaded as a causal language model"):
        if shards is None:
            transformers_logging.disable_progress_bar()  # weights are loaded at every step of a run
            model = AutoModelForCausalLM.from_pretrained(source, dtype=_DTYPES[dtype])
        else:
            model = empty_model(source, _DTYPES[dtype])

    def fill_rows() -> None:
        fill(model, source)
        rows = ((name, local_rows(parameter)[0]) for name, parameter in model.named_parameters())
        refuse_not_finite(rows, f"model {str(name)!r}")

    model.eval()
    if shards is None:
        refuse_not_finite(model.named_parameters(), f"model {str(name)!r}")  # a NaN need not show in the logits below
        model = model.to(place)
    else:
        shards.apply(model, fill_rows)
    with refusing(f"{type(model).__name__} fails in its first forward pass"):
        if dtype == "float64":
            keep_float64(model)
        other = plan_attention(model, shards)
    if other is not None and only_attention:
        raise ModelError(
            f"{type(model).__name__} mixes tokens through {other}; only attention layers that go through transformers' "
            "attention interface can be packed as trees, or cached by the embedded sampler. To train it set "
            'trainer.packing = "rows"; to sample from it use an inference server that knows this architecture'
        )
    if other is not None:
        text = "%s mixes tokens through %s, so rows are packed without a tree and computed one by one"
        logger.info(text, type(model).__name__, other)
    return model


def _kind(source: str) -> str:
    """The architecture that a folder's config.json names, formatted for an error message: " (Qwen3ForCausalLM)"; "" if
    config.json names none."""
    try:
        config = json.loads((Path(source) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    names = config.get("architectures") or config.get("model_type") if isinstance(config, dict) else None
    return f" ({', '.join(names) if isinstance(names, list) else names})" if names else ""


def load_tokenizer(name: str | Path) -> Any:
    """Load the model's fast tokenizer. An adapter's folder contains the tokenizer of its base model.

    For a hub id, generation_config.json is downloaded too: renderers read additional end-of-turn tokens from it.

    Raises:
        ModelError: there is no tokenizer, or the tokenizer is slow or has no chat template.
    """
    source = str(Path(name).expanduser()) if is_adapter(name) else find_source(name)
    with refusing(f"model {str(name)!r} has no tokenizer that can be loaded"):
        tokenizer = AutoTokenizer.from_pretrained(source)
        if not Path(source).is_dir():
            cached_file(source, GENERATION_CONFIG_NAME, _raise_exceptions_for_missing_entries=False)
    if not tokenizer.is_fast:
        raise ModelError(f"model {str(name)!r} has only a slow tokenizer; a tokenizer.json is needed")
    if not tokenizer.chat_template:
        raise ModelError(
            f"model {str(name)!r} has no chat template, so messages cannot become prompts; use an instruction-tuned "
            "model, or put a chat_template.jinja into its folder"
        )
    return tokenizer


def load_weights(model: Any, folder: Path) -> None:
    """Replace a model's weights in place with the weights in a folder, without building a second model.

    The folder is in the format that `save_model` writes and `from_pretrained` reads.

    Raises:
        ModelError: tensors are missing, unknown, not finite, or of the wrong shape; the model is then unchanged.
    """
    replace_weights(model, read_weights(model, folder))


def read_weights(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    """Read and check the tensors of a folder, and return them by the model's names, for `replace_weights`. The model is
    not changed.

    Raises:
        ModelError: tensors are missing, unknown, not finite, or of the wrong shape.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{folder} contains no *.safetensors")
    incoming: dict[str, torch.Tensor] = {}
    for file in files:
        if not file.is_file():  # reading a pipe would block
            raise ModelError(f"{file} is not a file; expected weights as safetensors")
        with reading(file):
            incoming.update(load_file(file))
    try:
        incoming, unknown = to_model_tensors(model, incoming)
    except ModelError as error:
        raise ModelError(f"{folder} does not fit the model: {error}") from error
    own = own_tensors(model)
    storages = {own[k].data_ptr() for k in incoming}  # a tied tensor needs only one of its names
    missing = [k for k, v in own.items() if k not in incoming and v.data_ptr() not in storages]
    shapes = [k for k, v in incoming.items() if own[k].shape != v.shape]
    _refuse_two_values_for_one_tensor(folder, incoming, own)
    if unknown or missing or shapes:
        raise ModelError(
            f"{folder} does not fit the model: unknown {unknown[:3]}, missing {missing[:3]}, other shape {shapes[:3]}"
        )
    refuse_not_finite(incoming.items(), str(folder), {key: own[key].dtype for key in incoming})
    return incoming


def replace_weights(model: Any, weights: Mapping[str, torch.Tensor]) -> None:
    """Copy tensors into a model's own tensors. `read_weights` or `BaseWeights.merged` has checked the new tensors."""
    own = own_tensors(model)
    with torch.no_grad():
        for key, value in weights.items():
            own[key].copy_(value)


def refuse_not_finite(
    tensors: Iterable[tuple[str, torch.Tensor]], where: str, dtypes: Mapping[str, torch.dtype] | None = None
) -> None:
    """Refuse weights that are NaN or infinite in the dtypes in which they will be stored (by default, the dtypes that
    they have now).

    Raises:
        ModelError: a NaN, an infinity, or a number outside the dtype's range; the message names the tensor.
    """
    for name, tensor in tensors:
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        value = tensor.detach()
        # aminmax reads the memory once and propagates NaN; it has no kernel for float8, hence the conversion.
        extremes = torch.stack(torch.aminmax(value.float() if value.itemsize == 1 else value))
        dtype = (dtypes or {}).get(name, extremes.dtype)
        if not bool(extremes.to(dtype).isfinite().all()):
            raise ModelError(
                f"{where}: the tensor {name} holds numbers that are not finite in {dtype}: the weights "
                "have diverged, or the file is damaged"
            )


def _refuse_two_values_for_one_tensor(
    folder: Path, incoming: dict[str, torch.Tensor], own: dict[str, torch.Tensor]
) -> None:
    """Refuse different values for two tied tensors. Tied tensors share one storage, so one of the two values would be
    lost."""
    first_name: dict[int, str] = {}
    for key, value in incoming.items():
        first = first_name.setdefault(own[key].data_ptr(), key)
        if first != key and not torch.equal(incoming[first], value):
            raise ModelError(
                f"{folder} does not fit the model: it has different values for {first} and {key}, "
                "which the model ties together"
            )


def save_model(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write a folder that `from_pretrained` loads.

    Raises:
        OSError: the system refused to write (disk full, no permission).
    """
    transformers_logging.disable_progress_bar()  # weights are saved at every step of a run
    with rust_errors_as_oserror(folder):
        model.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
