"""The documentation site is built without a warning."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
PAGES = sorted(DOCS.glob("*.md"))


@pytest.mark.slow
@pytest.mark.extras
@pytest.mark.realtime
def test_the_site_is_built_without_a_warning_and_can_be_searched(tmp_path: Path):
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "sphinx",
            "--fail-on-warning",
            "--keep-going",
            "--quiet",
            "-c",
            DOCS / "docs_site",
            "-b",
            "html",
            DOCS,
            tmp_path,
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert {path.stem for path in tmp_path.glob("*.html")} >= {page.stem for page in PAGES}
    index = (tmp_path / "searchindex.js").read_text(encoding="utf-8")
    assert "oversampling_factor" in index and "build_sampl" in index  # of the generated pages, the second stemmed
    start = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert 'href="tutorial.html"' in start and 'href="reference_python.html"' in start
    figure = (tmp_path / "concepts.html").read_text(encoding="utf-8")
    assert 'src="_images/data_flow.svg"' in figure
    # What a page loads comes with the site: search and looks need no network.
    assert not re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="https?:', start + figure)
