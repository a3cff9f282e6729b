"""Tests that every causal language model class of the installed `transformers` is either computed correctly or refused
with a message.

A tiny random model is made of each class, with the default configuration and with changed flags. In float64, the
results for rows, for trees and for single samples are compared with plain `transformers`. Sampler, trainer and saved
files are compared with each other over weight updates. Prints one JSON line per configuration, and a summary as the
last line. The exit status is 1 if anything is wrong.

    python benchmarks/model_campaign.py [--only NAME ...] [--part I/N] > RESULTS.jsonl
    python benchmarks/model_campaign.py --document RESULTS.jsonl ...

The first form takes a quarter of an hour on one core. The second form writes the table of results into
benchmarks/notes/models.md, and the lists of model types that trainer and sampler accept into docs/models.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from models.architectures import architectures
from models.verdict import judge, quiet

NOTE = Path(__file__).parent / "notes" / "models.md"
PAGE = Path(__file__).parents[1] / "docs" / "models.md"
BEGIN, END = "<!-- benchmarks/model_campaign.py: begin -->", "<!-- benchmarks/model_campaign.py: end -->"


def campaign(only: list[str], part: tuple[int, int] = (1, 1)) -> int:
    """Judge all configurations, or only those whose name contains one of these words. Returns the number of
    configurations with faults.

    Args:
        only: The words; all configurations are judged if there are no words.
        part: The part to judge. (2, 3) is the second of three parts; each part has every third configuration.
    """
    torch.set_num_threads(1)
    counts: Counter[str] = Counter()
    for architecture in architectures()[part[0] - 1 :: part[1]]:
        if only and not any(word in str(architecture) for word in only):
            continue
        began = time.perf_counter()
        with quiet(), tempfile.TemporaryDirectory() as folder:
            verdict = judge(architecture, Path(folder) / "model")
        counts[f"trainer {verdict.trainer}"] += 1
        counts[f"sampler {verdict.sampler}"] += 1
        counts["faults"] += bool(verdict.faults)
        print(json.dumps({**dataclasses.asdict(verdict), "seconds": round(time.perf_counter() - began, 1)}), flush=True)
    print(json.dumps({"summary": dict(sorted(counts.items()))}))
    return counts["faults"]


def document(results: list[Path]) -> str:
    """Make the table for the notes from the results of all parts of a campaign. If a configuration has several
    verdicts, the last one counts."""
    lines = [json.loads(line) for file in results for line in file.read_text(encoding="utf-8").splitlines()]
    last = {line["architecture"]: line for line in lines if "summary" not in line}
    missing = [str(a) for a in architectures() if str(a) not in last]
    if missing:
        raise SystemExit(f"{len(missing)} configurations are missing, {missing[0]!r} first; run all parts")
    verdicts = [last[str(a)] for a in architectures()]
    summary = Counter(f"{side} {v[side]}" for v in verdicts for side in ("trainer", "sampler"))
    wrong = sum(bool(v["faults"]) for v in verdicts)
    lines = [
        f"{len(verdicts)} configurations with transformers {transformers.__version__}, torch {torch.__version__}: "
        + ", ".join(f"trainer {name} {summary[f'trainer {name}']}" for name in ("trees", "rows", "refused"))
        + ", "
        + ", ".join(f"sampler {name} {summary[f'sampler {name}']}" for name in ("yes", "refused"))
        + f", not made {summary['trainer not made']}; **{wrong} wrong**.",
        "",
        "| configuration | class | trainer | sampler | largest difference in float64 | why not |",
        "|---|---|---|---|---|---|",
    ]
    for v in verdicts:
        packed = {
            k: x for k, x in v["worst"].items() if k.startswith(("logprobs of", "gradients of")) and "sampler" not in k
        }
        exact = v["worst"].get("precision") == 64 and packed
        largest = f"{max(packed.values()):.0e}" if exact else "float32" if packed else ""
        why = "WRONG: " + "; ".join(v["faults"]) if v["faults"] else _reason(v)
        lines.append(f"| {v['architecture']} | {v['name']} | {v['trainer']} | {v['sampler']} | {largest} | {why} |")
    return "\n".join(lines)


def overview(table: str) -> str:
    """Make the table for docs/models.md from the table for the notes. It lists model types by whether trainer and
    sampler accept them, and the flags that change this."""
    rows = re.findall(r"^\| ([^|]+) \| \w* \| (trees|rows|refused|not made) \| ([\w ]+) \|", table, re.MULTILINE)
    sides = {name: (trainer, sampler) for name, trainer, sampler in rows}
    listed: dict[tuple[str, str], list[str]] = {}
    for name, found in sides.items():
        kind, _, flag = name.partition(" ")
        if not flag or found != sides[kind]:
            listed.setdefault(found, []).append(f"{kind} ({flag})" if flag else kind)
    lines = [table.splitlines()[0], "", "| trainer | sampler | model types |", "|---|---|---|"]
    lines += [f"| {trainer} | {sampler} | {', '.join(names)} |" for (trainer, sampler), names in listed.items()]
    return "\n".join(lines)


def put(text: str, page: Path) -> None:
    """Replace the text between the marks `BEGIN` and `END` of a page."""
    whole = page.read_text(encoding="utf-8")
    page.write_text(f"{whole.split(BEGIN)[0]}{BEGIN}\n{text}\n{END}{whole.split(END)[1]}", encoding="utf-8")


def _reason(verdict: dict[str, Any]) -> str:
    """The first refusal, shortened to its reason."""
    if not verdict["reasons"]:
        return ""
    text = verdict["reasons"][-1 if verdict["trainer"] == "trees" else 0].splitlines()[0]
    text = re.sub(r"^model '[^']*' \(\w+\) ", "", text).removeprefix(verdict["name"]).strip(" :")
    text = re.sub(r"'/[^']*'", "the folder", text)
    for end in ("; ", ": under a plan", ", so nothing", ": the logprobs of a sample"):
        text = text.split(end)[0]
    return text.replace("|", "\\|")[:160]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME")
    parser.add_argument("--part", default="1/1", metavar="I/N")
    parser.add_argument("--document", nargs="+", type=Path, metavar="RESULTS")
    arguments = parser.parse_args()
    if arguments.document:
        table = document(arguments.document)
        put(table, NOTE)
        put(overview(table), PAGE)
        sys.exit(0)
    part, parts = map(int, arguments.part.split("/"))
    sys.exit(1 if campaign(arguments.only, (part, parts)) else 0)
