"""Defines the record of which experts of a mixture computed each token."""

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
"""Numbers of experts, [N, D, K]: of N tokens, in each of D decoder layers (0 in those without experts), K each."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RoutedExperts:
    """Which experts computed each of N tokens, where that was recorded.

    Example: of three tokens in a model of one layer, where each goes to two experts, the last is not known:
    `experts = [[[4, 1]], [[0, 3]], [[0, 0]]]`, `known = [T, T, F]`.
    """

    experts: Experts
    """uint8 or uint16 [N, D, K]; 0 where it is not known."""
    known: Bool
    """bool [N]."""

    def __len__(self) -> int:
        return len(self.known)

    @staticmethod
    def of_none(count: int, like: Experts) -> RoutedExperts:
        """Room for tokens of which nothing is known yet."""
        return RoutedExperts(
            experts=np.zeros((count, *like.shape[1:]), dtype=like.dtype), known=np.zeros(count, dtype=np.bool_)
        )

    def add(self, at: NDArray[np.int64], experts: Experts) -> None:
        """Fill in tokens that are not known yet; those that are stay.

        Args:
            at: The tokens: int64 [n].
            experts: Theirs: [n, D, K].
        """
        new = ~self.known[at]
        self.experts[at[new]] = experts[new]
        self.known[at[new]] = True


@dataclass(frozen=True, kw_only=True)
class Routing:
    """The sizes of a mixture of experts that a record of it has to have."""

    num_layers: int
    """D: all decoder layers."""
    num_experts: int
    """E, in each layer with experts."""
    experts_per_token: int | None
    """K; None where the model's configuration does not say."""

    def problem(self, experts: Experts) -> str | None:
        """Why recorded experts are not those of this model; None where they can be.

        >>> model = Routing(num_layers=2, num_experts=4, experts_per_token=1)
        >>> model.problem(np.array([[[3], [0]]], dtype=np.uint8)) is None
        True
        >>> model.problem(np.array([[[5, 1], [0, 2]]], dtype=np.uint8))
        'recorded experts are those of 2 layers, 2 for each token of at least 6; the model has 2 layers, 1 of 4'
        """
        num_layers, each = experts.shape[1:]
        used = int(experts.max(initial=0)) + 1
        if num_layers == self.num_layers and used <= self.num_experts and self.experts_per_token in (None, each):
            return None
        expected = f"{self.experts_per_token} of {self.num_experts}" if self.experts_per_token else self.num_experts
        return (
            f"recorded experts are those of {num_layers} layers, {each} for each token of at least {used}; the "
            f"model has {self.num_layers} layers, {expected}"
        )


def as_experts(values: Any, most: int) -> Experts:
    """Numbers of experts as a read-only array: the one that was given, where it is one already.

    Args:
        values: [N, D, K].
        most: Tokens that can have been computed: N is at most that.

    Raises:
        RecordError: another shape, or numbers that are none of experts.
    """
    found = np.asarray(values)
    if found.ndim != 3 or len(found) > most:
        raise RecordError(
            f"routed_experts: expected [tokens, layers, experts of a token] of at most {most} tokens, "
            f"found the shape {list(found.shape)}"
        )
    if found.dtype not in (np.uint8, np.uint16):
        if found.dtype.kind not in "iu" or (found.size and not 0 <= found.min() <= found.max() <= 0xFFFF):
            raise RecordError(f"routed_experts: expected integers from 0 to {0xFFFF}, found {found.dtype}")
        found = found.astype(np.uint16 if found.size and found.max() > 0xFF else np.uint8)
    experts: Experts = read_only(found)
    return experts


def experts_to_text(experts: Experts) -> str:
    """As vLLM writes them: the file format of numpy, in base64."""
    file = io.BytesIO()
    np.save(file, experts, allow_pickle=False)
    return base64.b64encode(file.getbuffer()).decode("ascii")


def experts_from_text(text: str) -> Experts:
    """The inverse of `experts_to_text`.

    Raises:
        ValueError: the text is no such file.
    """
    try:
        found = np.load(io.BytesIO(base64.b64decode(text, validate=True)), allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise ValueError(f"routed_experts: no array as base64 ({error})") from None
    if found.ndim != 3 or found.dtype not in (np.uint8, np.uint16):
        raise ValueError(
            f"routed_experts: expected [tokens, layers, experts of a token] of uint8 or uint16, found "
            f"{list(found.shape)} of {found.dtype}"
        )
    experts: Experts = found
    return experts


def same_routing(one: RoutedExperts | None, other: RoutedExperts | None, count: int) -> int:
    """How many of the first `count` tokens of two sequences were computed by the same experts, from the start; what is
    known of one and not of the other is not the same.

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
