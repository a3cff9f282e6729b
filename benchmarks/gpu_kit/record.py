"""Runs checks and records each one: passed, failed, or NOT RUN, with its figures.

A check is given `Findings` and puts its figures there. It fails by a figure above its bound or by any exception; where
it cannot run it raises `NotRun` with the reason, which is never counted as passed.
"""

from __future__ import annotations

import gc
import importlib.metadata
import json
import math
import platform
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .setting import Setting

PASSED, FAILED, NOT_RUN = "passed", "failed", "NOT RUN"
EXIT_OF = {PASSED: 0, FAILED: 1, NOT_RUN: 3}
"""Exit status of a part by the worst of its checks."""
_TRACE = 3000
"""Characters of a traceback that are kept: its end says what happened."""


class NotRun(Exception):
    """Raised by a check that cannot run here; its text is the reason."""


@dataclass
class Findings:
    """What a check found."""

    figures: dict[str, Any] = field(default_factory=dict)
    """By name; a comparison is `{"error": ..., "bound": ...}`."""
    wrong: list[str] = field(default_factory=list)
    """A sentence for each figure outside of its bound."""

    def at_most(self, name: str, error: float, bound: float) -> None:
        """Record a comparison. NaN is above every bound."""
        self.figures[name] = {"error": float(f"{error:.3g}"), "bound": float(f"{bound:.3g}")}
        if not error <= bound:
            self.wrong.append(f"{name}: {error:.3g}, expected at most {bound:.3g}")

    def holds(self, name: str, is_true: bool) -> None:
        """Record a statement that must be true."""
        self.figures[name] = bool(is_true)
        if not is_true:
            self.wrong.append(f"{name} is false")


@dataclass(frozen=True, kw_only=True)
class Check:
    """One claim, small enough to be run by itself."""

    name: str
    """Unique in its part."""
    about: str
    """The claim, and what it is compared with."""
    run: Callable[[Setting, Findings], None]
    """Fills the findings."""
    seconds: float = 60.0
    """Its time limit on a card."""


def run_check(check: Check, setting: Setting) -> dict[str, Any]:
    """The record of one check."""
    findings, began = Findings(), time.perf_counter()
    status, told = PASSED, {}
    try:
        check.run(setting, findings)
    except NotRun as reason:
        status, told = NOT_RUN, {"reason": str(reason)}
    except Exception as error:  # noqa: BLE001  (a fault of any kind is a result, and the other checks go on)
        status, told = FAILED, {"error": f"{type(error).__name__}: {error}"[:_TRACE]}
        told["traceback"] = traceback.format_exc()[-_TRACE:]
    if findings.wrong and status != FAILED:
        status, told = FAILED, {"error": "; ".join(findings.wrong)}
    gc.collect()  # the next check begins with the memory of this one given back
    return record_of(check, status, time.perf_counter() - began, figures=findings.figures, **told)


def record_of(check: Check, status: str, seconds: float, **told: Any) -> dict[str, Any]:
    """A check's record."""
    return {"name": check.name, "about": check.about, "status": status, "seconds": round(seconds, 2), **told}


def part_record(part: str, setting: Setting, checks: Sequence[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """The record of a part: where it ran, its counts, its checks."""
    counts = {status: sum(each["status"] == status for each in checks) for status in (PASSED, FAILED, NOT_RUN)}
    return {
        "part": part,
        "status": worst(checks),
        "counts": counts,
        "seconds": round(seconds, 1),
        "tiny": setting.tiny,
        **machine(setting.device),
        "checks": list(checks),
    }


def worst(checks: Sequence[dict[str, Any]]) -> str:
    """Failed if one check failed, else NOT RUN if one did not run; a part without checks did not run either."""
    found = {each["status"] for each in checks}
    return FAILED if FAILED in found else NOT_RUN if NOT_RUN in found or not found else PASSED


def machine(device: str) -> dict[str, Any]:
    """The device by its name, and the versions that decide what is computed."""
    import torch

    def version(name: str) -> str | None:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return None

    return {
        "device": torch.cuda.get_device_name()
        if device == "cuda" and torch.cuda.is_available()
        else platform.processor() or platform.machine(),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "packages": {name: version(name) for name in ("torch", "transformers", "triton", "peft", "trl", "verbatim-rl")},
    }


def line_of(record: dict[str, Any]) -> str:
    """A check's line in the log."""
    said = record.get("reason") or record.get("error") or _shown(record.get("figures", {}))
    return f"{record['status']:8} {record['seconds']:7.1f} s  {record['name']}: {said}"


def _shown(figures: dict[str, Any]) -> str:
    return ", ".join(
        f"{name} {value['error']:.2g} (at most {value['bound']:.2g})"
        if isinstance(value, dict) and "bound" in value
        else f"{name} {_short(value)}"
        for name, value in figures.items()
    )


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) and math.isfinite(value) else str(value)


def write_json(path: Path, value: Any) -> None:
    """Write a file that is there as a whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".writing")
    draft.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    draft.replace(path)
