"""Measures the effect of difficulty pools: sampled tokens per group that has a gradient, with pools and without.

The data set is guess_number, in which a third of the secrets is trivial (every game is won) and a third is impossible
(no game is won). Both runs start from the demo's model after a short warm start, and take the same number of steps.
From their trajectory logs, the tokens sampled after the first pass over the data are counted and divided by the number
of groups whose rewards differ (required: with pools, at most half as many tokens per such group). Prints one JSON line.
Run: python benchmarks/pools.py
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from demo_runs import finish, run_options, train_metrics, verbatim, warm_started_model
from verbatim.logs.monitors.trajectory_log import read_trajectories

UNEVEN = '''
from verbatim.environments.guess_number import GuessNumber, GuessNumberEpisode


class UnevenGame(GuessNumberEpisode):
    async def score(self, trajectory):
        kind = self.secret % 3
        return float(self.found) if kind == 0 else float(kind == 1)


class Uneven(GuessNumber):
    """A secret that leaves 1 when divided by 3 is found whatever is said, one that leaves 2 never."""

    async def start(self, example, seed):
        return UnevenGame(self, int(example.payload["secret"]))
'''
SECRETS, GROUP, GROUPS = 15, 16, 5
ENVIRONMENT = '[{ import_path = "uneven.Uneven" }]'


def tokens_per_useful_group(run: Path) -> tuple[float, int, int]:
    """Return three figures for the time after the first pass over the data: the sampled tokens per group with a
    gradient, the number of these groups, and the number of all groups."""
    rewards: dict[str, set[float]] = {}
    tokens = 0
    first_pass = SECRETS // GROUPS
    for step, trajectory in read_trajectories(run):
        if step > first_pass:
            tokens += trajectory.num_sampled_tokens
            rewards.setdefault(trajectory.group_id, set()).add(trajectory.reward or 0.0)
    useful = sum(len(different) > 1 for different in rewards.values())
    return tokens / useful, useful, len(rewards)


def main() -> None:
    """Train without and with pools, and print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--warm-start-steps", type=int, default=600)
    args = parser.parse_args()
    result: dict[str, object] = {"benchmark": "pools", "steps": args.steps}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "uneven.py").write_text(UNEVEN)
        model = warm_started_model(folder, args.warm_start_steps)
        found = {}
        for pools in (False, True):
            run = folder / f"pools-{pools}"
            thresholds = ["--orchestrator.buffer", "{ easy_threshold = 1.0, hard_threshold = 0.0 }"] if pools else []
            finish(
                verbatim(
                    "rl",
                    *run_options(model, args.steps, level=1),
                    "--run-dir",
                    str(run),
                    "--orchestrator.eval",
                    "null",
                    "--orchestrator.train.env",
                    ENVIRONMENT,
                    "--orchestrator.batch-size",
                    str(GROUP * GROUPS),
                    "--orchestrator.group-size",
                    str(GROUP),
                    "--orchestrator.filters",
                    "[]",
                    *thresholds,
                    cwd=folder,
                )
            )
            found[pools] = tokens_per_useful_group(run)
            key = "with" if pools else "without"
            result[f"tokens_per_useful_group_{key}"] = round(found[pools][0], 1)
            result[f"useful_groups_{key}"] = f"{found[pools][1]} of {found[pools][2]}"
            if pools:
                last = train_metrics(run)[-1]
                result |= {k: round(v, 3) for k, v in last.items() if k.startswith("pool/")}
    result["ratio"] = round(found[False][0] / found[True][0], 2)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
