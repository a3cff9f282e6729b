"""Writes a safetensors file of tensors that lie in parts, without joining them first.

The format: the length of the header as uint64, the header as JSON (type, shape and place of each tensor, and metadata),
then the bytes of the tensors, one after the other (https://huggingface.co/docs/safetensors).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

_TYPES = {"bool": "BOOL", "uint8": "U8", "uint16": "U16", "int32": "I32", "int64": "I64", "float32": "F32"}
_ALIGNED = 8
"""The bytes of the tensors begin at a multiple of this: spaces fill the header."""


def tensor_file(tensors: Mapping[str, Sequence[NDArray[Any]]], metadata: Mapping[str, str]) -> Iterator[memoryview]:
    """The content of the file, part by part.

    Args:
        tensors: By name the arrays that the tensor is joined of, along the first dimension; at least one.
        metadata: Texts by name.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    ordered = sorted(tensors, key=lambda name: (-tensors[name][0].itemsize, name))  # keeps each of them aligned
    end = 0
    for name in ordered:
        parts = tensors[name]
        start, end = end, end + sum(part.nbytes for part in parts)
        shape = [sum(len(part) for part in parts), *parts[0].shape[1:]]
        assert all(part.dtype == parts[0].dtype and part.shape[1:] == parts[0].shape[1:] for part in parts)
        header[name] = {"dtype": _TYPES[parts[0].dtype.name], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNED)
    yield memoryview(len(text).to_bytes(8, "little"))
    yield memoryview(text)
    for name in ordered:
        for part in tensors[name]:
            if part.nbytes:
                yield np.ascontiguousarray(part).data.cast("B")
