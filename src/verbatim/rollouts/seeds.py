"""Derives seeds as a pure function of their purpose, so that a resumed run draws what it would have drawn."""

from __future__ import annotations

import hashlib


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from the run's seed, the example, the sample, the turn, ...

    The parts are hashed with their types and lengths, so `(1, 23)` and `(12, 3)` differ.
    """
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
