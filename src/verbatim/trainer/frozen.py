"""Holds frozen models (reference, teachers), which score the targets with logprobs that a loss reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from verbatim.config.schema import TrainerConfig
from verbatim.core.errors import ModelError
from verbatim.models.adapters import fingerprint
from verbatim.models.head import CausalLM
from verbatim.models.loading import load_model
from verbatim.models.positions import refuse_moving_positions
from verbatim.trainer.bfloat16 import can_round
from verbatim.trainer.compile import choose_kernels
from verbatim.trainer.logprobs import TargetLogprobs
from verbatim.trainer.lora import Adapters
from verbatim.trainer.model_check import packing_for
from verbatim.trainer.parallel.ranks import Ranks
from verbatim.trainer.parallel.sequence import refuse_slices
from verbatim.trainer.parallel.sharding import Sharding, refuse_rows_alone


class FrozenModels:
    """The frozen models of a trainer, each under the name of its logprob stream.

    Args:
        sources: Folders or hub ids of the models, by the name of the logprob stream that each model provides to the
            loss.
        beside: The model in training.
        base: The folder or hub id that the model in training was loaded from.
        adapters: Low-rank adapters of the model in training. A frozen model with the same `base` is then the model in
            training with its adapters disabled, and costs no memory.
        ranks: The processes that train together, over which the frozen models are sharded too; None for one process.
        seq_len: Maximum number of tokens in a sample, 0 if unknown.
        config: The `[trainer]` table.
        dtype: Dtype of the weights.

    Raises:
        ModelError: as for `load_frozen`.
    """

    def __init__(
        self,
        sources: Mapping[str, str | Path],
        beside: TargetLogprobs,
        *,
        base: str | Path,
        adapters: Adapters | None,
        ranks: Ranks | None,
        seq_len: int,
        config: TrainerConfig,
        dtype: str,
    ) -> None:
        self.streams: dict[str, TargetLogprobs] = {}
        """The frozen models as sources of target logprobs, by stream name."""
        self.fingerprints: dict[str, str] = {}
        """Fingerprints of the frozen models' weights, by stream name."""
        for name, source in sources.items():
            if adapters is not None and Path(source) == Path(base):
                self.streams[name] = base_under_adapters(beside)
                self.fingerprints[name] = adapters.base_fingerprint
                continue
            lm = load_frozen(
                source,
                name,
                beside,
                dtype=dtype,
                seq_len=seq_len,
                ranks=ranks,
                compute=config.dtype,
                only_attention=config.packing == "tree",
                compiled=config.compile,
            )
            self.streams[name] = lm
            total = ranks.total if ranks is not None else lambda sums: sums
            self.fingerprints[name] = fingerprint(lm.model.model.named_parameters(), total)

    @property
    def models(self) -> list[Any]:
        """The `transformers` models behind the streams. They include the model in training if a stream comes from its
        base model."""
        return [lm.model.model for lm in self.streams.values()]


def load_frozen(
    source: str | Path,
    name: str,
    beside: TargetLogprobs,
    *,
    dtype: str,
    seq_len: int,
    only_attention: bool,
    ranks: Ranks | None = None,
    compute: str = "float32",
    compiled: bool = False,
) -> TargetLogprobs:
    """Load a frozen model on the trained model's device, with the same kernels, and sharded over the same ranks.

    Args:
        source: A folder or hub id in Hugging Face format.
        name: Name of its logprob stream, for messages.
        beside: The model in training. The frozen model and the model in training must have the same vocabulary size.
        dtype: Dtype of the weights.
        seq_len: Maximum number of tokens in a sample, 0 if unknown.
        only_attention: Refuse a model that mixes tokens outside attention and so cannot compute trees.
        ranks: The processes that train together; None for one process.
        compute: Dtype of the computation: "float32" or "bfloat16".
        compiled: True to compile the model's layers.

    Raises:
        ModelError: the model cannot be loaded, its vocabulary size differs from the vocabulary size of `beside`, or its
            context is too short for the samples.
    """
    sharding = None if ranks is None else Sharding(ranks, compute, trained=False)
    model: Any = load_model(
        source, dtype=dtype, device=beside.model.device, only_attention=only_attention, shards=sharding
    )
    model.requires_grad_(False)
    lm = CausalLM(model, sharding)
    rounds = compute == "bfloat16" and sharding is None and lm.device.type == "cpu"
    choose_kernels(model, compiled=compiled, rounds=rounds)
    refuse_rows_alone(lm, ranks)
    if lm.vocab_size != beside.model.vocab_size:
        here, there = beside.model.vocab_size, lm.vocab_size
        raise ModelError(
            f"the output head of the {name} model {str(source)!r} has {there} rows, but that of the model in training "
            f"has {here}. If both use the same tokenizer, the extra rows are padding: give the {name} model {here} "
            f"rows too (model.resize_token_embeddings({here}), then save_pretrained). A model with another tokenizer "
            "cannot score what this one samples"
        )
    refuse_moving_positions(lm, seq_len)
    if beside.sequence is not None:
        refuse_slices(lm, beside.sequence.size)
    autocast = beside.autocast
    # `beside` may round its products instead of using autocast; a model that cannot round its products needs real
    # autocast.
    if rounds and not can_round(model):
        autocast = partial(torch.autocast, "cpu", dtype=torch.bfloat16)
    return TargetLogprobs(lm, beside.chunk, autocast, beside.sequence)


def packing_beside(model: CausalLM, name: str, source: str | Path, packing: str) -> str:
    """A packing that a frozen model computes correctly too: `packing`, or "rows" if `packing` is "auto" and the model
    would compute trees wrongly.

    Args:
        model: The frozen model, as loaded.
        name: Name of its logprob stream, for messages.
        source: Its folder or hub id.
        packing: The packing of the model in training.

    Raises:
        ModelError: the model cannot compute the packing that the configuration asks for.
    """
    if model.rows_alone:
        return "rows"
    try:
        return packing_for(model, packing)
    except ModelError as error:
        raise ModelError(f"the {name} model {str(source)!r}: {error}") from error


def base_under_adapters(lm: TargetLogprobs) -> TargetLogprobs:
    """The model in training with its low-rank adapters disabled: the base model, without a second copy in memory."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in lm.model.model.modules() if isinstance(module, BaseTunerLayer)]

    @contextmanager
    def without_adapters() -> Iterator[None]:
        for layer in layers:
            layer.enable_adapters(False)
        try:
            with lm.autocast():
                yield
        finally:
            for layer in layers:
                layer.enable_adapters(True)

    return TargetLogprobs(lm.model, lm.chunk, without_adapters, lm.sequence)
