"""The fenced blocks of README and documentation."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Snippet:
    """One fenced block."""

    page: str
    line: int
    language: str
    text: str
    before: str
    """What the page says above it."""

    @property
    def module(self) -> str | None:
        """The module it is saved as, by its first comment or by the words above it."""
        comment = re.match(r"# (\w+)\.py\n", self.text)
        words = re.search(r"Save this as `(\w+)\.py`:\s*$", self.before)
        found = comment or words
        return found[1] if found else None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def snippets(language: str, *pages: Path) -> list[Snippet]:
    """The blocks of a language, in the order of the pages."""
    found = []
    for page in pages:
        text = page.read_text(encoding="utf-8")
        for block in FENCE.finditer(text):
            if block[1] == language:
                line = text.count("\n", 0, block.start()) + 1
                found.append(Snippet(page.name, line, language, block[2], text[: block.start()]))
    return found


LISTINGS = ("extending", "monitors", "alarms", "tutorial", "environments", "games")
"""Pages whose Python blocks are whole files; what needs the extra `verifiers` is played in its own tests."""
PYTHON = [
    snippet
    for snippet in snippets("python", ROOT / "README.md", *(ROOT / "docs" / f"{page}.md" for page in LISTINGS))
    if "import verifiers" not in snippet.text
]
MODULES = {snippet.module: snippet.text for snippet in PYTHON if snippet.module}
(RUN_FILE,) = [s.text for s in snippets("toml", ROOT / "README.md") if "parcel_desk.ParcelDesk" in s.text]


def lines_of(text: str) -> list[str]:
    """The commands of a block: continued lines joined, prompts and comments taken off."""
    joined = re.sub(r"\\\n\s*", "", text)
    return [re.sub(r"\s+#\s.*$", "", line.strip().removeprefix("$ ")) for line in joined.splitlines()]
