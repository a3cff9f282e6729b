"""Settings for servers that a run finds. Each backend that supports such servers has these settings in its table."""

from __future__ import annotations

import os
from typing import Self

from pydantic import model_validator

from verbatim.config import BackendSettings
from verbatim.config.sections import PositiveFloat
from verbatim.core.errors import UsageError
from verbatim.core.imports import refuse_without


class ServerSettings(BackendSettings):
    """The settings of a backend whose servers a run can find by `urls`."""

    urls: tuple[str, ...] = ()
    """Root URLs of running servers, such as "http://10.0.0.7:8000", started by `verbatim inference FILE`. The run then
    does not start servers, and the keys for starting servers apply only to that command."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the key of the servers in `urls`."""
    start_timeout: PositiveFloat = 900.0
    """Seconds within which a server must answer after it was started or lost."""
    update_timeout: PositiveFloat = 300.0
    """Timeout of each phase of a weight update, in seconds."""
    health_timeout: PositiveFloat = 60.0
    """Seconds for which a server may leave health checks unanswered before it counts as dead. A busy machine may be
    slow to answer. A server that refuses connections counts as dead immediately."""
    stall_timeout: PositiveFloat = 600.0
    """Seconds without a new token after which a server that has requests and passes health checks counts as hung."""

    @model_validator(mode="after")
    def _urls_fit(self) -> Self:
        repeated = sorted({url for url in self.urls if self.urls.count(url) > 1})
        if repeated:
            raise ValueError(f"urls: {', '.join(repeated)} is listed twice")
        if self.api_key_env is not None and not self.urls:
            raise ValueError(
                "api_key_env applies only to the servers in urls; a server that the run starts needs no key, because "
                "it listens on loopback only"
            )
        return self

    @property
    def api_key(self) -> str | None:
        """The key of the servers in `urls`, or None if `api_key_env` is not set."""
        return None if self.api_key_env is None else os.environ.get(self.api_key_env)

    def without_urls(self) -> Self:
        """These settings for the command that starts the servers."""
        return self.model_copy(update={"urls": (), "api_key_env": None})

    def check(self) -> None:
        """Refuse invalid addresses, and a key variable that is not set."""
        refuse_without("aiohttp", extra="serve", what="urls: the HTTP client")
        from verbatim.inference.http.connection_settings import check_address

        for url in self.urls:
            try:
                check_address(url, "url")
            except UsageError as error:
                raise UsageError(f"urls: {error}") from error
        if self.api_key_env is not None and not self.api_key:
            raise UsageError(f"api_key_env: the environment variable {self.api_key_env} is empty; put the key into it")
