"""Finds a model's files in a local folder, a folder made by `verbatim models get`, the hub's cache, or on the hub."""

from __future__ import annotations

import functools
import json
import logging
import os
import time
from pathlib import Path
from typing import Any, cast

from verbatim.core.errors import ModelError
from verbatim.core.texts import nearest
from verbatim.models.catalog import MODELS, folder_of

logger = logging.getLogger(__name__)

ADAPTER_CONFIG = "adapter_config.json"
"""The file in which `peft` describes an adapter."""
_TIMEOUTS = (5.0, 10.0)
"""Timeout in seconds of each attempt to reach the hub. `transformers` has its own timeouts for downloads."""


def is_adapter(name: str | Path) -> bool:
    """True for a folder with a `peft` adapter instead of a whole model."""
    folder = Path(name).expanduser()
    try:
        return (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").is_file()
    except OSError:  # the code that opens an invalid path reports it
        return False


def base_of(folder: str | Path) -> str:
    """The folder or hub id of an adapter's base model.

    Raises:
        ModelError: the adapter's configuration does not name the base model.
    """
    return str(_adapter_setting(folder, "base_model_name_or_path"))


def rank_of(folder: str | Path) -> int:
    """The rank of an adapter.

    Raises:
        ModelError: the adapter's configuration does not contain the rank.
    """
    return int(_adapter_setting(folder, "r"))


def scale_of(folder: str | Path) -> float:
    """The scale of an adapter, alpha / r.

    Raises:
        ModelError: the adapter's configuration lacks alpha or r.
    """
    return float(_adapter_setting(folder, "lora_alpha")) / rank_of(folder)


def _adapter_setting(folder: str | Path, key: str) -> Any:
    path = Path(folder).expanduser() / ADAPTER_CONFIG
    try:
        return json.loads(path.read_text(encoding="utf-8"))[key]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{path} does not have the {key} of an adapter: {error!r}") from error


def find_source(name: str | Path) -> str:
    """Resolve a folder, a catalog name or a hub id to the argument for `from_pretrained`: a folder or a hub id.

    A cached model is used if the hub cannot be reached, or if HF_HUB_OFFLINE is set. The hub is queried once per
    process and model, for at most about 16 seconds.

    Raises:
        ModelError: there is no such folder, and no such model that can be accessed on the hub or in the cache.
    """
    name = folder_of(str(name))
    folder = Path(name).expanduser()
    if folder.is_dir():
        if is_adapter(folder):
            raise ModelError(
                f"model folder {name!r} holds an adapter ({ADAPTER_CONFIG}), not a whole model; train "
                f"with trainer.lora.merge_final = true, and use {str(folder / 'merged')!r}"
            )
        if not (folder / "config.json").is_file():
            raise ModelError(
                f"model folder {name!r} has no config.json; expected a folder that `model.save_pretrained` wrote"
            )
        return str(folder)
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or os.path.exists(name):
        raise ModelError(
            f"there is no model folder {name!r}; set model.name to a folder in Hugging Face format, to a "
            'hub id such as "Qwen/Qwen3-0.6B", or use a [model.build] table'
        )
    if "/" not in name:
        logger.warning("there is no folder %r here; treating it as a hub id", name)
    return _on_hub(name)


@functools.cache
def _on_hub(name: str) -> str:
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    # The errors of the HTTP library that the hub's client uses.
    network = cast("tuple[type[Exception], ...]", HfHubHTTPError.__bases__)
    near = nearest(name, MODELS).removeprefix("; ")
    taken = f"there is no folder {name!r} here{f' ({near})' if near else ''}, so it was treated as a hub id"
    hub = constants.ENDPOINT
    try:
        url = hf_hub_url(name, "config.json")
        cached = try_to_load_from_cache(name, "config.json")
    except HFValidationError as error:
        raise ModelError(f"{taken}; but {name!r} is not a valid hub id: {error}") from None
    reason = ""
    for number, seconds in enumerate(_TIMEOUTS):
        if number:
            time.sleep(1)
        try:
            get_hf_file_metadata(url, timeout=seconds)
        except GatedRepoError:
            reason = f"it is gated on {hub}: request access on its page, then type `hf auth login`"
        except RepositoryNotFoundError:
            reason = f"{hub} has no such model for you; check the id, or type `hf auth login` for a private model"
        except EntryNotFoundError:
            raise ModelError(f"{taken}; the model with that id on {hub} has no config.json") from None
        except HfHubHTTPError:
            return name  # another status, for example of a busy hub, does not mean that the model is missing
        except OfflineModeIsEnabled:
            reason = f"HF_HUB_OFFLINE is set, so {hub} was not queried"
        except network as error:
            reason = f"{hub} cannot be reached ({error})"
            continue
        else:
            return name
        break
    if isinstance(cached, str):
        logger.warning("model %r is loaded from the cache, because %s", name, reason)
        return str(Path(cached).parent)
    raise ModelError(
        f"{taken}; it is not in the cache {constants.HF_HUB_CACHE}, and {reason}. Set model.name to a "
        "folder in Hugging Face format to do without the hub"
    )
