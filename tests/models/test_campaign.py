"""A part of `benchmarks/model_campaign.py`: each model is accepted and right, or refused by name; nothing else."""

import pytest

from models.architectures import architectures
from models.verdict import judge

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
}
"""What the trainer packs, and whether the embedded sampler takes it."""


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPECTED)
def test_a_model_is_right_or_refused(name, tmp_path):
    (architecture,) = (a for a in architectures() if str(a) == name)
    verdict = judge(architecture, tmp_path / "model")
    assert not verdict.faults
    assert (verdict.trainer, verdict.sampler) == EXPECTED[name]
    if verdict.trainer == NO or verdict.sampler == NO:
        assert any(verdict.name in reason for reason in verdict.reasons)
    if "yes" in EXPECTED[name]:
        assert {"sampled logprobs", "saved logprobs", "logprobs of tree", "gradients of tree"} <= verdict.worst.keys()


def test_every_configuration_has_a_name_of_its_own():
    names = [str(a) for a in architectures()]
    assert len(names) == len(set(names)) > 200
    assert EXPECTED.keys() <= set(names)
