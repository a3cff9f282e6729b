"""Freed memory stays in the process, unless the environment says otherwise."""

import subprocess
import sys

import pytest

CODE = """
import ctypes, os
from verbatim.models.native.freed_memory import keep_freed_memory
if getattr(ctypes.CDLL(None), "gnu_get_libc_version", None) is None:
    print("other")
    raise SystemExit
done = keep_freed_memory()
size, c = 20 * 2**20, ctypes.CDLL(None)
c.malloc.restype = ctypes.c_void_p

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def use():
    places = [ctypes.c_void_p(c.malloc(ctypes.c_size_t(size))) for _ in range(8)]
    for place in places:
        ctypes.memset(place, 1, size)
    used = resident()
    for place in places:
        c.free(place)
    return used

before = resident()
used = use()
print(done, (resident() - before) / (used - before))
"""


@pytest.mark.slow
@pytest.mark.realtime
@pytest.mark.parametrize("setting", [None, "MALLOC_TRIM_THRESHOLD_"])
def test_freed_memory_stays_in_the_process(setting, monkeypatch):
    """8 buffers of 20 MiB are freed. Page faults would count pages, which the kernel may make 512 times as large."""
    if setting is not None:
        monkeypatch.setenv(setting, "131072")
    found = subprocess.run([sys.executable, "-c", CODE], check=True, capture_output=True, text=True).stdout.split()
    if found == ["other"]:
        pytest.skip("glibc's limits, and this machine has another C library")
    done, stays = found[0] == "True", float(found[1])
    assert done == (setting is None)
    assert stays > 0.9 if done else stays < 0.1
