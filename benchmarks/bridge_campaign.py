"""Random dialogues against every chat template: is a bridge ever wrong, and how often is one proven?

For each template and dialogue, turns are sampled as the template itself would write them, messages are appended, and
the bridge is compared with the template's rendering of the whole, token for token. A dialogue *refutes* a template
for a kind of message if appending it changes what was there before. One JSON line per template.

    python benchmarks/bridge_campaign.py [FOLDER] [--dialogues 10000] [--first-seed 0] [--only NAME ...]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

TESTS = Path(__file__).parents[1] / "tests" / "renderers"
sys.path.insert(0, str(TESTS))

from random_dialogues import Tally, byte_tokenizer, check  # noqa: E402

from verbatim.errors import ModelError  # noqa: E402
from verbatim.renderers import create_renderer  # noqa: E402


def campaign(name: str, template: str, seeds: range) -> Tally:
    """Many dialogues for one template."""
    tokenizer = byte_tokenizer(template)
    renderer = create_renderer("template", tokenizer)
    tally = Tally(name)
    for seed in seeds:
        check(renderer, tokenizer, tally, seed)
    return tally


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, nargs="?", default=TESTS / "data" / "trl_templates")
    parser.add_argument("--dialogues", type=int, default=10_000)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--only", nargs="*")
    arguments = parser.parse_args()
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.dialogues)
    for file in sorted(arguments.folder.glob("*.jinja")):
        if arguments.only and file.stem not in arguments.only:
            continue
        started = time.perf_counter()
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
