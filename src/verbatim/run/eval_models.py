"""Finds the models that `verbatim eval` is asked to measure: a folder, a hub id, a run's checkpoint, or an API."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from verbatim.core.errors import UsageError
from verbatim.inference.chat.client import OpenAI
from verbatim.logs.checkpoints import CheckpointStore, find_checkpoint, read_record
from verbatim.logs.checkpoints.hold import holds_run
from verbatim.models.catalog import folder_of

_API = re.compile(r"(?P<model>.+)@(?P<url>https?://.+)")
_READ = 1 << 16
"""Bytes of the beginning and of the end of a file that tell it from another: training changes every tensor."""


@dataclass(frozen=True, kw_only=True)
class EvalModel:
    """One model to measure."""

    label: str
    """As it was typed, for people."""
    source: str = ""
    """A folder or hub id; "" where it is behind an API."""
    api: OpenAI | None = None
    """The server and the model's name there."""
    step: int = 0
    """Steps that it was trained for, where a checkpoint says so."""
    fingerprint: str = ""
    """Tells its weights from others of the same name."""

    @property
    def where(self) -> str:
        """What was measured, for reports: the folder behind a checkpoint's name."""
        return self.source if self.api is None else f"{self.api.model} at {self.api.base_url}"


def find_models(typed: Sequence[str], make_api: Callable[[str, str], OpenAI]) -> list[EvalModel]:
    """The models, in order.

    Args:
        typed: "FOLDER", a hub id or a name of `verbatim models`; "RUN", a run's folder, for its trained model or else
            its newest checkpoint; "RUN@latest", "RUN@best" or "RUN@120" for a checkpoint; "NAME@URL" for a model
            behind an OpenAI-compatible server.
        make_api: A server's settings, from the model's name and the address.

    Raises:
        UsageError: no such run, checkpoint or address, or one model twice.
        ModelError: no such model of the catalog.
    """
    found = [_find(text, make_api) for text in typed]
    places: dict[tuple[str, str], str] = {}
    for model in found:
        first = places.setdefault((model.where, model.fingerprint), model.label)
        if first is not model.label:
            raise UsageError(
                f"--model {model.label} is the same model as --model {first} ({model.where}); leave one of them out"
            )
    return found


def _find(text: str, make_api: Callable[[str, str], OpenAI]) -> EvalModel:
    behind_api = _API.fullmatch(text)
    if behind_api is not None:
        api = make_api(behind_api["model"], behind_api["url"])
        return EvalModel(label=text, api=api, fingerprint=text)
    folder, _, which = text.rpartition("@")
    if folder and not Path(text).exists():
        if not holds_run(Path(folder)):
            found = "no run" if Path(folder).is_dir() else "no folder"
            raise UsageError(
                f"--model {text}: {folder} is {found}; expected the folder of a run "
                "before @, and latest, best or a step behind it, or NAME@http://... for an "
                "API"
            )
        return _checkpoint(text, Path(folder), which)
    if holds_run(Path(text)):
        if not (Path(text) / "final").is_dir():
            return _checkpoint(text, Path(text), "latest")
        return _final(text, Path(text))
    source = folder_of(text)
    is_folder = Path(source).expanduser().is_dir()
    return EvalModel(
        label=text, source=source, fingerprint=fingerprint(Path(source).expanduser()) if is_folder else source
    )


def _checkpoint(text: str, run: Path, which: str) -> EvalModel:
    if which == "final":
        return _final(text, run)
    found = find_checkpoint(run, which)
    weights = found.folder / "weights"
    return EvalModel(label=text, source=str(weights), step=found.step, fingerprint=fingerprint(weights))


def _final(text: str, run: Path) -> EvalModel:
    """The trained model. Its summary says of which step it is: a run that was resumed since then has newer checkpoints,
    and this model until it ends again."""
    summary = run / "summary.json"
    steps = read_record(summary).get("steps") if summary.is_file() else None
    if not isinstance(steps, int):
        steps = max(CheckpointStore(run / "checkpoints", read_only=True).steps(), default=0)
    return EvalModel(label=text, source=str(run / "final"), step=steps, fingerprint=fingerprint(run / "final"))


def fingerprint(folder: Path) -> str:
    """A short digest of a model's files: their names, sizes, beginnings and ends.

    Raises:
        UsageError: there is no such folder.
    """
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder}")
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.suffix in (".safetensors", ".bin", ".json", ".gguf", ".jinja"):
            with path.open("rb") as file:
                size = file.seek(0, 2)
                file.seek(0)
                digest.update(f"{path.name} {size}\n".encode() + file.read(_READ))
                file.seek(max(0, size - _READ))
                digest.update(file.read(_READ))
    return digest.hexdigest()[:16]
