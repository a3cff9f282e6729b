"""Where a part runs, the small random models that it runs, and their batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from verbatim.core.types import KeptSets, TrainingSample


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Device and sizes. With `tiny` all of it takes seconds on two cores, and no figure means anything."""

    device: str
    """"cuda" or "cpu"."""
    tiny: bool
    """The smallest sizes that reach the same code."""
    folder: Path
    """An existing folder for models and runs, which the caller removes."""
    patience: float = 1.0
    """How many times its time limit each check has."""

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes of the models whose gradients are compared. The head size on a card is 64: kernels need at least 16."""
        if self.tiny:
            return {"hidden": 64, "head": 16, "inner": 96, "layers": 2, "vocab": 128, "window": 12, "unit": 4}
        return {"hidden": 256, "head": 64, "inner": 512, "layers": 3, "vocab": 512, "window": 48, "unit": 24}

    def model(self, kind: str) -> Path:
        """The folder of a random model of this kind (`KINDS`), made where it is missing."""
        folder = self.folder / f"{kind.replace(' ', '-')}-{self.sizes['hidden']}"
        if not (folder / "config.json").exists():
            _write(KINDS[kind](self.sizes), folder)
        return folder


def _common(sizes: dict[str, int]) -> dict[str, Any]:
    return {
        "vocab_size": sizes["vocab"],
        "hidden_size": sizes["hidden"],
        "intermediate_size": sizes["inner"],
        "num_hidden_layers": sizes["layers"],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": sizes["head"],
        "max_position_embeddings": 2048,
        # With the usual 0.02 attention is almost uniform in a narrow model, and a wrong mask would hardly be seen.
        "initializer_range": 0.85 * sizes["hidden"] ** -0.5,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


def _dense(sizes: dict[str, int]) -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(**_common(sizes), tie_word_embeddings=True)


def _window(sizes: dict[str, int]) -> Any:
    from transformers import MistralConfig

    return MistralConfig(**_common(sizes), sliding_window=sizes["window"])


def _two_windows(sizes: dict[str, int]) -> Any:
    from transformers import Gemma3TextConfig

    kinds = ["sliding_attention", "full_attention", "sliding_attention"][: sizes["layers"]]
    return Gemma3TextConfig(
        **_common(sizes), layer_types=kinds, sliding_window=sizes["window"], query_pre_attn_scalar=sizes["head"]
    )


def _soft_caps(sizes: dict[str, int]) -> Any:
    from transformers import Gemma2Config

    return Gemma2Config(
        **_common(sizes),
        sliding_window=sizes["window"],
        query_pre_attn_scalar=sizes["head"],
        attn_logit_softcapping=2.0,  # so low that it bends the scores of a random model
        final_logit_softcapping=8.0,
    )


def _sinks(sizes: dict[str, int]) -> Any:
    from transformers import GptOssConfig

    return GptOssConfig(**_common(sizes), sliding_window=sizes["window"], num_local_experts=4, num_experts_per_tok=2)


def _experts(sizes: dict[str, int]) -> Any:
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        **_common(sizes),
        moe_intermediate_size=sizes["inner"] // 4,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
    )


def _one_layer(sizes: dict[str, int]) -> Any:
    return _dense({**sizes, "layers": 1})


KINDS: dict[str, Callable[[dict[str, int]], Any]] = {
    "dense": _dense,
    "one layer": _one_layer,
    "window": _window,
    "two windows": _two_windows,
    "soft caps": _soft_caps,
    "sinks": _sinks,
    "experts": _experts,
}
"""Models whose attention or layers take different code."""


def _write(config: Any, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms at exactly 1 would hide a gradient that forgot them
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)


def sample_of(ids: np.ndarray, mask: np.ndarray, trajectory_id: str, rng: np.random.Generator) -> TrainingSample:
    """A sample with logprobs near those of a random model, and one advantage."""
    mask = mask.copy()
    mask[0], mask[-1] = False, True
    return TrainingSample(
        token_ids=ids.astype(np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, -np.log(200) + 0.3 * rng.standard_normal(len(ids)), np.nan).astype(np.float32),
        advantages=np.where(mask, rng.choice([-1.5, 1.0]), 0).astype(np.float32),
        chunk_ids=np.where(mask, 0, -1).astype(np.int32),
        policy_versions=np.where(mask, 0, -1).astype(np.int32),
        temperatures=np.where(mask, rng.choice([0.7, 1.0]), 1.0).astype(np.float32),
        trajectory_id=trajectory_id,
    )


def shared_prefixes(setting: Setting, seed: int = 0) -> list[TrainingSample]:
    """Four trajectories of three samples each: all share a system prompt, three of them more, and each sample begins
    with most of the one before it."""
    rng, unit, vocab = np.random.default_rng(seed), setting.sizes["unit"], setting.sizes["vocab"]
    system, samples = rng.integers(0, vocab, 2 * unit), []
    for name in "abcd":
        history = system if name == "d" else np.concatenate([system, rng.integers(0, vocab, unit)])
        for turn in range(3):
            ids = np.concatenate([history, rng.integers(0, vocab, unit + turn)])
            samples.append(sample_of(ids, rng.random(len(ids)) < 0.5, name, rng))
            history = ids[: len(ids) - 1 - turn // 2]
    return samples


def with_kept_sets(samples: list[TrainingSample], vocab: int, seed: int = 0) -> list[TrainingSample]:
    """The samples with a set of ids that each trained token was drawn from; of a fifth of them nothing was cut."""
    rng, found = np.random.default_rng(seed), []
    for sample in samples:
        sets = [
            sorted({token, *rng.integers(0, vocab, 20).tolist()}) if is_trained and rng.random() > 0.2 else []
            for token, is_trained in zip(sample.token_ids.tolist(), sample.loss_mask.tolist(), strict=True)
        ]
        found.append(replace(sample, kept_sets=KeptSets.of(sets)))
    return found
