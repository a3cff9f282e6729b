"""Holds models beside the one in training, whose logprobs of the targets a loss reads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from verbatim.errors import ModelError
from verbatim.models.head import CausalLM
from verbatim.models.loading import load_model
from verbatim.models.positions import refuse_moving_positions
from verbatim.trainer.linear import use_onednn
from verbatim.trainer.logprobs import TargetLogprobs
from verbatim.trainer.model_check import packing_for
from verbatim.trainer.parallel.sequence import refuse_slices


def load_frozen(
    source: str | Path, name: str, beside: TargetLogprobs, *, dtype: str, seq_len: int, only_attention: bool
) -> TargetLogprobs:
    """A model that is not trained, on the device of the one that is, computed with as that one is.

    Args:
        source: A folder or hub id in Hugging Face format.
        name: Of its logprob stream.
        beside: The model in training: its vocabulary has to be this one's.
        dtype: Number format of the weights.
        seq_len: Most tokens of a sample, if that is known.
        only_attention: Refuse a model that cannot compute trees.

    Raises:
        ModelError: no such model, or one of another vocabulary, or too short for these samples.
    """
    model: Any = load_model(source, dtype=dtype, device=beside.model.device, only_attention=only_attention)
    model.requires_grad_(False)
    use_onednn(model)
    lm = CausalLM(model)
    if lm.vocab_size != beside.model.vocab_size:
        raise ModelError(
            f"the {name} model {str(source)!r} has {lm.vocab_size} tokens, the model in training has "
            f"{beside.model.vocab_size}: it cannot score what that one samples; expected a model with the same "
            "tokenizer"
        )
    refuse_moving_positions(lm, seq_len)
    if beside.sequence is not None:
        refuse_slices(lm, beside.sequence.size)
    return TargetLogprobs(lm, beside.chunk, beside.autocast, beside.sequence)


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

    return TargetLogprobs(lm.model, lm.chunk, without_adapters)
