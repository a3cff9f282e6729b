"""Measures how well the work of sampler and trainer overlaps if each has its own core.

    python benchmarks/overlap.py [--steps 25] [--repetitions 3] [--warm-start-steps 600]

First, each side is timed alone on the same work, with one thread on one core: the orchestrator with a trainer that
answers immediately, and the trainer with the batches that this orchestrator has handed over. Then both run together,
each on its own core, asynchronous by one step. Nothing is learned (a learning rate of 1e-30), so that the work stays
the same. `ratio` is the wall-clock time of a step when both run together, divided by that of the slower side alone;
with perfect overlap it would be 1. Synchronous and asynchronous runs are also compared on both cores without pinning.
The measurements take turns. Prints one JSON line; figures are medians over the repetitions.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

from demo_runs import NO_LEARNING, finish, run_options, seconds_per_step, train_metrics, verbatim, warm_started_model
from verbatim.trainer.transport import StepReport, TrainerReady
from verbatim.trainer.transport.exchange import Exchange
from verbatim.trainer.transport.files import publish_bytes
from verbatim.trainer.transport.heartbeat import Heartbeat
from verbatim.trainer.transport.trainer_messages import TrainerMessage, message_to_bytes, to_json

SKIP = 4
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def sampler_alone(folder: Path, options: list[str], core: int, other: int) -> float:
    """Run the orchestrator alone; returns seconds per step. The batches are kept in `folder/messages`."""
    run = folder / "sampler"
    process = multiprocessing.get_context("spawn").Process(
        target=answer_at_once, args=(run, folder / "messages", folder / "sft" / "warm_start", other), daemon=True
    )
    process.start()
    finish(verbatim("orchestrator", *options, "--run-dir", str(run), cores=[core], cwd=folder, **ONE_THREAD))
    process.join()
    return seconds_per_step(train_metrics(run), SKIP)


def answer_at_once(run: Path, messages: Path, model: Path, core: int) -> None:
    """Act as a trainer that does not train. It keeps each batch in `messages`, and reports unchanged weights."""
    os.sched_setaffinity(0, {core})
    messages.mkdir()
    exchange = Exchange.open(run / "exchange")
    while not (run / "config.toml").exists():  # both sides need the same, so copy the other side's
        time.sleep(0.01)
    publish_bytes(exchange.config, (run / "config.toml").read_bytes())
    with Heartbeat(exchange.trainer_beat) as heartbeat:
        exchange.ready(TrainerReady(version=0, weights=str(model), checkpoint=None))
        for number in itertools.count(1):
            message = exchange.wait_for_message(number, lambda: heartbeat.progress("waiting"))
            if message.kind == "stop":
                return
            if message.kind == "save":
                exchange.answer(number, {"result": None})
                continue
            tokens = sum(sample.num_trained_tokens for sample in message.samples)
            report = StepReport(version=message.version, weights=model, num_trained_tokens=tokens, metrics={})
            exchange.answer(number, {"result": to_json(report, run)})
            (messages / f"{message.version:06d}").write_bytes(message_to_bytes(message))


def trainer_alone(folder: Path, options: list[str], core: int) -> float:
    """Run the trainer alone with batches that are always ready; returns seconds per step."""
    run = folder / "trainer"
    process = verbatim("trainer", *options, "--run-dir", str(run), cores=[core], cwd=folder, **ONE_THREAD)
    while (exchange := Exchange.current(run / "exchange")) is None or exchange.read_ready() is None:
        assert process.poll() is None, "the trainer ended"
        time.sleep(0.05)
    with Heartbeat(exchange.orchestrator_beat) as heartbeat:
        batches = sorted((folder / "messages").iterdir())
        done = []
        for number, batch in enumerate(batches, start=1):
            shutil.copy(batch, exchange.messages / f".{number:06d}")
            os.rename(exchange.messages / f".{number:06d}", exchange.messages / f"{number:06d}.safetensors")
        for number in range(1, len(batches) + 1):
            while exchange.take_answer(number) is None:
                heartbeat.progress("waiting")
                time.sleep(0.001)
            done.append(time.perf_counter())
        exchange.send(len(batches) + 1, TrainerMessage(kind="stop"))
        finish(process)
    return (done[-1] - done[SKIP - 1]) / (len(done) - SKIP)


def together(folder: Path, options: list[str], sampler_core: int, trainer_core: int) -> float:
    """Run orchestrator and trainer together, each on its own core; returns seconds per step."""
    run = ["--run-dir", str(folder / "together")]
    trainer = verbatim("trainer", *options, *run, cores=[trainer_core], cwd=folder, **ONE_THREAD)
    finish(verbatim("orchestrator", *options, *run, cores=[sampler_core], cwd=folder, **ONE_THREAD))
    finish(trainer)
    return seconds_per_step(train_metrics(folder / "together"), SKIP)


def unpinned(folder: Path, options: list[str]) -> float:
    """Run `verbatim rl` as users do, without pinning; returns seconds per step."""
    run = folder / "unpinned"
    finish(verbatim("rl", *options, "--run-dir", str(run), cwd=folder))
    return seconds_per_step(train_metrics(run), SKIP)


def main() -> None:
    """Run the benchmark and print the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--warm-start-steps", type=int, default=600)
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))[:2]
    assert len(cores) == 2, "two cores are needed"
    found: dict[str, list[float]] = {}
    ratios = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = warm_started_model(folder, args.warm_start_steps)
        overlapped = [*run_options(model, args.steps, 1), *NO_LEARNING]
        in_turn = [*run_options(model, args.steps, 0), *NO_LEARNING]
        for _ in range(args.repetitions):
            measured = {
                "sampler_alone": sampler_alone(folder, overlapped, *cores),
                "trainer_alone": trainer_alone(folder, overlapped, cores[1]),
                "together": together(folder, overlapped, *cores),
                "asynchronous": unpinned(folder, overlapped),
            }
            shutil.rmtree(folder / "unpinned")
            measured["synchronous"] = unpinned(folder, in_turn)
            for left in ("messages", "sampler", "trainer", "together", "unpinned"):
                shutil.rmtree(folder / left)
            ratios.append(measured["together"] / max(measured["sampler_alone"], measured["trainer_alone"]))
            for name, seconds in measured.items():
                found.setdefault(name, []).append(seconds)
    medians = {name: statistics.median(seconds) for name, seconds in found.items()}
    print(
        json.dumps(
            {
                "benchmark": "overlap",
                "ratio": round(statistics.median(ratios), 3),
                "ratios": [round(ratio, 3) for ratio in ratios],
                "synchronous_over_asynchronous": round(medians["synchronous"] / medians["asynchronous"], 3),
                "seconds_per_step": {name: round(seconds, 3) for name, seconds in medians.items()},
                "steps": args.steps,
                "threads_of_each_side": 1,
                "cores": len(os.sched_getaffinity(0)),
            }
        )
    )


if __name__ == "__main__":
    main()
