"""The documentation as a whole: every page can be found, every link leads somewhere, what is generated is current."""

from __future__ import annotations

import argparse
import functools
import importlib
import inspect
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from docs_site import reference_commands, reference_python
from docs_site.__main__ import generated
from docs_site.navigation import sections, with_toctrees
from verbatim.algorithms.credit.length_penalty import SLOPES
from verbatim.algorithms.filters import FILTERS
from verbatim.cli.main import COMMANDS
from verbatim.config.backends import schema_with_backends
from verbatim.config.fields import keys
from verbatim.logs.monitors.metric_table import about
from verbatim.run.tables import component_tables

ROOT = Path(__file__).parents[2]
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


def broken_links(page: Path) -> list[str]:
    """Links inside the documentation that lead to no file or no heading, as a git host reads them."""
    wrong = []
    for link in LINK.findall(prose(page)):
        if re.match(r"\w+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            wrong.append(f"{page.name}: {link}")
    return wrong


def test_every_link_inside_leads_to_a_file_and_a_heading():
    """The site's own check is a part of its build."""
    assert [link for page in (ROOT / "README.md", *PAGES) for link in broken_links(page)] == []


def test_a_link_to_a_missing_page_or_heading_is_seen(tmp_path: Path):
    (tmp_path / "a.md").write_text("# A\n\n[x](b.md) [y](a.md#a) [z](#nowhere) [w](https://example.org/b)\n")
    assert broken_links(tmp_path / "a.md") == ["a.md: b.md", "a.md: #nowhere"]


def test_a_page_begins_with_its_one_title():
    titles = {page.name: re.findall(r"^# .+$", prose(page), re.MULTILINE) for page in PAGES}
    assert [name for name, found in titles.items() if found != [(DOCS / name).read_text("utf-8").splitlines()[0]]] == []


# ---- what is generated


def test_generated_files_are_current():
    stale = [path.name for path, text in generated().items() if path.read_text(encoding="utf-8") != text]
    assert stale == [], "type: make reference"


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
    assert "| `max_tokens` | integer ≥ 1 | `512` | Maximum number of sampled tokens per turn. |" in page


def test_the_command_reference_explains_every_argument():
    page = (DOCS / "reference_commands.md").read_text(encoding="utf-8")
    for command in COMMANDS:
        section = page.split(f"## `verbatim {command}`\n")[1].split("\n## ")[0]
        for action in reference_commands.arguments(command):
            assert isinstance(action, argparse.Action) and action.help, f"{command}: {action.dest}"
            assert [o for o in action.option_strings if f"`{o}`" not in section] == [], command


@functools.cache
def python_reference() -> str:
    return reference_python.document()


def test_the_table_of_packages_says_what_their_docstrings_say():
    page = (DOCS / "reference_python.md").read_text(encoding="utf-8")
    for package in reference_python.PACKAGES:
        first = (inspect.getdoc(importlib.import_module(package)) or "").split("\n\n")[0]
        assert f"| `{package}` | {' '.join(first.split())} |" in page


def test_the_python_reference_has_every_public_name_with_its_docstring():
    page = python_reference()
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
    page = python_reference()
    turn = page.split("### `Turn`\n")[1].split("\n### ")[0]
    assert "| `temperature` | `float` | `1.0` | The sampling temperature. |" in turn
    build = page.split("### `build_samples`\n")[1].split("\n### ")[0]
    assert "- `trajectory`: The trajectory, with its advantages." in build
    assert "Raises `ValueError`: an unknown strategy." in build
    assert ">>> (sample,) = build_samples(" in build


def test_the_python_references_page_names_its_packages():
    page = (DOCS / "reference_python.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `([\w.]+)` \|", page, re.MULTILINE) == list(reference_python.PACKAGES)


def test_a_figure_has_a_title_and_is_shown_on_a_page():
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    figures = sorted((DOCS / "figures").glob("*.svg"))
    assert figures
    for path in figures:
        assert ElementTree.parse(path).getroot().findtext("{http://www.w3.org/2000/svg}title"), path.name
        assert f"figures/{path.name}" in text


# ---- by symptom


def symptom_metrics() -> list[str]:
    """The metrics in the first cells of the tables of docs/symptoms.md that have the column "look at"."""
    page = (DOCS / "symptoms.md").read_text(encoding="utf-8")
    tables = re.findall(r"^\| look at \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", page, re.MULTILINE)
    cells = [row.split(" | ")[0] for found in tables for row in found.splitlines()]
    return sorted({name for cell in cells for name in re.findall(r"`([^`]+)`", cell)})


def test_a_metric_or_key_of_the_symptoms_exists():
    schema, _ = schema_with_backends({}, component_tables())
    known = dict(keys(schema))
    named = [re.sub(rf"^filters/({'|'.join(FILTERS)})/", "filters/{name}/", name) for name in symptom_metrics()]
    assert len(named) > 20
    unknown = [name for name in named if name not in known and about(name.replace("{i}", "0")) is None]
    assert unknown == []


def test_every_key_that_a_page_names_exists():
    schema, _ = schema_with_backends({}, component_tables())
    known = {name.replace(".0.", ".") for name, _ in keys(schema)}
    tables = {name.rpartition(".")[0] for name in known}
    parameters = {"trainer.loss.kl_ref_tau"}
    for page in ("symptoms", "concepts", "operations", "recipes"):
        text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
        named = re.findall(r"`((?:trainer|orchestrator|inference|checkpoint|monitor|model|warm_start)\.[\w.]+)", text)
        assert [name for name in named if name not in known | tables | parameters] == [], page


# ---- the algorithms


def test_every_loss_advantage_and_filter_is_documented_with_its_parameters():
    page = (DOCS / "algorithms.md").read_text(encoding="utf-8")
    tables = component_tables()
    components = {
        **{name: loss.function for name, loss in tables.losses.items()},
        **{name: advantage.function for name, advantage in tables.advantages.items()},
        **tables.filters,
    }
    assert [name for name in components if f"`{name}`" not in page] == []
    parameters = [
        (name, parameter)
        for name, component in components.items()
        for parameter in inspect.signature(component).parameters
        if parameter not in ("inputs", "action")
    ]
    assert [
        (name, parameter) for name, parameter in parameters if not re.search(rf"`{parameter}( = [^`]*)?`", page)
    ] == []


def test_the_length_penalties_are_documented_with_their_slopes():
    page = (DOCS / "algorithms.md").read_text(encoding="utf-8")
    for kind, slope in SLOPES.items():
        assert re.search(rf'^\| `"{kind}"` \|.*`slope = {slope:g}` \|$', page, re.MULTILINE)


def test_every_module_that_a_page_names_exists():
    for page in (DOCS / "overview.md", DOCS / "trajectories.md", ROOT / "CONTRIBUTING.md"):
        named = re.findall(r"`([\w/]+\.py)`", page.read_text(encoding="utf-8"))
        assert len(named) > 5
        places = (ROOT / "src/verbatim", ROOT)
        assert [name for name in named if not any((place / name).is_file() for place in places)] == [], page
