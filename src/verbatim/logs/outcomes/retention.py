"""Defines the rules for which of a run's trajectories are written and kept."""

from __future__ import annotations

import zlib
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Rules for which trajectories of a run are written and kept."""

    share: float = 1.0
    """Share of the groups to write. Whole groups are selected by a hash of the group's id, so that a resumed run
    selects the same groups."""
    steps: int | None = None
    """Number of newest steps to keep; None for all."""
    size: int | None = None
    """Maximum total size of the files in bytes, or None for no limit. The oldest files are removed first."""

    def keeps(self, group_id: str) -> bool:
        """True if this group is to be written."""
        return zlib.crc32(group_id.encode("utf-8", "surrogatepass")) < self.share * 2**32


EVERYTHING = Retention()
