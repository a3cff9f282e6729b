"""Broadcasts tensors from a trainer to the workers of vLLM servers: over NCCL from device to device, or over gloo from
host memory to host memory.

Both sides run this module: the trainer is rank 0 of a group, and each worker is one of the other ranks. The module is
part of the plug-in, so it imports only torch. The ranks meet in a `TCPStore`, which the trainer serves. Keys below a
group's name:

    here/3      rank 3 is about to connect
    layout      names, dtypes and shapes of the tensors in order; written by rank 0
    over        why the group has ended; written by the rank that fails first, polled by every rank that waits
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed
from torch import Tensor

dist: Any = torch.distributed
"""Typed as Any, because torch's stubs lack the stores and the options of process groups."""

_LOOK_EVERY = 0.1
"""Seconds between two checks of whether another rank has failed."""
_CONNECTING = 30.0
"""Maximum seconds for connecting, once all ranks have arrived."""
_FIRST_PAUSE, _LONGEST_PAUSE = 2e-5, 2e-3
"""Seconds between two checks while waiting: short at first, for small tensors, then doubled up to the maximum."""
_FOREVER = timedelta(days=365)
"""Timeout that is given to NCCL, too long ever to be reached: if it were reached, torch's watchdog would end the whole
process. `_until` applies the real timeout."""

