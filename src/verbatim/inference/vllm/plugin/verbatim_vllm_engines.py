"""Defines two weight-transfer engines for vLLM. One loads a folder of safetensors, the other receives a trainer's
broadcast. Both record which values the kernels are built from."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from verbatim_vllm_watch import Watch
from verbatim_weight_group import WeightGroup
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload


@dataclass
class FilesInitInfo(WeightTransferInitInfo):
    """Has no parameters, because a folder needs no connection."""


@dataclass
class FilesUpdateInfo(WeightTransferUpdateInfo):
    """The weights to load."""

    path: str
    """A folder in Hugging Face format, on this machine."""


class FilesEngine(WeightTransferEngine[FilesInitInfo, FilesUpdateInfo]):
    """Loads a folder of safetensors. A failure is recorded in `report`, which the client reads, because an exception
    would reach the client only as status 500 without a text."""

    init_info_cls = FilesInitInfo
    update_info_cls = FilesUpdateInfo
    supports_draft_weight_update = False

    report: dict[str, Any] | None = None
    """The report of the last update; see `Watch.report`."""
    _shapes: dict[str, tuple[int, ...]] | None = None
    """Shapes of the first folder's tensors. Every later folder must have the same shapes."""

    def init_transfer_engine(self, init_info: FilesInitInfo) -> None:
        """Do nothing, because there is nothing to prepare."""

    def start_weight_update(self) -> None:
        """Drop the report of an earlier update, so that it cannot be mistaken for the report of this update."""
        self.report = None

    def receive_weights(self, update_info: FilesUpdateInfo) -> None:
        """Load all tensors. If the folder is refused, the weights are not changed."""
        self.receive(update_info.path, lambda: Folder(Path(update_info.path)))

    def receive(self, path: str | None, open_source: "Callable[[], Folder | Broadcast]") -> None:
        """Load all tensors of a source. If the source cannot be opened or has different tensors, nothing is loaded."""
        watch = Watch(self.model)
        try:
            source = open_source()
            watch.expect(source.shapes)
            if self._shapes is not None:
                refuse_other_shapes(source.shapes, self._shapes)
        except Exception as error:  # noqa: BLE001 - the client reads any error from the report
            self.report = watch.report(path=path, error=f"{type(error).__name__}: {error}", loaded=False)
            return
        error_text = None
        try:
            self.load(watch, source)
            self._shapes = source.shapes
        except Exception as error:  # noqa: BLE001 - the client reads any error from the report
            error_text = f"{type(error).__name__}: {error}"
        self.report = watch.report(path=path, error=error_text, loaded=True)

    def load(self, watch: Watch, source: "Folder | Broadcast") -> None:
        """Load the tensors and build the kernels from them. A tensor that is not loaded keeps its old kernel."""
        with watch:
            initialize_layerwise_reload(self.model)
            try:
                self.model.load_weights(source.tensors())
            finally:
                finalize_layerwise_reload(self.model, self.model_config)
            watch.rebuild_heads()

    def finish_weight_update(self) -> None:
        """Do nothing, because kernels are built while the weights are received."""

    def shutdown(self) -> None:
        """Do nothing, because there is nothing to release."""


@dataclass
class BroadcastUpdateInfo(WeightTransferUpdateInfo):
    """The weights to load: the weights in a folder, or the weights that a group broadcasts."""

    path: str | None = None
    """A folder in Hugging Face format, on this machine."""
    group: dict[str, Any] | None = None
    """The trainer's store (`host`, `port`), the group's `name`, `size`, `kind` and `seconds` (timeout), and
    `first_rank`, the rank of this server's first worker."""


class BroadcastEngine(FilesEngine):
    """Receives the tensors that the trainer broadcasts to all servers. If the server missed a broadcast, the engine
    loads a folder."""

    update_info_cls = BroadcastUpdateInfo
    _group: WeightGroup | None = None

    def receive_weights(self, update_info: BroadcastUpdateInfo) -> None:
        """Load the tensors in a folder, or the tensors that the group broadcasts."""
        about = update_info.group
        if about is None:
            self.receive(update_info.path, lambda: Folder(Path(str(update_info.path))))
            return
        self.receive(None, lambda: Broadcast(self._enter(about)))
        # After a failure other ranks may still wait in a broadcast. Ending the group releases them.
        if self._group is not None and self.report is not None and self.report["error"] is not None:
            self._leave(str(self.report["error"]))

    def _enter(self, about: dict[str, Any]) -> WeightGroup:
        """The group of this update: the last group if it has the same name, otherwise a new group."""
        if self._group is not None and self._group.name == about["name"]:
            self._group.begin()
            return self._group
        self._leave(None)
        parallel = self.parallel_config
        worker = parallel.data_parallel_index * parallel.world_size + parallel.rank
        limit = timedelta(seconds=about["seconds"])
        store = dist.TCPStore(about["host"], about["port"], is_master=False, wait_for_workers=False, timeout=limit)
        self._group = WeightGroup(
            store,
            about["name"],
            rank=about["first_rank"] + worker,
            size=about["size"],
            kind=about["kind"],
            device=self.device,
            seconds=about["seconds"],
        )
        return self._group

    def _leave(self, why: str | None) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close(why)

    def load(self, watch: Watch, source: "Folder | Broadcast") -> None:
        """Load the tensors. Tensors that the model does not use are received too, because the trainer broadcasts all
        tensors."""
        super().load(watch, source)
        if isinstance(source, Broadcast):
            for _ in source.tensors():
                pass

    def shutdown(self) -> None:
        """Leave the group."""
        self._leave(None)


class Broadcast:
    """The tensors that the trainer broadcasts.

    Args:
        group: A group that this rank has joined.
    """

    def __init__(self, group: WeightGroup) -> None:
        layout = group.layout()
        self.shapes = {name: shape for name, (_, shape) in layout.items()}
        self._tensors = ((name, group.receive(dtype, shape)) for name, (dtype, shape) in layout.items())

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors that have not been received yet. Iterating over them receives them one at a time."""
        return self._tensors


class Folder:
    """The tensors of a folder in Hugging Face format. All files are opened before any tensor is loaded.

    Raises:
        ValueError: there are no tensors, a file is damaged, or an index does not match its files.
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
            key: tuple(file.get_slice(key).get_shape())
            for file in self._files
            for key in file.keys()  # noqa: SIM118
        }
        if where is not None and set(where) != set(self.shapes):
            raise ValueError(
                f"the index of {path} and its files name different tensors: {sorted(set(where) ^ set(self.shapes))[:3]}"
            )

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the pair (name, tensor) of each tensor. The tensor is memory-mapped from its file, so that it is not
        read until it is copied."""
        for file in self._files:
            for key in file.keys():  # noqa: SIM118 - no mapping
                yield key, file.get_tensor(key)


def refuse_other_shapes(found: dict[str, tuple[int, ...]], expected: dict[str, tuple[int, ...]]) -> None:
    """Refuse a folder whose tensors differ in name or shape from the tensors of the first folder.

    Raises:
        ValueError: names or shapes differ; the message names the first three tensors.
    """
    other = [
        f"{name}: found {found.get(name)}, expected {expected.get(name)}"
        for name in sorted(found.keys() | expected.keys())
        if found.get(name) != expected.get(name)
    ]
    if other:
        raise ValueError("; ".join(other[:3]))
