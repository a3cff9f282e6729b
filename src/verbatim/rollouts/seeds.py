"""Derives seeds as a pure function of their purpose, so that a resumed run samples what it would have sampled without
the interruption."""

from __future__ import annotations

import hashlib


def derive_seed(*parts: int | str) -> int:
    """Derive a 63-bit seed from parts such as the run's seed, the example, the sample and the turn.

    The parts are hashed as a tuple's `repr`, so `(1, 23)` and `(12, 3)`, or `1` and `"1"`, give different seeds.
    """
    # Not `hash()`, which differs between processes. 63 bits, so that the seed fits a signed 64-bit integer.
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
