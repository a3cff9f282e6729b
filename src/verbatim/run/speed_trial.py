"""Measures how fast this machine samples and trains a run's model: a program of its own, whose memory ends with it.

    python -m verbatim.run.speed_trial < a pickled `TrialOrder` > a JSON object, the fields of `Trial`

Both sides run real passes for some seconds, with the model's weights and the conversations that were handed over.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from verbatim.config import load_config
from verbatim.config.schema import RunConfig, TrainerConfig
from verbatim.core.sampling import SamplingParams
from verbatim.core.types import TrainingSample
from verbatim.run.expected_time import Trial, TrialOrder
from verbatim.run.make_trainer import threads_of
from verbatim.run.rollouts import inference_settings

SECONDS = 2.0
"""Duration of each of the measurements, beyond loading and a first pass that does not count."""
_TRAINED_TOKENS = 1024
"""Number of tokens that a measured training step computes, as far as one conversation does not have more."""


def measure(order: TrialOrder) -> Trial:
    """Measure both sides, one after the other, with the threads that each has while both compute."""
    import torch

    config, model = _parsed(order.config), order.model
    torch.set_num_threads(threads_of(config, None) or torch.get_num_threads())
    _forget_peak()
    sampled, prompts, sequences = _sampler(config, model, order.conversations)
    sampler_bytes = _resident("VmHWM")
    settings, sizes = config.trainer, _batch_sizes(config, order.conversations)
    _forget_peak()
    trained, trainer_bytes = _trainer(settings, model, order.conversations, sizes["most_trained"])
    warm_start = trained if config.warm_start is not None else None
    if config.warm_start is not None and settings.lora is not None:
        full = settings.model_copy(update={"lora": None})
        warm_start, _ = _trainer(full, model, order.conversations, None)
    return Trial(
        threads=torch.get_num_threads(),
        sequences=sequences,
        sampled_per_second=sampled,
        prompts_per_second=prompts,
        trained_per_second=trained,
        warm_start_per_second=warm_start,
        sampler_bytes=sampler_bytes,
        trainer_bytes=trainer_bytes,
        **sizes,
    )


def _parsed(toml: str) -> RunConfig:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.toml"
        file.write_text(toml, encoding="utf-8")
        return load_config(file)


def _sampler(
    config: RunConfig, model: str, conversations: Sequence[Sequence[TrainingSample]]
) -> tuple[float, float, int]:
    """Sampled tokens per second, prompt tokens per second, and the number of sequences decoded together."""
    from verbatim.inference.embedded.decoder import Decoder
    from verbatim.inference.sampler import SampleRequest
    from verbatim.models.head import CausalLM
    from verbatim.models.loading import load_model

    settings: Any = inference_settings(config)
    loaded = load_model(model, dtype=settings.dtype, device="cpu").requires_grad_(False)
    length = config.orchestrator.seq_len
    decoder = Decoder(CausalLM(loaded), settings, context_length=length, version=0, warns=False)
    count = min(settings.max_batch_size, config.orchestrator.batch_size, config.orchestrator.max_concurrent)
    requests = []
    for seed in range(count):
        sample = conversations[seed % len(conversations)][0]
        prompt = sample.token_ids[: max(1, int(sample.loss_mask.argmax()))]
        params = SamplingParams(max_tokens=max(1, length - len(prompt)))
        requests.append(SampleRequest(prompt_ids=prompt, params=params, seed=seed))
    began = time.perf_counter()
    # Requests have to wait while another one computes the prefix that they share.
    while requests := [request for request in requests if decoder.add(request) is None]:
        decoder.step()
    decoder.step()
    prompts = decoder.counts.prefill_tokens / (time.perf_counter() - began)
    before = decoder.counts.sampled_tokens
    seconds = _repeat(decoder.step)
    return (decoder.counts.sampled_tokens - before) / seconds, prompts, count


def _trainer(
    settings: TrainerConfig, model: str, conversations: Sequence[Sequence[TrainingSample]], most: int | None
) -> tuple[float, int]:
    """Tokens that the trainer computes per second, and its most memory for micro-batches of `most` tokens, or as many
    as fit; None: 0 instead of the memory, which takes one more pass to measure."""
    from verbatim.algorithms.losses import LOSSES
    from verbatim.trainer.packer import CPU_MICRO_BATCH_TOKENS
    from verbatim.trainer.trainer import Trainer

    trainer = Trainer(model, settings, loss=LOSSES["sft"], total_optimizer_steps=1_000_000)
    trainer.packer.trees_are_right = True  # the run checks them; here the check would count as training
    samples, needed = _first(conversations, _TRAINED_TOKENS, settings.packing), 0
    if most is None:
        many = trainer.train_batch(samples)["num_tokens"]
    else:
        # The memory of two sizes gives that of others: a part is the same for all, the rest grows with the tokens.
        few = trainer.train_batch(_first(conversations, 0, settings.packing))["num_tokens"]
        with_few = _resident("VmHWM")
        many = trainer.train_batch(samples)["num_tokens"]
        of_each = max(0.0, (_resident("VmHWM") - with_few) / max(1.0, many - few))
        most = min(most, settings.micro_batch_tokens or CPU_MICRO_BATCH_TOKENS)
        needed = int(with_few + of_each * max(0.0, most - few))
    times = [0]

    def step() -> None:
        trainer.train_batch(samples)
        times[0] += 1

    seconds = _repeat(step)
    return times[0] * many / seconds, needed


def _repeat(do: Callable[[], object]) -> float:
    """Call `do` at least once and until `SECONDS` are over. Returns the seconds taken."""
    began = time.perf_counter()
    while True:
        do()
        if (seconds := time.perf_counter() - began) >= SECONDS:
            return seconds


# ---- sizes of a batch


def _first(conversations: Sequence[Sequence[TrainingSample]], most: int, packing: str) -> list[TrainingSample]:
    """The samples of the first conversations for which the trainer computes at most this many tokens; of one
    conversation at least."""
    chosen: list[TrainingSample] = []
    for number, conversation in enumerate(conversations):
        wider = [*chosen, *(dataclasses.replace(sample, trajectory_id=str(number)) for sample in conversation)]
        if chosen and _tokens(wider, packing) > most:
            break
        chosen = wider
    return chosen


def _batch_sizes(config: RunConfig, conversations: Sequence[Sequence[TrainingSample]]) -> dict[str, Any]:
    """The sizes in `Trial`, if episodes are as long as the conversations."""
    orchestrator, packing = config.orchestrator, config.trainer.packing
    groups = max(1, orchestrator.batch_size // orchestrator.group_size)
    rng = np.random.default_rng(0)
    alike: list[TrainingSample] = []
    different: list[TrainingSample] = []
    for group in range(groups):
        for sample in conversations[group % len(conversations)]:
            alike.append(sample)
            for _ in range(orchestrator.group_size):
                ids = sample.token_ids.copy()
                ids[sample.loss_mask] = rng.integers(0, 1 << 30, int(sample.loss_mask.sum()))
                different.append(dataclasses.replace(sample, token_ids=ids))
    trained = [sum(sample.num_trained_tokens for sample in conversation) for conversation in conversations]
    warm_start = 0
    if config.warm_start is not None:
        count = config.warm_start.batch_size
        warm_start = _tokens([s for i in range(count) for s in conversations[i % len(conversations)]], packing)
    return {
        "sampled_per_episode": float(np.mean(trained)),
        "fewest_trained": _tokens(alike if packing != "rows" else different, packing),
        "most_trained": _tokens(different, packing),
        "warm_start_tokens": warm_start,
    }


def _tokens(samples: Sequence[TrainingSample], packing: str) -> int:
    """The number of tokens that the trainer computes for these samples."""
    from verbatim.trainer.packing.tree import unique_tokens

    named = [dataclasses.replace(sample, trajectory_id=str(i)) for i, sample in enumerate(samples)]
    return sum(map(len, named)) if packing == "rows" else unique_tokens(named)


# ---- memory


def _forget_peak() -> None:
    """Make the kernel forget the most that this process has held so far. Where that is not possible, later peaks are
    those of the whole process."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _resident(which: str) -> int:
    """VmRSS, the bytes that this process holds now, or VmHWM, the most that it held; 0 if the system does not say."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(which)), 0)


def main() -> None:
    """Read an order, measure, and print the result. Only the result goes to standard output."""
    result = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print must not mix with the result
    order: TrialOrder = pickle.load(sys.stdin.buffer)  # noqa: S301 - written by the process that started this one
    with result:
        json.dump(dataclasses.asdict(measure(order)), result)


if __name__ == "__main__":
    main()
