"""Models and batches for the tests of `verbatim plan`."""

import numpy as np

from verbatim.core.types import TrainingSample


def write_model(
    folder, *, hidden_size, layers, vocab_size, tied=True, intermediate_size=None, heads=4, weights=True, experts=0
):
    """A random Qwen3 with two key/value heads, or only its config.json. With `experts` the parameters of each
    feed-forward layer are those of so many experts, of which two compute each token."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

    inner = intermediate_size or 3 * hidden_size
    kind, settings = Qwen3Config, {}
    if experts:
        kind = Qwen3MoeConfig
        settings = {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": inner // experts}
    config = kind(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=2,
        head_dim=hidden_size // heads,
        max_position_embeddings=65536,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=None,
        **settings,
    )
    if not weights:
        config.architectures = [f"{kind.__name__.removesuffix('Config')}ForCausalLM"]
        config.save_pretrained(folder)
        return folder
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def groups(*, num_groups, group_size, length, shared, vocab_size):
    """One sample for each trajectory; those of a group begin with the same `shared` tokens, the others are trained."""
    rng = np.random.default_rng(0)
    samples = []
    for group in range(num_groups):
        prompt = rng.integers(0, vocab_size, shared)
        for number in range(group_size):
            ids = np.concatenate([prompt, rng.integers(0, vocab_size, length - shared)]).astype(np.int32)
            mask = np.arange(length) >= shared
            samples.append(
                TrainingSample(
                    token_ids=ids,
                    loss_mask=mask,
                    logprobs=np.where(mask, -8.0, np.nan).astype(np.float32),
                    advantages=np.where(mask, 0.5, 0).astype(np.float32),
                    chunk_ids=np.where(mask, 0, -1).astype(np.int32),
                    policy_versions=np.where(mask, 0, -1).astype(np.int32),
                    temperatures=np.ones(length, np.float32),
                    trajectory_id=f"{group}-{number}",
                )
            )
    return samples
