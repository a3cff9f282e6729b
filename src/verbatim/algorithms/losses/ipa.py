"""IPA: one importance ratio per chunk, that is, for the sampled tokens of one turn (arXiv 2512.24873)."""

from __future__ import annotations

from verbatim.algorithms.losses.loss import LossInputs, LossOutputs, refuse_bad_parameters
from verbatim.algorithms.losses.ratios import segment_means, share, trained_tokens
from verbatim.algorithms.losses.reference import Estimator, reference_term
from verbatim.config.schema import NonNegativeFloat, PositiveFloat
from verbatim.core.errors import ComponentError


def ipa_loss(
    inputs: LossInputs, *, max_ratio: PositiveFloat = 2.0, kl_ref_tau: NonNegativeFloat = 0.0, kl_ref: Estimator = "k2"
) -> LossOutputs:
    """The sum of the terms of one trajectory's chunks.

    ```
    rho_c  = exp(mean_{t in c}(l - m))         l trainer_logprobs, m inference_logprobs; detached
    keep_c = rho_c <= max_ratio
    loss   = sum_c  -keep_c G_c sum_{t in c} l                          where G_c > 0
                    -keep_c min(rho_c, 1) G_c sum_{t in c} l            otherwise
    ```

    G_c is the advantage of the chunk's tokens. Chunks are identified by `chunk_ids` alone: adjacent chunks are not
    merged, and an untrained token does not split a chunk. Chunks with G > 0 are reinforced with full weight. Other
    chunks are suppressed with a weight that decreases as the chunk becomes less likely.

    Example: chunk 0 has tokens with `l - m = log 0.25` and `log 1`, so `rho = 0.5`; chunk 1 has a token with `log 3`.
    With `G = -1` for both, the gradient is 0.5 at each token of chunk 0, and 0 in chunk 1, which is dropped.

    Args:
        inputs: A whole trajectory, float [seq] tensors, with chunk ids; only tokens under `loss_mask` are read.
        max_ratio: Drop chunks whose ratio is above this.
        kl_ref_tau: Weight of the reference KL term (`reference_term`); 0 to use no reference.
        kl_ref: Estimator of the reference KL term.

    Returns:
        The loss, and the metrics `chunk_ratio_{mean,min,max}`, `chunks_dropped` (share of the chunks), `clipped_high`
        (share of the tokens whose weight is clipped to 1), and the count `masked_by_loss`: tokens of dropped chunks.

    Raises:
        ComponentError: a parameter is outside its range, there are no chunk ids, or `kl_ref_tau` is set without a
            reference.
    """
    refuse_bad_parameters(ipa_loss, max_ratio=max_ratio, kl_ref_tau=kl_ref_tau, kl_ref=kl_ref)
    if inputs.chunk_ids is None:
        raise ComponentError("ipa works on chunks: expected LossInputs.chunk_ids, found None")
    reference = reference_term(inputs, kl_ref_tau=kl_ref_tau, kl_ref=kl_ref)
    trainer, inference, advantages = trained_tokens(inputs, reference.penalty)
    log_ratios_C, chunks = segment_means((trainer - inference).detach(), inputs.chunk_ids[inputs.loss_mask])
    ratios_C = log_ratios_C.exp()
    ratios, good = ratios_C[chunks], advantages > 0
    dropped = ratios > max_ratio
    # Chunks are dropped last, so that good chunks with too large a ratio are dropped as well.
    weights = ratios.clamp(max=1.0).masked_fill(good, 1.0).masked_fill(dropped, 0.0)

    metrics = {
        "chunk_ratio_mean": ratios_C.mean(),
        "chunk_ratio_min": ratios_C.min(),
        "chunk_ratio_max": ratios_C.max(),
        "chunks_dropped": share(ratios_C > max_ratio, ratios_C),
        "clipped_high": share((ratios > 1) & ~dropped & ~good, ratios),
        "masked_by_loss": dropped.sum(),
    }
    return LossOutputs(loss=(reference.terms - weights * advantages * trainer).sum(), metrics=metrics)
