"""Runs the trainer's process: executes one message after the other until it is told to end."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from verbatim.core.errors import RunStopped
from verbatim.core.machine_faults import describe
from verbatim.trainer.transport.exchange import Exchange
from verbatim.trainer.transport.heartbeat import Heartbeat
from verbatim.trainer.transport.trainer_messages import TrainerMessage, path_to_json, to_json
from verbatim.trainer.worker import TrainerWorker

_DOING = {"train": "training on batch {}", "save": "writing its state", "send": "sending version {} of the weights"}


def serve(
    worker: TrainerWorker,
    exchange: Exchange,
    heartbeat: Heartbeat,
    *,
    look: Callable[[], None],
    on_step: Callable[[int, dict[str, float]], None] = lambda version, metrics: None,
) -> None:
    """Train until the orchestrator ends the run.

    `look` is called while waiting, and raises when the orchestrator is gone; `on_step` is called after each step with
    the new version and the metrics.
    """
    number = 0
    while True:
        number += 1
        began = time.monotonic()

        def waiting() -> None:
            heartbeat.progress(f"waiting for batch {worker.version}")
            look()

        message = exchange.wait_for_message(number, waiting)
        if message.kind == "stop":
            return
        idle = time.monotonic() - began
        heartbeat.progress(_DOING[message.kind].format(worker.version))
        exchange.answer(number, _execute(worker, message, exchange.run, idle, on_step))


def _execute(
    worker: TrainerWorker,
    message: TrainerMessage,
    run: Path,
    idle: float,
    on_step: Callable[[int, dict[str, float]], None],
) -> dict[str, Any]:
    """The answer. An external fault is reported; a bug of ours ends the process with a traceback."""
    try:
        if message.kind == "save":
            return {"result": path_to_json(worker.leave_state(message.version), run)}
        if message.kind == "send":
            assert message.order is not None
            return {"result": dataclasses.asdict(worker.send(message.order))}
        report = to_json(worker.train(message.samples, message.version, checkpoint=message.checkpoint), run)
    except (RunStopped, OSError) as error:
        return {"error": describe(error)}
    report["metrics"] = {**report["metrics"], "time/trainer_idle": idle}
    on_step(message.version, report["metrics"])
    return {"result": report}
