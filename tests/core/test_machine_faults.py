"""A fault of the machine is told from a mistake, whatever it was wrapped in, and described in one line."""

from __future__ import annotations

import errno
import os
import resource
import shutil
from pathlib import Path

import pytest
import torch

from e2e.tiny_runs import build_tiny_model
from verbatim.core.errors import UsageError
from verbatim.core.machine_faults import describe, is_machine_fault, is_out_of_memory, naming, rust_errors_as_oserror
from verbatim.models.head import CausalLM
from verbatim.models.loading import load_model, load_tokenizer, save_model
from verbatim.trainer import model_check

FULL = OSError(errno.ENOSPC, "No space left on device")


def raised(error: BaseException, cause: BaseException, *, hidden: bool = False) -> BaseException:
    try:
        try:
            raise cause
        except type(cause):
            if hidden:
                raise error from None
            raise error from cause
    except type(error) as caught:
        return caught


@pytest.mark.parametrize(
    "error",
    [
        FULL,
        OSError(errno.EIO, "Input/output error", "a"),
        OSError(errno.EMFILE, "Too many open files", "a"),
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory: you tried"),
        Exception("No space left on device (os error 28)"),
        raised(UsageError("a cannot be read"), OSError(errno.EIO, "Input/output error", "a")),
        raised(UsageError("a cannot be read"), OSError(errno.EIO, "Input/output error", "a"), hidden=True),
        raised(UsageError("no model"), raised(ValueError("no config"), MemoryError())),
    ],
)
def test_a_fault_of_the_machine(error: BaseException):
    assert is_machine_fault(error)


@pytest.mark.parametrize(
    "error",
    [
        UsageError("no such key"),
        RuntimeError("the loss is wrong"),
        FileNotFoundError(errno.ENOENT, "No such file or directory", "a"),
        PermissionError(errno.EACCES, "Permission denied", "a"),
        raised(UsageError("there is no file a"), FileNotFoundError(errno.ENOENT, "No such file", "a"), hidden=True),
        Exception("Permission denied (os error 13)"),
    ],
)
def test_a_mistake_is_none(error: BaseException):
    assert not is_machine_fault(error)
    assert not is_out_of_memory(error)


def test_memory_that_ran_out_is_described_with_the_place():
    with pytest.raises(MemoryError) as caught:
        raise MemoryError("8 EiB")
    assert describe(caught.value).startswith("out of memory: 8 EiB, in test_memory_that_ran_out")
    assert f"({__file__}:" in describe(caught.value)


def test_a_tree_that_cannot_be_copied_is_described_by_its_first_file(tmp_path: Path):
    (tmp_path / "from").mkdir()
    (tmp_path / "from" / "a").touch()

    def copy(source: str, target: str) -> None:
        raise FULL

    with pytest.raises(shutil.Error) as caught:
        shutil.copytree(tmp_path / "from", tmp_path / "to", copy_function=copy)
    assert describe(caught.value) == f"No space left on device ({tmp_path / 'to' / 'a'})"


def test_an_error_of_writing_gets_its_file_and_one_that_has_one_keeps_it(tmp_path: Path):
    with pytest.raises(OSError, match="No space") as caught, naming(tmp_path / "a"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert describe(caught.value) == f"No space left on device ({tmp_path / 'a'})"
    with pytest.raises(FileNotFoundError) as missing, naming(tmp_path / "a"):
        (tmp_path / "b").open()
    assert describe(missing.value) == f"No such file or directory ({tmp_path / 'b'})"


def test_what_a_library_in_rust_says_of_the_system_is_the_systems_error():
    with pytest.raises(OSError, match="No space") as caught, rust_errors_as_oserror("weights"):
        raise Exception("I/O error: No space left on device (os error 28)")
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, "weights")
    with pytest.raises(ValueError, match="a bug"), rust_errors_as_oserror("weights"):
        raise ValueError("a bug")


def test_memory_that_runs_out_while_trees_are_tried_does_not_change_how_the_run_is_packed(tmp_path, monkeypatch):
    """As a fault of the model it would be: "auto" would fall back to rows, and a resumed run to other rounding."""
    model = CausalLM(load_model(build_tiny_model(tmp_path / "model")))

    def full(*args: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes")

    monkeypatch.setattr(model_check, "DeviceBatch", full)
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        model_check.packing_for(model, "auto")


@pytest.mark.parametrize("limit", [100, 2000, 30_000])
def test_a_disk_that_is_full_while_a_model_or_its_tokenizer_is_saved_is_the_systems_error(tmp_path: Path, limit: int):
    """Of the tiny model: `config.json` has about 1,000 bytes, `tokenizer.json` some 20,000, the weights 100,000."""
    source = build_tiny_model(tmp_path / "model")
    model, tokenizer = load_model(source), load_tokenizer(source)
    (tmp_path / "saved").mkdir()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for parts in ((model, None), (_NoWeights(), tokenizer)):
        if limit > 20_000 and parts[1] is not None:
            continue
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            with pytest.raises(OSError, match="File too large") as caught:
                save_model(*parts, tmp_path / "saved")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert caught.value.errno == errno.EFBIG
        assert str(tmp_path / "saved") in str(caught.value.filename)


class _NoWeights:
    def save_pretrained(self, folder: Path) -> None:
        """Nothing: the tokenizer comes next."""
