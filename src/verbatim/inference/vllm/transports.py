"""The ways in which a published folder reaches a vLLM server."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from verbatim.inference.http.client import HttpClient
from verbatim.inference.http.uploads import digests_of, upload
from verbatim.inference.vllm.broadcast import Broadcast, BroadcastTransport
from verbatim.inference.vllm.command import TRANSFER_ENGINES
from verbatim.inference.vllm.control import VllmControl
from verbatim.inference.vllm.digests import PublishedFolder
from verbatim.inference.vllm.settings import WeightTransfer


class Transport(Protocol):
    """Brings weights to a server. Both methods raise a SamplerFault that names the replica and the phase."""

    @property
    def engine(self) -> str:
        """vLLM's weight-transfer engine that it speaks to."""

    async def prepare(self, client: HttpClient, control: VllmControl, path: Path, version: int) -> None:
        """Do what can be done while the server samples."""

    async def load(self, control: VllmControl, folder: PublishedFolder) -> None:
        """Make the paused server load the weights."""

    def there(self, path: Path) -> str:
        """The path of a prepared folder on the server's host; the server that is told it reads adapters from it."""


class SharedFolder:
    """The server reads the folder, which has the same path on its host."""

    engine = TRANSFER_ENGINES["files"]

    async def prepare(self, client: HttpClient, control: VllmControl, path: Path, version: int) -> None:
        """Nothing to do."""

    async def load(self, control: VllmControl, folder: PublishedFolder) -> None:
        """Name the folder."""
        await control.load({"path": str(folder.path)})

    def there(self, path: Path) -> str:
        """The same path."""
        return str(path.absolute())


class Upload:
    """The folder is sent to the server's host, which reads its copy."""

    engine = TRANSFER_ENGINES["http"]

    def __init__(self) -> None:
        self._there = ""

    async def prepare(self, client: HttpClient, control: VllmControl, path: Path, version: int) -> None:
        """Send what the host does not have."""
        self._there = await upload(client, path, await digests_of(path), version)

    async def load(self, control: VllmControl, folder: PublishedFolder) -> None:
        """Name the copy."""
        await control.load({"path": self._there})

    def there(self, path: Path) -> str:
        """The copy's path."""
        return self._there


def make_transport(name: str, weight_transfer: WeightTransfer, broadcast: Broadcast | None) -> Transport:
    """The transport of a replica.

    Args:
        name: The replica's.
        weight_transfer: The transport's name in the configuration.
        broadcast: That of the run; None = there is no trainer that sends.
    """
    if weight_transfer == "http":
        return Upload()
    if weight_transfer in ("nccl", "gloo"):
        return BroadcastTransport(name, broadcast)
    return SharedFolder()
