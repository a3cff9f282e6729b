"""Keeps a copy of a run folder behind a URL, and brings it back to another machine.

In: a run folder, the steps of its checkpoints, a URL that fsspec can read (`s3://bucket/runs`). Out: the copy, complete
up to the newest uploaded checkpoint. Read `uploads.py` first.
"""

from verbatim.logs.uploads.download import download_run, newest_run, newest_step
from verbatim.logs.uploads.remote_folder import RemoteFault, RemoteFolder
from verbatim.logs.uploads.uploads import NoUploads, Uploads, uploading

__all__ = [
    "NoUploads",
    "RemoteFault",
    "RemoteFolder",
    "Uploads",
    "download_run",
    "newest_run",
    "newest_step",
    "uploading",
]
