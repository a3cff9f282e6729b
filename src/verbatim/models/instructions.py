"""Detects whether this processor has instructions for bfloat16 products."""

from __future__ import annotations

import torch


def has_bfloat16() -> bool:
    """True if the processor multiplies bfloat16 natively: AVX512-BF16 or AMX on x86, or Arm's extension.

    Without such instructions, torch first widens every number, which is slower than computing in float32.
    """
    capabilities = getattr(torch.cpu, "get_capabilities", None)  # only newer releases of torch have it
    found = {} if capabilities is None else capabilities()
    return any(found.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16", "arm_bf16"))
