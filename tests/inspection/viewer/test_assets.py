"""The built page: made from the committed sources, allowed by the server's policy, and free of addresses elsewhere."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import pytest

import verbatim

ASSETS = Path(verbatim.__file__).parent / "inspection" / "viewer" / "assets"
SOURCES = Path(__file__).parents[3] / "viewer"
BUILD = "the page was not built from these sources: type make viewer, and commit src/verbatim/inspection/viewer/assets"


def hash_of_sources(folder: Path) -> str:
    """As viewer/build.mjs: sha256 over path, NUL, content, NUL of every source in the order of the paths."""
    files = ["build.mjs", "package-lock.json", "package.json", "tsconfig.json"]
    files += [path.relative_to(folder).as_posix() for path in (folder / "src").rglob("*") if path.is_file()]
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(name.encode() + b"\0" + (folder / name).read_bytes() + b"\0")
    return digest.hexdigest()


@pytest.mark.parametrize("name", ["viewer.js", "viewer.css"])
def test_the_page_was_built_from_the_committed_sources(name: str):
    first_line = (ASSETS / name).read_text(encoding="ascii").split("\n", 1)[0]
    assert f"sources sha256:{hash_of_sources(SOURCES)};" in first_line, BUILD


def test_the_html_holds_nothing_but_the_script_and_the_style_sheet():
    html = (ASSETS / "index.html").read_text()
    assert re.findall(r'(?:src|href)="([^"]*)"', html) == ["data:,", "./viewer.css", "./viewer.js"]
    assert re.findall(r"<script[^>]*>", html) == ['<script type="module" src="./viewer.js">']
    assert "<style" not in html and " style=" not in html and not re.search(r"\son\w+=", html)


def test_the_script_makes_no_markup_from_texts_and_can_be_put_into_a_page():
    script = (ASSETS / "viewer.js").read_text()
    assert "</script" not in script.lower() and "<!--" not in script
    assert not re.search(r"\beval\(|new Function\(|document\.write|insertAdjacentHTML|outerHTML\s*=", script)
    own = "".join(path.read_text() for path in (SOURCES / "src").rglob("*.ts*"))
    assert not re.search(r"innerHTML|dangerously|setAttribute\(\"style\"", own)


def test_nothing_names_a_host_to_load_from():
    for name in ("viewer.js", "viewer.css", "index.html"):
        hosts = set(re.findall(r"https?://([\w.-]+)", (ASSETS / name).read_text()))
        assert hosts <= {"www.w3.org"}, "only the names of XML namespaces"


def test_versions_are_exact_and_the_lock_names_no_registry():
    package = json.loads((SOURCES / "package.json").read_text())
    lock = json.loads((SOURCES / "package-lock.json").read_text())
    wanted = package["dependencies"] | package["devDependencies"]
    assert all(re.fullmatch(r"\d+\.\d+\.\d+", version) for version in wanted.values())
    assert {name: lock["packages"][f"node_modules/{name}"]["version"] for name in wanted} == wanted
    assert not [name for name, entry in lock["packages"].items() if "resolved" in entry]


def test_the_licences_of_what_is_bundled_are_there():
    notice = (ASSETS / "NOTICE.txt").read_text()
    package = json.loads((SOURCES / "package.json").read_text())
    for name, version in package["dependencies"].items():
        assert f"{name} {version}\n" in notice
    assert notice.count("Permission is hereby granted") == len(package["dependencies"])
