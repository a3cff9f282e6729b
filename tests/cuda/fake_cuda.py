"""Runs code on fake CUDA tensors, without a GPU: they have shapes, dtypes and a device, and no values.

Tensors on the CPU are real. An operation with a CUDA tensor runs on torch's fake tensors, which raise where a tensor is
on another device. What is read of them is what it would be if all of them were zeros, and a mask keeps everything. A
build of torch for CUDA is needed, because autograd asks it for the device of each operation; a driver is not.

The backward pass of torch's engine asks for a driver, so the graph is walked here: each node's own formula is called,
and the devices of gradients are compared with those of the tensors that they belong to, as the engine does.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

_aten = torch.ops.aten
_TRUE = {_aten.equal.default, _aten.allclose.default}
_COMPARISONS = {"eq", "ne", "lt", "le", "gt", "ge"}
_FALSE = {"gt", "lt", "ne", "isnan", "isinf"}
"""Comparisons that are false of zeros; the others are true."""


def has_cuda_build():
    """Whether this build of torch knows CUDA."""
    return torch.version.cuda is not None


class FakeCuda(TorchDispatchMode):
    """Operations with a CUDA tensor run on fake tensors, all others as ever."""

    def __init__(self):
        super().__init__()
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.namespace == "aten" and func._can_decompose():
            with self:  # an operation made of others, which inference mode does not take apart
                return func.decompose(*args, **kwargs)
        fake = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, FakeTensor)]
        if not fake and torch.device(kwargs.get("device") or "cpu").type != "cuda":
            return func(*args, **kwargs)
        if func is _aten._local_scalar_dense.default:
            value = not getattr(args[0], "is_false", False) if args[0].dtype == torch.bool else 0
            return float(value) if args[0].is_floating_point() else value
        if func in _TRUE:
            return True
        if func is _aten.nonzero.default:
            return args[0].new_zeros(args[0].numel(), args[0].ndim, dtype=torch.int64)
        if func is _aten.bincount.default:
            return args[0].new_zeros(args[2] if len(args) > 2 else kwargs["minlength"])
        if func is _aten._unique2.default:
            numbers = {"dtype": torch.int64}
            return args[0].new_zeros(1), args[0].new_zeros(args[0].shape, **numbers), args[0].new_zeros(1, **numbers)
        with self._fake:
            if func in (_aten.index.Tensor, _aten.index_put_.default, _aten.index_put.default):
                args = (args[0], [_everything(index) for index in args[1]], *args[2:])
            if func is _aten._grouped_mm.default:  # its fake one knows bfloat16 alone
                out = func(args[0].bfloat16(), args[1].bfloat16(), *args[2:], **kwargs).to(args[0].dtype)
            else:
                out = func(*args, **kwargs)
        if isinstance(out, FakeTensor) and out.dtype == torch.bool:
            out.is_false = _is_false(func, args, fake)
        if func is _aten.copy_.default and not isinstance(args[0], FakeTensor):
            return args[0].zero_()
        return tree_map_only(FakeTensor, _on_its_side, out)


def _is_false(func, args, fake):
    """What an operation with a truth value says of zeros."""
    if func._opname in _COMPARISONS and isinstance(args[1], int | float):
        return not func(torch.zeros((), dtype=args[0].dtype, device="cpu"), args[1])
    is_false = func._opname in _FALSE or any(getattr(x, "is_false", False) for x in fake)
    return is_false != (func._opname in ("logical_not", "bitwise_not"))


def _everything(index):
    """A mask as the places of all its elements; anything else as it is."""
    if isinstance(index, FakeTensor) and index.dtype == torch.bool:
        assert index.ndim == 1
        return torch.zeros(len(index), dtype=torch.int64, device=index.device)
    return index


def _on_its_side(tensor):
    return tensor if tensor.device.type == "cuda" else torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")


# ---- the backward pass


_walks = itertools.count()


def _walk(outputs, grads, wanted=()):
    """Add gradients to the leaves behind the outputs, or give those of `wanted` alone."""
    edges = [torch.autograd.graph.get_gradient_edge(x) for x in wanted]
    pending = defaultdict(dict)
    roots = []
    for output, grad in zip(outputs, grads, strict=True):
        edge = torch.autograd.graph.get_gradient_edge(output)
        _add(pending[edge.node], edge.node, edge.output_nr, torch.ones_like(output) if grad is None else grad)
        roots.append(edge.node)
    found = {}
    walk = next(_walks)  # checkpoint recomputes a layer once for each backward pass
    with torch.no_grad(), mock.patch.object(torch._C, "_current_graph_task_id", lambda: walk):
        for node in _in_order(roots):
            grads = pending.pop(node, {})
            for edge in edges:
                if edge.node is node:
                    found[edge] = grads.get(edge.output_nr)
            if grads:
                _step(node, grads, pending, accumulate=not wanted)
    return tuple(found.get(edge) for edge in edges)


def _step(node, grads, pending, accumulate):
    if hasattr(node, "variable"):
        if accumulate:
            _accumulate(node.variable, grads[0])
        return
    about = node._input_metadata
    given = [grads.get(i) for i in range(len(about))]
    following = list(node.next_functions)
    if isinstance(node, torch.autograd.function.BackwardCFunction):
        given = [
            torch.zeros(tuple(meta.shape), dtype=meta.dtype, device=meta.device) if grad is None else grad
            for grad, meta in zip(given, about, strict=True)
        ]
        results = node.apply(*given)
        results = results if isinstance(results, tuple) else (results,)
        results = [grad for grad, needed in zip(results, node.needs_input_grad, strict=True) if needed]
        following = [edge for edge in following if edge[0] is not None]
    else:
        results = node(*given)
        results = results if isinstance(results, tuple) else (results,)
    for (then, number), grad in zip(following, results, strict=True):
        if then is not None and grad is not None:
            _add(pending[then], then, number, grad)


def _accumulate(leaf, grad):
    assert grad.device == leaf.device and grad.shape == leaf.shape
    leaf.grad = grad if leaf.grad is None else leaf.grad + grad
    for hook in (leaf._post_accumulate_grad_hooks or {}).values():
        hook(leaf)


def _add(grads, node, number, grad):
    """Add a gradient to those that a node has got; sums over what was broadcast are left to the engine."""
    about = node._input_metadata[number]
    assert grad.device == about.device, f"{node.name()} on {about.device} gets a gradient on {grad.device}"
    grad = grad.sum_to_size(tuple(about.shape)).to(about.dtype)
    grads[number] = grad if number not in grads else grads[number] + grad


def _in_order(roots):
    """Each node behind the roots once, after all that lead to it."""
    before, seen, todo = defaultdict(int), set(roots), list(set(roots))
    while todo:
        for node, _ in todo.pop().next_functions:
            if node is not None:
                before[node] += 1
                if node not in seen:
                    seen.add(node)
                    todo.append(node)
    ready = [node for node in seen if not before[node]]
    while ready:
        node = ready.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None:
                before[following] -= 1
                if not before[following]:
                    ready.append(following)


_backward, _grad = torch.autograd.backward, torch.autograd.grad


def backward(outputs, grads=None, *_, **settings):
    """`torch.autograd.backward`."""
    listed = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    if not isinstance(listed[0], FakeTensor):
        return _backward(outputs, grads, **settings)
    grads = [None] * len(listed) if grads is None else [grads] if isinstance(grads, Tensor) else list(grads)
    _walk(listed, grads)


def grad(outputs, inputs, grad_outputs=None, *_, allow_unused=False, **settings):
    """`torch.autograd.grad`."""
    listed = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    if not isinstance(listed[0], FakeTensor):
        return _grad(outputs, inputs, grad_outputs, allow_unused=allow_unused, **settings)
    inputs = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    grads = [None] * len(listed) if grad_outputs is None else list(grad_outputs)
    found = _walk(listed, grads, inputs)
    assert allow_unused or all(x is not None for x in found)
    return found


# ---- all of it


def explicit_flex(query, key, value, score_mod=None, block_mask=None, scale=None, enable_gqa=False, return_aux=None):
    """`flex_attention` by its definition: all scores, masked by the function of the mask."""
    for tensor in block_mask.as_tuple():
        assert not isinstance(tensor, Tensor) or tensor.device == query.device, "a mask on another device"
    groups = query.shape[1] // key.shape[1]
    assert enable_gqa or groups == 1
    keys, values = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    scores = (query @ keys.transpose(2, 3)).float() * scale
    at = torch.arange(query.shape[2], device=query.device)
    if score_mod is not None:
        scores = score_mod(scores, at[:1], at[:1], at[:, None], at[None])
    scores = scores.masked_fill(~block_mask.mask_mod(at[:1], at[:1], at[:, None], at[None]), -torch.inf)
    lse = scores.logsumexp(-1)
    aux = mock.Mock(lse=lse if return_aux is not None and return_aux.lse else None)
    return (scores - lse[..., None]).exp().to(value.dtype) @ values, aux


_swap_tensors = torch.utils.swap_tensors


def _swap(tensor, moved):
    """What `Module.to` does to a fake parameter; nothing, where it is on that device already."""
    if (tensor.device, tensor.dtype) != (moved.device, moved.dtype):
        _swap_tensors(tensor, moved)


@contextlib.contextmanager
def fake_cuda():
    """While the block runs, "cuda" is a device of this machine, whose tensors have no values."""
    from verbatim.models import loading
    from verbatim.trainer.attention import flex

    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (loading, "_check_cuda", lambda *_: None),
            (flex, "_compiled", lambda: explicit_flex),
            (torch.autograd, "backward", backward),
            (torch.autograd, "grad", grad),
            (Tensor, "backward", lambda self, gradient=None, **_: backward(self, gradient)),
            (torch.utils, "swap_tensors", _swap),
            (torch.cuda, "_lazy_init", lambda: None),
            (torch.cuda.amp.common, "amp_definitely_not_available", lambda: False),
            (torch.cuda, "get_device_capability", lambda *_: (9, 0)),
            (torch.cuda, "is_bf16_supported", lambda *_, **__: True),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(FakeCuda())
        torch.empty(0, device="cuda")  # torch copies nothing to a device before a tensor was made there
        yield
