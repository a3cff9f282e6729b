"""The process of a rank that another one has started: `python -m verbatim.run.trainer_rank`."""

from __future__ import annotations

import logging
import os
import threading
import time

from verbatim.core.redaction import WithoutSecrets


def main() -> None:
    """Follow rank 0 until it ends."""
    parent = int(os.environ["VERBATIM_TRAINER_LEADER"])
    threading.Thread(target=_end_with, args=[parent], daemon=True).start()
    handler = logging.StreamHandler()
    handler.setFormatter(WithoutSecrets("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.info("started (process %d)", os.getpid())

    from verbatim.run.trainer_ranks import follow_leader

    follow_leader()


def _end_with(parent: int) -> None:
    """What this process holds is of no use without the others."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


if __name__ == "__main__":
    main()