Layout = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""Dtype and shape of each tensor, in the order in which they are broadcast."""


class GroupOver(Exception):
    """The group has ended, and nothing more can be broadcast. The message is the reason."""


class WeightGroup:
    """One rank of a group. Rank 0 sends, and the other ranks receive.

    Every wait ends when another rank fails, or at the timeout.

    Args:
        store: A connection to the trainer's store.
        name: The group's name, which must not have been used before in this store.
        rank: This process's rank.
        size: Number of ranks.
        kind: "nccl" or "gloo".
        device: The device of this process's tensors.
        seconds: Timeout for creating the group, and for each update (`begin`).
        layout: On rank 0: the tensors that rank 0 will send.

    Raises:
        GroupOver: another rank failed, or did not arrive.
    """

    def __init__(
        self,
        store: Any,
        name: str,
        *,
        rank: int,
        size: int,
        kind: str,
        device: torch.device,
        seconds: float,
        layout: Layout | None = None,
    ) -> None:
        self.name = name
        self._store = dist.PrefixStore(name, store)
        self._rank, self._size, self._kind, self._seconds = rank, size, kind, seconds
        self._device = device if kind == "nccl" else torch.device("cpu")
        self._group: Any = None
        self._is_broken = False
        self.begin()
        with self._noticing():
            if layout is not None:
                self._store.set("layout", json.dumps(_to_json(layout)))
            self._store.set(f"here/{rank}", "")
            # Connect only once all ranks are here, because torch's own wait for a missing rank cannot be interrupted.
            here = [f"here/{other}" for other in range(size)]
            self._until(lambda: bool(self._store.check(here)), "waiting for the other ranks")
            self._refuse_if_over()
            self._connect()

    def begin(self) -> None:
        """Begin an update, whose timeout counts from now."""
        self._ends = time.monotonic() + self._seconds

    def layout(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Dtype and shape of each tensor that rank 0 sends."""
        with self._noticing():
            return _from_json(json.loads(self._store.get("layout")))

    def send(self, tensor: Tensor) -> None:
        """On rank 0: broadcast a contiguous tensor. The tensor may be overwritten once this returns.

        Raises:
            GroupOver: the group has ended.
        """
        self._broadcast(tensor.to(self._device))

    def receive(self, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """Receive the next tensor that rank 0 broadcasts.

        Raises:
            GroupOver: the group has ended.
        """
        tensor = torch.empty(shape, dtype=dtype, device=self._device)
        self._broadcast(tensor)
        return tensor

    def close(self, why: str | None = None) -> None:
        """Leave the group. If a reason is given, the group ends: every rank that waits raises `GroupOver` with this
        reason, or with an earlier reason."""
        if why is not None:
            self._is_broken = True
            with contextlib.suppress(RuntimeError):  # the trainer may be gone, and its store with it
                self._store.compare_set("over", "", why)
        group, self._group = self._group, None
        if group is None:
            return
        if self._kind == "nccl":
            group.abort()
        elif self._is_broken:
            # Gloo's destructor would wait for the hanging operation until torch's timeout, so the object is leaked on
            # purpose.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))

    # ---- internals

    def _broadcast(self, tensor: Tensor) -> None:
        if self._group is None:
            raise GroupOver("this rank has left the group")
        if not tensor.numel():
            return
        with self._noticing():
            work = self._start(self._group, tensor)
            self._until(work.is_completed, "a broadcast")
            work.wait()

    @staticmethod
    def _start(group: Any, tensor: Tensor) -> Any:
        # Sent as bytes, so that every dtype can be broadcast. The receiver knows the dtype from the layout.
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        return group.broadcast([tensor.view(-1).view(torch.uint8)], options)

    def _connect(self) -> None:
        """Connect on a separate thread, because torch waits while it connects, and these waits cannot be
        interrupted."""
        found: list[Any] = []

        def connect() -> None:
            try:
                if self._device.type == "cuda":
                    torch.cuda.set_device(self._device)
                group = self._make()
                self._start(group, torch.zeros(1, device=self._device)).wait()  # NCCL connects at the first broadcast
                found.append(group)
            except Exception as error:  # noqa: BLE001  (raised below, on the thread that waits)
                found.append(error)

        threading.Thread(target=connect, name="connecting a weight group", daemon=True).start()
        self._until(lambda: bool(found), "connecting")
        if isinstance(found[0], Exception):
            raise found[0]
        self._group = found[0]

    def _make(self) -> Any:
        store = dist.PrefixStore(f"{self.name}/group", self._other_connection())
        if self._kind == "nccl":
            nccl = dist.ProcessGroupNCCL.Options()
            nccl._timeout = _FOREVER
            return dist.ProcessGroupNCCL(store, self._rank, self._size, nccl)
        gloo = dist.ProcessGroupGloo._Options()
        gloo._timeout = timedelta(seconds=self._seconds)
        gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=self._own_address())]
        return dist.ProcessGroupGloo(store, self._rank, self._size, gloo)

    def _other_connection(self) -> Any:
        """A second connection to the store. Torch's blocking waits use it, so that they do not block our own checks."""
        inner, limit = self._store.underlying_store, timedelta(seconds=min(self._seconds, _CONNECTING))
        return dist.TCPStore(inner.host, inner.port, is_master=False, wait_for_workers=False, timeout=limit)

    def _own_address(self) -> str:
        """The address at which other ranks reach this host: its address on the route to the store."""
        inner = self._store.underlying_store
        return address_towards(inner.host, inner.port)

    def _until(self, done: Callable[[], bool], doing: str) -> None:
        pause, looked = _FIRST_PAUSE, time.monotonic()
        while not done():
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
            now = time.monotonic()
            if now - looked > _LOOK_EVERY:
                looked = now
                self._refuse_if_over()
            if now > self._ends:
                raise _TookTooLong(f"{doing} took more than {self._seconds:g} s")

    def _refuse_if_over(self) -> None:
        if self._store.check(["over"]):
            raise GroupOver(self._store.get("over").decode())

    @contextlib.contextmanager
    def _noticing(self) -> Iterator[None]:
        """If the block fails, leave the group and tell the other ranks why."""
        try:
            yield
        except GroupOver:
            self._is_broken = True
            self.close()
            raise
        except (RuntimeError, OSError, ValueError) as error:
            self._give_up(f"rank {self._rank}: {_first_line(error)}", error)

    def _give_up(self, why: str, error: Exception) -> NoReturn:
        # If another rank failed before, its reason is the cause, and this error is only the consequence.
        first = why
        with contextlib.suppress(RuntimeError):
            if self._store.check(["over"]):
                first = self._store.get("over").decode()
        self.close(why)
        raise GroupOver(first) from error


class _TookTooLong(RuntimeError):
    """A wait reached its timeout."""


def address_towards(host: str, port: int) -> str:
    """The address of this host on the route to another host.

    Raises:
        OSError: there is no route, or the host does not exist.

    Example: `address_towards("127.0.0.1", 29500)` is "127.0.0.1".
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as asking:
        asking.connect(address)  # for a UDP socket, this only chooses the route, and sends nothing
        return str(asking.getsockname()[0])


def end_group(host: str, port: int, name: str, why: str, seconds: float = 5.0) -> None:
    """End a group from a process that is not one of its ranks. If the store is unreachable, the ranks time out."""
    with contextlib.suppress(RuntimeError):
        store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=seconds))
        dist.PrefixStore(name, store).compare_set("over", "", why)


def _to_json(layout: Layout) -> list[Any]:
    return [[name, str(dtype).removeprefix("torch."), list(shape)] for name, (dtype, shape) in layout.items()]


def _from_json(value: list[Any]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    return {name: (getattr(torch, dtype), tuple(shape)) for name, dtype, shape in value}


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
