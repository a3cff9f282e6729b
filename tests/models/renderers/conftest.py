"""One small tokenizer with ChatML's control tokens for all renderer tests."""

import pytest

from verbatim.environments.guess_number import GuessNumber
from verbatim.environments.resolve import corpus
from verbatim.models.renderers import create_renderer
from verbatim.models.trained_tokenizer import build_tokenizer


@pytest.fixture(scope="session")
def tokenizer():
    texts = corpus(GuessNumber().demonstrations(60, seed=0))
    return build_tokenizer(texts, vocab_size=600, context_length=512)


@pytest.fixture(scope="session")
def qwen3(tokenizer):
    return create_renderer("qwen3", tokenizer)


@pytest.fixture(scope="session")
def template(tokenizer):
    return create_renderer("template", tokenizer)
