"""A certificate authority of one's own, made on the fly."""

from __future__ import annotations

import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class PrivateCa:
    """PEM files."""

    authority: Path
    """What clients have to trust."""
    certificate: Path
    """The certificate of a server on 127.0.0.1, signed by the authority."""
    key: Path
    """The server's."""

    def tls(self) -> ssl.SSLContext:
        """For the server."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(self.certificate, self.key)
        return context


def make_private_ca(folder: Path) -> PrivateCa:
    """Make both certificates with openssl; they are good for two days."""
    ca, ca_key, signed, key = (folder / f"{name}.pem" for name in ("ca", "ca_key", "cert", "key"))
    new = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "2",
    ]
    for command in (
        [*new, "-subj", "/CN=an authority", "-keyout", ca_key, "-out", ca],
        [
            *new,
            "-subj",
            "/CN=a server",
            "-addext",
            "subjectAltName=IP:127.0.0.1",
            "-addext",
            "basicConstraints=critical,CA:FALSE",
            "-CA",
            ca,
            "-CAkey",
            ca_key,
            "-keyout",
            key,
            "-out",
            signed,
        ],
    ):
        subprocess.run(command, check=True, capture_output=True)
    return PrivateCa(authority=ca, certificate=signed, key=key)
