import math

import numpy as np
import pytest
import torch

from verbatim.inference.embedded.sampling import Truncation, draw, kept_sets, seed_key, uniforms

HALF = torch.tensor([0.5], dtype=torch.float64)


def one(logits, u, temperature=1.0, truncation=None):
    tokens, logprobs, _ = draw(
        torch.tensor([logits]), torch.tensor([temperature]), torch.tensor([u], dtype=torch.float64), truncation
    )
    return int(tokens), float(logprobs)


def cut(top_k=0, top_p=1.0, min_p=0.0):
    return Truncation(top_k_N=torch.tensor([top_k]), top_p_N=torch.tensor([top_p]), min_p_N=torch.tensor([min_p]))


def test_uniforms_are_splitmix64():
    # First output of the published splitmix64 with state 0.
    expected = ((0xE220A8397B1DCDAF >> 12) + 0.5) / 2**52
    assert uniforms(np.array([0], np.uint64), np.array([0]))[0] == expected


def test_uniforms_do_not_depend_on_the_batch_and_stay_inside_the_open_interval():
    keys = np.array([seed_key(s) for s in range(-500, 500)], np.uint64)
    positions = np.arange(1000)
    together = uniforms(keys, positions)
    alone = [uniforms(keys[i : i + 1], positions[i : i + 1])[0] for i in range(1000)]
    assert together.tolist() == alone
    assert together.min() > 0 and together.max() < 1
    assert len(set(keys.tolist())) == 1000


def test_uniforms_of_neighbouring_seeds_and_positions_are_uncorrelated():
    keys = np.array([seed_key(s) for s in range(2000)], np.uint64)
    a = uniforms(keys, np.zeros(2000, np.int64))
    b = uniforms(keys, np.ones(2000, np.int64))
    assert abs(a.mean() - 0.5) < 4 * math.sqrt(1 / 12 / 2000)
    assert abs(np.corrcoef(a, b)[0, 1]) < 4 / math.sqrt(2000)
    assert abs(np.corrcoef(a[:-1], a[1:])[0, 1]) < 4 / math.sqrt(2000)


@pytest.mark.parametrize(("u", "token"), [(0.01, 0), (0.24, 0), (0.26, 1), (0.5, 1), (0.74, 1), (0.76, 2), (0.99, 2)])
def test_draw_inverts_the_cdf(u, token):
    drawn, logprob = one([0.0, math.log(2.0), 0.0], u)
    assert drawn == token
    assert logprob == pytest.approx(math.log([0.25, 0.5, 0.25][token]), abs=1e-7)


def test_logprobs_are_of_the_temperature_scaled_distribution():
    # At T = 2, logits 0 and 2 log 3 become 0 and log 3: probabilities 1/4 and 3/4.
    assert one([0.0, 2 * math.log(3.0)], 0.1, temperature=2.0) == (0, pytest.approx(math.log(0.25), abs=1e-7))
    assert one([0.0, 2 * math.log(3.0)], 0.3, temperature=2.0) == (1, pytest.approx(math.log(0.75), abs=1e-7))


def test_temperature_zero_takes_the_most_likely_token_as_a_point_mass():
    assert one([1.0, 3.0, 2.0], 0.001, temperature=0.0) == (1, 0.0)


def test_rows_are_drawn_independently_of_each_other():
    logits = torch.randn(5, 11, generator=torch.Generator().manual_seed(0))
    temperatures = torch.tensor([1.0, 0.0, 0.5, 1.0, 2.0])
    u = torch.tensor([0.1, 0.2, 0.5, 0.9, 0.7], dtype=torch.float64)
    tokens, logprobs, _ = draw(logits, temperatures, u)
    for i in range(5):
        assert one(logits[i].tolist(), float(u[i]), float(temperatures[i])) == (
            int(tokens[i]),
            pytest.approx(float(logprobs[i]), abs=1e-6),
        )


def test_impossible_tokens_are_never_drawn_even_at_the_ends():
    logits = [-math.inf, 0.0, -math.inf, 0.0, -math.inf]
    assert one(logits, 2.0**-53)[0] == 1
    assert one(logits, 1 - 2.0**-53)[0] == 3
    assert one(logits, 0.5)[0] in (1, 3)


def test_frequencies_follow_the_probabilities():
    probs = np.array([0.5, 0.3, 0.15, 0.05])
    n = 20_000
    u = uniforms(np.array([seed_key(s) for s in range(n)], np.uint64), np.full(n, 7))
    logits = torch.tensor(np.log(probs), dtype=torch.float32).expand(n, 4)
    tokens, _, _ = draw(logits, torch.ones(n), torch.from_numpy(u))
    share = np.bincount(tokens.numpy(), minlength=4) / n
    assert np.all(np.abs(share - probs) < 4 * np.sqrt(probs * (1 - probs) / n))


PROBS = [0.1, 0.4, 0.3, 0.2]
LOGITS = [math.log(p) for p in PROBS]


