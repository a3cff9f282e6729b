"""Freed memory stays in the process, unless the environment says otherwise."""

import subprocess
import sys

import pytest

CODE = """
import ctypes, os, resource
from verbatim.trainer.freed_memory import keep_freed_memory
if getattr(ctypes.CDLL(None), "gnu_get_libc_version", None) is None:
    print("other")
    raise SystemExit
done = keep_freed_memory()
size, c = 20 * 2**20, ctypes.CDLL(None)
c.malloc.restype = ctypes.c_void_p

def touched():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    places = [ctypes.c_void_p(c.malloc(ctypes.c_size_t(size))) for _ in range(8)]
    for place in places:
        ctypes.memset(place, 1, size)
    for place in places:
        c.free(place)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

touched()
print(done, touched())
"""


@pytest.mark.parametrize("setting", [None, "MALLOC_TRIM_THRESHOLD_"])
def test_memory_that_is_used_again_is_not_fetched_again(setting, monkeypatch):
    """8 buffers of 20 MiB are 40,960 pages."""
    if setting is not None:
        monkeypatch.setenv(setting, "131072")
    found = subprocess.run([sys.executable, "-c", CODE], check=True, capture_output=True, text=True).stdout.split()
    if found == ["other"]:
        pytest.skip("glibc's limits, and this machine has another C library")
    done, pages = found[0] == "True", int(found[1])
    assert done == (setting is None)
    assert pages < 1000 if done else pages > 1000
