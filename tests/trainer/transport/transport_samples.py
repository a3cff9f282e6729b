"""Training samples with every bit pattern that must survive a trip."""

import numpy as np

from verbatim.core.records.experts import RoutedExperts
from verbatim.core.types import KeptSets, TrainingSample

NAN_WITH_A_MESSAGE = np.array([0x7FC0BEEF], dtype=np.uint32).view(np.float32)[0]


def make_sample(length, *, name="t", teacher=False, seed=0):
    """Every field differs from its default; logprobs hold NaNs of two kinds, -0.0 and a denormal."""
    rng = np.random.default_rng([seed, length])
    mask = rng.random(length) < 0.5
    mask[:1] = False
    logprobs = np.where(mask, -rng.random(length) * 5, np.nan).astype(np.float32)
    odd = np.array([np.nan, NAN_WITH_A_MESSAGE, -0.0, -1e-45, -np.inf], dtype=np.float32)[:length]
    logprobs[: len(odd)] = odd
    return TrainingSample(
        token_ids=rng.integers(0, 2**31 - 1, length, dtype=np.int32),
        loss_mask=mask,
        logprobs=logprobs,
        advantages=rng.standard_normal(length).astype(np.float32),
        chunk_ids=rng.integers(-1, 5, length).astype(np.int32),
        policy_versions=rng.integers(-1, 100, length).astype(np.int32),
        temperatures=(0.1 + rng.random(length)).astype(np.float32),
        teacher_logprobs=-rng.random(length).astype(np.float32) if teacher else None,
        logprob_streams={"reference": -rng.random(length).astype(np.float32)} if teacher else {},
        trajectory_id=f"{name}-{length}",
        group_id=f"group-{name}",
        env=f"env-{name}",
        part=length,
        routed_experts=_experts(length, rng) if teacher else None,
        kept_sets=KeptSets.of(np.flatnonzero(rng.random(40) < 0.2 * is_kept) for is_kept in mask) if teacher else None,
    )


def _experts(length, rng):
    known = rng.random(length) < 0.5
    experts = np.where(known[:, None, None], rng.integers(0, 200, (length, 2, 3)), 0).astype(np.uint8)
    return RoutedExperts(experts=experts, known=known)


def assert_same_sample(found, sent):
    """The same bits, dtypes and texts."""
    assert found.logprob_streams.keys() == sent.logprob_streams.keys()
    assert (found.routed_experts is None) == (sent.routed_experts is None)
    fields = [
        (name, getattr(found, name), value)
        for name, value in vars(sent).items()
        if name not in ("logprob_streams", "routed_experts", "kept_sets")
    ]
    streams = [(name, found.logprob_streams[name], stream) for name, stream in sent.logprob_streams.items()]
    experts = (
        []
        if sent.routed_experts is None
        else [(name, getattr(found.routed_experts, name), value) for name, value in vars(sent.routed_experts).items()]
    )
    assert (found.kept_sets is None) == (sent.kept_sets is None)
    kept = [] if sent.kept_sets is None else [(n, vars(found.kept_sets)[n], v) for n, v in vars(sent.kept_sets).items()]
    for name, value, expected in fields + streams + experts + kept:
        if isinstance(expected, np.ndarray):
            assert (value.dtype, value.tobytes()) == (expected.dtype, expected.tobytes()), name
        else:
            assert value == expected, name
