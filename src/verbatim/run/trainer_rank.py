"""Runs the process of a trainer rank other than 0: `python -m verbatim.run.trainer_rank`."""

from __future__ import annotations

import logging
import os

from verbatim.core.children import end_with_parent
from verbatim.core.ctrl_c import ignore_presses
from verbatim.core.redaction import WithoutSecrets


def main() -> None:
    """Follow rank 0 until rank 0 ends."""
    end_with_parent(int(os.environ["VERBATIM_TRAINER_LEADER"]))  # a rank without rank 0 would only hold memory
    handler = logging.StreamHandler()
    handler.setFormatter(WithoutSecrets("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.info("started (process %d)", os.getpid())
    # This comes after the parent check and the first log record, because it imports torch, which takes seconds.
    from verbatim.run.trainer_ranks import follow_leader

    ignore_presses()  # Ctrl-C reaches all ranks; rank 0 alone handles it, and ends the run in order
    follow_leader()


if __name__ == "__main__":
    main()
