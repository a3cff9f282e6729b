"""Makes FSDP reduce the gradients of parameters that one rank used and another did not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule


def reduce_unused(root: Any) -> None:
    """All ranks must reduce the same tensors, but an expert, say, may be used on one rank only. Gradients of parameters
    that a rank's backward pass did not reach are zeros from now on.

    torch 2.13 has a method for this. With a release that lacks it, as 2.11 does, the same is done before each group's
    gradients are reduced.
    """
    if hasattr(root, "set_reduce_scatter_unused_params"):
        root.set_reduce_scatter_unused_params(True)
        return
    module: nn.Module
    for module in root.modules():
        if isinstance(module, FSDPModule):
            group: Any = module._get_fsdp_state()._fsdp_param_group
            if group is not None:
                group.post_backward = partial(_fill_and_reduce, group, group.post_backward)


def _fill_and_reduce(group: Any, post_backward: Callable[..., None], *unused: Any) -> None:
    for parameter in group.fsdp_params:
        if not hasattr(parameter, "_unsharded_param") or parameter.unsharded_accumulated_grad is not None:
            continue
        gathered = parameter.unsharded_param
        if gathered.requires_grad and gathered.grad is None:
            gathered.grad = torch.zeros_like(gathered)
    post_backward(*unused)
