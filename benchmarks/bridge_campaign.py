"""Tests bridges on random dialogues with every chat template: is a bridge ever wrong, and how many turns are bridged?

For each template and dialogue, turns are made as the template itself would write them, and messages are appended. The
bridge is then compared, token for token, with the text that the template writes after a turn that stands in for the
sampled turn. Prints one JSON line per template.

    python benchmarks/bridge_campaign.py [FOLDER] [--dialogues 10000] [--first-seed 0] [--only NAME ...]
    python benchmarks/bridge_campaign.py --document RESULTS.jsonl ...

The second form adds up the results that earlier runs have printed, and prints them as a table.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

TESTS = Path(__file__).parents[1] / "tests" / "models" / "renderers"
sys.path.insert(0, str(TESTS))

from random_dialogues import CampaignCounts, byte_tokenizer, check  # noqa: E402

from verbatim.core.errors import ModelError  # noqa: E402
from verbatim.models.renderers import create_renderer  # noqa: E402

COUNTS = ("turns", "bridged", "broken")


def campaign(name: str, template: str, seeds: range) -> CampaignCounts:
    """Check the dialogues of these seeds for one template; returns the counts."""
    tokenizer = byte_tokenizer(template)
    renderer = create_renderer("template", tokenizer)
    counts = CampaignCounts(name)
    for seed in seeds:
        check(renderer, tokenizer, counts, seed)
    return counts


def document(folder: Path, results: Sequence[Path]) -> str:
    """The results of all campaigns as a Markdown table with one row per template."""
    total: dict[str, dict[str, Counter[str]]] = {}
    dialogues, wrong = Counter[str](), 0
    for line in (line for file in results for line in file.read_text(encoding="utf-8").splitlines()):
        found = json.loads(line)
        name = found["template"]
        if "error" in found:
            continue
        dialogues[name] += found["dialogues"]
        wrong += found["wrong"]
        counts = total.setdefault(name, {count: Counter() for count in COUNTS})
        for count in COUNTS:
            counts[count].update(found[count])
    lines = []
    for name in sorted(file.stem for file in folder.glob("*.jinja")):
        counts = total.get(name, {})
        cells = [f"{counts['bridged'][kind]:,} of {counts['turns'][kind]:,}" if counts else "" for kind in KINDS]
        broken = sorted(counts["broken"].items()) if counts else []
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in broken) if counts else "no text"
        lines.append("| " + " | ".join([f"`{name}`", *cells, reasons]) + " |")
    return (
        f"{sum(dialogues.values()):,} random dialogues, at least {min(dialogues.values()):,} for each of the "
        f"{len(dialogues)} templates that write text; {sum(c['turns'].total() for c in total.values()):,} turns, "
        f"{sum(c['bridged'].total() for c in total.values()):,} bridges, **{wrong} wrong**.\n\n"
        f"| template | {' | '.join(KINDS.values())} | rendered anew |\n|---|---|---|---|---|\n" + "\n".join(lines)
    )


KINDS = {"tool": "tools' answers", "user": "a user's message", "tool+user": "both"}


def main() -> None:
    """Run a campaign, or print the table of earlier results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, nargs="?", default=TESTS / "data" / "trl_templates")
    parser.add_argument("--dialogues", type=int, default=10_000)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--document", type=Path, nargs="+", metavar="RESULTS")
    arguments = parser.parse_args()
    if arguments.document:
        print(document(arguments.folder, arguments.document))
        return
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.dialogues)
    for file in sorted(arguments.folder.glob("*.jinja")):
        if arguments.only and file.stem not in arguments.only:
            continue
        started = time.perf_counter()
        try:
            counts = campaign(file.stem, file.read_text(encoding="utf-8"), seeds)
        except ModelError as error:
            print(json.dumps({"template": file.stem, "error": str(error)}), flush=True)
            continue
        print(
            json.dumps(
                {
                    "template": file.stem,
                    "dialogues": counts.num_dialogues,
                    "turns": counts.tried,
                    "broken": counts.broken,
                    "refused": counts.refused,
                    "bridged": counts.bridged,
                    "wrong": len(counts.wrong),
                    "first_wrong": counts.wrong[:3],
                    "differs": counts.differs,
                    "seconds": round(time.perf_counter() - started, 1),
                }
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
