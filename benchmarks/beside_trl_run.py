"""Runs TRL for `beside_trl.py`, in a Python environment that has TRL but not Verbatim.

python beside_trl_run.py MODEL STEPS DEVICE EPISODES TOKENS: prints one JSON line with the seconds of each step and what
it sampled. EPISODES are those of a step, TOKENS the most of an episode.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from beside_trl_job import GUESSES, GuessTheNumber, rows

GROUP = 16


class Clock(TrainerCallback):
    """Records when each step ended, and what the trainer logged about the step."""

    def __init__(self) -> None:
        self.ends, self.logs = [time.perf_counter()], list[dict[str, Any]]()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ends.append(time.perf_counter())

    def on_log(self, *_: Any, logs: dict[str, Any], **__: Any) -> None:  # type: ignore[override]  # always by name
        self.logs.append(logs)


def main(model: str, device: str, steps: int, episodes: int, tokens: int) -> None:
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        settings = GRPOConfig(
            output_dir=folder,
            use_cpu=device == "cpu",
            bf16=False,
            fp16=False,
            gradient_checkpointing=False,
            max_steps=steps,
            per_device_train_batch_size=episodes,
            num_generations=GROUP,
            gradient_accumulation_steps=1,
            max_completion_length=tokens,
            max_tool_calling_iterations=GUESSES,
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            learning_rate=1e-30,
            beta=0.0,
            loss_type="dapo",
            report_to="none",
            logging_steps=1,
            save_strategy="no",
            seed=0,
            dataloader_num_workers=0,
        )
        trainer = GRPOTrainer(
            model=model,
            args=settings,
            train_dataset=Dataset.from_list(rows()),
            callbacks=[clock],
            processing_class=AutoTokenizer.from_pretrained(model),
            environment_factory=GuessTheNumber,
        )
        trainer.train()
    names = ("completions/mean_length", "tools/call_frequency", "reward")
    shown = [{name: log[name] for name in names if name in log} for log in clock.logs if "reward" in log]
    seconds = [after - before for before, after in zip(clock.ends, clock.ends[1:], strict=False)]
    print(json.dumps({"seconds": seconds, "threads": torch.get_num_threads(), "steps": shown}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[3], *map(int, (sys.argv[2], *sys.argv[4:])))
