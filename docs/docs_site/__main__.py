"""`make reference`: writes the pages and figures that are generated and kept as files."""

from __future__ import annotations

from pathlib import Path

from docs_site import figures, reference_commands, reference_configuration, reference_metrics

DOCS = Path(__file__).parents[1]


def generated() -> dict[Path, str]:
    """What each file has to hold that is generated, or in parts."""
    return {
        DOCS / "reference_configuration.md": reference_configuration.document(),
        DOCS / "reference_commands.md": reference_commands.document(),
        DOCS / "metrics.md": reference_metrics.document((DOCS / "metrics.md").read_text(encoding="utf-8")),
        **{DOCS / "figures" / f"{name}.svg": svg for name, svg in figures.drawings().items()},
    }


if __name__ == "__main__":
    for path, text in generated().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
