"""Holds models beside the one in training, whose logprobs of the targets a loss reads."""

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
    """The models beside the one in training.

    Args:
        sources: Folders or hub ids, by the name of the logprob stream that each gives to the loss.
        beside: The model in training.
        base: The folder or hub id that it was loaded from.
        adapters: Its low-rank adapters. Under these it is its own first model, at no memory.
        ranks: The processes that train together: each holds its share of these models too; None: this one alone.
        seq_len: Most tokens of a sample, if that is known.
        config: The `[trainer]` table.
        dtype: Number format of the weights.

    Raises:
        ModelError: as `load_frozen`.
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
        """Each one's logprobs of targets, by the name of the stream."""
        self.fingerprints: dict[str, str] = {}
        """Digests of their weights."""
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
        """Those that have weights; under adapters, the one in training."""
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
    """A model that is not trained, on the device of the one that is, computed with as that one is: sharded, where that
    one is.

    Args:
        source: A folder or hub id in Hugging Face format.
        name: Of its logprob stream.
        beside: The model in training: its vocabulary has to be this one's.
        dtype: Number format of the weights.
        seq_len: Most tokens of a sample, if that is known.
        only_attention: Refuse a model that cannot compute trees.
        ranks: The processes that train together; None: this one alone.
        compute: What is computed with: "float32" or "bfloat16".
        compiled: Whether its layers are.

    Raises:
        ModelError: no such model, or one of another vocabulary, or too short for these samples.
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
            f"the output head of the {name} model {str(source)!r} has {there} rows, that of the model in training "
            f"{here}. If both have the same tokenizer, rows beyond its ids are padding: give that model {here} rows "
            f"too (model.resize_token_embeddings({here}), then save_pretrained). A model with another tokenizer cannot "
            "score what this one samples"
        )
    refuse_moving_positions(lm, seq_len)
    if beside.sequence is not None:
        refuse_slices(lm, beside.sequence.size)
    autocast = beside.autocast
    if rounds and not can_round(model):  # beside a model whose products alone are rounded, which has no autocast
        autocast = partial(torch.autocast, "cpu", dtype=torch.bfloat16)
    return TargetLogprobs(lm, beside.chunk, autocast, beside.sequence)


def packing_beside(model: CausalLM, name: str, source: str | Path, packing: str) -> str:
    """The packing of micro-batches that this model scores too: "rows" where "auto" would give it wrong trees.

    Args:
        model: As it was loaded.
        name: Of its logprob stream.
        source: Its folder or hub id.
        packing: That of the model in training.

    Raises:
        ModelError: it cannot be packed as it was asked for.
    """
    if model.rows_alone:
        return "rows"
    try:
        return packing_for(model, packing)
    except ModelError as error:
        raise ModelError(f"the {name} model {str(source)!r}: {error}") from error


def base_under_adapters(lm: TargetLogprobs) -> TargetLogprobs:
    """The model in training without its low-rank adapters: the model that it began with, at no memory."""
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
