"""Compares how the losses learn on guess_number, each with the same warm-started model, seeds, batch size and learning
rate.

    python benchmarks/learning.py [--steps 350] [--seeds 1] [--warm-start-steps 1500] [--only ppo gspo]

Runs `verbatim rl` once per loss and seed, with the recipe unchanged except for the loss (and, for ipa, the advantage).
Prints one JSON line, and writes into benchmarks/notes the figure learning.png and a table, which replaces the text
between two marks in losses.md. With `--out`, figure and table are written into the given folder instead; with `--only`,
which runs a part of the comparison, into the current folder.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from curves import draw, smoothed, success
from demo_runs import finish, run_options, train_metrics, verbatim, warm_started_model
from verbatim.logs.monitors.learning_curve import Curve, read_curve

NOTES = Path(__file__).parent / "notes"
BEGIN, END = "<!-- benchmarks/learning.py: begin -->", "<!-- benchmarks/learning.py: end -->"

ALGORITHMS = {
    "default": (),
    "ppo": ("--trainer.loss.type", "ppo"),
    "gspo": ("--trainer.loss.type", "gspo"),
    "cispo": ("--trainer.loss.type", "cispo"),
    "ipa + chunk_returns": ("--trainer.loss.type", "ipa", "--orchestrator.advantage.type", "chunk_returns"),
}
LEARNED = 0.9
"""The smoothed training reward from which on a run counts as having learned."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of one run."""

    curve: Curve
    """The run's training rewards and evaluations."""
    masked: float
    """Share of the trained tokens that the loss masked, over the whole run."""

    @property
    def learned_after(self) -> int | None:
        """The first batch whose smoothed reward is at least `LEARNED`; None if there is no such batch."""
        return next((batch for batch, reward in smoothed(self.curve) if reward >= LEARNED), None)


def run(name: str, model: Path, steps: int, seed: int, folder: Path) -> Outcome:
    """Run one algorithm with one seed."""
    place = folder / f"{name.replace(' ', '')}-{seed}"
    options = [*run_options(model, steps, 1), *ALGORITHMS[name], "--seed", str(seed), "--run-dir", str(place)]
    options += ["--orchestrator.eval.interval", str(max(1, steps // 5))]
    finish(verbatim("rl", *options, cwd=folder))
    metrics = train_metrics(place)
    trained = sum(m["trained_tokens"] for m in metrics)
    masked = sum(m.get("masked_by_loss", 0) for m in metrics) / trained
    return Outcome(curve=read_curve(place / "metrics.jsonl"), masked=masked)


def table(outcomes: Mapping[str, Sequence[Outcome]]) -> str:
    """The results as a Markdown table with one row per algorithm. Figures are means over the seeds."""
    rows = [
        f"| | success before | after | steps until the training reward is {LEARNED} | tokens masked by the loss |",
        "|---|---|---|---|---|",
    ]
    for name, runs in outcomes.items():
        before, after = (statistics.fmean(column) for column in zip(*(success(r.curve) for r in runs), strict=True))
        steps = [r.learned_after for r in runs]
        learned = "never" if None in steps else f"{statistics.fmean(s for s in steps if s is not None):.0f}"
        masked = statistics.fmean(r.masked for r in runs)
        rows.append(f"| {name} | {before:.2f} | {after:.2f} | {learned} | {masked:.1%} |")
    return "\n".join(rows)


def put_into(page: Path, text: str) -> None:
    """Replace the text between the marks `BEGIN` and `END` of a page."""
    before, mark, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    assert mark and end, f"{page} lacks the marks {BEGIN} and {END}"
    page.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}", encoding="utf-8")


def main() -> None:
    """Run the comparison, draw the figure, write the table, and print the JSON line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=350)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--warm-start-steps", type=int, default=1500)
    parser.add_argument("--only", nargs="+", choices=list(ALGORITHMS), default=list(ALGORITHMS))
    parser.add_argument("--out", type=Path, help="folder for the figure and a learning.md")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = warm_started_model(folder, args.warm_start_steps)
        outcomes = {
            name: [run(name, model, args.steps, seed, folder) for seed in range(args.seeds)] for name in args.only
        }
    curves = {name: [one.curve for one in runs] for name, runs in outcomes.items()}
    text = table(outcomes) + (
        f"\n\n{args.steps} steps of 240 episodes, {args.seeds} seed{'s' * (args.seeds > 1)}; "
        "`python benchmarks/learning.py` makes table and figure again.\n\n![learning curves](learning.png)"
    )
    if args.out is None and list(args.only) == list(ALGORITHMS):
        draw(curves, NOTES / "learning.png")
        put_into(NOTES / "losses.md", text)
    else:
        out = args.out or Path.cwd()
        out.mkdir(parents=True, exist_ok=True)
        draw(curves, out / "learning.png")
        (out / "learning.md").write_text(text + "\n", encoding="utf-8")
    print(
        json.dumps(
            {
                "benchmark": "learning",
                "success": {name: [success(r.curve)[1] for r in runs] for name, runs in outcomes.items()},
                "success_before": {name: [success(r.curve)[0] for r in runs] for name, runs in outcomes.items()},
                "steps_until_learned": {name: [r.learned_after for r in runs] for name, runs in outcomes.items()},
                "masked_by_loss": {name: [round(r.masked, 4) for r in runs] for name, runs in outcomes.items()},
                "steps": args.steps,
                "cores": len(os.sched_getaffinity(0)),
            }
        )
    )


if __name__ == "__main__":
    main()
