"""Reads one trajectory from a run folder, given its location."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from verbatim.core.errors import UsageError
from verbatim.core.texts import cut
from verbatim.core.trajectory_json import trajectory_from_json
from verbatim.core.types import Trajectory
from verbatim.inspection.viewer.columns import FOLDERS, RecordLocation
from verbatim.logs.outcomes.files import refuse_other_columns
from verbatim.logs.outcomes.table import StoredOutcome, records_of


def trajectory_of(found: StoredOutcome) -> Trajectory:
    """Convert a stored record to a trajectory.

    Raises:
        UsageError: the record is not a trajectory.
    """
    try:
        return trajectory_from_json(found.record)
    except (KeyError, TypeError, ValueError, AssertionError, IndexError) as error:
        raise UsageError(
            f"the record is not a trajectory of Verbatim ({type(error).__name__}: {cut(str(error), 200)})"
        ) from error


def read_record(folder: Path, place: RecordLocation) -> StoredOutcome:
    """Read the trajectory at a location in a run folder.

    Raises:
        UsageError: the trajectory no longer exists, or is damaged; the message names the location.
    """
    path = folder / FOLDERS[place.source] / f"step-{place.file:06d}.parquet"
    where = f"row {place.place} of {path.parent.name}/{path.name}"
    try:
        return _read_outcome(path, place.place)
    except FileNotFoundError:
        raise UsageError(f"{where}: the file no longer exists") from None
    except (
        pa.ArrowException,
        OSError,
        ValueError,
        KeyError,
        TypeError,
        IndexError,
        AttributeError,
        AssertionError,
        RecursionError,
    ) as error:
        raise UsageError(f"{where} cannot be read ({type(error).__name__}: {cut(str(error), 200)})") from error


def _read_outcome(path: Path, row: int) -> StoredOutcome:
    with pq.ParquetFile(path) as file:
        refuse_other_columns(file, "the file")
        first = 0
        for group in range(file.num_row_groups):
            count = file.metadata.row_group(group).num_rows
            if row < first + count:
                table = file.read_row_group(group, use_threads=False).take([row - first])
                (found,) = records_of(table)
                return found
            first += count
    raise IndexError(f"the file has {first} rows")
