"""Prints, for a user's chat templates, a table of which turns can be bridged, with rows like those of
benchmarks/notes/renderers.md.

Each bridge is compared with the template's rendering of a turn that stands in for the sampled turn. Wrong bridges are
printed below the table, and the exit status is then 1.

    python benchmarks/bridge_table.py FOLDER   # of *.jinja
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1] / "tests" / "models" / "renderers"
sys.path.insert(0, str(TESTS))

import bridge_kinds  # noqa: E402

from verbatim.core.errors import EnvironmentFault, ModelError  # noqa: E402


def main() -> int:
    """Print the table. Returns the exit status, which is 0 if no bridge is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="holds *.jinja")
    files = sorted(parser.parse_args().folder.glob("*.jinja"))
    templates = {file.stem: file.read_text(encoding="utf-8") for file in files}
    bridge_kinds.TEMPLATES.update(templates)
    refused: dict[str, Exception] = {}
    wrong: dict[Any, str] = {}
    num_bridges = 0
    print("\n".join(bridge_kinds.table([])))
    for name in templates:
        try:
            print(bridge_kinds.table([name])[-1], flush=True)
            found, faults = bridge_kinds.faults_of(name)
        except (ModelError, EnvironmentFault) as error:  # the template cannot render even one question
            refused[name] = error
            continue
        num_bridges += found
        wrong.update(faults)
    print(f"\n{len(templates) - len(refused)} templates, {num_bridges} bridges, {len(wrong)} wrong")
    for name, why in (*refused.items(), *wrong.items()):
        print(f"{name}: {why}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
