"""Describes how a vLLM server was started, and checks whether it can sample exactly for a run."""

from __future__ import annotations

from dataclasses import dataclass

from verbatim.core.errors import UsageError
from verbatim.inference.vllm.command import RETURN_EXPERTS, RETURN_KEPT_SETS, lora_options

_LAYERS = ("q_proj", "k_proj", "...all linear layers but the head...")
"""Placeholder for the names of layers in messages, because the model's layers are not known here."""


@dataclass(frozen=True, kw_only=True)
class ServerFacts:
    """How a server was started: the settings that exactness depends on."""

    model: str
    """The model: a folder or a hub id."""
    vocab_size: int
    """Size of the vocabulary. All token ids are below it."""
    max_model_len: int
    """Maximum tokens of prompt plus completion."""
    logprobs_mode: str
    """"processed_logprobs" if logprobs belong to the distribution that tokens are sampled from."""
    generation_config: str
    """"vllm" if the model's own sampling defaults are ignored."""
    prefix_caching: bool
    chunked_prefill: bool
    speculative: bool
    """True if a draft model proposes tokens (speculative decoding)."""
    weight_transfer: str | None
    """Name of the weight-transfer engine; None if no engine is configured."""
    unsupported_heads: str | None
    """The model's head size and the supported head sizes, worded for a message; None if the server's attention supports
    the model's head size."""
    nccl: str | None = None
    """Version of the server's NCCL; None without CUDA."""
    max_lora_rank: int | None = None
    """Highest accepted rank of LoRA adapters; None if the server does not accept adapters."""
    returns_routed_experts: bool = False
    """True if completions report which experts of a mixture computed each token."""
    returns_kept_sets: bool = False
    """True if completions include the kept set of each token."""
    adapts_head: bool = False
    """True if the output head is wrapped for adapters."""


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
    """Refuse a server that cannot sample exactly for this run, or cannot load the run's weights.

    Args:
        facts: The server's facts.
        name: The replica's name, for the message.
        transfer: The weight-transfer engine that the run needs.
        vocab_size: The vocabulary size of the run's model.
        context_length: Maximum tokens of prompt plus completion that the run requests.
        adapter_rank: Rank of the LoRA adapters that updates bring; None if updates bring full weights.
        return_routed_experts: True if the run needs the experts that computed each token.
        return_kept_sets: True if the run needs the kept set of each token.
        nccl: Version of the trainer's NCCL; None if the trainer does not send over NCCL.

    Raises:
        UsageError: the server does not fit; the message lists everything that is wrong, and the flags to add.
    """
    wrong = [
        said
        for ok, said in (
            (
                facts.vocab_size == vocab_size,
                f"it serves {facts.model} with a vocabulary of {facts.vocab_size} ids, but this run's model has "
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
            (facts.prefix_caching, "it computes every prompt from scratch: add --enable-prefix-caching"),
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
                f"its NCCL is {facts.nccl} and the trainer's is {nccl}, which cannot connect: install the "
                "same version in both environments (nvidia-nccl-cu12 or -cu13), or "
                'use inference.vllm.weight_transfer = "files"',
            ),
            (
                adapter_rank is None or (facts.max_lora_rank or 0) >= adapter_rank,
                f"it does not accept adapters of rank {adapter_rank}: add "
                f"{' '.join(lora_options(adapter_rank or 1, _LAYERS))}, "
                "and the environment variable VLLM_ALLOW_RUNTIME_LORA_UPDATING=1",
            ),
            (
                adapter_rank is None or not facts.adapts_head,
                f"it adapts the output head, which crashes vLLM 0.32 in a step with prompt logprobs: add "
                f"--lora-target-modules {' '.join(_LAYERS)}",
            ),
            *_returned(facts, routed_experts=return_routed_experts, kept_sets=return_kept_sets),
            (
                adapter_rank is not None or facts.max_lora_rank is None,
                "it was started for adapters, but this run's updates bring full weights: leave out --enable-lora",
            ),
        )
        if not ok
    ]
    if wrong:
        raise UsageError(f"{name} cannot be used: " + "; ".join(wrong))


def _returned(facts: ServerFacts, *, routed_experts: bool, kept_sets: bool) -> tuple[tuple[bool, str], ...]:
    """Checks that completions can return routed experts and kept sets. Each check is (True if the server passes, what
    to do if it does not)."""
    runner = "and the environment variable VLLM_USE_V2_MODEL_RUNNER=1"
    return (
        (
            facts.returns_routed_experts or not routed_experts,
            f"it does not return the experts that computed each token (inference.return_routed_experts): add "
            f"{RETURN_EXPERTS}, {runner}",
        ),
        (
            facts.returns_kept_sets or not kept_sets,
            "it does not return the kept set of each token, which this run needs because it truncates the distribution "
            f"(top_p, top_k or min_p): add {RETURN_KEPT_SETS}, which vLLM 0.32 has, {runner}",
        ),
        (
            kept_sets or not facts.returns_kept_sets,
            f"it returns the kept set of each token, and refuses requests without top_k: leave out {RETURN_KEPT_SETS}",
        ),
    )
