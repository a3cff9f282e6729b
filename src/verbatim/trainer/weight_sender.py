"""Broadcasts the trainer's weights to the workers of the sampler's servers, as rank 0 of a joint process group."""

from __future__ import annotations

import logging
import socket
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from verbatim.core.errors import SamplerFault
from verbatim.inference.sending import SendOrder, SendReport, WeightStore
from verbatim.inference.weight_group import GroupOver, WeightGroup
from verbatim.trainer.parallel.publish import published_layout
from verbatim.trainer.trainer import Trainer

logger = logging.getLogger(__name__)


class WeightBroadcaster:
    """Serves the rendezvous store for trainer and receivers, and sends weights on request.

    Args:
        trainer: The trainer of rank 0.
        host: An address of this host that the receivers can reach.

    Raises:
        OSError: the process cannot listen on this address.
    """

    def __init__(self, trainer: Trainer, host: str) -> None:
        self._trainer = trainer
        self._group: WeightGroup | None = None
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # The socket is bound here, because TCPStore would listen on all of the host's addresses.
        listening = socket.create_server((host, 0), family=family)
        port = listening.getsockname()[1]
        self._server = dist.TCPStore(  # type: ignore[attr-defined]
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
            timeout=timedelta(minutes=5),
        )
        on_cuda = trainer.device.type == "cuda"
        nccl = ".".join(map(str, torch.cuda.nccl.version())) if on_cuda else None  # type: ignore[no-untyped-call]
        self.store = WeightStore(host=host, port=port, on=socket.gethostname(), nccl=nccl)
        """The address of the rendezvous store."""

    def send(self, order: SendOrder) -> SendReport:
        """Send the trainer's weights. A failure of the receivers is reported in the result, not raised.

        Raises:
            RunStopped: another rank of the trainer failed; the receivers are notified.
        """
        began = time.monotonic()
        try:
            group = self._enter(order)
        except GroupOver as over:
            return SendReport(fault=str(over), seconds=time.monotonic() - began)
        met = time.monotonic()
        receivers = _GroupReceivers(group)
        try:
            self._trainer.send_weights(receivers)
        except SamplerFault as fault:
            self._leave(str(fault))
            return SendReport(fault=str(fault), seconds=time.monotonic() - began, seconds_meeting=met - began)
        except BaseException:
            self._leave("the trainer failed")  # the receivers are waiting for tensors: tell them
            raise
        return SendReport(num_bytes=receivers.num_bytes, seconds=time.monotonic() - began, seconds_meeting=met - began)

    def _enter(self, order: SendOrder) -> WeightGroup:
        """The process group for an order: the existing group if the order names it, otherwise a new group that all
        receivers have joined.

        Raises:
            GroupOver: the receivers do not join, or a receiver failed.
        """
        if self._group is not None and self._group.name == order.group:
            self._group.begin()
            return self._group
        self._leave(None)
        logger.info("sending weights to %d receivers (%s)", order.size - 1, order.kind)
        self._group = WeightGroup(
            self._server,
            order.group,
            rank=0,
            size=order.size,
            kind=order.kind,
            device=self._trainer.device,
            seconds=order.seconds,
            layout=published_layout(self._trainer.model),
        )
        return self._group

    def _leave(self, why: str | None) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close(why)


class _GroupReceivers:
    """The other ranks of a process group, as the `Receivers` of `Trainer.send_weights`."""

    def __init__(self, group: WeightGroup) -> None:
        self._group = group
        self.num_bytes = 0
        """Bytes sent so far."""

    def send(self, name: str, tensor: Tensor) -> None:
        """Broadcast a tensor.

        Raises:
            SamplerFault: the receivers failed; the message names the tensor.
        """
        try:
            self._group.send(tensor)
        except GroupOver as over:
            raise SamplerFault(f"{over} (at {name})") from over
        self.num_bytes += tensor.nbytes
