"""A packer of the user's own is named by its import path, and tried on a small copy of the model before it is used."""

from __future__ import annotations

from pathlib import Path

import pytest

from e2e.tiny_runs import build_tiny_model, workplace
from verbatim.config import load_config
from verbatim.core.errors import ComponentError, ConfigError, ModelError
from verbatim.models.head import CausalLM
from verbatim.models.loading import load_model
from verbatim.run.tables import component_tables
from verbatim.trainer.model_check import packing_for
from verbatim.trainer.packing import find_packer, pack_rows

MINE = """
import dataclasses

import numpy as np

from verbatim.trainer.packing import pack_rows, pack_tree


def pack(samples, *, micro_batch_tokens, keep_whole):
    return pack_tree(samples, micro_batch_tokens=micro_batch_tokens, keep_whole=keep_whole)


def shifted(samples, *, micro_batch_tokens, keep_whole):
    packed = pack_rows(samples, micro_batch_tokens=micro_batch_tokens, keep_whole=keep_whole)
    return [dataclasses.replace(m, position_ids=(np.asarray(m.position_ids) * 3).astype(np.int32)) for m in packed]


def short(samples, *, micro_batch_tokens):
    return []
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    folder = build_tiny_model(tmp_path_factory.mktemp("packer") / "model")
    return CausalLM(load_model(folder, dtype="float32", device="cpu"))


def test_a_packer_with_the_right_gradient_is_taken_and_one_with_another_is_refused(model: CausalLM, tmp_path: Path):
    with workplace(tmp_path, {"my_packers": MINE}):
        assert packing_for(model, "my_packers.pack") == "my_packers.pack"
        with pytest.raises(ModelError, match=r"cannot be packed by my_packers\.shifted: in a small copy, .*differ"):
            packing_for(model, "my_packers.shifted")
        assert find_packer("rows") is pack_rows
        with pytest.raises(ComponentError, match="has no 'pakc'; did you mean \"pack\""):
            find_packer("my_packers.pakc")


@pytest.mark.parametrize(
    ("packing", "expected"),
    [
        (
            "tre",
            "trainer.packing: there is no packer 'tre'; did you mean \"tree\"? There are auto, rows, tree; or "
            'import your own: "my_module.name"',
        ),
        ("my_packers.short", 'trainer.packing.keep_whole: unknown parameter "keep_whole"'),
        ("my_packers.pakc", "trainer.packing: my_packers ("),
    ],
)
def test_a_packer_that_cannot_be_called_is_refused_when_the_file_is_loaded(tmp_path: Path, packing: str, expected: str):
    with workplace(tmp_path, {"my_packers": MINE}):
        Path("run.toml").write_text('[model]\nname = "m"\n[[orchestrator.train.env]]\nid = "guess_number"\n')
        with pytest.raises(ConfigError) as refused:
            load_config("run.toml", ["--trainer.packing", packing], component_tables())
        assert expected in str(refused.value)
