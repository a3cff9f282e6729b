"""Tiny random models of every causal language model class of the installed `transformers`, with flags set otherwise."""

import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers import logging as transformers_logging
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from verbatim.models.tiny import tiny_copy


@dataclass(frozen=True)
class Architecture:
    """One configuration of one class."""

    model_type: str
    """As `transformers` registers it."""
    variant: str = ""
    """What is set besides the defaults; "" = nothing that matters."""
    settings: dict[str, Any] = field(default_factory=dict, hash=False)
    """Fields of its configuration."""

    def __str__(self) -> str:
        return f"{self.model_type} {self.variant}".strip()


NEEDED: dict[str, dict[str, Any]] = {
    "blt": {"encoder_hash_byte_group_vocab": 64},
    "deepseek_v2": {"topk_method": "greedy", "topk_group": 1, "n_group": 1, "num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
              "n_shared_experts": 1},
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0}},
    "git": {"num_hidden_layers": 2},
    "granitemoehybrid": {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_expand": 2, "hidden_size": 64,
                         "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 4,
                         "layer_types": ["mamba", "full_attention"]},
    "hunyuan_v1_dense": {"head_dim": 64},
    "hunyuan_v1_moe": {"head_dim": 64},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "mamba2": {"num_heads": 64, "expand": 1, "head_dim": 64},
    "ministral": {"head_dim": 64},
    "nemotron": {"num_key_value_heads": 8},
    "qwen4_exp_text": {"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 64,
                       "indexer_compress_ratio": 4},
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "xmod": {"default_language": "en_XX", "is_decoder": True},
    "zamba2": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2,
               "hybrid_layer_ids": [1, 3]},
}  # fmt: skip
"""What the defaults of a configuration leave out and its class asks for."""


LATER = (
    "bailing_hybrid", "beam", "dots3_note", "dots3_note_text", "flint", "inkling2_text", "internlm3", "iquestcoder",
    "kolibri1", "lfm3", "moss_transcribe_diarize",
)  # fmt: skip
"""Model types that the lowest `transformers` of pyproject.toml lacks and the pinned one has."""
ABSENT = frozenset(LATER) - MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys()
"""Those of `LATER` that the installed one lacks; `test_campaign` sees that the pinned one lacks none."""


ENCODERS = (
    "bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert", "rembert",
    "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl",
)  # fmt: skip
"""Classes that look both ways unless they are told that they are decoders."""


def _rope(kind: str, **settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **settings}}


def _longrope(angles: int, length: int) -> dict[str, Any]:
    return _rope(
        "longrope",
        factor=4.0,
        original_max_position_embeddings=length,
        short_factor=[1.0] * angles,
        long_factor=[3.0] * angles,
    )


_MIXED = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
_FOUR = {"num_hidden_layers": 4}

