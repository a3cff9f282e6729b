"""Checks what a connection is made with: its address, its limits, its key, and the proxy and the certificates that
environment variables name."""

from __future__ import annotations

import os
import ssl
import urllib.request
from urllib.parse import urlsplit

from verbatim.core.errors import UsageError
from verbatim.core.redaction import hide
from verbatim.core.texts import shown

OPENAI_HOST, OPENAI_KEY = "api.openai.com", "OPENAI_API_KEY"
"""OpenAI's own server, and the variable in which its clients look for its key."""
_ACCOUNT = {"OPENAI_ORG_ID": "OpenAI-Organization", "OPENAI_PROJECT_ID": "OpenAI-Project"}
"""Environment variable: header. Who pays, where a key belongs to several; OpenAI's own client reads them too."""


def check_address(url: object, name: str) -> None:
    """Raises `UsageError` for what is no plain http(s) address, without a password in it; `name` is the setting's."""
    example = 'expected an address such as "http://localhost:8000"'
    if not isinstance(url, str):
        raise UsageError(f"{name}: found {shown(url, 80)} ({type(url).__name__}), {example}")
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, half a bracket
        is_address = False
    if not is_address or any(c.isspace() or not c.isprintable() for c in url):
        raise UsageError(f"{name} {url.rpartition('@')[2]!r}; {example}")
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise UsageError(
            f"{name} of {parts.hostname} holds a password or a query, which would be written down; give "
            "the key as api_key, or in an environment variable"
        )


def check_limits(request_timeout: object, max_retries: object) -> None:
    """Raises `UsageError` for limits with which no request could be made."""
    is_count = isinstance(max_retries, int) and max_retries >= 0
    if not is_count or not isinstance(request_timeout, int | float) or not request_timeout > 0:
        raise UsageError(
            f"max_retries = {max_retries!r}, request_timeout = {request_timeout!r}; expected at least 0 "
            "retries and a time above 0, in seconds"
        )


def check_key(key: object) -> None:
    """Refuse a key that no header can hold, without quoting it."""
    if key is not None and not (isinstance(key, str) and key.isascii() and key.isprintable() and " " not in key):
        raise UsageError(
            "the API key holds a line break, a space or a letter that a header cannot hold, or is no "
            "text; a key that was read from a file needs .strip()"
        )


def key_variable(url: str, named: str | None) -> str | None:
    """The environment variable with the key of the server at this address: the one that is named, and for OpenAI's own
    server without a name OPENAI_API_KEY. No other server is sent that key unasked.

    >>> key_variable("https://api.openai.com/v1", None), key_variable("http://localhost:8000/v1", None)
    ('OPENAI_API_KEY', None)
    """
    return named if named is not None or urlsplit(url).hostname != OPENAI_HOST else OPENAI_KEY


def account_headers(url: str) -> dict[str, str]:
    """The account that environment variables name, for OpenAI's own server; no other one is told.

    >>> account_headers("http://localhost:8000/v1")
    {}
    """
    if urlsplit(url).hostname != OPENAI_HOST:
        return {}
    return {header: value for name, header in _ACCOUNT.items() if (value := os.environ.get(name))}


def named_key(url: str, named: str | None) -> str | None:
    """The key in `key_variable`; None where there is none.

    Raises:
        UsageError: the variable that is named is empty.
    """
    variable = key_variable(url, named)
    key = (os.environ.get(variable) or None) if variable is not None else None
    if named is not None and key is None:
        raise UsageError(
            f"api_key_env: the environment variable {named} is empty; put the key of {url} into it, or "
            "leave api_key_env out for a server that needs none"
        )
    hide(key)
    return key


def proxy_of_environment(url: str) -> str | None:
    """HTTP_PROXY, HTTPS_PROXY, ALL_PROXY, unless NO_PROXY names the host."""
    parts, proxies = urlsplit(url), urllib.request.getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    if not proxy or urllib.request.proxy_bypass(parts.netloc):
        return None
    proxy = proxy if "://" in proxy else f"http://{proxy}"
    if urlsplit(proxy).scheme not in ("http", "https"):
        raise UsageError(
            f"the environment names a {urlsplit(proxy).scheme} proxy for {parts.hostname}; expected an "
            f"http proxy, or the host in NO_PROXY: NO_PROXY={parts.hostname}"
        )
    return proxy


def untrusted(error: Exception) -> str:
    """What to type where a server's certificate is not trusted."""
    return f"its certificate is not trusted ({error}); name the file that vouches for it in SSL_CERT_FILE"


def certificates() -> ssl.SSLContext:
    """Those that the environment names, else certifi's: a container may have none of its own."""
    if os.environ.get("SSL_CERT_FILE") or os.environ.get("SSL_CERT_DIR"):
        return ssl.create_default_context()  # OpenSSL reads both variables
    import certifi

    return ssl.create_default_context(cafile=certifi.where())
