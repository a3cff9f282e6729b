"""Which tokens end a turn: the same rule for every renderer, whatever the model's generation_config.json lists."""

import json

import pytest
from bridge_oracle import ids
from families import FAMILIES, MORE, family_tokenizer
from huggingface_hub import constants
from tokenizers import AddedToken

from verbatim.core.errors import ModelError, UsageError
from verbatim.models import loading
from verbatim.models.renderers import Conversation, create_renderer
from verbatim.models.renderers.stop_ids import ends_in_words, ends_within, generation_stops
from verbatim.rollouts.demonstrations import trajectory_from_messages

ASK = {"role": "user", "content": "How warm is it?"}
THANK = {"role": "user", "content": "Thanks."}
EXTRA = "<|extra_end|>"
RENDERERS = [*((name, name) for name in (*FAMILIES, *MORE)), ("template", "qwen3"), ("template", "llama-3")]
ANSWERS = {
    "glm-5": "</think>yo",
    "glm-4.5": "<think></think>\nyo",
    "minimax-m2": "</think>\n\nyo",
    "kimi-k2.5": "</think>yo",
    "nemotron-3": "</think>yo",
    "nemotron-3-ultra": "</think>yo",
    "qwen3.5": "</think>\n\nyo",
    "qwen3.6": "</think>\n\nyo",
    "qwen3.8": "</think>\n\nyo",
    "gpt-oss": "<|channel|>final<|message|>yo",
}
"""A plain answer, where it is more than "yo"."""


def listing(folder, eos):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    return str(folder)


def tokenizer_with(family, folder, extra=EXTRA):
    """The family's tokenizer with one more token, which the model's folder lists as an end."""
    tokenizer = family_tokenizer.__wrapped__(family)
    if extra == EXTRA:
        tokenizer.add_tokens([AddedToken(EXTRA, special=True, normalized=False)], special_tokens=True)
    (token,) = tokenizer.encode(extra, add_special_tokens=False)
    tokenizer.name_or_path = listing(folder, [tokenizer.eos_token_id, token])
    return tokenizer, token


@pytest.mark.slow
@pytest.mark.parametrize(("name", "family"), RENDERERS)
@pytest.mark.parametrize("extra", [EXTRA, "\n"])
def test_every_renderer_ends_turns_with_the_formats_ids_and_those_of_the_models_folder(name, family, extra, tmp_path):
    plain = create_renderer(name, family_tokenizer(family))
    tokenizer, token = tokenizer_with(family, tmp_path, extra)
    renderer = create_renderer(name, tokenizer)
    own = [plain.decode(ids([i])) for i in plain.stop_token_ids]
    found = [renderer.decode(ids([i])) for i in renderer.stop_token_ids]
    assert found == [*own, *(text for text in (tokenizer.eos_token, extra) if text not in own)]
    assert token in renderer.stop_token_ids


@pytest.mark.slow
@pytest.mark.parametrize(("name", "family"), RENDERERS)
@pytest.mark.parametrize("extra", [EXTRA, "\n"])
def test_a_turn_that_ended_so_is_rendered_again_and_other_turns_continue_as_before(name, family, extra, tmp_path):
    plain = create_renderer(name, family_tokenizer(family))
    renderer = create_renderer(name, tokenizer_with(family, tmp_path, extra)[0])
    said = ANSWERS.get(family, "yo").replace(extra, "")
    ends = [renderer.decode(ids([i])) for i in plain.stop_token_ids]

    def following(which, end):
        opened = Conversation.open(which, [ASK])
        return opened.answered(ids(which.tokenizer.encode(said + end))).continued([THANK])

    anew = following(renderer, extra)
    assert (anew.extends, str(anew.broken)) == (False, "other_end")
    for end in ["", *ends]:
        now, before = following(renderer, end), following(plain, end)
        assert (renderer.decode(now.prompt_ids), now.broken) == (plain.decode(before.prompt_ids), before.broken)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "family"), RENDERERS)
def test_what_a_turn_says_ends_before_it(name, family, tmp_path):
    renderer = create_renderer(name, tokenizer_with(family, tmp_path)[0])
    said = ANSWERS.get(family, "yo")
    prompt = renderer.render_ids([ASK])
    read = renderer.parse_response(ids(renderer.tokenizer.encode(said + EXTRA)), prompt)
    assert (read.content.strip(), bool(read.reasoning_content)) == ("yo", False)


@pytest.mark.parametrize("name", ["qwen3", "template"])
def test_an_unreadable_file_is_refused_by_every_renderer(name, tmp_path):
    tokenizer, _ = tokenizer_with("qwen3", tmp_path)
    listing(tmp_path, ["</s>"])
    with pytest.raises(ModelError, match=r"generation_config\.json has the eos_token_id"):
        create_renderer(name, tokenizer)


def test_an_adapter_has_the_ids_of_its_base_model(tmp_path):
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    base.mkdir(), adapter.mkdir()
    listing(base, [3, 7])
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(base)}))
    assert generation_stops(str(adapter)) == [3, 7]


def test_a_model_of_the_hub_has_those_of_the_cached_file(tmp_path, monkeypatch):
    commit = "a" * 40
    cached = tmp_path / "models--who--what"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text(commit)
    (cached / "snapshots" / commit).mkdir(parents=True)
    listing(cached / "snapshots" / commit, 9)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert generation_stops("who/what") == [9]
    assert generation_stops("who/else") == generation_stops("not a name") == generation_stops("") == []


def test_loading_the_tokenizer_of_a_hub_id_caches_the_file(monkeypatch):
    asked = []
    monkeypatch.setattr(loading, "find_source", lambda name: name)
    monkeypatch.setattr(loading.AutoTokenizer, "from_pretrained", lambda name: family_tokenizer("qwen3"))
    monkeypatch.setattr(loading, "cached_file", lambda name, file, **how: asked.append((name, file)))
    loading.load_tokenizer("who/what")
    assert asked == [("who/what", "generation_config.json")]


def test_more_ids_than_any_model_has_are_refused(tmp_path):
    with pytest.raises(ModelError, match=r"generation_config\.json .*1024 at most"):
        generation_stops(listing(tmp_path, list(range(1025))))


def test_the_ends_of_turns_are_told_with_their_texts(tmp_path):
    tokenizer, token = tokenizer_with("qwen3", tmp_path)
    said = ends_in_words(create_renderer("qwen3", tokenizer))
    assert said == f"turns end with '<|im_end|>' (258) or '<|endoftext|>' (256) or '<|extra_end|>' ({token})"


def test_ids_outside_of_the_vocabulary_are_left_out():
    assert ends_within((9, 3, 3, 12, 0), 10) == (9, 3, 0)


@pytest.mark.parametrize("name", ["qwen3", "template"])
def test_a_demonstration_that_could_not_be_sampled_to_its_end_is_refused(name, tmp_path):
    renderer = create_renderer(name, tokenizer_with("qwen3", tmp_path, "!")[0])
    with pytest.raises(UsageError, match=r"message 1 contains token \d+ \('!'\) before its end.*generation_config"):
        trajectory_from_messages(renderer, [ASK, {"role": "assistant", "content": "It is! 20 degrees."}])
    (turn,) = trajectory_from_messages(renderer, [ASK, {"role": "assistant", "content": "It is 20."}]).turns
    assert renderer.decode(turn.completion_ids).endswith("It is 20.<|im_end|>")
