"""Every causal language model class of the installed `transformers` is accepted and right, or refused by name; nothing
else. The whole is what `benchmarks/model_campaign.py` documents."""

import dataclasses
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from campaigns import sized
from models import verdict
from models.architectures import ABSENT, architectures
from models.verdict import judge
from pinned import is_pinned
from verbatim.trainer.packing import PACKERS, pack_tree

TREES, ROWS, NO = "trees", "rows", "refused"
EXPECTED = {
    "llama one key/value head": (TREES, "yes"),
    "llama dynamic rope": (NO, NO),
    "qwen2 use_sliding_window": (TREES, "yes"),
    "qwen3 mixed layer_types": (TREES, "yes"),
    "gpt2 untied": (TREES, "yes"),
    "gpt_neox": (TREES, "yes"),
    "deepseek_v3": (TREES, "yes"),
    "granite multipliers": (TREES, "yes"),
    "mixtral sliding_window": (TREES, "yes"),
    "diffllama": (TREES, NO),
    "qwen2_moe use_sliding_window": (ROWS, NO),
    "doge": (NO, NO),
    "gpt_oss": (TREES, "yes"),
    "bloom": (ROWS, NO),
    "bert-generation": (NO, NO),
    "bert-generation is_decoder": (TREES, "yes"),
    "gemma3_text use_bidirectional_attention": (NO, NO),
    "phi3 longrope": (NO, NO),
    "mpt": (ROWS, NO),
    "opt": (TREES, "yes"),
}
"""What the trainer packs, and whether the embedded sampler takes it."""
PARTS = sized(2, 12)
"""Tests that the models are dealt to, which may run at the same time."""
ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "benchmarks/notes/models.md"


def documented():
    """What benchmarks/notes/models.md says of each configuration: its class, trainer and sampler."""
    rows = re.findall(r"^\| ([^|]+) \| (\w*) \| ([\w ]+) \| ([\w ]+) \|", DOCUMENT.read_text(encoding="utf-8"), re.M)
    return {name: (trainer, sampler) for name, _, trainer, sampler in rows if trainer != "trainer"}


def complaints(architecture, folder):
    """What is wrong with a configuration's verdict, or with what is written of it."""
    found = judge(architecture, folder / "model")
    shutil.rmtree(folder, ignore_errors=True)
    sides = (found.trainer, found.sampler)
    wrong = list(found.faults)
    if sides != documented()[found.architecture]:
        wrong.append(f"{sides}, but the documentation says {documented()[found.architecture]}")
    if sides != EXPECTED.get(found.architecture, sides):
        wrong.append(f"{sides}, expected {EXPECTED[found.architecture]}")
    if NO in sides and not any(found.name in reason for reason in found.reasons):
        wrong.append(f"refused, but not by name: {found.reasons}")
    measured = {"sampled logprobs", "saved logprobs", "logprobs of tree", "gradients of tree"}
    if sides == (TREES, "yes") and not measured <= found.worst.keys():
        wrong.append(f"{measured - found.worst.keys()} were not measured")
    return wrong


@pytest.mark.slow
@pytest.mark.campaign
@pytest.mark.parametrize("part", range(PARTS))
def test_a_model_is_right_or_refused(part, tmp_path, campaign):
    row, wrong = campaign("model classes"), {}
    chosen = sized([a for a in architectures() if str(a) in EXPECTED], architectures())
    for number, architecture in enumerate(chosen[part::PARTS]):
        with verdict.quiet():
            found = complaints(architecture, tmp_path / str(number))
        row.add(wrong=bool(found))
        if found:
            wrong[str(architecture)] = found
    assert wrong == {}


def far_apart(samples, *, micro_batch_tokens, keep_whole):
    """Trees whose tokens have three times their positions."""
    packed = pack_tree(samples, micro_batch_tokens=micro_batch_tokens, keep_whole=keep_whole)
    return [dataclasses.replace(m, position_ids=(np.asarray(m.position_ids) * 3).astype(np.int32)) for m in packed]


@pytest.mark.slow
def test_wrong_positions_are_found(tmp_path, monkeypatch):
    """The campaign can fail."""
    monkeypatch.setattr(verdict, "PACKERS", {**PACKERS, "tree": far_apart})
    (architecture,) = (a for a in architectures() if str(a) == "llama one key/value head")
    faults = complaints(architecture, tmp_path)
    assert {fault.split(" differ")[0] for fault in faults} == {
        f"{what} of tree{how}" for what in ("logprobs", "gradients") for how in ("", " one at a time")
    }


def test_every_configuration_has_a_name_of_its_own_and_is_documented():
    names = [str(a) for a in architectures()]
    assert len(names) == len(set(names)) > 200
    assert EXPECTED.keys() <= set(names) == documented().keys() - ABSENT


def test_the_pinned_transformers_has_every_model_type():
    """So nothing is left out by `ABSENT` but with another release (`make test-versions`)."""
    assert not (ABSENT and is_pinned("transformers"))


def test_the_page_lists_each_model_type_and_each_flag_that_changes_what_takes_it():
    text = (ROOT / "docs/models.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (trees|rows|refused|not made) \| (yes|refused|not made) \| (.+) \|$", text, re.M)
    listed = [(name, (trainer, sampler)) for trainer, sampler, names in rows for name in names.split(", ")]
    found = documented()
    defaults = {name: sides for name, sides in found.items() if " " not in name}
    flags = {name: sides for name, sides in found.items() if " " in name and sides != found[name.split()[0]]}
    assert dict(listed) == {**defaults, **{f"{name.replace(' ', ' (', 1)})": sides for name, sides in flags.items()}}
    assert len(listed) == len(defaults) + len(flags) > 150
