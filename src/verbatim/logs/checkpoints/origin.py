"""Reads and writes `forked_from.json`, which records the run and the step that a fork was made from, and the changed
keys.

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
"""Name of a file that exists while a fork's folder is being filled. It lists the files that the fork writes."""


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The origin of a fork. It is for information only: the fork does not need the original run, which may have been
    deleted."""

    run: str
    """Absolute path of the original run's folder at the time of the fork."""
    step: int
    """The step of the checkpoint at which the fork begins."""
    fresh: tuple[str, ...] = ()
    """Parts of the state that were reset instead of copied from the checkpoint: "optimizer", "examples"."""
    changes: tuple[str, ...] = ()
    """The changed keys of the configuration, as "key: before -> after", without secrets."""
    forked_from: Origin | None = None
    """The origin of the original run, if the original run is also a fork."""

    def in_short(self) -> dict[str, Any]:
        """The original run, its step and the changed keys, as plain JSON values."""
        return {"run": self.run, "step": self.step, "changes": list(self.changes)}


def write_origin(run: Path, origin: Origin) -> None:
    """Write an origin into a run folder."""
    write_record(run / ORIGIN, asdict(origin))


def read_origin(run: Path) -> Origin | None:
    """Read the origin of the run in this folder; None if it is not a fork.

    Raises:
        CheckpointError: the file is damaged, or a different version of Verbatim wrote it.
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
