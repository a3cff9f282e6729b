"""Makes real servers of tests cheap: their processes are forked from one that has imported vLLM, not started anew, and
a process that waits for another one sleeps.

vLLM starts its engine and workers anew on a CPU, which costs eight seconds of the processor each, and lets them wait
busily for a second after each message.
"""

import os
import time


def register() -> None:
    """In each process, before it starts others and opens its queues."""
    from vllm.distributed.device_communicators import shm_broadcast
    from vllm.platforms.cpu import CpuPlatform

    shm_broadcast.sched_yield = lambda: time.sleep(0.001)
    configure = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls, vllm_config) -> None:
        configure(cls, vllm_config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
