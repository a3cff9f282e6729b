"""Makes the trainer of a run or of its warm start, in every process that trains."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from verbatim.config.schema import RunConfig
from verbatim.inference.embedded.settings import TorchSettings
from verbatim.rollouts import derive_seed
from verbatim.run.build import frozen_models, make_loss, named_weights
from verbatim.run.rollouts import inference_settings

if TYPE_CHECKING:
    from verbatim.trainer.parallel.ranks import Ranks
    from verbatim.trainer.trainer import Trainer

Purpose = Literal["run", "warm_start"]


def make_trainer(
    config: RunConfig,
    purpose: Purpose,
    source: str | Path,
    *,
    first: str | Path | None = None,
    ranks: Ranks | None,
    tokenizer: Any = None,
) -> Trainer:
    """Make the trainer of a run or of its warm start. With several ranks, rank 0 has the other ranks make their
    trainers.

    Args:
        config: The run's configuration.
        purpose: Says whether the trainer is for the run or for its warm start.
        source: The folder or hub id of its initial weights.
        first: The model from which the run started; it is used as the frozen model if that has no name of its own.
        ranks: The processes that train together. None if this process trains alone.
        tokenizer: Saved alongside the weights.
    """
    from verbatim.algorithms.losses import LOSSES
    from verbatim.trainer.trainer import Trainer

    settings, warm_start = config.trainer, config.warm_start
    if purpose == "run":
        loss, steps = make_loss(config), config.max_steps * settings.optimizer_steps_per_batch
    else:  # the warm start trains all weights, even if LoRA follows: adapters need a base that knows the format already
        assert warm_start is not None
        settings = settings.model_copy(update={"optim": warm_start.optim, "optimizer_steps_per_batch": 1, "lora": None})
        loss, steps = LOSSES["sft"], warm_start.steps
    models = frozen_models(config) if purpose == "run" else {}
    frozen = {name: str(first if model is None else model) for name, model in models.items()}
    together: AbstractContextManager[None] = nullcontext()
    # This sends the order to the other ranks, which make their trainers while this rank makes its own.
    if ranks is not None and ranks.leads:
        together = ranks.lead("make", purpose=purpose, source=_as_path(source), first=_as_path(first))
    with together:
        return Trainer(
            source,
            settings,
            loss=loss,
            total_optimizer_steps=steps,
            tokenizer=tokenizer,
            seq_len=config.orchestrator.seq_len,
            seed=derive_seed(config.seed, "lora") % 2**32,
            frozen=frozen,
            ranks=ranks,
        )


def _as_path(source: str | Path | None) -> Path | str | None:
    """A folder as an absolute path, which orders may translate for other hosts; a hub id unchanged."""
    return Path(source).resolve() if source is not None and Path(source).is_dir() else source and str(source)


def threads_of(config: RunConfig, own: int | None) -> int | None:
    """Number of threads for one side's matrix products. None for torch's default, which is all cores.

    If trainer and sampler compute at the same time, each gets half of the cores: two thread pools on the same cores
    would wait for each other.
    """
    if own is not None:
        return own
    if config.orchestrator.max_async_level == 0 or "OMP_NUM_THREADS" in os.environ:
        return None
    return max(1, len(os.sched_getaffinity(0)) // 2)


def while_both_start(config: RunConfig) -> AbstractContextManager[None]:
    """While the block runs, use half of torch's threads if trainer and sampler load the model at the same time."""
    import torch

    from verbatim.inference.embedded.engine_thread import torch_threads

    return torch_threads(None if named_weights(config) is None else max(1, torch.get_num_threads() // 2))


def shares_cores(config: RunConfig) -> bool:
    """True if a trainer and a sampler in two processes on this machine may use each other's idle cores.

    False if either number of threads is set, if several processes train, or if the sampler is deterministic: the last
    bits of results depend on the number of threads.
    """
    engine = inference_settings(config)
    if not isinstance(engine, TorchSettings) or engine.urls or engine.num_threads is not None or engine.deterministic:
        return False
    trainer = config.trainer
    own = trainer.num_threads is not None or trainer.parallel.processes > 1 or trainer.device not in ("auto", "cpu")
    return config.orchestrator.max_async_level > 0 and not own and "OMP_NUM_THREADS" not in os.environ


def set_trainer_threads(config: RunConfig, processes: int) -> None:
    """Give this process its share of the cores; `processes` trainer ranks run on this machine."""
    from verbatim.trainer.local import set_num_threads

    own = config.trainer.num_threads
    if own is None and "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0))
        own = max(1, (threads_of(config, None) or cores) // processes)
    set_num_threads(own)