FLAGS: tuple[Architecture, ...] = tuple(
    Architecture(model_type, variant, settings)
    for model_type, variant, settings in (
        ("qwen2", "use_sliding_window", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 8}),
        ("qwen2", "tied", {"tie_word_embeddings": True}),
        ("qwen2_moe", "use_sliding_window", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 8}),
        ("qwen2_moe", "some layers dense", {"mlp_only_layers": [1], **_FOUR}),
        ("qwen3", "use_sliding_window", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 8}),
        ("qwen3", "mixed layer_types", {"layer_types": _MIXED, "sliding_window": 64, "use_sliding_window": True,
                                        **_FOUR}),
        ("qwen3", "attention_bias", {"attention_bias": True}),
        ("qwen3", "untied", {"tie_word_embeddings": False}),
        ("qwen3_moe", "use_sliding_window", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 8}),
        ("phimoe", "sliding_window", {"sliding_window": 64}),
        ("phi3", "sliding_window", {"sliding_window": 64}),
        ("phi3", "longrope", {
            **_longrope(48, 24), "original_max_position_embeddings": 24}),
        ("phi3", "longrope at full length", _longrope(48, 256)),
        ("mistral", "no window", {"sliding_window": None}),
        ("mistral", "sliding_window", {"sliding_window": 64}),
        ("mixtral", "sliding_window", {"sliding_window": 64}),
        ("starcoder2", "sliding_window", {"sliding_window": 64}),
        ("stablelm", "qk_layernorm", {"qk_layernorm": True}),
        ("stablelm", "parallel residual", {"use_parallel_residual": True}),
        ("doge", "experts", {"is_moe": True}),
        ("gemma2", "no softcap", {"attn_logit_softcapping": None}),
        ("gemma2", "no softcap at all", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
        ("gemma3_text", "use_bidirectional_attention", {"use_bidirectional_attention": True}),
        ("gemma3_text", "all layers full", {"layer_types": ["full_attention"] * 4, **_FOUR}),
        ("gemma3_text", "all layers sliding", {"layer_types": ["sliding_attention"] * 4, **_FOUR}),
        ("gemma3_text", "untied", {"tie_word_embeddings": False}),
        ("cohere", "qk norm", {"use_qk_norm": True}),
        ("cohere2", "all layers sliding", {"layer_types": ["sliding_attention"] * 4, **_FOUR}),
        ("llama", "tied", {"tie_word_embeddings": True}),
        ("llama", "biases", {"attention_bias": True, "mlp_bias": True}),
        ("llama", "one key/value head", {"num_key_value_heads": 1}),
        ("llama", "linear rope", _rope("linear", factor=4.0)),
        ("llama", "dynamic rope", {**_rope("dynamic", factor=4.0), "max_position_embeddings": 24}),
        ("llama", "dynamic rope at full length", {**_rope("dynamic", factor=4.0), "max_position_embeddings": 256}),
        ("llama", "yarn rope", _rope("yarn", factor=4.0, original_max_position_embeddings=16)),
        ("llama", "llama3 rope", _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                                       original_max_position_embeddings=16)),
        ("llama", "longrope", _longrope(64, 24)),
        ("gpt2", "untied", {"tie_word_embeddings": False}),
        ("gpt2", "scaled by layer", {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True}),
        ("gpt_bigcode", "many key/value heads", {"multi_query": False}),
        ("gpt_neox", "no parallel residual", {"use_parallel_residual": False}),
        ("gpt_oss", "all layers full", {"layer_types": ["full_attention"] * 4, **_FOUR}),
        ("falcon", "alibi", {"alibi": True}),
        ("falcon", "new architecture", {"new_decoder_architecture": True, "num_kv_heads": 8}),
        ("mpt", "no alibi", {"attn_config": {"alibi": False}}),
        ("olmo", "clip_qkv", {"clip_qkv": 0.5}),
        ("olmoe", "clip_qkv", {"clip_qkv": 0.5}),
        ("opt", "norms behind", {"do_layer_norm_before": False}),
        ("deepseek_v2", "no query compression", {"q_lora_rank": None}),
        ("deepseek_v3", "no query compression", {"q_lora_rank": None}),
        ("glm4_moe", "qk norm", {"use_qk_norm": True}),
        ("granite", "multipliers", {"embedding_multiplier": 3.0, "attention_multiplier": 0.3, "logits_scaling": 2.0,
                                    "residual_multiplier": 0.5}),
        ("lfm2", "convolutions", {"layer_types": ["conv", "full_attention"] * 2, **_FOUR}),
        ("llama4_text", "no chunks", {"layer_types": ["full_attention"] * 4, **_FOUR}),
        ("exaone4", "all layers full", {"layer_types": ["full_attention"] * 4, "sliding_window": None, **_FOUR}),
        ("smollm3", "sliding", {"use_sliding_window": True, "sliding_window": 64}),
        ("minimax_m3_vl_text", "sparse", {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2, **_FOUR}),
        ("modernbert-decoder", "no biases", {"decoder_bias": False}),
        ("persimmon", "no qk norm", {"qk_layernorm": False}),
        ("phi", "qk norm", {"qk_layernorm": True}),
    )
)  # fmt: skip
"""Flags of masks, layers, position scalings and heads."""


def architectures() -> list[Architecture]:
    """Every class at the defaults of its configuration, every encoder also as a decoder, then `FLAGS`."""
    found = []
    for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        found.append(Architecture(model_type))
        if model_type in ENCODERS:
            found.append(Architecture(model_type, "is_decoder", {"is_decoder": True}))
    return found + list(FLAGS)


def tiny_model(architecture: Architecture) -> Any:
    """A model of a few thousand random weights, in float32, or an exception of whoever cannot make it."""
    transformers_logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        settings = {**NEEDED.get(architecture.model_type, {}), **architecture.settings}
        config = CONFIG_MAPPING[architecture.model_type](**settings)
        with torch.device("meta"):
            whole = AutoModelForCausalLM.from_config(config)
        return tiny_copy(whole)
