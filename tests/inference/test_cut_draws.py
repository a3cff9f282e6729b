"""What the embedded sampler draws from cut distributions: which ids, and how often each of them."""

import math

import numpy as np
import pytest
import torch
from test_sampled_kept_sets import by_definition
from transformers import LlamaConfig

from inference.conftest import save
from verbatim.core.sampling import SamplingParams
from verbatim.inference.embedded.forward import open_forward
from verbatim.inference.embedded.settings import TorchSettings
from verbatim.inference.embedded.slots import SlotTable
from verbatim.inference.sampler import SampleRequest
from verbatim.models.head import CausalLM
from verbatim.models.loading import load_model

VOCAB, WIDTH = 5000, 64


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=64, tie_word_embeddings=False, initializer_range=0.3,
    )  # fmt: skip
    return save(config, 0, tmp_path_factory.mktemp("large"))


class Draws:
    """Draws the next token after given hidden states."""

    def __init__(self, folder, kernel, num_slots):
        self.model = CausalLM(load_model(folder).requires_grad_(False))
        settings = TorchSettings(max_batch_size=num_slots, device="cpu", kernel=kernel)
        with torch.inference_mode():
            self.forward = open_forward(
                self.model, settings, context_length=64, keep_cache=False, record_experts=False, warns=False
            )
        self.table, self.slots = SlotTable(num_slots, 0, 8), np.arange(num_slots)

    def start(self, params):
        for slot, own in enumerate(params):
            request = SampleRequest(prompt_ids=np.array([1], np.int32), params=own, seed=slot)
            self.table.start(slot, request, 0, 0)

    def draw(self, hidden, position=1):
        self.table.length[:] = position
        with torch.inference_mode():
            return self.forward.draw(hidden, None, None, np.ones(len(self.slots), np.bool_), self.table, self.slots)

    def logits(self, hidden):
        return (hidden.double() @ self.model.output.weight.double().T).tolist()


CUTS = [
    {"top_k": 1}, {"top_k": 7}, {"top_k": 300}, {"top_k": 4999}, {"top_p": 1e-6}, {"top_p": 0.5}, {"top_p": 0.95},
    {"top_p": 0.9999}, {"min_p": 0.5}, {"min_p": 0.05}, {"min_p": 1e-4}, {"top_k": 50, "top_p": 0.9},
    {"top_k": 20, "top_p": 0.95, "min_p": 0.02}, {"top_p": 0.95, "min_p": 0.1}, {"top_k": 3, "min_p": 0.3},
    {"top_k": 1000, "top_p": 0.999}, {"top_k": 5001}, {"top_p": 0.7, "temperature": 3.0},
    {"top_k": 400, "top_p": 0.98, "temperature": 2.0}, {"top_p": 0.99, "temperature": 0.3},
]  # fmt: skip


@pytest.mark.parametrize("kernel", ["torch", "compiled"])
def test_sets_of_a_large_vocabulary_are_those_of_the_definition(large, kernel):
    draws = Draws(large, kernel, len(CUTS))
    hidden = torch.randn(len(CUTS), WIDTH, generator=torch.Generator().manual_seed(1))
    hidden[0] = 0.0  # all logits are equal
    hidden[1] *= 60  # probabilities below what float32 has
    draws.start([SamplingParams(return_kept_sets=True, **cut) for cut in CUTS])
    tokens, logprobs, kept = draws.draw(hidden)
    assert kept[0].size == 0, "nothing was cut: equal ones stay together"
    for row, cut in enumerate(CUTS[1:], start=1):
        temperature = cut.get("temperature", 1.0)
        logits = [x / temperature for x in draws.logits(hidden[row])]
        expected = by_definition(logits, **{name: cut[name] for name in cut if name != "temperature"})
        found = kept[row].tolist() or list(range(VOCAB))
        assert set(found) ^ set(expected) <= near_the_edge(logits, expected), cut
        assert int(tokens[row]) in found
        over_kept = logits[int(tokens[row])] - float(torch.tensor(logits)[found].logsumexp(0))
        assert abs(over_kept - float(logprobs[row])) <= 5e-5


def near_the_edge(logits, kept):
    """Ids that rounding to float32 may put on the other side: at most one, of those that follow each other there."""
    order = sorted(range(len(logits)), key=lambda v: -logits[v])
    return {order[len(kept) - 1], order[min(len(kept), len(logits) - 1)]} if len(kept) > 100 else set()


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["torch", "compiled"])
def test_200_000_draws_of_each_cut_follow_the_probabilities_over_what_was_kept(models, kernel):
    num_slots, repeats = 2000, 100
    draws = Draws(models["untied"], kernel, num_slots)
    one = torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(2)) * 1.5
    logits, hidden = draws.logits(one[0]), one.expand(num_slots, WIDTH).contiguous()
    for cut in CUTS:
        draws.start([SamplingParams(**cut)] * num_slots)
        temperature = cut.get("temperature", 1.0)
        scaled = np.array(logits) / temperature
        kept = by_definition(scaled.tolist(), **{name: cut[name] for name in cut if name != "temperature"})
        counts = np.zeros(len(logits))
        for position in range(1, repeats + 1):
            counts += np.bincount(draws.draw(hidden, position)[0], minlength=len(logits))
        weights = np.exp(scaled[kept] - scaled.max())
        expected = np.zeros(len(logits))
        expected[kept] = counts.sum() * weights / weights.sum()
        assert not counts[expected == 0].any(), cut
        assert counts.sum() == 200_000 and chi_square_deviation(counts, expected) < 4.5, cut


def chi_square_deviation(counts, expected):
    """How many standard deviations the statistic is above its mean (Wilson and Hilferty 1931); rare ids are one."""
    rare = expected < 10
    cells = [*zip(counts[~rare], expected[~rare], strict=True), (counts[rare].sum(), expected[rare].sum())]
    cells = [(found, mean) for found, mean in cells if mean > 0]
    statistic, free = sum((found - mean) ** 2 / mean for found, mean in cells), len(cells) - 1
    if not free:
        return 0.0
    return ((statistic / free) ** (1 / 3) - (1 - 2 / (9 * free))) / math.sqrt(2 / (9 * free))
