"""The router of every mixture of experts has the gradient that plain `transformers` gives it, in float64.

`test_campaign` compares all parameters, but a router's gradient is small beside the largest one; here it is compared
with its own norm.
"""

import inspect
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from campaigns import sized
from models.architectures import ABSENT, Architecture, architectures, tiny_model
from models.verdict import _eager_experts, branching_samples, packed_gradient, plain, plain_gradient
from verbatim.models.experts import router_modules
from verbatim.models.head import CausalLM
from verbatim.models.loading import load_model

TREES = (
    "afmoe", "aria_text", "axk1", "beam", "cohere2_moe", "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5_moe",
    "exaone_moe", "flex_olmo", "flint", "glm4_moe", "glm4_moe_lite", "gpt_oss", "granitemoe", "granitemoe_swa",
    "granitemoeshared", "hunyuan_v1_moe", "hy_v3", "jetmoe", "kolibri1", "laguna", "longcat_flash", "mellum",
    "minimax_m2", "minimax_m3_vl_text", "mixtral", "olmoe", "phimoe", "qwen2_moe", "qwen2_moe some layers dense",
    "qwen3_moe", "solar_open",
)  # fmt: skip
ROWS = (
    "axk2", "bailing_hybrid", "deepseek_v32", "deepseek_v4", "dots3_note", "dots3_note_text", "glm_moe_dsa",
    "granitemoehybrid", "hy_v4", "jamba", "kimi_linear", "lfm2_moe", "mimo_v2_flash", "minimax", "nemotron_h",
    "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next", "zaya",
)  # fmt: skip
LEFT_OUT = {"gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text", "inkling2_text"}
"""Dense at the defaults of their configurations; the last one does not compute in float64."""
WITHOUT = {
    "hunyuan_v1_moe": "by default one expert for each token, whose normalised weight is 1",
    "phimoe": "outside of training mode, a weight is 1 wherever no two logits are almost the same",
}
"""Routers whose weights are constant here, in plain `transformers` too."""
FAST = ("qwen3_moe", "gpt_oss", "deepseek_v3")
TOLERANCE = 1e-5
"""Norms and routers compute in float32."""


def named(name: str) -> Architecture:
    return next(a for a in architectures() if str(a) == name)


def present(names):
    """Those that the installed `transformers` has."""
    return [name for name in names if name not in ABSENT]


def router_names(model):
    """Parameters of routers; of what has none apart, whatever is called so."""
    routers = router_modules(model)
    own = {id(p) for router in routers for p in router.parameters()}
    return {name for name, p in model.named_parameters() if id(p) in own or (not routers and "router" in name)}


SHORT = (*FAST, *TREES[1::3], *ROWS[1::3])
PARTS = sized(2, 8)
"""Tests that the models are dealt to, which may run at the same time."""


def complaints(name, folder, spoil=None):
    """The routers whose gradient is not that of plain `transformers`; `spoil` changes each gradient of ours."""
    tiny_model(named(name)).save_pretrained(folder)
    samples = branching_samples(np.random.default_rng(0))
    own = plain(folder, torch.float64)
    _, expected = plain_gradient(own, samples)
    model = load_model(folder, only_attention=False).to(torch.float64)
    _eager_experts(model, torch.float64)
    lm = CausalLM(model)
    assert not lm.rows_alone or name in ROWS
    routers = router_names(model)
    assert routers
    if spoil is not None:
        for parameter in (p for router, p in model.named_parameters() if router in routers):
            parameter.register_hook(spoil)
    wrong = []
    for packing in ["rows"] if name in ROWS else ["rows", "tree"]:
        _, found = packed_gradient(lm, [samples], packing, samples)
        assert [router for router in routers if router.endswith("weight") and router in found]
        for router in routers & (found.keys() | expected.keys()):
            norm = expected[router].norm()
            if not (norm > 1e-6 or name in WITHOUT):
                wrong.append(f"{router} of {name} has no gradient")
            if not (found[router] - expected[router]).norm() <= TOLERANCE * norm:
                wrong.append(f"{router} of {name} as {packing}")
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("name", FAST)
def test_a_router_has_the_gradient_of_transformers(name, tmp_path):
    assert complaints(name, tmp_path) == []


@pytest.mark.slow
@pytest.mark.campaign
@pytest.mark.parametrize("part", range(PARTS))
def test_every_router_has_the_gradient_of_transformers(part, tmp_path, campaign):
    row, wrong = campaign("router gradients"), []
    for name in present(sized(SHORT, TREES + ROWS))[part::PARTS]:
        found = complaints(name, tmp_path / name)
        row.add(wrong=bool(found))
        wrong += found
    assert wrong == []


def test_a_router_whose_gradient_is_a_ten_thousandth_too_large_is_found(tmp_path):
    """The campaign can fail."""
    assert complaints("qwen3_moe", tmp_path, spoil=lambda gradient: gradient * 1.0001)


@pytest.mark.slow
def test_every_mixture_of_experts_that_is_trained_is_tried():
    """Those in benchmarks/notes/models.md whose class says where its router logits are."""
    document = (Path(__file__).parents[2] / "benchmarks/notes/models.md").read_text(encoding="utf-8")
    trained = re.findall(r"^\| (\w+) \| (\w+) \| (trees|rows) \|", document, re.MULTILINE)
    routed = {
        name: packing
        for name, kind, packing in trained
        if name not in ABSENT and '"router_logits": ' in source_of(kind)
    }
    tried = {name: "trees" for name in present(TREES) if " " not in name} | {name: "rows" for name in present(ROWS)}
    assert {name: packing for name, packing in routed.items() if name not in LEFT_OUT} == tried


def source_of(kind: str) -> str:
    return inspect.getsource(sys.modules[getattr(transformers, kind).__module__])
