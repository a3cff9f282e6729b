"""Checks the settings of a connection (address, limits, key), and reads the proxy and certificates from environment
variables."""

from __future__ import annotations

import os
import ssl
import urllib.request
from urllib.parse import urlsplit

from verbatim.core.errors import UsageError
from verbatim.core.redaction import hide
from verbatim.core.texts import shown

OPENAI_HOST, OPENAI_KEY = "api.openai.com", "OPENAI_API_KEY"
"""Host name of OpenAI's own server, and the environment variable with the key for it."""
_ACCOUNT = {"OPENAI_ORG_ID": "OpenAI-Organization", "OPENAI_PROJECT_ID": "OpenAI-Project"}
"""For keys with several accounts: the headers that select the account, by environment variable. OpenAI's own client
reads the same variables."""


def check_address(url: object, name: str) -> None:
    """Raise `UsageError` unless the address is http or https, without password, query and fragment. `name` is the
    setting's name for the message."""
    example = 'expected an address such as "http://localhost:8000"'
    if not isinstance(url, str):
        raise UsageError(f"{name}: found {shown(url, 80)} ({type(url).__name__}), {example}")
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is not a number, or a bracket is unpaired
        is_address = False
    if not is_address or any(c.isspace() or not c.isprintable() for c in url):
        raise UsageError(f"{name} {url.rpartition('@')[2]!r}; {example}")  # without user and password
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise UsageError(
            f"{name} of {parts.hostname} contains a password or a query, which logs would show; give the key as "
            "api_key or in an environment variable"
        )


def check_limits(request_timeout: object, max_retries: object) -> None:
    """Raise `UsageError` if the timeout or the number of retries is out of range."""
    is_count = isinstance(max_retries, int) and max_retries >= 0
    if not is_count or not isinstance(request_timeout, int | float) or not request_timeout > 0:
        raise UsageError(
            f"max_retries = {max_retries!r}, request_timeout = {request_timeout!r}; expected at least 0 "
            "retries and a timeout above 0, in seconds"
        )


def check_key(key: object) -> None:
    """Refuse a key that cannot be sent in a header. The message does not quote the key, because it is a secret."""
    if key is not None and not (isinstance(key, str) and key.isascii() and key.isprintable() and " " not in key):
        raise UsageError(
            "the API key contains a line break, a space or a character that is not allowed in a header, or is not a "
            "string; apply .strip() to a key that was read from a file"
        )


def key_variable(url: str, named: str | None) -> str | None:
    """The environment variable that holds the key for this address: `named`, or OPENAI_API_KEY for OpenAI's own server.
    Any other server gets OPENAI_API_KEY only if `named` is "OPENAI_API_KEY".

    >>> key_variable("https://api.openai.com/v1", None), key_variable("http://localhost:8000/v1", None)
    ('OPENAI_API_KEY', None)
    """
    return named if named is not None or urlsplit(url).hostname != OPENAI_HOST else OPENAI_KEY


def account_headers(url: str) -> dict[str, str]:
    """Headers with the account that environment variables name; empty unless the server is OpenAI's own.

    >>> account_headers("http://localhost:8000/v1")
    {}
    """
    if urlsplit(url).hostname != OPENAI_HOST:
        return {}
    return {header: value for name, header in _ACCOUNT.items() if (value := os.environ.get(name))}


def named_key(url: str, named: str | None) -> str | None:
    """Read the key from the environment variable `key_variable(url, named)`. Returns None if that function returns
    None, or if `named` is None and OPENAI_API_KEY is not set or empty.

    Raises:
        UsageError: `named` is the name of a variable that is not set or empty.
    """
    variable = key_variable(url, named)
    key = (os.environ.get(variable) or None) if variable is not None else None
    if named is not None and key is None:
        raise UsageError(
            f"api_key_env: the environment variable {named} is empty; put the key of {url} into it, or "
            "remove api_key_env if the server needs no key"
        )
    hide(key)
    return key


def proxy_of_environment(url: str) -> str | None:
    """The proxy from HTTP_PROXY, HTTPS_PROXY or ALL_PROXY; None if no proxy is set, or if NO_PROXY excludes the
    host."""
    parts, proxies = urlsplit(url), urllib.request.getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    if not proxy or urllib.request.proxy_bypass(parts.netloc):
        return None
    proxy = proxy if "://" in proxy else f"http://{proxy}"
    if urlsplit(proxy).scheme not in ("http", "https"):
        raise UsageError(
            f"the environment sets a {urlsplit(proxy).scheme} proxy for {parts.hostname}; expected an http proxy; "
            f"to use no proxy for this host, set NO_PROXY={parts.hostname}"
        )
    return proxy


def untrusted(error: Exception) -> str:
    """The error message for a server certificate that is not trusted."""
    return f"its certificate is not trusted ({error}); set SSL_CERT_FILE to the file of the CA that signed it"


def certificates() -> ssl.SSLContext:
    """The CA certificates set in the environment, or else certifi's, because a container may not have certificates."""
    if os.environ.get("SSL_CERT_FILE") or os.environ.get("SSL_CERT_DIR"):
        return ssl.create_default_context()  # OpenSSL reads both variables
    import certifi

    return ssl.create_default_context(cafile=certifi.where())
