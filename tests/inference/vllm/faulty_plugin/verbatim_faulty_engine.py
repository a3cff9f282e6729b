"""An engine that loads wrongly, as planted."""

from verbatim_faulty import planted
from verbatim_faulty_tensors import wrong
from verbatim_vllm_engines import FilesEngine, Folder
from verbatim_vllm_watch import Watch


class FaultyEngine(FilesEngine):
    """`FilesEngine` with a fault between the folder and the kernels."""

    def receive_weights(self, update_info) -> None:
        if planted() != "update skipped":
            super().receive_weights(update_info)

    def load(self, watch: Watch, folder: Folder) -> None:
        fault = planted()
        if fault == "stale head":
            watch.rebuild_heads = lambda: None
        folder.tensors = lambda tensors=folder.tensors: wrong(fault, dict(tensors()))
        super().load(watch, folder)
