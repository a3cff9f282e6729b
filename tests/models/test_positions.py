"""Positions that move with the longest sequence of a pass are refused where they would, and taken where they stay."""

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from verbatim.core.errors import ModelError
from verbatim.inference.embedded.whole_sequence import sequence_logprobs
from verbatim.models import positions
from verbatim.models.head import CausalLM
from verbatim.models.loading import load_model
from verbatim.models.positions import fixed_length, refuse_moving_positions

ROPES = {
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 24,
        "short_factor": [1.0] * 8,
        "long_factor": [3.0] * 8,
    },
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    "yarn": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16},
    "default": {"rope_type": "default", "rope_theta": 1e4},
}


@pytest.fixture
def model(tmp_path):
    def make(rope, max_position_embeddings=96):
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=61,
            hidden_size=64,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=max_position_embeddings,
            rope_parameters=ROPES[rope],
            initializer_range=0.15,
        )
        LlamaForCausalLM(config).save_pretrained(tmp_path)
        return CausalLM(load_model(tmp_path))

    return make


@pytest.mark.parametrize(("rope", "most"), [("longrope", 96), ("dynamic", 24)])
def test_up_to_the_first_length_they_stay_and_beyond_it_the_setting_is_named(rope, most, model):
    lm = model(rope, most)
    assert fixed_length(lm.config) == 24
    refuse_moving_positions(lm, 24)
    with pytest.raises(ModelError, match=f"LlamaForCausalLM .'{rope}' rope. .* set orchestrator.seq_len to at most 24"):
        refuse_moving_positions(lm, 25)


@pytest.mark.parametrize("rope", ["yarn", "default"])
def test_scalings_that_do_not_look_at_the_pass_are_taken_at_any_length(rope, model):
    lm = model(rope)
    assert fixed_length(lm.config) is None
    refuse_moving_positions(lm, 10_000)


def test_a_configuration_that_does_not_say_so_is_found_out(model, monkeypatch):
    monkeypatch.setattr(positions, "fixed_length", lambda config: None)
    lm = model("longrope")
    refuse_moving_positions(lm, 24)
    with pytest.raises(ModelError, match="changes for all tokens"):
        refuse_moving_positions(lm, 25)


def test_a_scored_sequence_is_refused_too(model):
    lm = model("longrope")
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, 61, 30))
    assert sequence_logprobs(lm, ids[:24], 1.0)[1:].isfinite().all()
    with pytest.raises(ModelError, match="'longrope' rope"):
        sequence_logprobs(lm, ids, 1.0)
