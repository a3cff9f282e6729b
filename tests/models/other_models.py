"""Tiny random models of architectures that mix tokens otherwise than by attention, or by attention of other kinds."""

import torch
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    BloomConfig,
    Gemma2Config,
    GPT2Config,
    GptOssConfig,
    Lfm2Config,
    LlamaConfig,
    MambaConfig,
    Qwen3Config,
    Qwen3NextConfig,
)

VOCAB = 61
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def config(name):
    """The configuration of `write_other`."""
    match name:
        case "mamba":
            return MambaConfig(vocab_size=VOCAB, hidden_size=32, state_size=4, num_hidden_layers=2)
        case "bamba":
            return BambaConfig(
                **SMALL,
                attn_layer_indices=[1],
                mamba_n_heads=8,
                mamba_d_head=8,
                mamba_d_state=4,
                mamba_n_groups=1,
                mamba_chunk_size=8,
            )
        case "lfm2":
            return Lfm2Config(**SMALL, layer_types=["conv", "full_attention"])
        case "qwen3_next":
            return Qwen3NextConfig(
                **SMALL,
                head_dim=8,
                layer_types=["linear_attention", "full_attention"],
                linear_num_key_heads=2,
                linear_num_value_heads=4,
                linear_key_head_dim=8,
                linear_value_head_dim=8,
                num_experts=4,
                num_experts_per_tok=2,
                moe_intermediate_size=16,
                shared_expert_intermediate_size=16,
            )
        case "bloom":
            return BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4)
        case "gemma2":
            return Gemma2Config(**SMALL, head_dim=8)
        case "gpt2":
            return GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
        case "gpt_oss":
            return GptOssConfig(**SMALL, head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=5)
        case "llama":
            return LlamaConfig(**SMALL)
        case "qwen3":
            return Qwen3Config(**SMALL, head_dim=8)
    raise ValueError(name)


def write_other(name, folder):
    """A random model, with weights large enough that a token's context matters."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config(name))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder
