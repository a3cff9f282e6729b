"""A process of a trainer with a fault: `python faulty_rank.py MODULE ARGUMENTS` is `python -m MODULE ARGUMENTS`.

The rank that `fault.json` names, rank 1 by default, gets its fault: those of its start now, the others as soon as the
file says so. Ranks have as long as they need to say what is wrong with them.
"""

import errno
import json
import os
import runpy
import signal
import sys
import threading
from pathlib import Path

import verbatim.config
from verbatim.core.errors import ModelError, UsageError
from verbatim.run import trainer_ranks
from verbatim.trainer import optimizer_state, trainer
from verbatim.trainer.logprobs import TargetLogprobs
from verbatim.trainer.parallel import failures
from waiting import HANGS

hidden, save_file, load_model = TargetLogprobs.hidden, optimizer_state.save_file, trainer.load_model


def fault():
    return json.loads(Path("fault.json").read_text()) if Path("fault.json").exists() else {}


def pass_(*arguments, **rest):
    match fault().get("pass"):
        case "usage":
            raise UsageError("a bad record")
        case "system":
            raise OSError(errno.EIO, "Input/output error", "/dev/shm/x")
        case "bug":
            raise KeyError("no such layer")
        case "hang":
            Path("hangs").touch()
            threading.Event().wait()
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
    return hidden(*arguments, **rest)


def full(tensors, path, **rest):
    if fault().get("disk"):
        Path(path).write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device", str(path))
    return save_file(tensors, path, **rest)


def refusing(*arguments, **rest):
    if fault().get("load"):
        raise ModelError("no such file on this host: config.json")
    return load_model(*arguments, **rest)


def bad(*arguments, **rest):
    raise UsageError("a bad sample")


def unreadable(*arguments, **rest):
    raise ModelError("another version of verbatim")


def plant():
    TargetLogprobs.hidden, optimizer_state.save_file, trainer.load_model = pass_, full, refusing
    if fault().get("between"):
        trainer.check_samples = bad
    if fault().get("start"):
        os._exit(3)
    if fault().get("config"):
        verbatim.config.make_config = unreadable


if __name__ == "__main__":
    failures.GRACE = failures._LEAVE_SECONDS = trainer_ranks._PATIENCE = HANGS
    if os.environ["RANK"] == fault().get("rank", "1"):
        plant()
    del sys.argv[0]
    sys.modules.pop(sys.argv[0], None)
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
