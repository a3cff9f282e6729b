import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from trainer.trainer_helpers import VOCAB, write_model


def write_llama(folder, *, tied):
    """A random Llama of two layers with grouped heads, whose weights make context matter."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        initializer_range=0.15,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


WRITE = {
    "qwen3": write_model,
    "qwen3_sliding_untied": lambda folder: write_model(folder, sliding_window=7, tied=False),
    "llama_untied": lambda folder: write_llama(folder, tied=False),
    "llama_tied": lambda folder: write_llama(folder, tied=True),
}


@pytest.fixture(scope="session", params=list(WRITE))
def model(request, tmp_path_factory):
    """The folder of a small model."""
    return WRITE[request.param](tmp_path_factory.mktemp(request.param))
