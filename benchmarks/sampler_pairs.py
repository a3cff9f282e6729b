"""Today's sampler against that of another checkout, in turns, on ragged episodes of a pretrained model.

    python benchmarks/sampler_pairs.py --against ../other --model smollm2-135m

Each checkout runs in a process of its own, with its own compiled kernel, and plays the same episodes of two turns when
its turn comes: prompts of 48 to 150 tokens, 32 sampled, an answer of 8 to 64, 32 sampled. The other checkout has
`--theirs` (a dtype, or "auto": what it measures to be faster), this one `--ours`. Prints what each pair of runs took in
tokens per second of the clock and of processor time (of all threads), and the medians of the ratios. No pair begins
after `--seconds`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TURNS, SAMPLED = 2, 32


def serve(model: str, dtype: str, threads: int, most: int) -> None:
    """The child: open the sampler, then play a batch for each line of standard input, and print what it took."""
    import torch

    from engine import Script, play_ours, write_scripts
    from verbatim.inference.embedded.engine import TorchSampler
    from verbatim.inference.embedded.settings import TorchSettings
    from verbatim.models.catalog import folder_of
    from verbatim.run.precision import resolve_server

    torch.set_num_threads(threads)
    folder, settings = Path(folder_of(model)), TorchSettings(max_batch_size=most, device="cpu", dtype=dtype)
    if dtype == "auto":
        settings, choice = resolve_server(settings, folder)
        print(choice, file=sys.stderr, flush=True)

    def cut(script: Script) -> Script:
        answers = (script.answers + script.answers or (script.opening[:24],))[: TURNS - 1]
        return Script(opening=script.opening, lengths=(SAMPLED,) * TURNS, answers=answers, seed=script.seed)

    async def loop() -> None:
        sampler = TorchSampler(folder, config=settings, context_length=1024, num_threads=threads)
        print(json.dumps({"dtype": settings.dtype}), flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            sequences, seed = json.loads(line)
            scripts = [cut(script) for script in write_scripts(sequences, sampler.vocab_size, seed)]
            began, computed = time.perf_counter(), time.process_time()
            await play_ours(sampler, scripts, sequences)
            tokens = sequences * TURNS * SAMPLED
            took = {
                "clock": tokens / (time.perf_counter() - began),
                "processor": tokens / (time.process_time() - computed),
            }
            print(json.dumps(took), flush=True)
        await sampler.close()

    with torch.inference_mode():
        asyncio.run(loop())


class Side:
    """One checkout's process."""

    def __init__(self, root: Path, dtype: str, args: argparse.Namespace) -> None:
        paths = os.pathsep.join(map(str, (root / "src", ROOT / "benchmarks")))
        command = [sys.executable, __file__, "--serve", dtype, "--model", args.model, "--threads", str(args.threads)]
        self.process = subprocess.Popen(
            [*command, "--sequences", *map(str, args.sequences)],
            env={**os.environ, "PYTHONPATH": paths, "OMP_WAIT_POLICY": "passive"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def read(self) -> dict[str, Any]:
        """The next line of results."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("a side of the comparison ended; its message is above")
        found: dict[str, Any] = json.loads(line)
        return found

    def play(self, sequences: int, seed: int) -> dict[str, float]:
        """Tokens per second, of the clock and of processor time."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([sequences, seed]) + "\n")
        self.process.stdin.flush()
        return self.read()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="the other checkout's folder")
    parser.add_argument("--model", default="smollm2-135m", help="a folder, or a name of `verbatim models get`")
    parser.add_argument("--ours", default="auto")
    parser.add_argument("--theirs", default="auto")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--sequences", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=180)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.model, args.serve, args.threads, max(args.sequences))
        return
    began = time.perf_counter()
    sides = {"ours": Side(ROOT, args.ours, args), "theirs": Side(args.against.resolve(), args.theirs, args)}
    print({name: side.read()["dtype"] for name, side in sides.items()}, flush=True)
    found: dict[int, list[tuple[dict[str, float], dict[str, float]]]] = {count: [] for count in args.sequences}
    for number in range(args.pairs + 1):  # the first warms up, with few sequences
        if number > 1 and time.perf_counter() - began > args.seconds:
            break
        for count in args.sequences:
            order = list(sides) if number % 2 else list(sides)[::-1]
            took = {name: sides[name].play(count if number else 4, number) for name in order}
            if number:
                found[count].append((took["ours"], took["theirs"]))
                rates = "  ".join(
                    f"{unit}: {took['ours'][unit]:.0f} and {took['theirs'][unit]:.0f} tokens/s" for unit in took["ours"]
                )
                print(f"{count} sequences, ours and theirs; {rates}", flush=True)
    for count, pairs in found.items():
        for unit in ("clock", "processor"):
            ours, theirs = (statistics.median(pair[side][unit] for pair in pairs) for side in (0, 1))
            ratios = sorted(one[unit] / other[unit] for one, other in pairs)
            print(
                f"{count} sequences, {unit}: {ours:.0f} and {theirs:.0f} tokens/s, ratio "
                f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}, {len(ratios)} pairs)"
            )
    for side in sides.values():
        side.process.stdin.close()  # type: ignore[union-attr]
        side.process.wait()


if __name__ == "__main__":
    from engine import processor_name

    if "--serve" not in sys.argv:
        print(processor_name(), flush=True)
    main()
