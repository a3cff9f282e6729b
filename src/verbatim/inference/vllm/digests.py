"""Computes digests of published weights from their files, and compares them with the digests of a server's kernels.

A server's report (`plugin/verbatim_vllm_watch.py`) lists, for each part of each tensor, the digest of the values that a
kernel was built from. The digests of files and of kernels are computed by separate implementations, so that a bug in
one of them shows as a mismatch.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from verbatim.core.errors import ModelError, SamplerFault
from verbatim.core.texts import brief, first_of
from verbatim.models.source import is_adapter, scale_of

if TYPE_CHECKING:
    from torch import Tensor

REPORT_FORMAT = 1
_COLUMNS = 512
"""Number of columns of the digest's matrix, in words of 8 bytes. It is part of the format, and the plug-in uses the
same number."""
_ROWS_AT_ONCE = 32
"""Number of rows (of 4 KiB each) that are summed at a time, so that a block is still in the core's cache for the second
sum."""
MOST_NAMED = 5
"""Maximum number of tensors that a message names."""


@dataclass(frozen=True, kw_only=True)
class TensorPiece:
    """A slice of a checkpoint's tensor, converted to the dtype in which the server computes."""

    name: str
    """The tensor's name in the checkpoint."""
    dim: int
    """The dimension that is sliced."""
    start: int
    """Index along `dim` of the slice's first element."""
    shape: tuple[int, ...]
    """The slice's shape."""
    dtype: str
    """"float32", "bfloat16" or "float16"."""


@dataclass(frozen=True, kw_only=True)
class WorkerReport:
    """What one worker of a server built its kernels from in the last update."""

    error: str | None
    """Why the worker failed to load all tensors; None if it loaded them."""
    digests: tuple[tuple[TensorPiece, str, str], ...]
    """(slice, digest, source of the digest) of each part. The source is "kernel" (input of a kernel) or "live"
    (parameter in use)."""
    stale: tuple[str, ...]
    """Tensors that no kernel was built from."""
    unmapped: tuple[str, ...]
    """Checkpoint tensors whose place in the server's model is unknown, so that no digest covers them."""


@dataclass(frozen=True, kw_only=True)
class Proof:
    """Result of comparing reports with a folder."""

    fault: str | None
    """How the server's weights differ from the folder, worded for a message; None if all digests match."""
    unmapped: tuple[str, ...] = ()
    """Tensors that no digest covers."""


