"""Makes the site's navigation from the lists of links in docs/index.md, which a git host shows as they are."""

from __future__ import annotations

import re

SECTION = re.compile(r"^## (.+)\n((?:(?!^## ).*\n?)*)", re.MULTILINE)
ENTRY = re.compile(r"^- \[([^\]]+)\]\((\w+)\.md\)", re.MULTILINE)
OUTSIDE = re.compile(r"\[([^\]\n]+)\]\(\.\./([^)#\s]+)(?:#[^)]*)?\)")


def sections(index: str) -> dict[str, list[tuple[str, str]]]:
    """The title and the page of every entry, by the heading it stands below.

    >>> sections("## Begin\\n- [Tutorial](tutorial.md): first\\n## Then\\n- [How](how.md)\\n")
    {'Begin': [('Tutorial', 'tutorial')], 'Then': [('How', 'how')]}
    """
    found = {match[1]: ENTRY.findall(match[2]) for match in SECTION.finditer(index)}
    return {title: entries for title, entries in found.items() if entries}


def with_toctrees(index: str) -> str:
    """The start page with a hidden toctree for each of its lists: the same pages, in the same order."""
    trees = []
    for caption, entries in sections(index).items():
        lines = "\n".join(f"{title} <{page}>" for title, page in entries)
        trees.append(f"```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{lines}\n```\n")
    return index.rstrip("\n") + "\n\n" + "\n".join(trees)


def without_links_outside(page: str) -> str:
    """A page with links to files of the repository that are no pages (`../README.md`) as plain text.

    >>> without_links_outside("see [the README](../README.md#a) and [metrics](metrics.md)")
    'see the README and [metrics](metrics.md)'
    """
    return OUTSIDE.sub(r"\1", page)
