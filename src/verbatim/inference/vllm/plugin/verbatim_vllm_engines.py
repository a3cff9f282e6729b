"""Defines the weight-transfer engines: from a folder of safetensors, and over NCCL; both watch what the kernels get."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from verbatim_vllm_watch import Watch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload


@dataclass
class FilesInitInfo(WeightTransferInitInfo):
    """Nothing has to be agreed on."""


@dataclass
class FilesUpdateInfo(WeightTransferUpdateInfo):
    """Which weights to load."""

    path: str
    """A folder in Hugging Face format, on this machine."""


class FilesEngine(WeightTransferEngine[FilesInitInfo, FilesUpdateInfo]):
    """Loads a folder of safetensors. What cannot be loaded stands in `report`, which the client reads: an exception
    would only reach it as status 500 without a text."""

    init_info_cls = FilesInitInfo
    update_info_cls = FilesUpdateInfo
    supports_draft_weight_update = False

    report: dict[str, Any] | None = None
    """What the last update loaded; see `Watch.report`."""
    _shapes: dict[str, tuple[int, ...]] | None = None
    """Shapes of the first folder's tensors: every later folder has the same."""

    def init_transfer_engine(self, init_info: FilesInitInfo) -> None:
        """Nothing to prepare."""

    def start_weight_update(self) -> None:
        """A report of an earlier update is never taken for one of this update."""
        self.report = None

    def receive_weights(self, update_info: FilesUpdateInfo) -> None:
        """Load all tensors; the weights stay as they are where the folder is refused."""
        watch = Watch(self.model)
        try:
            folder = Folder(Path(update_info.path))
            watch.expect(folder.shapes)
            if self._shapes is not None:
                refuse_other_shapes(folder.shapes, self._shapes)
        except Exception as error:  # noqa: BLE001 - whatever it is, the client is told
            self.report = watch.report(path=update_info.path, error=f"{type(error).__name__}: {error}", loaded=False)
            return
        error_text = None
        try:
            self.load(watch, folder)
            self._shapes = folder.shapes
        except Exception as error:  # noqa: BLE001 - whatever it is, the client is told
            error_text = f"{type(error).__name__}: {error}"
        self.report = watch.report(path=update_info.path, error=error_text, loaded=True)

    def load(self, watch: Watch, folder: "Folder") -> None:
        """Load the tensors and build the kernels from them; what was not loaded keeps its old kernel."""
        with watch:
            initialize_layerwise_reload(self.model)
            try:
                self.model.load_weights(folder.tensors())
            finally:
                finalize_layerwise_reload(self.model, self.model_config)
            watch.rebuild_heads()

    def finish_weight_update(self) -> None:
        """All was done while the weights were received."""

    def shutdown(self) -> None:
        """Nothing to release."""


class NcclEngine(NCCLWeightTransferEngine):
    """vLLM's own engine for NCCL, watched."""

    report: dict[str, Any] | None = None
    """What the last update loaded; see `Watch.report`."""
    _watch: Watch | None = None

    def start_weight_update(self) -> None:
        """Watch from here on, until the update is finished."""
        self.report = None
        self._watch = Watch(self.model)
        self._watch.__enter__()
        super().start_weight_update()

    def receive_weights(self, update_info: Any) -> None:
        """Receive one part of the weights."""
        assert self._watch is not None, "start_weight_update comes first"
        named = zip(update_info.names, update_info.shapes, strict=True)
        self._watch.expect({name: tuple(shape) for name, shape in named}, complete=False)
        super().receive_weights(update_info)

    def finish_weight_update(self) -> None:
        """Build the kernels and report what from."""
        watch, self._watch = self._watch, None
        assert watch is not None, "start_weight_update comes first"
        try:
            super().finish_weight_update()
            watch.rebuild_heads()
        finally:
            watch.__exit__()
        self.report = watch.report(path=None, error=None, loaded=True)


class Folder:
    """The tensors of a folder in Hugging Face format, opened before any of them is loaded.

    Raises:
        ValueError: there are none, a file is damaged, or an index does not fit its files.
    """

    def __init__(self, path: Path) -> None:
        index = path / "model.safetensors.index.json"
        if index.is_file():
            where = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            files = sorted(set(where.values()))
        else:
            where, files = None, ["model.safetensors"]
        self._files = [safe_open(path / name, framework="pt") for name in files]
        self.shapes = {
            key: tuple(file.get_slice(key).get_shape()) for file in self._files for key in file.keys()  # noqa: SIM118
        }
        if where is not None and set(where) != set(self.shapes):
            raise ValueError(f"the index of {path} does not name the tensors of its files: "
                             f"{sorted(set(where) ^ set(self.shapes))[:3]}")  # fmt: skip

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Each tensor, mapped from its file and read when it is copied."""
        for file in self._files:
            for key in file.keys():  # noqa: SIM118 - no mapping
                yield key, file.get_tensor(key)


def refuse_other_shapes(found: dict[str, tuple[int, ...]], expected: dict[str, tuple[int, ...]]) -> None:
    """Refuse a folder whose tensors are not those of the first one.

    Raises:
        ValueError: names the first three.
    """
    other = [f"{name}: found {found.get(name)}, expected {expected.get(name)}"
             for name in sorted(found.keys() | expected.keys()) if found.get(name) != expected.get(name)]  # fmt: skip
    if other:
        raise ValueError("; ".join(other[:3]))
