"""Digests of published weights: both sides compute the same, any change shows, every part of every tensor counts."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from verbatim.core.errors import ModelError, SamplerFault
from verbatim.inference.vllm.command import PLUGIN
from verbatim.inference.vllm.digests import (
    PublishedFolder,
    TensorPiece,
    WorkerReport,
    digest,
    open_folder,
    read_reports,
)


def plugin_digest() -> Callable[[torch.Tensor], str]:
    """The plug-in's own code, which vLLM's processes run."""
    spec = importlib.util.spec_from_file_location("verbatim_vllm_digest", PLUGIN / "verbatim_vllm_digest.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    found: Callable[[torch.Tensor], str] = module.digest
    return found


theirs = plugin_digest()


def piece(name: str, tensor: torch.Tensor, **fields: Any) -> TensorPiece:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorPiece(**{"name": name, "dim": 0, "start": 0, "shape": tuple(tensor.shape), "dtype": dtype, **fields})


def report(tensors: dict[str, torch.Tensor], **fields: Any) -> WorkerReport:
    """A worker that holds these tensors whole."""
    digests = tuple((piece(name, tensor), theirs(tensor), "kernel") for name, tensor in tensors.items())
    return WorkerReport(**{"error": None, "digests": digests, "stale": (), "unmapped": (), **fields})


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {"a": torch.randn(12, 8), "b": torch.randn(12, 8), "norm": torch.randn(8)}


@pytest.fixture
def folder(tmp_path: Path, weights: dict[str, torch.Tensor]) -> PublishedFolder:
    save_file(weights, tmp_path / "model.safetensors")
    return PublishedFolder(tmp_path)


def test_the_digest_is_of_row_and_column_sums_of_words():
    words = np.arange(1, 1025, dtype=np.uint64)
    columns = words[:512] + words[512:]
    rows = np.array([131_328, 393_472, 0], dtype=np.uint64)
    expected = hashlib.sha256(b"int64 [1024]" + columns.tobytes() + rows.tobytes()).hexdigest()[:32]
    tensor = torch.from_numpy(words.astype(np.int64))
    assert digest(tensor) == theirs(tensor) == expected


@settings(max_examples=60, deadline=None)
@given(
    shape=st.sampled_from([(), (1,), (3,), (7, 5), (513, 3), (40, 1030), (2, 3, 4)]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 2**31),
)
def test_both_sides_compute_the_same_digest(shape: tuple[int, ...], dtype: torch.dtype, seed: int):
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    assert digest(tensor) == theirs(tensor)
    if tensor.ndim == 2 and len(tensor) > 2:  # a part of a fused weight begins anywhere in its memory
        assert digest(tensor[1:-1]) == theirs(tensor[1:-1]) == digest(tensor[1:-1].clone())


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    change=st.sampled_from(["one bit", "two rows", "two columns", "sign", "shift", "shape"]),
)
def test_every_change_shows(seed: int, change: str):
    generator = torch.Generator().manual_seed(seed)
    tensor = torch.randn(60, 1030, generator=generator)
    other = tensor.clone()
    row, column = (int(torch.randint(0, size - 1, (), generator=generator)) for size in tensor.shape)
    if change == "one bit":
        other.view(torch.int32)[row, column] ^= 1
    elif change == "two rows":
        other[[row, row + 1]] = tensor[[row + 1, row]]
    elif change == "two columns":
        other[:, [column, column + 1]] = tensor[:, [column + 1, column]]
    elif change == "sign":
        other.neg_()
    elif change == "shift":
        other = other.flatten().roll(1).view(60, 1030)
    else:
        other = other.view(1030, 60)
    assert theirs(other) != theirs(tensor)
    assert digest(other) != digest(tensor)


def test_the_same_tensors_prove_themselves(folder: PublishedFolder, weights: dict[str, torch.Tensor]):
    assert folder.compare([report(weights)]).fault is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda w: {**w, "a": w["b"], "b": w["a"]}, "other values: a, b"),
        (lambda w: {**w, "norm": w["norm"] * (1 + 1e-6)}, "other values: norm"),
        (lambda w: {**w, "a": w["a"].index_fill(0, torch.tensor([3]), torch.nan)}, "other values: a"),
        (lambda w: {**w, "a": w["a"].T.contiguous()}, "parts that these tensors do not have: a"),
        (lambda w: {**w, "c": w["a"]}, "parts that these tensors do not have: c"),
        (lambda w: {"a": w["a"], "norm": w["norm"]}, "never loaded: b"),
    ],
)
def test_wrong_tensors_are_named(folder: PublishedFolder, weights: dict[str, torch.Tensor], change: Any, said: str):
    assert said in str(folder.compare([report(change(weights))]).fault)


def test_a_kernel_that_was_not_built_anew_is_named(folder: PublishedFolder, weights: dict[str, torch.Tensor]):
    proof = folder.compare([report(weights, stale=("a (as lm_head)",))])
    assert proof.fault == "kernels that were not rebuilt: a (as lm_head)"


def test_what_no_digest_tells_of_is_reported_and_not_passed_as_proven(
    folder: PublishedFolder, weights: dict[str, torch.Tensor]
):
    known = {name: tensor for name, tensor in weights.items() if name != "b"}
    proof = folder.compare([report(known, unmapped=("b",))])
    assert proof.fault is None
    assert proof.unmapped == ("b",)


def test_parts_on_several_workers_make_up_a_tensor(folder: PublishedFolder, weights: dict[str, torch.Tensor]):
    def half(start: int) -> WorkerReport:
        at = 0 if start == 0 else 4
        rows, columns = weights["a"][start : start + 6], weights["b"][:, at : at + 4]
        digests = (
            (piece("a", rows, start=start), theirs(rows), "kernel"),
            (piece("b", columns, dim=1, start=at), theirs(columns), "kernel"),
            (piece("norm", weights["norm"]), theirs(weights["norm"]), "live"),
        )
        return replace(report({}), digests=digests)

    assert folder.compare([half(0), half(6)]).fault is None
    assert folder.compare([half(0)]).fault == "never loaded: a, b"


def test_a_server_in_another_number_format_is_compared_in_its_own(
    folder: PublishedFolder, weights: dict[str, torch.Tensor]
):
    assert folder.compare([report({name: tensor.bfloat16() for name, tensor in weights.items()})]).fault is None


def test_a_refusal_of_the_server_is_passed_on(folder: PublishedFolder):
    assert folder.compare([report({}, error="ValueError: no")]).fault == "it refused them: ValueError: no"


@pytest.mark.parametrize("kind", ["half a file", "no file", "not finite", "infinite"])
def test_a_folder_that_cannot_be_published_weights_is_refused(
    tmp_path: Path, weights: dict[str, torch.Tensor], kind: str
):
    file = tmp_path / "model.safetensors"
    if kind in ("not finite", "infinite"):
        weights["b"][2, 3] = torch.nan if kind == "not finite" else torch.inf
    save_file(weights, file)
    if kind == "half a file":
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    elif kind == "no file":
        file.unlink()
    with pytest.raises(ModelError, match=r"cannot be read|b holds a number that is not finite"):
        PublishedFolder(tmp_path).prepare([])


def test_replicas_share_what_is_computed_of_a_folder_and_not_of_the_one_that_replaces_it(
    tmp_path: Path, weights: dict[str, torch.Tensor]
):
    save_file(weights, tmp_path / "model.safetensors")
    first = open_folder(tmp_path)
    assert open_folder(tmp_path) is first
    save_file({**weights, "a": weights["b"].clone(), "more": torch.zeros(2)}, tmp_path / "model.safetensors")
    assert open_folder(tmp_path) is not first


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        (None, "a report from each worker"),
        ([], "no worker reported"),
        ([{"format": 99}], "format 1"),
        ([{"format": 1, "engine": "FilesEngine", "report": None}], "has loaded nothing in this update"),
        ([{"format": 1, "report": {"path": None}}], "cannot be read"),
    ],
)
def test_answers_that_are_no_reports_are_faults(answers: object, said: str):
    with pytest.raises(SamplerFault, match=said):
        read_reports(answers)
