"""Writes runs to a single HTML file that browsers can open from disk. It contains the page, and the API's answers as
compressed JSON.

Each answer is an element `<script type="application/json" data-url="..." data-encoding="gzip-base64">`. Base64 contains
no `<`, so no data can end the element.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote

from verbatim.core.disk import replacing, temporary_beside
from verbatim.core.errors import UsageError
from verbatim.inspection.viewer.assets import INDEX, Asset
from verbatim.inspection.viewer.encoding import to_json
from verbatim.inspection.viewer.query import Filters
from verbatim.inspection.viewer.run_view import MOST_ROWS, RunView, list_runs

VERSION = 1
"""The format number that is written into the file."""
_LEVEL = 6
"""Compression level."""
_PATIENCE = 0.05
"""Seconds to wait before asking again for the results of an unfinished search."""
_SCRIPT = re.compile(r'<script\b[^>]*\bsrc="\.?/?([^"]+)"[^>]*>\s*</script>')
_STYLE = re.compile(r'<link\b[^>]*\brel="stylesheet"[^>]*>')
_HREF = re.compile(r'\bhref="\.?/?([^"]+)"')
_OTHER_LINK = re.compile(r'<link\b[^>]*\brel="(?:modulepreload|preload)"[^>]*>')
# Matches text that would end the element of the script. JavaScript reads `<\/` in a string as `</`.
_END = re.compile(r"</(?=script)", re.IGNORECASE)


@dataclass(frozen=True)
class Written:
    """A summary of an export."""

    trajectories: int
    of_total: int
    size: int
    """Size of the file in bytes."""


def export(
    runs: Sequence[RunView],
    assets: Mapping[str, Asset],
    path: Path,
    *,
    filters: Mapping[str, Sequence[str]],
    sort: str = "",
    most: int,
) -> Written:
    """Write the export.

    Args:
        runs: The runs. This function reads them; no thread follows them.
        assets: The files of the page: one document with one script and one stylesheet.
        path: The file to create.
        filters: Filters, in the same form as in the API.
        sort: The order of trajectories, in the same form as in the API.
        most: Maximum number of trajectories per run.

    Raises:
        UsageError: the file already exists, a filter is invalid, or the filters match no trajectory.
        OSError: the file cannot be written.
    """
    if path.exists():
        raise UsageError(f"--export {path} already exists; name a new file")
    if not path.parent.is_dir():
        raise UsageError(f"--export {path}: there is no folder {path.parent}; name a file in an existing folder")
    asked = Filters.of(filters)
    begin, end = _page(assets)
    count = 0
    with replacing(path, temporary=temporary_beside(path)) as partial:
        with partial.open("wb") as file:
            file.write(begin)
            for run in runs:
                run.read_all()
            total = sum(run.about()["num_trajectories"] for run in runs)
            marker = to_json({"version": VERSION, "of_total": total})
            file.write(b'<script type="application/json" id="verbatim-export">' + marker + b"</script>\n")
            _write(file, "/api/runs", list_runs(runs))
            for number, run in enumerate(runs):
                for url, answer in _answers(run, asked, sort, most):
                    count += url.startswith("/trajectories/")
                    _write(file, f"/api/runs/{number}{url}", answer)
            file.write(end)
        if most and total and not count:
            raise UsageError(f"--export {path}: the filters match no trajectory of {total:,}; nothing was written")
        size = partial.stat().st_size
    return Written(count, total, size)


def _answers(run: RunView, filters: Filters, sort: str, most: int) -> Iterator[tuple[str, Any]]:
    """For each answer, yield the part of its address after the run's number, and the answer."""
    yield "/metrics", run.metrics(None)
    yield "/config", run.config()
    yield "/summary", run.summary()
    yield "/facets", run.facets()
    rows: list[dict[str, Any]] = []
    while len(rows) < most:
        found = run.rows(filters, sort=sort, offset=len(rows), limit=min(MOST_ROWS, most - len(rows)))
        if found["pending"]:  # the search through messages is still running
            time.sleep(_PATIENCE)
            continue
        rows += found["rows"]
        if not found["rows"]:
            break
    yield "/trajectories", {"total": len(rows), "matched": len(rows), "pending": False, "rows": rows}
    for row in rows:
        # The page looks up answers by unquoted keys. Keys contain only characters that `quote` leaves unchanged.
        yield f"/trajectories/{quote(row['key'], safe='~.')}", _or_problem(run.trajectory, row["key"])
    for key in dict.fromkeys(row["group_key"] for row in rows):
        yield f"/groups/{quote(key, safe='~.=')}", _or_problem(run.group, key)


def _or_problem(read: Callable[[str], dict[str, Any]], key: str) -> dict[str, Any]:
    try:
        return read(key)
    except (UsageError, LookupError) as error:
        return {"error": str(error)}


def _write(file: BinaryIO, url: str, answer: Any) -> None:
    file.write(f'<script type="application/json" data-url="{url}" data-encoding="gzip-base64">'.encode())
    # The time of writing is left out, so that the same answer gives the same bytes.
    file.write(base64.b64encode(gzip.compress(to_json(answer), _LEVEL, mtime=0)))
    file.write(b"</script>\n")


def _page(assets: Mapping[str, Asset]) -> tuple[bytes, bytes]:
    """The parts of the document before and after the data. Script and style are inlined, and the document's policy
    allows only these."""
    page = assets[INDEX].data.decode()
    scripts, styles = _SCRIPT.findall(page), _STYLE.findall(page)
    if len(scripts) > 1 or len(styles) > 1:
        raise UsageError(
            f"the page has {len(scripts)} scripts and {len(styles)} stylesheets; expected at most one of each"
        )
    policy = ["default-src 'none'", "img-src data:", "base-uri 'none'", "form-action 'none'"]
    style = script = ""
    if styles:
        style = _text(assets, _HREF.findall(styles[0])[0])
        assert "</style" not in style.lower(), "a stylesheet cannot contain the end tag of its element"
        policy.append(f"style-src {_hash(style)}")
    if scripts:
        script = _END.sub(r"<\\/", _text(assets, scripts[0]))
        policy.append(f"script-src {_hash(script)}")
    page = _OTHER_LINK.sub("", _STYLE.sub("", _SCRIPT.sub("", page)))
    head = f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{"; ".join(policy)}">'
    if style:
        head += f"<style>{style}</style>"
    if "<head>" not in page or "</body>" not in page:
        page = f"<!doctype html><html><head></head><body>{page}</body></html>"
    begin, _, end = page.replace("<head>", "<head>" + head, 1).rpartition("</body>")
    tail = (f'<script type="module">{script}</script>' if script else "") + "</body>" + end
    return begin.encode() + b"\n", tail.encode()


def _text(assets: Mapping[str, Asset], name: str) -> str:
    if name not in assets:
        raise UsageError(f"the page refers to {name}, which is not among its files")
    return assets[name].data.decode()


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
