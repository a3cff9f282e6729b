"""Broadcasts tensors from a trainer to the workers of vLLM servers: over NCCL from device to device, or over gloo from
host memory to host memory.

Both sides run this module: the trainer is rank 0 of a group, each worker is another rank. It imports torch only,
because it is part of the plug-in. The ranks meet in a store, which the trainer serves. Below the name of a group it
holds

    here/3      rank 3 is about to connect
    layout      names, dtypes and shapes of the tensors in their order; written by rank 0
    over        why the group has ended; whoever fails writes it, and every rank that waits reads it
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
"""Its stubs know neither the stores nor the options of groups."""

_LOOK_EVERY = 0.1
"""Seconds between two looks whether another rank has failed."""
_CONNECTING = 30.0
"""Most seconds until all ranks, which are there, have connected."""
_FIRST_PAUSE, _LONGEST_PAUSE = 2e-5, 2e-3
_FOREVER = timedelta(days=365)
"""For torch's own watchdog, which would end the whole process at its limit."""

Layout = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""Dtype and shape of each tensor, in the order in which they are broadcast."""


class GroupOver(Exception):
    """The group has ended, and nothing can be broadcast any more; says why."""


class WeightGroup:
    """One rank of a group: rank 0 sends, the others receive.

    Each wait for the others ends when one of them fails, and at the limit.

    Args:
        store: The trainer's.
        name: Of the group; never used before in this store.
        rank: This process's.
        size: Ranks in all.
        kind: "nccl" or "gloo".
        device: Where tensors of this process lie.
        seconds: Limit for making the group, and for each update (`begin`).
        layout: Of rank 0: what it will send.

    Raises:
        GroupOver: another rank failed, or did not come.
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
            here = [f"here/{other}" for other in range(size)]
            self._until(lambda: bool(self._store.check(here)), "waiting for the other ranks")
            self._refuse_if_over()
            self._connect()

    def begin(self) -> None:
        """Begin an update: the limit counts from here."""
        self._ends = time.monotonic() + self._seconds

    def layout(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """What rank 0 sends."""
        with self._noticing():
            return _from_json(json.loads(self._store.get("layout")))

    def send(self, tensor: Tensor) -> None:
        """Rank 0: broadcast a contiguous tensor; it may be overwritten when this returns.

        Raises:
            GroupOver: it is not received.
        """
        self._broadcast(tensor.to(self._device))

    def receive(self, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """The tensor that rank 0 broadcasts.

        Raises:
            GroupOver: it does not come.
        """
        tensor = torch.empty(shape, dtype=dtype, device=self._device)
        self._broadcast(tensor)
        return tensor

    def close(self, why: str | None = None) -> None:
        """Leave the group. With a reason it ends: every rank that waits raises `GroupOver` with this one, or with one
        that came before."""
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
            # Gloo's destructor waits for the operation that hangs, until torch's own limit: it is never called.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))

    # ---- inside

    def _broadcast(self, tensor: Tensor) -> None:
        if self._group is None:
            raise GroupOver("the group was left")
        if not tensor.numel():
            return
        with self._noticing():
            work = self._start(self._group, tensor)
            self._until(work.is_completed, "a broadcast")
            work.wait()

    @staticmethod
    def _start(group: Any, tensor: Tensor) -> Any:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        return group.broadcast([tensor.view(-1).view(torch.uint8)], options)

    def _connect(self) -> None:
        """Connect on a thread: what torch waits for there cannot be ended from outside."""
        found: list[Any] = []

        def connect() -> None:
            try:
                if self._device.type == "cuda":
                    torch.cuda.set_device(self._device)
                group = self._make()
                self._start(group, torch.zeros(1, device=self._device)).wait()  # NCCL connects at the first one
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
        """The store over a connection of its own: what torch waits for would hold up our looks."""
        inner, limit = self._store.underlying_store, timedelta(seconds=min(self._seconds, _CONNECTING))
        return dist.TCPStore(inner.host, inner.port, is_master=False, wait_for_workers=False, timeout=limit)

    def _own_address(self) -> str:
        """The address of this host from which the other ranks are reached: the one that reaches the store."""
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
        """Leave the group, and let the others know, where something fails."""
        try:
            yield
        except GroupOver:
            self._is_broken = True
            self.close()
            raise
        except (RuntimeError, OSError, ValueError) as error:
            self._give_up(f"rank {self._rank}: {_first_line(error)}", error)

    def _give_up(self, why: str, error: Exception) -> NoReturn:
        first = why
        with contextlib.suppress(RuntimeError):
            if self._store.check(["over"]):
                first = self._store.get("over").decode()
        self.close(why)
        raise GroupOver(first) from error


class _TookTooLong(RuntimeError):
    """A wait reached its limit."""


def address_towards(host: str, port: int) -> str:
    """The address of this host from which another one is reached.

    Raises:
        OSError: there is no route, or no such host.

    Example: `address_towards("127.0.0.1", 29500)` is "127.0.0.1".
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as asking:
        asking.connect(address)  # sends nothing
        return str(asking.getsockname()[0])


def end_group(host: str, port: int, name: str, why: str, seconds: float = 5.0) -> None:
    """End a group from a process that is no rank of it. Where its store cannot be reached, the ranks' limit ends it."""
    with contextlib.suppress(RuntimeError):
        store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=seconds))
        dist.PrefixStore(name, store).compare_set("over", "", why)


def _to_json(layout: Layout) -> list[Any]:
    return [[name, str(dtype).removeprefix("torch."), list(shape)] for name, (dtype, shape) in layout.items()]


def _from_json(value: list[Any]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    return {name: (getattr(torch, dtype), tuple(shape)) for name, dtype, shape in value}


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