class PublishedFolder:
    """The tensors of a folder in Hugging Face format, or of an adapter in the format of `peft`.

    Args:
        path: The folder.

    Raises:
        ModelError: the folder holds no safetensors, or a file is damaged; the message names the folder or the file.
    """

    def __init__(self, path: Path) -> None:
        from safetensors import SafetensorError, safe_open

        self.path = path
        self._lock = threading.Lock()
        self._digests: dict[TensorPiece, str] = {}
        self._finite: set[str] = set()
        self._scale = scale_of(path) if is_adapter(path) else 1.0
        try:
            files = [safe_open(file, framework="pt") for file in _weight_files(path)]
            self._where = {name: file for file in files for name in file.keys()}  # type: ignore[no-untyped-call]  # noqa: SIM118 - no mapping
            self.shapes = {
                name: tuple(file.get_slice(name).get_shape())  # type: ignore[no-untyped-call]
                for name, file in self._where.items()
            }
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise ModelError(f"{path}: the weights cannot be read: {error}") from error

    def refuse_other_shapes(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        """Refuse a folder whose tensors differ in name or shape from the tensors of the previous weights.

        Raises:
            ModelError: names or shapes differ; the message names the tensors.
        """
        other = [
            f"{name} (found {self.shapes.get(name, 'none')}, expected {expected.get(name, 'none')})"
            for name in sorted(self.shapes.keys() | expected.keys())
            if self.shapes.get(name) != expected.get(name)
        ]
        if other:
            raise ModelError(
                f"{self.path}: tensor names or shapes differ from those of the previous weights: "
                f"{first_of(other, MOST_NAMED)}"
            )

    def tensor(self, name: str) -> Tensor:
        """A tensor, memory-mapped from its file."""
        found: Tensor = self._where[name].get_tensor(name)  # type: ignore[no-untyped-call]
        return found

    def prepare(self, pieces: Sequence[TensorPiece]) -> None:
        """Check that all values are finite, and compute the digests of these slices, in one pass over the files.

        Raises:
            ModelError: a value is not finite; the message names the tensor.
        """
        by_name: dict[str, list[TensorPiece]] = {}
        for piece in pieces:
            by_name.setdefault(piece.name, []).append(piece)
        # Replicas share this object and call it from several threads. The lock ensures that each digest is computed
        # only once.
        with self._lock:
            for name in self._where:
                if name not in self._finite:
                    self._refuse_not_finite(name)
                self._digest_all(name, by_name.get(name, ()))

    def _refuse_not_finite(self, name: str) -> None:
        import torch

        tensor = self.tensor(name)
        # If the sum is finite, so is every element. Otherwise each element is checked, because a sum of finite elements
        # may overflow.
        if (
            tensor.is_floating_point()
            and not bool(torch.isfinite(tensor.sum(dtype=torch.float32)))
            and not bool(torch.isfinite(tensor).all())
        ):
            raise ModelError(f"{self.path}: {name} holds a number that is not finite")
        self._finite.add(name)

    def _digest_all(self, name: str, pieces: Sequence[TensorPiece]) -> None:
        import torch

        missing = [piece for piece in pieces if piece not in self._digests]
        if not missing:
            return
        tensor = self.tensor(name)
        for piece in missing:
            part = tensor
            if part.ndim and piece.shape != tuple(part.shape):
                part = part.narrow(piece.dim, piece.start, piece.shape[piece.dim])
            held = part.to(getattr(torch, piece.dtype))
            if self._scale != 1 and name.endswith(".lora_B.weight"):  # as vLLM scales B
                held = held * self._scale
            self._digests[piece] = digest(held)

    def compare(self, reports: Sequence[WorkerReport]) -> Proof:
        """Check that the workers' kernels were built from all of the folder's tensors, and from nothing else."""
        failed = next((report.error for report in reports if report.error is not None), None)
        if failed is not None:
            return Proof(fault=f"it refused them: {failed}")
        unmapped = tuple(sorted({name for report in reports for name in report.unmapped}))
        # Checked first, because `prepare` could not slice a piece that does not fit.
        foreign = {piece.name for report in reports for piece, _, _ in report.digests if not self._fits(piece)}
        if foreign:
            return Proof(
                fault=f"it holds parts that these tensors do not have: {first_of(sorted(foreign), MOST_NAMED)}"
            )
        self.prepare([piece for report in reports for piece, _, _ in report.digests])
        differing = {
            piece.name for report in reports for piece, found, _ in report.digests if self._digests[piece] != found
        }
        not_built = {name for report in reports for name in report.stale}
        parts: dict[str, set[tuple[int, int, int]]] = {}
        for piece in (piece for report in reports for piece, _, _ in report.digests):
            end = piece.start + piece.shape[piece.dim] if piece.shape else 0
            parts.setdefault(piece.name, set()).add((piece.start, end, piece.dim))
        absent = {
            name
            for name in self.shapes
            if name not in unmapped and not self._is_covered(name, sorted(parts.get(name, ())))
        }
        said = [
            f"{what}: {first_of(sorted(names), MOST_NAMED)}"
            for what, names in (
                ("other values", differing),
                ("kernels that were not rebuilt", not_built),
                ("never loaded", absent),
            )
            if names
        ]
        return Proof(fault="; ".join(said) or None, unmapped=unmapped)

    def _fits(self, piece: TensorPiece) -> bool:
        shape = self.shapes.get(piece.name)
        if shape is None or len(shape) != len(piece.shape):
            return False
        return all(
            (piece.start + size <= whole if dim == piece.dim else size == whole)
            for dim, (size, whole) in enumerate(zip(piece.shape, shape, strict=True))
        )

    def _is_covered(self, name: str, parts: Sequence[tuple[int, int, int]]) -> bool:
        """True if the slices of all workers (start, end, dim; sorted) cover the tensor.

        Example: [0, 4) and [4, 8) cover 8 rows.
        """
        if parts and not self.shapes[name]:
            return True
        reached = 0
        for start, end, _ in parts:
            if start > reached:
                return False
            reached = max(reached, end)
        return bool(parts) and reached == self.shapes[name][parts[0][2]]


@lru_cache(maxsize=2)
def _opened(path: Path, _stamp: tuple[tuple[str, int, int], ...]) -> PublishedFolder:
    return PublishedFolder(path)


def open_folder(path: Path) -> PublishedFolder:
    """Open a folder. Replicas that load the same folder share the object and its digests.

    Raises:
        ModelError: as for `PublishedFolder`.
    """
    # Times and sizes are part of the cache key, because a path may be written again with different weights.
    stats = [(file, file.stat()) for file in sorted(path.glob("*.safetensors"))]
    return _opened(path.absolute(), tuple((file.name, stat.st_mtime_ns, stat.st_size) for file, stat in stats))


def digest(tensor: Tensor) -> str:
    """Digest of dtype, shape and bytes. The bytes are read as a matrix of little-endian 64-bit words with 512 columns,
    and SHA-256 is taken of the matrix's column sums and row sums modulo 2**64. Zeros pad the last row; if all rows are
    full, a row of zeros is added.

    Computing the digest takes about as long as reading the memory. The digest detects faults, not forgery. It always
    changes if one to three words change. If more words change, or words change their order, it stays the same only if
    the changes cancel in every row and in every column.

    Example: the 1,024 words 1, 2, ..., 1,024 fill two rows, to which a row of zeros is added. The row sums are 131,328,
        393,472 and 0.
    """
    import torch

    raw = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
    full = len(raw) // (8 * _COLUMNS)
    last = np.zeros(8 * _COLUMNS, dtype=np.uint8)
    last[: len(raw) - full * 8 * _COLUMNS] = raw[full * 8 * _COLUMNS :]
    words = raw[: full * 8 * _COLUMNS].view(np.uint64).reshape(full, _COLUMNS)
    columns = last.view(np.uint64).copy()
    rows = np.zeros(full + 1, dtype=np.uint64)
    for start in range(0, full, _ROWS_AT_ONCE):
        part = words[start : start + _ROWS_AT_ONCE]
        columns += part.sum(axis=0, dtype=np.uint64)
        rows[start : start + len(part)] = part.sum(axis=1, dtype=np.uint64)
    rows[full] = last.view(np.uint64).sum(dtype=np.uint64)
    head = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}".encode()
    return hashlib.sha256(head + columns.tobytes() + rows.tobytes()).hexdigest()[:32]


