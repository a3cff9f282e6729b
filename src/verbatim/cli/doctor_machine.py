"""`verbatim doctor --machine`: reports whether the package's C files compile here and agree with PyTorch, and whether
they support a given model."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from verbatim.core.plain_console import PlainConsole
from verbatim.inference.embedded.compiled.library import SOURCE as KERNEL
from verbatim.inference.embedded.compiled.library import bfloat16_path, load_kernel
from verbatim.inference.embedded.forward import why_no_kernel
from verbatim.inference.embedded.settings import TorchSettings
from verbatim.models import native
from verbatim.models.attention import follow_plans
from verbatim.models.head import CausalLM
from verbatim.models.instructions import has_bfloat16
from verbatim.models.loading import load_model
from verbatim.trainer.attention.native_tree import SOURCE as TREE
from verbatim.trainer.fused import SOURCE as LAYERS
from verbatim.trainer.fused import fuse_layers

_PARTS = {
    KERNEL: "passes of the embedded sampler on a CPU, several times as fast as PyTorch's",
    TREE: "attention of prefix trees in a training step on a CPU",
    LAYERS: "norms, gated parts and rotations in a training step on a CPU",
}
_Dtype: TypeAlias = Literal["float32", "bfloat16"]
_DTYPES: tuple[_Dtype, ...] = ("float32", "bfloat16")
_PATHS = {
    "amx": "products and attention by AMX",
    "avx512_bf16": "products by AVX512-BF16",
    "float32": "only weights; this processor multiplies them as float32",
    None: "by PyTorch",
}
"""How the sampler computes a bfloat16 model, by the kernel's path."""
_INSTALL = "install one; on Debian and Ubuntu: apt install gcc"
"""The advice if there is no compiler."""
_SMALL = LlamaConfig(
    vocab_size=97,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)


@dataclass(frozen=True, kw_only=True)
class _Part:
    """A C file of the package on this machine."""

    file: str
    what: str
    """What the file computes."""
    compiled: bool
    options: str
    """The compiler options."""
    reason: str
    """Why the file is not compiled, or is not compiled with the fastest options; "" if it is."""
    disagrees: str
    """Why the sampler does not use the compiled code; "" if it uses the code."""

    def __str__(self) -> str:
        if not self.compiled:
            return f"missing: {self.reason}. PyTorch computes instead: {self.what}"
        if self.disagrees:
            return f"compiled, and not used: {self.disagrees}"
        slower = f", slower than it could be: {self.reason}" if self.reason else ""
        return f"compiled ({self.options}{slower}): {self.what}"


def report(*, model: str, as_json: bool) -> bool:
    """Print the report. True if all parts are compiled and used.

    Args:
        model: A folder or hub id of a model to try, or "".
        as_json: Print one JSON object.

    Raises:
        ModelError: the model cannot be loaded.
    """
    compiler = native.find_compiler()
    parts = [_look(source, what) for source, what in _PARTS.items()]
    version = _version(compiler) if compiler else []
    not_computed = _try_model(model) if model else {}
    kernel = load_kernel()
    path = None if kernel is None else bfloat16_path(kernel)
    found = {
        "processor": torch.backends.cpu.get_cpu_capability(),
        "bfloat16": has_bfloat16(),
        "sampler_bfloat16": path,
        "cores": os.cpu_count(),
        "compiler": " ".join(compiler) if compiler else None,
        "version": version[0] if version else None,
        "libraries": str(native.library_folder()),
    }
    if as_json:
        tried = {"model": {"name": model, "not_computed": not_computed}} if model else {}
        print(json.dumps({**found, "parts": [asdict(part) for part in parts], **tried}, indent=2))
    else:
        console = PlainConsole()
        for line in (
            f"processor  {found['processor']}, products in bfloat16: {'yes' if found['bfloat16'] else 'no'}, "
            f"{found['cores']} cores",
            f"compiler   {found['compiler']} ({found['version']})" if compiler else f"compiler   none; {_INSTALL}",
            f"libraries  {found['libraries']}",
            *(f"{part.file:10} {part}" for part in parts),
            f"bfloat16   in the sampler: {_PATHS[path]}",
            *([f"model      {model}"] if model else []),
            *(
                f"{'':10} {part} {f'does not compute it: {reason}' if reason else 'computes it'}"
                for part, reason in not_computed.items()
            ),
        ):
            console.print(line, soft_wrap=True)
    return all(part.compiled and not part.disagrees for part in parts) and not any(not_computed.values())


def _version(compiler: tuple[str, ...]) -> list[str]:
    """The lines of the compiler's version; empty if the compiler fails or hangs."""
    try:
        return native.compiler_version(compiler).decode(errors="replace").splitlines()
    except (OSError, subprocess.TimeoutExpired):  # this is reported elsewhere, as the reason why nothing is compiled
        return []


def _look(source: native.CSource, what: str) -> _Part:
    """Compile a file, and try the sampler's kernel."""
    made = native.build(source)
    compiled = made.functions is not None
    return _Part(
        file=source.name,
        what=what,
        compiled=compiled,
        options=made.options,
        reason=" ".join(made.reason.split()),
        disagrees=_try_kernel() if compiled and source is KERNEL else "",
    )


def _try_kernel() -> str:
    """Run a small model with the sampler's kernel in both dtypes. Returns why the kernel cannot be used, or ""."""
    for dtype in _DTYPES:
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(_SMALL, dtype=getattr(torch, dtype)).eval()
            follow_plans(model)
            if reason := _why_no_kernel(model, dtype):
                return f"in {dtype}, {reason}"
    return ""


def _try_model(source: str) -> dict[str, str]:
    """Why the sampler's kernel or the trainer's C code cannot compute the model, by part and dtype; "" if it can."""
    reasons = {}
    for dtype in _DTYPES:
        model = load_model(source, dtype=dtype)
        reasons[f"{KERNEL.name} in {dtype}"] = _why_no_kernel(model, dtype)
        if dtype == "float32":
            differing = fuse_layers(model)
            is_fused = any("forward" in vars(module) for module in model.modules())
            reasons[LAYERS.name] = "; ".join(differing) if differing or is_fused else "it supports no part of the model"
    return reasons


@torch.inference_mode()
def _why_no_kernel(model: Any, dtype: _Dtype) -> str:
    settings = TorchSettings(device="cpu", dtype=dtype)
    return why_no_kernel(CausalLM(model.requires_grad_(False)), settings, context_length=64)
