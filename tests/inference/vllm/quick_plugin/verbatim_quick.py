"""A vLLM plug-in that reduces the processor time of servers in tests.

On a CPU, vLLM starts each process of the engine as a new one, which imports vLLM again: eight seconds of the
processor. Here they are forked. A process that waits for a message polls without a pause for a second; here it sleeps
between two polls.
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