@pytest.mark.parametrize(
    ("truncation", "kept"),
    [
        (cut(top_k=2), {1: 4 / 7, 2: 3 / 7}),
        (cut(top_k=1), {1: 1.0}),
        (cut(top_k=9), {0: 0.1, 1: 0.4, 2: 0.3, 3: 0.2}),
        (cut(top_p=0.65), {1: 4 / 7, 2: 3 / 7}),  # 0.4 < 0.65 <= 0.7
        (cut(top_p=0.75), {1: 4 / 9, 2: 3 / 9, 3: 2 / 9}),
        (cut(top_p=1e-6), {1: 1.0}),  # the most likely token is always kept
        (cut(min_p=0.45), {1: 4 / 9, 2: 3 / 9, 3: 2 / 9}),  # at least 0.18
        (cut(top_k=3, top_p=0.7), {1: 4 / 7, 2: 3 / 7}),  # of the three, 4/9 < 0.7 <= 7/9
    ],
)
def test_truncation_renormalises_what_is_kept(truncation, kept):
    seen = {}
    for u in np.linspace(0.005, 0.995, 100):
        token, logprob = one(LOGITS, float(u), truncation=truncation)
        seen[token] = logprob
    assert seen.keys() == kept.keys()
    for token, probability in kept.items():
        assert seen[token] == pytest.approx(math.log(probability), abs=1e-6)


def kept_of(logits, truncation):
    kept = draw(torch.tensor([logits]), torch.ones(1), HALF, truncation)[2]
    return kept_sets(kept)[0].tolist()


@pytest.mark.parametrize(
    ("truncation", "kept"),
    [
        (cut(top_k=2), [1, 2]),
        (cut(top_p=0.75), [1, 2, 3]),
        (cut(min_p=0.6), [1, 2]),
        (cut(top_k=3, top_p=0.9, min_p=0.6), [1, 2]),
        (cut(top_k=9), []),  # nothing is cut
        (cut(), []),
    ],
)
def test_kept_sets_are_the_ids_that_could_be_drawn(truncation, kept):
    assert kept_of(LOGITS, truncation) == kept


def test_equal_tokens_at_the_edge_are_kept_together():
    assert kept_of([1.0, 3.0, 1.0, 0.0, 1.0], cut(top_k=2)) == [0, 1, 2, 4]
    assert kept_of([1.0, 3.0, 1.0, 0.0, 1.0], cut(top_p=0.8)) == [0, 1, 2, 4]
    seen = {one([1.0, 3.0, 1.0, 0.0, 1.0], float(u), truncation=cut(top_k=2))[0] for u in np.linspace(0.01, 0.99, 50)}
    assert seen == {0, 1, 2, 4}


def by_sorting(logits, top_k, top_p, min_p):
    """By the definition: rank, keep k, of them the fewest with mass p, of them those with a share of the top."""
    order = sorted(range(len(logits)), key=lambda v: -logits[v])
    kept = order[: top_k or len(order)]
    weights = {v: math.exp(logits[v] - logits[order[0]]) for v in kept}
    mass, nucleus = 0.0, []
    for v in kept:
        if mass < top_p * math.fsum(weights.values()) or top_p == 1:
            nucleus.append(v)
        mass += weights[v]
    return sorted(v for v in nucleus if weights[v] >= min_p)


@pytest.mark.parametrize("vocab", [5, 300, 5000])
def test_sets_found_without_a_sort_are_those_of_a_sort(vocab):
    rng = np.random.default_rng(vocab)
    settings = [(0, 0.9, 0.0), (0, 0.999, 0.0), (3, 1.0, 0.0), (40, 0.95, 0.02), (0, 1.0, 0.1), (700, 0.5, 0.0)]
    logits = torch.tensor(rng.standard_normal((len(settings), vocab)) * 2, dtype=torch.float32)
    together = Truncation(
        top_k_N=torch.tensor([k for k, _, _ in settings]),
        top_p_N=torch.tensor([p for _, p, _ in settings]),
        min_p_N=torch.tensor([m for _, _, m in settings]),
    )
    kept = together.kept(logits)
    for row, (top_k, top_p, min_p) in enumerate(settings):
        assert kept[row].nonzero()[:, 0].tolist() == by_sorting(logits[row].tolist(), top_k, top_p, min_p)


def test_a_row_without_truncation_is_left_alone_beside_one_with():
    both = Truncation(top_k_N=torch.tensor([1, 0]), top_p_N=torch.ones(2), min_p_N=torch.zeros(2))
    _, logprobs, _ = draw(torch.tensor([LOGITS, LOGITS]), torch.ones(2), HALF.expand(2), both)
    plain = one(LOGITS, 0.5)[1]
    assert logprobs.tolist() == [0.0, pytest.approx(plain, abs=1e-7)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_finite_has_a_nan_logprob_and_spoils_no_other(bad, temperature):
    logits = torch.tensor([[0.0, bad, 0.0], [0.0, 0.0, 0.0]])
    _, logprobs, _ = draw(logits, torch.tensor([temperature, 1.0]), HALF.expand(2))
    assert math.isnan(logprobs[0])
    assert float(logprobs[1]) == pytest.approx(math.log(1 / 3), abs=1e-7)
