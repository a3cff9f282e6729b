"""Says whether this processor has instructions for products in bfloat16."""

from __future__ import annotations

import torch


def has_bfloat16() -> bool:
    """Whether it multiplies bfloat16: AVX512-BF16 or AMX of x86, or Arm's. Without, torch widens each number first,
    which is slower than float32."""
    capabilities = getattr(torch.cpu, "get_capabilities", None)  # of newer releases of torch
    found = {} if capabilities is None else capabilities()
    return any(found.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16", "arm_bf16"))
