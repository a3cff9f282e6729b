"""Counts the bytes of all live tensors while operations run on fake tensors, and records the peak.

A fake tensor has the shape, dtype and lifetime of a real tensor, but no memory. torch's own tracker
(`torch.distributed._tools`) cannot be used, because it rejects a module that is called several times before its
backward pass, such as the output head, which is called once for each chunk of targets.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

ACTIVATIONS = "activations"
BATCH = "batch"
GATHERED = "gathered"
GRADIENTS = "gradients"
LOGITS = "logits"
OPTIMIZER = "optimizer"
REFERENCE = "reference"
WEIGHTS = "weights"
KINDS = (WEIGHTS, OPTIMIZER, GRADIENTS, REFERENCE, GATHERED, ACTIVATIONS, LOGITS, BATCH)
"""The kinds of tensors, in this order: this process's parameters, its optimizer state, its gradients, the frozen
reference model, weights and gradients in transfer between processes, tensors saved for the backward pass or used
between two operations, vocabulary-sized logits, and the ids, positions and masks of micro-batches."""

_aten: Any = torch.ops.aten
_c10d: Any = torch.ops.c10d
_VALUES = {_aten.allclose.default, _aten.equal.default}


@dataclass
class _Storage:
    kind: str
    num_bytes: int


class LiveMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts live tensors inside a `FakeTensorMode`. It must be entered after the `FakeTensorMode`.

    Code that reads a value of a fake tensor gets a made-up value, so that the code can continue: any number is 1, any
    two tensors are equal, and any one-dimensional mask keeps everything.

    Args:
        vocab_size: Size of the vocabulary. Tensors whose last dimension has this size are counted as logits.
    """

    def __init__(self, vocab_size: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._vocab_size = vocab_size
        self._known: Any = WeakIdKeyDictionary()
        self._now = dict.fromkeys(KINDS, 0)
        self._total = 0
        self.peak = 0
        """Peak of `total` since the last `restart`, in bytes."""
        self.at_peak: dict[str, int] = {}
        """Bytes of each kind at the peak."""

    @property
    def total(self) -> int:
        """Size of all tensors that are live now, in bytes."""
        return self._total

    def restart(self) -> None:
        """Forget the peak, and record a new peak from now on."""
        self.peak, self.at_peak = self._total, dict(self._now)

    def mark(self, tensors: Iterable[Tensor | None], kind: str) -> None:
        """Set the kind of these tensors."""
        for tensor in tensors:
            if tensor is None:
                continue
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            found = self._count(local.detach().untyped_storage(), kind)
            self._change(found.kind, -found.num_bytes)
            found.kind = kind
            self._change(kind, found.num_bytes)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count live tensors while the block runs, including storages that FSDP resizes directly, without a torch
        operation."""
        resize = torch.UntypedStorage.resize_

        def resized(storage: Any, size: int) -> Any:
            out = resize(storage, size)
            self.mark_storage(storage, GATHERED)
            return out

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign,assignment]
        try:
            with self:
                yield
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]

    def mark_storage(self, storage: Any, kind: str) -> None:
        """Set the kind of a storage and update its size."""
        found = self._count(storage, kind)
        self._change(found.kind, -found.num_bytes)
        found.kind, found.num_bytes = kind, storage.nbytes()
        self._change(kind, found.num_bytes)
        self._look()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor then calls the operation again on the local shards
        if func is _aten._local_scalar_dense.default:
            return True if args[0].dtype == torch.bool else 1.0 if args[0].is_floating_point() else 1
        if func in _VALUES:
            return True
        if func is _aten.index.Tensor:
            args = (args[0], [_everything(index) for index in args[1]])
        if func in _SHAPED:
            func = _SHAPED[func]
        out = func(*args, **(kwargs or {}))
        for tensor in _tensors(args):
            if type(tensor) is Tensor:  # a real tensor (positions, masks), made outside of the fake mode
                self._count(tensor.untyped_storage(), BATCH)
        # A gather has the whole tensor as its output, a reduction as its input.
        if func is _c10d._allgather_base_.default:
            self.mark([args[0]], GATHERED)
        elif func is _c10d._reduce_scatter_base_.default:
            self.mark([args[1]], GATHERED)
        for tensor in _tensors(out if isinstance(out, tuple | list) else [out]):
            is_logits = tensor.ndim == 2 and tensor.shape[1] == self._vocab_size
            self._count(tensor.untyped_storage(), LOGITS if is_logits else ACTIVATIONS)
        self._look()
        return out

    def _count(self, storage: Any, kind: str) -> _Storage:
        known = self._known.get(storage)
        if known is not None:
            found: _Storage = known[0]
            return found
        found = _Storage(kind, storage.nbytes())
        # The weak reference is kept too, because a weak reference that has been freed would not call `_forget`.
        self._known[storage] = (found, weakref.ref(storage, self._forget(found)))
        self._change(kind, found.num_bytes)
        return found

    def _forget(self, found: _Storage) -> Callable[[Any], None]:
        return lambda _: self._change(found.kind, -found.num_bytes)

    def _change(self, kind: str, num_bytes: int) -> None:
        self._now[kind] += num_bytes
        self._total += num_bytes

    def _look(self) -> None:
        if self._total > self.peak:
            self.restart()


def _grouped_mm(
    a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Make an output with the shape of grouped matrix products, because torch's own fake implementation supports only
    bfloat16."""
    shape = [a.shape[-2], b.shape[-1]]
    if a.ndim == b.ndim:
        shape.insert(0, len(a) if a.ndim == 3 or offs is None else len(offs))
    return a.new_empty(shape, dtype=out_dtype)


def _bincount(values: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """Make an output with the shape of the counts, assuming that all values are below `minlength`."""
    return values.new_empty(minlength, dtype=None if weights is None else weights.dtype)


_SHAPED = {_aten._grouped_mm.default: _grouped_mm, _aten.bincount.default: _bincount}
"""Replacements for the operations whose output shapes torch cannot infer for fake tensors."""


def _everything(index: Any) -> Any:
    """If the index is a one-dimensional mask, return the indices of all its positions; return anything else
    unchanged."""
    if isinstance(index, Tensor) and index.dtype == torch.bool and index.ndim == 1:
        return torch.arange(len(index), device=index.device)
    return index


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
