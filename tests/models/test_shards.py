"""Filling a model's own rows from a folder or from the hub."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from other_models import write_other
from torch import nn
from transformers import AutoModelForCausalLM

from verbatim.models import shards


def test_of_a_model_on_the_hub_only_the_weights_that_transformers_loads_are_fetched(tmp_path, monkeypatch):
    listed = [
        "config.json",
        "consolidated.safetensors",
        "metal/model.bin",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "original/model.safetensors",
    ]
    folder, asked = write_other("llama", tmp_path), []

    def download(name: str, **patterns: Any) -> str:
        asked.append((name, list(filter_repo_objects(listed, **patterns))))
        return str(folder)

    monkeypatch.setattr(shards, "snapshot_download", download)
    found, expected = (AutoModelForCausalLM.from_pretrained(folder) for _ in range(2))
    found.get_input_embeddings().weight.data.zero_()
    shards.fill(found, "an-organisation/a-model")
    assert asked == [
        ("an-organisation/a-model", ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"])
    ]
    assert found.get_input_embeddings().weight.equal(expected.get_input_embeddings().weight)


def test_a_folder_without_weights_is_refused(tmp_path):
    with pytest.raises(shards.ModelError, match=r"contains no \*\.safetensors"):
        shards.fill(None, str(tmp_path))


def test_an_empty_model_is_empty_and_what_another_thread_builds_meanwhile_is_not(tmp_path, monkeypatch):
    built = []

    def from_config(*given, **named):
        with ThreadPoolExecutor(1) as elsewhere:
            built.append(elsewhere.submit(nn.Linear, 2, 2).result())
        return make(*given, **named)

    make = shards.AutoModelForCausalLM.from_config
    monkeypatch.setattr(shards.AutoModelForCausalLM, "from_config", from_config)
    model = shards.empty_model(str(write_other("llama", tmp_path)), torch.float32)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert {buffer.device.type for buffer in model.buffers()} == {"cpu"}
    assert {parameter.device.type for parameter in (*built[0].parameters(), *nn.Linear(2, 2).parameters())} == {"cpu"}
