"""Finds the models that `verbatim eval` evaluates: a folder, a hub id, a run's checkpoint, or a model behind an API."""

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
"""A model behind an API: "NAME@http://..."."""
_READ = 1 << 16
"""Number of bytes read from the start and from the end of each file for the fingerprint. A few bytes are enough to tell
two checkpoints apart, because training changes every tensor."""


@dataclass(frozen=True, kw_only=True)
class EvalModel:
    """A model to evaluate."""

    label: str
    """The model as typed on the command line."""
    source: str = ""
    """A folder or hub id; "" if the model is behind an API."""
    api: OpenAI | None = None
    """The server, and the model's name on it."""
    step: int = 0
    """Number of steps for which the model was trained; 0 if unknown."""
    fingerprint: str = ""
    """Distinguishes the model's weights from other weights under the same name."""

    @property
    def where(self) -> str:
        """The model as shown in reports: the folder that a checkpoint's name stands for, or the API's model and URL."""
        return self.source if self.api is None else f"{self.api.model} at {self.api.base_url}"


def find_models(typed: Sequence[str], make_api: Callable[[str, str], OpenAI]) -> list[EvalModel]:
    """The models, in the order given.

    Args:
        typed: One string per model. "FOLDER", a hub id, or a name listed by `verbatim models`; "RUN", a run folder, for
            its trained model or else its newest checkpoint; "RUN@latest", "RUN@best" or "RUN@120" for a checkpoint;
            "NAME@URL" for a model behind an OpenAI-compatible server.
        make_api: Makes a server's settings from the model's name and the URL.

    Raises:
        UsageError: a run, checkpoint or URL is invalid, or a model is given twice.
        ModelError: the catalog has no such model.
    """
    found = [_find(text, make_api) for text in typed]
    places: dict[tuple[str, str], str] = {}
    for model in found:
        first = places.setdefault((model.where, model.fingerprint), model.label)
        if first is not model.label:  # compare by identity: the same text given twice is a duplicate as well
            raise UsageError(
                f"--model {model.label} is the same model as --model {first} ({model.where}); leave one of them out"
            )
    return found


def _find(text: str, make_api: Callable[[str, str], OpenAI]) -> EvalModel:
    """The model that one string names."""
    behind_api = _API.fullmatch(text)
    if behind_api is not None:
        api = make_api(behind_api["model"], behind_api["url"])
        return EvalModel(label=text, api=api, fingerprint=text)
    folder, _, which = text.rpartition("@")
    if folder and not Path(text).exists():
        if not holds_run(Path(folder)):
            found = "not a run" if Path(folder).is_dir() else "not a folder"
            raise UsageError(
                f"--model {text}: {folder} is {found}; expected a run folder "
                "before @, and latest, best or a step after it, or NAME@http://... for an "
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
    """The trained model of a run. The step comes from the run's summary: a run that has been resumed since then has
    newer checkpoints, but `final` is replaced only when the run finishes again."""
    summary = run / "summary.json"
    steps = read_record(summary).get("steps") if summary.is_file() else None
    if not isinstance(steps, int):
        steps = max(CheckpointStore(run / "checkpoints", read_only=True).steps(), default=0)
    return EvalModel(label=text, source=str(run / "final"), step=steps, fingerprint=fingerprint(run / "final"))


def fingerprint(folder: Path) -> str:
    """A short digest of a model's files: their names, sizes, first and last bytes.

    Raises:
        UsageError: the folder does not exist.
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
