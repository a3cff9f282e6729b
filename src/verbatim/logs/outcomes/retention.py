"""Says how much of a run's trajectories is kept."""

from __future__ import annotations

import zlib
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Retention:
    """How much of a run is kept."""

    share: float = 1.0
    """Share of the groups that are written, whole groups, chosen by a hash of their ids."""
    steps: int | None = None
    """Newest steps that are kept; None: all."""
    size: int | None = None
    """Bytes that all files together may have; the oldest are removed first. None: no limit."""

    def keeps(self, group_id: str) -> bool:
        """Whether this group is written."""
        return zlib.crc32(group_id.encode("utf-8", "surrogatepass")) < self.share * 2**32


EVERYTHING = Retention()
