"""Defines the record of the experts that processed each token in a mixture of experts."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from verbatim.core.errors import RecordError
from verbatim.core.records.fields import Bool, read_only

Experts: TypeAlias = NDArray[np.uint8] | NDArray[np.uint16]
"""Expert numbers [N, D, K]: the K experts of each of N tokens in each of D decoder layers; 0 in layers without
experts."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RoutedExperts:
    """Which experts processed each of N tokens, as far as that was recorded.

    Example: three tokens in a model with one layer and two experts per token; the experts of the last token are
        unknown:
    `experts = [[[4, 1]], [[0, 3]], [[0, 0]]]`, `known = [T, T, F]`.
    """

    experts: Experts
    """uint8 or uint16 [N, D, K]; 0 where unknown."""
    known: Bool
    """bool [N]; True for tokens whose experts were recorded."""

    def __len__(self) -> int:
        return len(self.known)

    @staticmethod
    def of_none(count: int, like: Experts) -> RoutedExperts:
        """A record of `count` tokens, for all of which the experts are still unknown."""
        return RoutedExperts(
            experts=np.zeros((count, *like.shape[1:]), dtype=like.dtype), known=np.zeros(count, dtype=np.bool_)
        )

    def add(self, at: NDArray[np.int64], experts: Experts) -> None:
        """Fill in tokens that are still unknown; known tokens keep their experts.

        Args:
            at: Indices of the tokens: int64 [n].
            experts: The experts of these tokens: [n, D, K].
        """
        new = ~self.known[at]
        self.experts[at[new]] = experts[new]
        self.known[at[new]] = True


@dataclass(frozen=True, kw_only=True)
class Routing:
    """The sizes of a model's mixture of experts. A record of experts must match these sizes."""

    num_layers: int
    """D, the number of decoder layers, including layers without experts."""
    num_experts: int
    """E, the number of experts in each layer that has experts."""
    experts_per_token: int | None
    """K, or None if the model's configuration does not contain it."""

    def problem(self, experts: Experts) -> str | None:
        """Why recorded experts cannot come from this model, or None if they can.

        >>> model = Routing(num_layers=2, num_experts=4, experts_per_token=1)
        >>> model.problem(np.array([[[3], [0]]], dtype=np.uint8)) is None
        True
        >>> model.problem(np.array([[[5, 1], [0, 2]]], dtype=np.uint8))
        'recorded experts have 2 layers and 2 of at least 6 experts per token; the model has 2 layers and 1 of 4'
        """
        num_layers, each = experts.shape[1:]
        used = int(experts.max(initial=0)) + 1
        if num_layers == self.num_layers and used <= self.num_experts and self.experts_per_token in (None, each):
            return None
        expected = f"{self.experts_per_token} of {self.num_experts}" if self.experts_per_token else self.num_experts
        return (
            f"recorded experts have {num_layers} layers and {each} of at least {used} experts per token; the model has "
            f"{self.num_layers} layers and {expected}"
        )


def as_experts(values: Any, most: int) -> Experts:
    """Expert numbers as a read-only array; an array that already has the right form is not copied.

    Args:
        values: [N, D, K].
        most: Upper bound of N: the number of tokens that can have been processed.

    Raises:
        RecordError: the shape is wrong, or a value is not an expert number.
    """
    found = np.asarray(values)
    if found.ndim != 3 or len(found) > most:
        raise RecordError(
            f"routed_experts: expected [tokens, layers, experts per token] with at most {most} tokens, "
            f"found the shape {list(found.shape)}"
        )
    if found.dtype not in (np.uint8, np.uint16):
        if found.dtype.kind not in "iu" or (found.size and not 0 <= found.min() <= found.max() <= 0xFFFF):
            raise RecordError(f"routed_experts: expected integers from 0 to {0xFFFF}, found {found.dtype}")
        found = found.astype(np.uint16 if found.size and found.max() > 0xFF else np.uint8)
    experts: Experts = read_only(found)
    return experts


def experts_to_text(experts: Experts) -> str:
    """Encode experts as vLLM does: numpy's file format, in base64."""
    file = io.BytesIO()
    np.save(file, experts, allow_pickle=False)
    return base64.b64encode(file.getbuffer()).decode("ascii")


def experts_from_text(text: str) -> Experts:
    """The inverse of `experts_to_text`.

    Raises:
        ValueError: the text is not a file in numpy's format, encoded in base64.
    """
    try:
        found = np.load(io.BytesIO(base64.b64decode(text, validate=True)), allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise ValueError(f"routed_experts: not an array in base64 ({error})") from None
    if found.ndim != 3 or found.dtype not in (np.uint8, np.uint16):
        raise ValueError(
            f"routed_experts: expected [tokens, layers, experts per token] of uint8 or uint16, found "
            f"{list(found.shape)} of {found.dtype}"
        )
    experts: Experts = found
    return experts


def same_routing(one: RoutedExperts | None, other: RoutedExperts | None, count: int) -> int:
    """The number of leading tokens, up to `count`, that were processed by the same experts in two sequences. A token
    whose experts are known in only one of the two sequences counts as different.

    >>> a = RoutedExperts(experts=np.array([[[4, 1]], [[0, 3]]], dtype=np.uint8), known=np.array([True, True]))
    >>> b = RoutedExperts(experts=np.array([[[4, 1]], [[0, 2]]], dtype=np.uint8), known=np.array([True, True]))
    >>> same_routing(a, a, 2), same_routing(a, b, 2), same_routing(a, None, 2)
    (2, 1, 0)
    """
    if one is None or other is None:
        known = one.known if one is not None else other.known if other is not None else np.zeros(0, dtype=np.bool_)
        differs = known[:count]
    else:
        differs = one.known[:count] != other.known[:count]
        differs = differs | (one.experts[:count] != other.experts[:count]).any(axis=(1, 2))
    return int(differs.argmax()) if differs.any() else count
