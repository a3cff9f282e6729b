"""An object store in this process, with the few functions of Ray that folders go through."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np


class Lost(Exception):
    """Ray's ObjectLostError."""


class FakeRay:
    """`put`, `get` and `wait`; objects can be lost."""

    def __init__(self) -> None:
        self.exceptions = SimpleNamespace(ObjectLostError=Lost)
        self.objects: dict[int, Any] = {}

    def put(self, value: Any) -> int:
        """A copy, as in Ray."""
        self.objects[len(self.objects)] = np.array(value)
        return len(self.objects) - 1

    def get(self, reference: int) -> Any:
        """The object."""
        if reference not in self.objects:
            raise Lost(f"object {reference} is lost")
        return self.objects[reference]

    def wait(self, references: list[int], **options: Any) -> None:
        """Nothing has to be fetched."""
