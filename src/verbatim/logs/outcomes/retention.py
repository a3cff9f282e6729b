"""Defines which of a run's trajectories are written and kept."""

from __future__ import annotations

import zlib
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Which trajectories of a run are written and kept."""

    share: float = 1.0
    """Share of the groups to write. Whole groups are chosen by a hash of their ids, the same ones in a resumed run."""
    steps: int | None = None
    """Number of newest steps to keep; None: all."""
    size: int | None = None
    """Limit in bytes on all files together; the oldest are removed first. None: no limit."""

    def keeps(self, group_id: str) -> bool:
        """True if this group is to be written."""
        return zlib.crc32(group_id.encode("utf-8", "surrogatepass")) < self.share * 2**32


EVERYTHING = Retention()
