"""Reads and writes `forked_from.json`: which run another one was forked from, at which step, and what was changed.

```
{"format": 1, "run": "/data/runs/guess_number/20260131-142501", "step": 40, "fresh": [],
 "changes": ["trainer.optim.lr: 1e-06 -> 5e-06"], "forked_from": null}
```
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from verbatim.core.errors import CheckpointError
from verbatim.logs.checkpoints.json_files import read_record, write_record

ORIGIN = "forked_from.json"
FORKING = ".forking"
"""The file of a folder that is being made, with the names of what is put into it."""


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a fork comes from. Its folder needs nothing of that run: it may be gone."""

    run: str
    """The folder of the run that it was forked from, absolute, as it was then."""
    step: int
    """The step after which it goes on."""
    fresh: tuple[str, ...] = ()
    """What was not taken over of the checkpoint: "optimizer", "examples"."""
    changes: tuple[str, ...] = ()
    """The keys that were changed, "key: before -> after", without secrets."""
    forked_from: Origin | None = None
    """Where that run was forked from in turn."""

    def in_short(self) -> dict[str, Any]:
        """Run, step and changed keys: plain JSON values."""
        return {"run": self.run, "step": self.step, "changes": list(self.changes)}


def write_origin(run: Path, origin: Origin) -> None:
    """Write it into the folder of a run."""
    write_record(run / ORIGIN, asdict(origin))


def read_origin(run: Path) -> Origin | None:
    """Where the run in this folder was forked from; None where it was not.

    Raises:
        CheckpointError: the file is damaged, or of another version.
    """
    path = run / ORIGIN
    if not path.exists():
        return None
    stored = read_record(path)
    try:
        return _origin(stored)
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error!r}") from error


def _origin(stored: Mapping[str, Any]) -> Origin:
    before = stored["forked_from"]
    return Origin(
        run=str(stored["run"]),
        step=int(stored["step"]),
        fresh=tuple(map(str, stored["fresh"])),
        changes=tuple(map(str, stored["changes"])),
        forked_from=None if before is None else _origin(before),
    )
