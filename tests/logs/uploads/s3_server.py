"""A server that speaks S3, in a thread of this process (moto), with one bucket."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator

import pytest


@contextlib.contextmanager
def s3_bucket() -> Iterator[str]:
    """The URL of an empty bucket; s3fs finds the server and its keys by the environment."""
    import boto3
    import fsspec
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("AWS_ACCESS_KEY_ID", "testing")
        patched.setenv("AWS_SECRET_ACCESS_KEY", "testing")
        patched.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patched.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        bucket = f"runs-{uuid.uuid4().hex[:8]}"
        boto3.client("s3").create_bucket(Bucket=bucket)
        try:
            yield f"s3://{bucket}"
        finally:
            fsspec.filesystem("s3").clear_instance_cache()
            server.stop()
