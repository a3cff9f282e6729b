"""The documentation as a whole: every page can be found, every link leads somewhere, what is generated is current."""

from __future__ import annotations

import argparse
import importlib
import inspect
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from docs_site import reference_commands, reference_python
from docs_site.__main__ import generated
from docs_site.navigation import sections, with_toctrees
from verbatim.cli.main import COMMANDS
from verbatim.config.backends import schema_with_backends
from verbatim.config.fields import keys
from verbatim.filters import FILTERS
from verbatim.run.tables import component_tables

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^)\s]+)\)")
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def prose(page: Path) -> str:
    return FENCED.sub("", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """The anchors that a git host makes of a page's headings."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").strip().lower()
        slug = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        number = 0
        while (name := f"{slug}-{number}" if number else slug) in found:
            number += 1
        found.add(name)
    return found


# ---- navigation and links


def test_every_page_is_in_the_navigation_once():
    entries = [page for listed in sections((DOCS / "index.md").read_text()).values() for _, page in listed]
    assert sorted(entries) == sorted(page.stem for page in PAGES if page.stem != "index")


def test_each_list_of_the_start_page_becomes_a_toctree():
    text = with_toctrees("# A\n\n## Begin\n\n- [First](one.md): x\n- [Second](two.md): y\n\n## Prose\n\nNone.\n")
    assert text.endswith("```{toctree}\n:hidden:\n:caption: Begin\n\nFirst <one>\nSecond <two>\n```\n")
    assert text.count("{toctree}") == 1


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: page.stem)
def test_every_link_inside_leads_to_a_file_and_a_heading(page: Path):
    """As a git host reads them; the site's own check is a part of its build."""
    wrong = []
    for link in LINK.findall(prose(page)):
        if re.match(r"\w+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            wrong.append(link)
    assert wrong == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_begins_with_its_one_title(page: Path):
    assert re.findall(r"^# .+$", prose(page), re.MULTILINE) == [page.read_text(encoding="utf-8").splitlines()[0]]


# ---- what is generated


@pytest.mark.parametrize("path", generated(), ids=lambda path: path.name)
def test_generated_files_are_current(path: Path):
    assert path.read_text(encoding="utf-8") == generated()[path], "type: make reference"


def test_the_configuration_reference_explains_every_key():
    page = (DOCS / "reference_configuration.md").read_text(encoding="utf-8")
    schema, _ = schema_with_backends({}, component_tables())
    every = list(keys(schema))
    assert len(every) > 150
    for name, field in every:
        if not name.endswith(("import_path", "kwargs", "type")):
            row = re.search(rf"^\| `{name.rpartition('.')[2]}` \|.*\| (.+) \|$", page, re.MULTILINE)
            assert field.description and row and len(row[1]) > 2, name
    for kind in ("losses", "advantages", "filters"):
        for name in getattr(component_tables(), kind):
            assert f'| `"{name}"` |' in page


def test_a_row_of_the_configuration_reference_has_type_default_and_meaning():
    page = (DOCS / "reference_configuration.md").read_text(encoding="utf-8")
    assert "| `lr` | number > 0 | `1e-06` | Peak learning rate. |" in page
    assert '| `schedule` | `"constant"` or `"linear"` or `"cosine"` | `"constant"` | Shape after the warm-up. |' in page
    assert "| `train` | [table](#orchestratortrain) | required | The training environments. |" in page
    assert "| `max_tokens` | integer ≥ 1 | `512` | Most tokens of one turn. |" in page


@pytest.mark.parametrize("command", COMMANDS)
def test_the_command_reference_explains_every_argument(command: str):
    page = (DOCS / "reference_commands.md").read_text(encoding="utf-8")
    section = page.split(f"## `verbatim {command}`\n")[1].split("\n## ")[0]
    for action in reference_commands.arguments(command):
        assert isinstance(action, argparse.Action) and action.help, action.dest
        for option in action.option_strings:
            assert f"`{option}`" in section


def test_the_python_reference_has_every_public_name_with_its_docstring():
    page = reference_python.document()
    missing = []
    for package in reference_python.PACKAGES:
        module = importlib.import_module(package)
        for name in reference_python.public_names(module):
            value = getattr(module, name)
            section = page.split(f"\n## `{package}`\n")[1].split("\n## ")[0]
            if not re.search(rf"^### `([\w.]+\.)?{name}`$|\[`{name}`\]\(#", section, re.MULTILINE):
                missing.append(f"{package}.{name}")
            if (inspect.isclass(value) or inspect.isfunction(value)) and not inspect.getdoc(value):
                missing.append(f"{package}.{name} has no docstring")
    assert missing == []


def test_the_python_reference_shows_fields_arguments_and_errors():
    page = reference_python.document()
    turn = page.split("### `Turn`\n")[1].split("\n### ")[0]
    assert "| `temperature` | `float` | `1.0` | The temperature it was sampled at. |" in turn
    build = page.split("### `build_samples`\n")[1].split("\n### ")[0]
    assert "- `trajectory`: Its advantages are already assigned." in build
    assert "Raises `ValueError`: an unknown strategy." in build
    assert ">>> (sample,) = build_samples(" in build


def test_the_python_references_page_names_its_packages():
    page = (DOCS / "reference_python.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `([\w.]+)` \|", page, re.MULTILINE) == list(reference_python.PACKAGES)


@pytest.mark.parametrize("path", sorted((DOCS / "figures").glob("*.svg")), ids=lambda path: path.stem)
def test_a_figure_has_a_title_and_is_shown_on_a_page(path: Path):
    root = ElementTree.parse(path).getroot()
    assert root.findtext("{http://www.w3.org/2000/svg}title")
    assert any(f"figures/{path.name}" in page.read_text(encoding="utf-8") for page in PAGES)


@pytest.mark.slow
@pytest.mark.extras
def test_the_site_is_built_without_a_warning_and_can_be_searched(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "--quiet", "-c", DOCS / "docs_site",
         "-b", "html", DOCS, tmp_path],
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
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


# ---- by symptom


def symptom_metrics() -> list[str]:
    """The metrics in the first cells of the tables of docs/symptoms.md that have the column "look at"."""
    page = (DOCS / "symptoms.md").read_text(encoding="utf-8")
    tables = re.findall(r"^\| look at \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", page, re.MULTILINE)
    cells = [row.split(" | ")[0] for found in tables for row in found.splitlines()]
    return sorted({name for cell in cells for name in re.findall(r"`([^`]+)`", cell)})


@pytest.mark.parametrize("name", symptom_metrics())
def test_a_metric_of_the_symptoms_is_documented_and_reported(name: str):
    if name.startswith(("trainer.", "orchestrator.")):  # a key of the file
        schema, _ = schema_with_backends({}, component_tables())
        assert name in dict(keys(schema))
        return
    name = re.sub(rf"^filters/({'|'.join(FILTERS)})/", "filters/{name}/", name)
    pages = "".join((DOCS / f"{page}.md").read_text(encoding="utf-8") for page in ("metrics", "asynchrony"))
    family, _, last = name.rpartition("/")
    listed = f"`{name}`" in pages or (f"`{family}/" in pages and f"/{last}`" in pages)
    assert listed or f"`{name.rpartition('_')[0]}_*`" in pages
    fixed = [part for part in re.split(r"\{\w+\}", name.replace("replica/{i}/", "")) if part.strip("/")]
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    for part in fixed:
        assert re.search(rf"[\"'}}/]{re.escape(part.strip('/'))}[\"'/{{]", sources), part


@pytest.mark.parametrize("page", ["symptoms", "concepts", "operations", "recipes"])
def test_every_key_that_a_page_names_exists(page: str):
    schema, _ = schema_with_backends({}, component_tables())
    known = {name.replace(".0.", ".") for name, _ in keys(schema)}
    tables = {name.rpartition(".")[0] for name in known}
    knobs = {"trainer.loss.kl_ref_tau"}
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:trainer|orchestrator|inference|checkpoint|monitor|model|warm_start)\.[\w.]+)", text)
    assert [name for name in named if name not in known | tables | knobs] == []
