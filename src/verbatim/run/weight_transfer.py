"""Determines where and how the trainer sends its weights to the sampler's servers, and refuses configurations that
cannot work."""

from __future__ import annotations

import ipaddress
import socket
from urllib.parse import urlsplit

from verbatim.config.schema import RunConfig
from verbatim.config.sections import BroadcastSettings, table_of
from verbatim.core.errors import UsageError
from verbatim.inference.sending import WeightStore
from verbatim.run.rollouts import inference_settings
from verbatim.run.trainer_ranks import is_launched

_ANY_PORT = 9
"""The port used to find the address from which this host reaches a server. Any port will do, because nothing is
sent."""


def check_broadcast(config: RunConfig, *, is_trainers_host: bool) -> BroadcastSettings | None:
    """How weights are sent; None if the sampler reads the files that the trainer publishes.

    Args:
        config: The run's configuration.
        is_trainers_host: True if the trainer runs on this host and sees the devices that this process sees.

    Raises:
        UsageError: the configuration cannot work; the message says what to type.
    """
    settings = inference_settings(config).broadcast
    if settings is None:
        return None
    table, parallel = f"inference.{table_of(config.inference.backend)}", config.trainer.parallel
    if (parallel.processes > 1 or is_launched()) and settings.seconds >= parallel.deadline:
        raise UsageError(
            f"{table}.update_timeout = {settings.seconds:g}, trainer.parallel.deadline = {parallel.deadline:g}: while "
            "rank 0 of the trainer waits for the servers, the other ranks wait for rank 0 and would time out; "
            "expected update_timeout below deadline"
        )
    if settings.kind == "nccl" and is_trainers_host:
        from verbatim.models.loading import resolve_device

        device = resolve_device(config.trainer.device)
        if device.type != "cuda":
            raise UsageError(
                f'{table}.weight_transfer = "nccl" connects CUDA devices, and trainer.device = '
                f'"{config.trainer.device}" is {device.type} here; use "files", or "gloo"'
            )
    return settings


def own_address(config: RunConfig) -> str | None:
    """The address at which the sampler's servers connect to the trainer; None if no weights are sent.

    Raises:
        UsageError: as for `check_broadcast`; also if there is no such address, there are several, or the configured
            address does not belong to this host.
    """
    settings = check_broadcast(config, is_trainers_host=True)
    if settings is None:
        return None
    setting = f"inference.{table_of(config.inference.backend)}.transfer_address"
    if settings.address is not None:
        family = socket.AF_INET6 if ":" in settings.address else socket.AF_INET
        try:  # this listens once now, so that a wrong address is found before a model is prepared
            socket.create_server((settings.address, 0), family=family).close()
        except OSError as error:
            raise UsageError(
                f'{setting} = "{settings.address}": the trainer cannot listen there ({error.strerror or error}); '
                f"expected an address of its host ({socket.gethostname()}) that the sampler's servers reach"
            ) from None
        return settings.address
    from verbatim.inference.weight_group import address_towards

    loopback = "127.0.0.1"
    hosts = [loopback if _is_loopback(_host(url)) else _host(url) for url in settings.urls] or [loopback]
    try:
        found = {address_towards(host, _ANY_PORT) for host in hosts}
    except OSError as error:
        raise UsageError(
            f"there is no route to the sampler's servers ({', '.join(hosts)}: {error}); if the servers "
            f"can reach this host, type {setting} = the address of this host"
        ) from error
    outside = sorted(address for address in found if not _is_loopback(address)) or sorted(found)
    if len(outside) > 1:
        raise UsageError(
            f"the sampler's servers are reached from several addresses of this host "
            f"({', '.join(outside)}); type the one that all of them reach: {setting} = "
            f'"{outside[0]}"'
        )
    return outside[0]


def refuse_unreachable(store: WeightStore) -> None:
    """Refuse a trainer on a different host if its address is a loopback address of that host.

    Raises:
        UsageError: the address is a loopback address; the message says what to type.
    """
    if _is_loopback(store.host) and store.on != socket.gethostname():
        raise UsageError(
            f"the trainer on host {store.on} listens on {store.host} for the sampler's servers, but no other host can "
            f"reach that address; set inference.vllm.transfer_address to an address of {store.on} that they can reach"
        )


def _host(url: str) -> str:
    return urlsplit(url).hostname or url


def _is_loopback(host: str) -> bool:
    """True if this is a name or address of the host itself.

    >>> _is_loopback("127.0.0.1"), _is_loopback("localhost"), _is_loopback("10.0.0.7"), _is_loopback("a-host")
    (True, True, False, False)
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
