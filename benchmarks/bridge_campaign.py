"""Random dialogues against every chat template: is a bridge ever wrong, and how often is one proven?

For each template and dialogue, turns are sampled as the template itself would write them, messages are appended, and
the bridge is compared with the template's rendering of the whole, token for token. A dialogue *refutes* a template
for a kind of message if appending it changes what was there before. One JSON line per template.

    python benchmarks/bridge_campaign.py [FOLDER] [--dialogues 10000] [--first-seed 0] [--only NAME ...]
    python benchmarks/bridge_campaign.py [FOLDER] --refute [--dialogues 10000]
    python benchmarks/bridge_campaign.py --document RESULTS.jsonl ...

The second form only looks for dialogues that refute, whatever a renderer reads from the turns. The third adds up what
earlier runs of both printed, and puts it with the proofs into docs/renderers.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

TESTS = Path(__file__).parents[1] / "tests" / "renderers"
sys.path.insert(0, str(TESTS))

from random_dialogues import Tally, byte_tokenizer, check, refutations  # noqa: E402

from verbatim.errors import ModelError  # noqa: E402
from verbatim.renderers import create_renderer  # noqa: E402
from verbatim.renderers.proof import Row, proof_table  # noqa: E402
from verbatim.renderers.template import TemplateRenderer  # noqa: E402

PAGE = Path(__file__).parents[1] / "docs" / "renderers.md"
BEGIN, END = "<!-- benchmarks/bridge_campaign.py: begin -->", "<!-- benchmarks/bridge_campaign.py: end -->"
COUNTS = ("turns", "bridged")


def campaign(name: str, template: str, seeds: range) -> Tally:
    """Many dialogues for one template."""
    tokenizer = byte_tokenizer(template)
    renderer = create_renderer("template", tokenizer)
    tally = Tally(name)
    for seed in seeds:
        check(renderer, tokenizer, tally, seed)
    return tally


def document(folder: Path, results: Sequence[Path]) -> str:
    """The proofs and the campaigns' figures, one row for each template."""
    total: dict[str, dict[str, Counter[str]]] = {}
    refuted: dict[str, dict[str, int]] = {}
    dialogues, wrong = Counter[str](), 0
    for line in (line for file in results for line in file.read_text(encoding="utf-8").splitlines()):
        found = json.loads(line)
        name = found["template"]
        if "error" in found:
            continue
        if "refutations" in found:
            refuted[name] = found["refutations"]
            continue
        dialogues[name] += found["dialogues"]
        wrong += found["wrong"]
        counts = total.setdefault(name, {count: Counter() for count in COUNTS})
        for count in COUNTS:
            counts[count].update(found[count])
    lines, held = [], {kind: {True: [0, 0], False: [0, 0]} for kind in ("tool", "user")}
    for file in sorted(folder.glob("*.jinja")):
        name = file.stem
        cells = [f"`{name}`"]
        for row in proof_table(file.read_text(encoding="utf-8")) if name in total else ():
            first = refuted[name].get(row.kind)
            bridged, turns = (total[name][count][row.kind] for count in ("bridged", "turns"))
            cells += [said(row), "-" if first is None else f"{first}", f"{bridged:,} of {turns:,}"]
            if first is None:
                tally = held[row.kind][name.endswith("_training")]
                tally[0] += row.outcome != "refused"
                tally[1] += 1
        lines.append("| " + " | ".join(cells if name in total else [*cells, "no text", "", "", "", "", ""]) + " |")
    shares = "; ".join(
        f"{KINDS[kind]}: {held[kind][False][0]} of {held[kind][False][1]} originals and {held[kind][True][0]} of "
        f"{held[kind][True][1]} patched" for kind in held
    )  # fmt: skip
    return (
        f"{sum(dialogues.values()):,} random dialogues, at least {min(dialogues.values()):,} for each of the "
        f"{len(dialogues)} templates that write text; {sum(c['bridged'].total() for c in total.values()):,} bridges, "
        f"**{wrong} wrong**. Proven, of the templates that no dialogue refutes: {shares}.\n\n"
        f"| template | {KINDS['tool']} | refuted by | bridged | {KINDS['user']} | refuted by | bridged |\n"
        "|---|---|---|---|---|---|---|\n" + "\n".join(lines)
    )


KINDS = {"tool": "tools' answers", "user": "a user's message"}


def said(row: Row) -> str:
    """What is proven, in a few words."""
    if row.outcome == "condition":
        words = " and ".join("no marker" if " holds " in c else c for c in row.conditions)
        return f"if {words} (line {row.line})"
    return "always" if row.outcome == "always" else f"refused, line {row.line}"


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, nargs="?", default=TESTS / "data" / "trl_templates")
    parser.add_argument("--dialogues", type=int, default=10_000)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--refute", action="store_true")
    parser.add_argument("--document", type=Path, nargs="+", metavar="RESULTS")
    arguments = parser.parse_args()
    if arguments.document:
        before, mark, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        _, end, after = rest.partition(END)
        assert mark and end, f"{PAGE} lacks the marks {BEGIN} and {END}"
        table = document(arguments.folder, arguments.document)
        PAGE.write_text(f"{before}{BEGIN}\n\n{table}\n\n{END}{after}", encoding="utf-8")
        return
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.dialogues)
    for file in sorted(arguments.folder.glob("*.jinja")):
        if arguments.only and file.stem not in arguments.only:
            continue
        started = time.perf_counter()
        if arguments.refute:
            template = file.read_text(encoding="utf-8")
            try:
                renderer = TemplateRenderer(byte_tokenizer(template))
            except ModelError as error:
                print(json.dumps({"template": file.stem, "error": str(error)}), flush=True)
                continue
            print(json.dumps({
                "template": file.stem, "refutations": refutations(renderer, seeds), "of": len(seeds),
                "seconds": round(time.perf_counter() - started, 1),
            }), flush=True)  # fmt: skip
            continue
        try:
            tally = campaign(file.stem, file.read_text(encoding="utf-8"), seeds)
        except ModelError as error:
            print(json.dumps({"template": file.stem, "error": str(error)}), flush=True)
            continue
        print(json.dumps({
            "template": file.stem, "dialogues": tally.num_dialogues, "turns": tally.tried, "refuted": tally.refuted,
            "refused": tally.refused, "bridged": tally.bridged, "wrong": len(tally.wrong),
            "first_wrong": tally.wrong[:3], "differs": tally.differs,
            "seconds": round(time.perf_counter() - started, 1),
        }), flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
