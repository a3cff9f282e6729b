"""An engine that loads wrongly, as planted."""

from verbatim_faulty import planted
from verbatim_faulty_tensors import wrong
from verbatim_vllm_engines import Broadcast, BroadcastEngine, Folder
from verbatim_vllm_watch import Watch


class FaultyEngine(BroadcastEngine):
    """`BroadcastEngine` with a fault between the tensors and the kernels."""

    def receive_weights(self, update_info) -> None:
        if planted() != "update skipped":
            super().receive_weights(update_info)

    def load(self, watch: Watch, source: Folder | Broadcast) -> None:
        fault = planted()
        if fault == "stale head":
            watch.rebuild_heads = lambda: None
        if fault:
            source.tensors = lambda tensors=source.tensors: wrong(fault, dict(tensors()))
        super().load(watch, source)
