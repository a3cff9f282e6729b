"""Main loop of the trainer process: executes messages one at a time until a stop message."""

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
    """Execute messages until the orchestrator ends the run.

    Args:
        worker: Executes the requests.
        exchange: Where messages arrive and answers go.
        heartbeat: Publishes what this process is doing.
        look: Called while waiting for a message; raises if the orchestrator is gone.
        on_step: Called after each step with the new policy version and the metrics.
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
    """Execute a message and return the answer. An external fault becomes an error in the answer; a bug in this code
    ends the process with a traceback."""
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
