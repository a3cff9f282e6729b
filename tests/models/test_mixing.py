"""A model that mixes tokens otherwise than by attention is refused by name, or computes its rows one by one."""

import logging

import pytest
import torch
from torch import nn
from transformers.models.gpt2.modeling_gpt2 import GPT2Model
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from models.other_models import VOCAB, write_other
from verbatim.core.errors import ModelError
from verbatim.models.attention import ATTENTION
from verbatim.models.head import CausalLM
from verbatim.models.loading import load_model


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("mamba", "MambaForCausalLM mixes tokens through linear_attention layers"),
        ("bamba", "BambaForCausalLM mixes tokens through linear_attention layers"),
        ("lfm2", "Lfm2ForCausalLM mixes tokens through conv layers"),
        ("qwen3_next", "Qwen3NextForCausalLM mixes tokens through linear_attention layers"),
        ("bloom", "BloomForCausalLM mixes tokens through attention that cannot be replaced"),
    ],
)
def test_what_plans_cannot_describe_is_refused_by_name_or_kept_as_it_is(name, what, tmp_path, caplog):
    write_other(name, tmp_path)
    with pytest.raises(ModelError, match=what) as refused:
        load_model(tmp_path)
    assert 'trainer.packing = "rows"' in str(refused.value)
    with caplog.at_level(logging.INFO, logger="verbatim.models.loading"):
        model = load_model(tmp_path, only_attention=False)
    (message,) = (record.message for record in caplog.records if record.name == "verbatim.models.loading")
    assert message.startswith(what)
    assert model.config._attn_implementation != ATTENTION


@pytest.mark.parametrize("name", ["qwen3", "llama", "gpt2", "gemma2", "gpt_oss"])
def test_attention_alone_follows_plans(name, tmp_path):
    model = load_model(write_other(name, tmp_path))
    assert model.config._attn_implementation == ATTENTION
    assert not CausalLM(model).rows_alone


@pytest.fixture
def looks_back(monkeypatch):
    """Feed-forward layers that see the token before."""
    forward = Qwen3MLP.forward
    monkeypatch.setattr(Qwen3MLP, "forward", lambda self, x: forward(self, x + nn.functional.pad(x, (0, 0, 1, -1))))


@pytest.fixture
def counts_by_itself(monkeypatch):
    """Positions that go on where a row begins."""
    forward = GPT2Model.forward

    def counted(
        self, input_ids, past_key_values=None, attention_mask=None, token_type_ids=None, position_ids=None, **inputs
    ):
        return forward(self, input_ids, past_key_values, attention_mask, token_type_ids, **inputs)

    monkeypatch.setattr(GPT2Model, "forward", counted)


@pytest.mark.parametrize(("name", "fault"), [("qwen3", "looks_back"), ("gpt2", "counts_by_itself")])
def test_a_model_that_mixes_rows_unsaid_is_found_out(name, fault, tmp_path, request):
    """Its configuration says attention."""
    write_other(name, tmp_path)
    request.getfixturevalue(fault)
    with pytest.raises(ModelError, match="mixes tokens through something besides its attention layers"):
        load_model(tmp_path)


@pytest.mark.parametrize("name", ["mamba", "bamba", "lfm2", "qwen3_next"])
def test_rows_of_such_a_model_do_not_see_each_other(name, tmp_path):
    lm = CausalLM(load_model(write_other(name, tmp_path), only_attention=False))
    assert lm.rows_alone
    ids = torch.randint(0, VOCAB, (12,), generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([*range(5), *range(4), *range(3)])
    together = lm.hidden(ids, positions, None)
    for start, end in ((0, 5), (5, 9), (9, 12)):
        alone = lm.model.base_model(input_ids=ids[None, start:end], use_cache=False).last_hidden_state[0]
        torch.testing.assert_close(together[start:end], alone, rtol=0, atol=0)
