"""Sends a published folder's tensors to vLLM's workers over NCCL, from a GPU of this process.

Written from the source of vLLM 0.32 (`distributed/weight_transfer/nccl_engine.py`). It has never been run on a GPU.
"""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verbatim.errors import UsageError
from verbatim.inference.http.client import HttpClient
from verbatim.inference.vllm.command import TRANSFER_ENGINES
from verbatim.inference.vllm.control import VllmControl
from verbatim.inference.vllm.digests import PublishedFolder

if TYPE_CHECKING:
    from torch import Tensor


class Broadcast:
    """Rank 0 of a communicator whose other ranks are the workers of one server.

    The id of the communicator travels over HTTP (vLLM's way for trainers outside of its environment): all ranks enter
    it at the same time and begin with an all-reduce of one element; then each tensor is broadcast, in the order of the
    names in the request. A phase that ends by its limit leaves a thread waiting in NCCL, and the server has to be
    restarted.
    """

    engine = TRANSFER_ENGINES["nccl"]

    def __init__(self) -> None:
        self._communicator: Communicator | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_communicator": None}

    async def prepare(self, client: HttpClient, control: VllmControl, path: Path, version: int) -> None:
        """Make the communicator, the first time.

        Raises:
            UsageError: this process has no GPU, or its torch no NCCL.
        """
        if self._communicator is not None:
            return
        import torch

        if not torch.cuda.is_available() or not torch.distributed.is_nccl_available():
            raise UsageError('inference.vllm.weight_transfer = "nccl" needs a GPU and NCCL in the process of the '
                             'orchestrator; use "files" or "http"')  # fmt: skip
        num_ranks = 1 + await control.num_workers()
        unique_id: bytes = torch.cuda.nccl.unique_id()  # type: ignore[no-untyped-call]
        info = {"nccl_unique_id_b64": base64.b64encode(unique_id).decode(), "rank_offset": 1, "world_size": num_ranks,
                "packed": False}  # fmt: skip
        _, self._communicator = await asyncio.gather(
            control.init_transfer(info), asyncio.to_thread(Communicator, num_ranks, unique_id)
        )

    async def load(self, control: VllmControl, folder: PublishedFolder) -> None:
        """Broadcast every tensor while the server receives."""
        names = list(folder.shapes)
        info = {"names": names, "dtype_names": [folder.dtype_of(name) for name in names],
                "shapes": [list(folder.shapes[name]) for name in names]}  # fmt: skip
        await asyncio.gather(control.load(info), asyncio.to_thread(self._send, folder, names))

    def there(self, path: Path) -> str:
        """Adapters are not sent so."""
        raise UsageError('inference.vllm.weight_transfer = "nccl" sends whole weights; use "files" or "http"')

    def _send(self, folder: PublishedFolder, names: list[str]) -> None:
        import torch

        assert self._communicator is not None, "prepare comes first"
        for name in names:
            self._communicator.send(name, folder.tensor(name))
        torch.cuda.synchronize()


class Communicator:
    """Rank 0 of an NCCL communicator on this process's CUDA device; enters it together with the other ranks.

    It is what `Trainer.send_weights` sends to. Everything here needs CUDA.

    Args:
        num_ranks: This process, and all workers.
        unique_id: Of the communicator: 128 bytes that all ranks have.
    """

    def __init__(self, num_ranks: int, unique_id: bytes) -> None:
        import torch

        self._communicator: Any = torch.cuda.nccl.init_rank(num_ranks, unique_id, 0)  # type: ignore[no-untyped-call]
        torch.cuda.nccl.all_reduce(  # type: ignore[no-untyped-call]
            [torch.zeros(1, device="cuda")], comms=[self._communicator]
        )
        torch.cuda.synchronize()

    def send(self, name: str, tensor: Tensor) -> None:
        """Broadcast a tensor, from host memory or from the device. The name is known from the request."""
        import torch

        torch.cuda.nccl.broadcast([tensor.cuda().contiguous()], root=0, comms=[self._communicator])