def read_reports(answers: object) -> list[WorkerReport]:
    """The reports of a server's workers, from the answer of `/collective_rpc`.

    Raises:
        SamplerFault: the answer is not a list of reports, or a report has another format.
    """
    found = []
    if not isinstance(answers, list):
        raise SamplerFault(f"expected a report from each worker, found {brief(answers)}")
    for answer in answers:
        if not isinstance(answer, dict) or answer.get("format") != REPORT_FORMAT:
            raise SamplerFault(f"expected reports of format {REPORT_FORMAT}, found {brief(answer)}")
        report = answer.get("report")
        if not isinstance(report, dict):
            raise SamplerFault(f"its engine {brief(answer.get('engine'))} has loaded nothing in this update")
        try:
            found.append(_read_report(report))
        except (KeyError, TypeError, ValueError) as error:
            raise SamplerFault(f"a report cannot be read ({error}): {brief(report)}") from error
    if not found:
        raise SamplerFault("no worker reported what it loaded")
    return found


def _read_report(report: Mapping[str, Any]) -> WorkerReport:
    return WorkerReport(
        error=report["error"],
        digests=tuple(
            (TensorPiece(name=name, dim=dim, start=start, shape=tuple(shape), dtype=dtype), found, source)
            for name, dim, start, shape, dtype, found, source in report["tensors"]
        ),
        stale=tuple(report["stale"]),
        unmapped=tuple(report["unmapped"]),
    )


def _weight_files(path: Path) -> list[Path]:
    if is_adapter(path):
        return [path / "adapter_model.safetensors"]
    index = path / "model.safetensors.index.json"
    if not index.is_file():
        return [path / "model.safetensors"]
    return [path / name for name in sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))]
