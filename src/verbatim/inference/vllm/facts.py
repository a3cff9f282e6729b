"""How a vLLM server was started, and whether a run can sample exactly from it."""

from __future__ import annotations

from dataclasses import dataclass

from verbatim.core.errors import UsageError
from verbatim.inference.vllm.command import RETURN_EXPERTS, RETURN_KEPT_SETS, lora_options

_LAYERS = ("q_proj", "k_proj", "...all linear layers but the head...")


@dataclass(frozen=True, kw_only=True)
class ServerFacts:
    """How a server was started, as far as exactness depends on it."""

    model: str
    """A folder or a hub id."""
    vocab_size: int
    """Ids are below this."""
    max_model_len: int
    """Most tokens of prompt and completion together."""
    logprobs_mode: str
    """"processed_logprobs": logprobs of the distribution that is sampled from."""
    generation_config: str
    """"vllm": no sampling defaults of the model's."""
    prefix_caching: bool
    chunked_prefill: bool
    speculative: bool
    """Whether a draft model proposes tokens."""
    weight_transfer: str | None
    """The weight-transfer engine."""
    unsupported_heads: str | None
    """The size of the model's attention heads and those that the server can compute; None: it can compute the
    model's."""
    nccl: str | None = None
    """Version of its NCCL; None where there is no CUDA."""
    max_lora_rank: int | None = None
    """Highest rank of low-rank adapters; None: it takes none."""
    returns_routed_experts: bool = False
    """Whether completions have the experts of a mixture that computed each token."""
    returns_kept_sets: bool = False
    """Whether completions have the ids among which each token was drawn."""
    adapts_head: bool = False
    """Whether it has room for an adapter of the output head."""


def refuse_inexact(
    facts: ServerFacts,
    *,
    name: str,
    transfer: str,
    vocab_size: int,
    context_length: int,
    adapter_rank: int | None = None,
    return_routed_experts: bool = False,
    return_kept_sets: bool = False,
    nccl: str | None = None,
) -> None:
    """Refuse a server that does not sample exactly what is asked for, or that cannot load weights.

    Args:
        facts: The server's.
        name: The replica's.
        transfer: The weight-transfer engine that it needs.
        vocab_size: The model's.
        context_length: Most tokens of prompt and completion together that the run asks for.
        adapter_rank: Rank of the low-rank adapters that it is to load; None: it gets whole weights.
        return_routed_experts: Whether completions have to have the experts of a mixture.
        return_kept_sets: Whether they have to have the ids among which each token was drawn.
        nccl: Version of the trainer's NCCL, where it sends over NCCL.

    Raises:
        UsageError: names everything that is wrong, and the flags to add.
    """
    wrong = [
        said
        for ok, said in (
            (
                facts.vocab_size == vocab_size,
                f"it serves {facts.model} with {facts.vocab_size} ids, expected the model of this run with "
                f"{vocab_size}: start it with --model and the folder in model.name",
            ),
            (
                facts.max_model_len >= context_length,
                f"its context is {facts.max_model_len} tokens, expected at least {context_length}: add --max-model-len "
                f"{context_length}",
            ),
            (
                facts.unsupported_heads is None,
                f"its attention heads have a size of {facts.unsupported_heads}: sample this model with a GPU, or with "
                'inference.backend = "torch"',
            ),
            (
                facts.logprobs_mode == "processed_logprobs",
                f"its logprobs are {facts.logprobs_mode}, not those of the distribution that is sampled from: add "
                "--logprobs-mode processed_logprobs",
            ),
            (
                facts.generation_config == "vllm",
                "it takes sampling defaults from the model's generation_config.json: add --generation-config vllm",
            ),
            (facts.prefix_caching, "it computes every prompt anew: add --enable-prefix-caching"),
            (facts.chunked_prefill, "long prompts hold up all other requests: add --enable-chunked-prefill"),
            (
                not facts.speculative,
                "a draft model proposes its tokens, which weight updates do not reach: leave out --speculative-config",
            ),
            (
                facts.weight_transfer == transfer,
                f"its weight-transfer engine is {facts.weight_transfer}: add --weight-transfer-config "
                f'\'{{"backend": "{transfer}"}}\'',
            ),
            (
                nccl is None or facts.nccl == nccl,
                f"its NCCL is {facts.nccl}, and that of the trainer {nccl}, which do not connect: install the same "
                "version with both torches (nvidia-nccl-cu12 or -cu13), or "
                'use inference.vllm.weight_transfer = "files"',
            ),
            (
                adapter_rank is None or (facts.max_lora_rank or 0) >= adapter_rank,
                f"it takes no adapters of rank {adapter_rank}: add "
                f"{' '.join(lora_options(adapter_rank or 1, _LAYERS))}, "
                "and the environment variable VLLM_ALLOW_RUNTIME_LORA_UPDATING=1",
            ),
            (
                adapter_rank is None or not facts.adapts_head,
                f"it adapts the output head, which ends vLLM 0.32 in a step with prompt logprobs: add "
                f"--lora-target-modules {' '.join(_LAYERS)}",
            ),
            *_returned(facts, routed_experts=return_routed_experts, kept_sets=return_kept_sets),
            (
                adapter_rank is not None or facts.max_lora_rank is None,
                "it was started for adapters, and this run sends it whole weights: leave out --enable-lora",
            ),
        )
        if not ok
    ]
    if wrong:
        raise UsageError(f"{name} cannot be used: " + "; ".join(wrong))


def _returned(facts: ServerFacts, *, routed_experts: bool, kept_sets: bool) -> tuple[tuple[bool, str], ...]:
    """What completions have beside ids and logprobs: whether it is what is asked for, and else what to do."""
    runner = "and the environment variable VLLM_USE_V2_MODEL_RUNNER=1"
    return (
        (
            facts.returns_routed_experts or not routed_experts,
            f"it does not return the experts that computed each token (inference.return_routed_experts): add "
            f"{RETURN_EXPERTS}, {runner}",
        ),
        (
            facts.returns_kept_sets or not kept_sets,
            "it does not return the ids among which it draws each token, and this run cuts the distribution (top_p, "
            f"top_k or min_p): add {RETURN_KEPT_SETS}, which vLLM 0.32 has, {runner}",
        ),
        (
            kept_sets or not facts.returns_kept_sets,
            "it returns the ids among which it draws each token, and so takes no request without top_k: leave out "
            f"{RETURN_KEPT_SETS}",
        ),
    )
