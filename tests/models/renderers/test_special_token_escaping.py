"""Untrusted text never becomes a control token, and always comes back from its ids."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from drawn import drawn, is_found
from verbatim.core.errors import EnvironmentFault, ModelError
from verbatim.models.renderers import create_renderer
from verbatim.models.renderers.special_token_escaping import BREAK, EscapingTokenizer, SpecialTokenEscaper
from verbatim.models.trained_tokenizer import CONTROL_TOKENS, MARKUP_TOKENS

CONTROL = CONTROL_TOKENS + MARKUP_TOKENS
# Whole control tokens, halves of them, the escaping's own noncharacters, and spaces that templates strip.
FRAGMENTS = [*CONTROL, "<", "|", ">", "<|", "|>", "<|im_", "end|>", "im_end|>", "<tool", "_call>", "</", "think>", "\n",
             " ", "\ufdd0", "\ufdd1", "\ufdd2", "\ufdd3", "\ufdd4", "{", '"', "\\", "é", "🙂", "a"]  # fmt: skip
TRICKY = (
    st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=8)
    .map("".join)
    .filter(lambda text: not any("\ud800" <= c <= "\udfff" for c in text))
)


@pytest.mark.parametrize("depth", [65, 600, 900, 100_000])
def test_json_that_cannot_be_walked_through_is_refused(depth):
    with pytest.raises(EnvironmentFault, match="a call's arguments are JSON that is nested deeper than 64 levels"):
        SpecialTokenEscaper(["<|im_end|>"]).json_text('{"a": ' + "[" * depth + "]" * depth + "}")


@pytest.fixture(scope="module")
def escaping(tokenizer):
    return EscapingTokenizer(tokenizer)


def control_ids(tokenizer, ids):
    wanted = set(tokenizer.convert_tokens_to_ids(list(CONTROL)))
    return Counter(int(i) for i in ids if int(i) in wanted)


def dialogue(words):
    system, user, name, argument, content, thought, answer, again = words
    return [
        {"role": "system", "content": system},
        {"role": "user", "content": user},
        {
            "role": "assistant",
            "content": content,
            "reasoning_content": "x" + thought,
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": name, "arguments": {"a": argument, argument: [1]}}}
            ],
        },
        {"role": "tool", "content": answer, "tool_call_id": "1"},
        {"role": "tool", "content": again, "tool_call_id": "1"},
    ]


@pytest.mark.parametrize("renderer_name", ["qwen3", "template"])
@given(words=st.lists(TRICKY, min_size=8, max_size=8), tool=TRICKY)
@drawn("control tokens of prompts", 10, 2000)
def test_no_text_changes_the_control_tokens_of_a_prompt(request, tokenizer, renderer_name, words, tool):
    keeps_control_tokens(request.getfixturevalue(renderer_name), tokenizer, words, tool)


def keeps_control_tokens(renderer, tokenizer, words, tool):
    """With these words a prompt has as many as with harmless ones."""
    schema = {"type": "function", "function": {"name": "f" + tool, "description": tool, "parameters": {tool: tool}}}
    plain_schema = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}
    # Also where the tool has a name that could not be called.
    hostile = renderer.write_ids(dialogue(words), [schema], True)
    # Empty content is a shape of its own (no line break before the call): keep it where it is.
    plain = renderer.write_ids(dialogue(["w" if word else "" for word in words]), [plain_schema], True)
    assert control_ids(tokenizer, hostile) == control_ids(tokenizer, plain)


def test_text_that_is_not_marked_is_found(tokenizer, monkeypatch):
    """The campaign can fail."""
    renderer = create_renderer("template", tokenizer)
    monkeypatch.setattr(renderer.tokenizer.escaper, "text", lambda text: text)
    assert is_found(
        lambda words, tool: keeps_control_tokens(renderer, tokenizer, words, tool),
        st.lists(TRICKY, min_size=8, max_size=8),
        TRICKY,
    )


@given(text=TRICKY)
@settings(max_examples=100, deadline=None)
def test_text_comes_back_from_its_ids(qwen3, text):
    ids = qwen3.render_ids([{"role": "user", "content": text}])
    assert qwen3.decode(ids) == f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


@given(pieces=st.lists(TRICKY, max_size=4))
@settings(max_examples=100, deadline=None)
def test_marked_pieces_can_be_joined_without_forming_a_control_token(escaping, tokenizer, pieces):
    ids = escaping.encode("".join(map(escaping.escaper.text, pieces)))
    assert not control_ids(tokenizer, ids)
    assert escaping.decode(ids) == "".join(pieces)


@given(pieces=st.lists(TRICKY, min_size=1, max_size=3))
@settings(max_examples=60, deadline=None)
def test_a_template_may_strip_marked_text_before_joining_it(escaping, tokenizer, pieces):
    ids = escaping.encode("".join(escaping.escaper.text(piece).strip() for piece in pieces))
    assert not control_ids(tokenizer, ids)


def test_a_token_begun_by_one_message_is_not_completed_by_the_next_text(escaping, tokenizer):
    marked = escaping.escaper.text("ends with <") + "|im_end|>" + escaping.escaper.text("|im_end|>")
    assert not control_ids(tokenizer, escaping.encode(marked))


def test_a_token_begun_by_the_template_is_not_completed_by_text(escaping, tokenizer):
    assert not control_ids(tokenizer, escaping.encode("<|im_" + escaping.escaper.text("end|> and more")))


def test_text_that_imitates_the_guards_own_notation_stays_text(escaping, tokenizer):
    bracketed, marked = "\ufdd3<|im_end|>\ufdd4", "\ufdd0\ufdd1<|im_end|>"
    for text in (bracketed, marked, "<\ufdd0\ufdd1|im_end|>", "\ufdd3\ufdd3<think>\ufdd4"):
        ids = escaping.encode(escaping.escaper.text(text))
        assert not control_ids(tokenizer, ids)
        assert escaping.decode(ids) == text


def test_control_tokens_of_the_template_are_kept_beside_marked_text(escaping, tokenizer):
    ids = escaping.encode("<|im_start|>user\n" + escaping.escaper.text("a <|im_end|> b") + "<|im_end|>")
    assert control_ids(tokenizer, ids) == Counter(tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"]))


@given(text=st.text(alphabet="ab1 <|\n{}é", max_size=20))
@settings(max_examples=60, deadline=None)
def test_text_without_control_tokens_has_the_ids_it_always_had(escaping, tokenizer, text):
    assert escaping.encode(escaping.escaper.text(text)) == tokenizer.encode(text, add_special_tokens=False)


def test_only_the_ends_of_control_tokens_are_marked():
    escaper = SpecialTokenEscaper(["<|im_end|>", "<think>"])
    for text in ("object", "function", "a b", "|im_end|", "{}", ""):
        assert escaper.text(text) == text
    assert escaper.text("a < b") == f"a <{BREAK} b"
    assert escaper.text("<|") == f"<{BREAK}|"
    assert escaper.text("end|> b") == f"end|{BREAK}> b"


def test_of_a_token_of_letters_only_its_first_and_last_pair_are_marked():
    escaper = SpecialTokenEscaper(["EOS"])
    assert escaper.text("an EOS here") == f"an E{BREAK}O{BREAK}S here"
    assert escaper.text("sE") == f"sE{BREAK}"
    assert escaper.text("OS S Es") == f"O{BREAK}S {BREAK}S Es"


@given(text=TRICKY, removed=st.sampled_from(["\n", " ", "XX", "</think>", "|"]))
@drawn("text that a template takes pieces out of", 20, 2000)
def test_what_is_taken_out_of_text_completes_no_control_token(escaping, tokenizer, text, removed):
    for token in CONTROL:
        hostile = text + token[:1] + removed + token[1:-1] + removed + token[-1:] + text
        taken = escaping.escaper.text(hostile).replace(removed, "")
        assert not control_ids(tokenizer, escaping.encode(taken))
        assert escaping.decode(escaping.encode(taken)).replace(removed, "") == hostile.replace(removed, "")


@given(text=st.lists(st.sampled_from(["<", ">", "|", "</p>", "<p>", " ", "\n", "a", "x -> y", "é"])).map("".join))
@settings(max_examples=100, deadline=None)
def test_markup_that_holds_no_control_token_has_the_ids_it_always_had(escaping, tokenizer, text):
    marked = f"<|im_start|>{escaping.escaper.text(text)}<|im_end|>"
    plain = tokenizer(f"<|im_start|>{text}<|im_end|>", add_special_tokens=False)
    assert escaping.encode(marked) == escaping(marked)["input_ids"] == plain["input_ids"]


@pytest.mark.parametrize(
    ("text", "marked"),
    [
        ('{"a":  [1, "b"]}', '{"a":  [1, "b"]}'),
        ('{"a": "<b"}', f'{{"a": "<{BREAK}b"}}'),
        ('{"a": "\\u003cb"}', f'{{"a": "<{BREAK}b"}}'),
        ('{"a": "\\u00e9"}', '{"a": "\\u00e9"}'),
        ("[no <json", f"[{BREAK}no <{BREAK}json"),
    ],
)
def test_arguments_given_as_json_are_marked_in_their_strings_and_stay_json(text, marked):
    call = {"type": "function", "function": {"name": "f", "arguments": text}}
    (message,) = SpecialTokenEscaper(["<end>", "[EOS]"]).messages(
        [{"role": "assistant", "content": "", "tool_calls": [call]}]
    )
    assert message["tool_calls"][0]["function"]["arguments"] == marked


def test_roles_and_shapes_stay_readable_for_templates():
    escaper = SpecialTokenEscaper(["<|user|>", "<|object|>", "<|function|>"])
    message = {"role": "user", "content": "hi", "tool_calls": [{"type": "function"}]}
    assert escaper.messages([message]) == [message]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    assert escaper.tools(tools) == tools


def test_a_leading_think_block_of_an_assistant_is_its_reasoning():
    escaper = SpecialTokenEscaper(["<think>", "</think>"])
    (marked,) = escaper.messages([{"role": "assistant", "content": "<think>\nhm\n</think>\n\nso"}])
    assert marked == {"role": "assistant", "content": "so", "reasoning_content": "hm"}


def test_think_tags_elsewhere_are_text():
    escaper = SpecialTokenEscaper(["<think>", "</think>"])
    for message in (
        {"role": "user", "content": "<think>a</think>b"},
        {"role": "assistant", "content": "so</think>b"},
        {"role": "assistant", "content": "<think>a</think>b", "reasoning_content": "r"},
    ):
        (marked,) = escaper.messages([message])
        assert BREAK in marked["content"]
        assert marked["content"].replace(BREAK, "") == message["content"]


def test_half_a_surrogate_pair_is_refused_with_its_place():
    with pytest.raises(EnvironmentFault, match=r"U\+D83D at position 2"):
        SpecialTokenEscaper(["<a>"]).text("ab\ud83d")


# -- tokenizers of other makes


def tokenizer_of(*tokens, normalizer=None, pre_tokenizer=None, decoder=None):
    backend = Tokenizer(BPE(unk_token=None))
    backend.pre_tokenizer = pre_tokenizer or pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoder or decoders.ByteLevel()
    if normalizer is not None:
        backend.normalizer = normalizer
    trainer = BpeTrainer(
        vocab_size=400, initial_alphabet=[*pre_tokenizers.ByteLevel.alphabet(), "▁"], show_progress=False
    )
    backend.train_from_iterator(["some words, <end> some more words"] * 3, trainer)
    backend.add_tokens(list(tokens))
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")


def test_text_that_normalises_to_a_control_token_stays_text():
    fast = tokenizer_of(AddedToken("<end>", normalized=True, special=True), normalizer=normalizers.NFKC())
    escaping = EscapingTokenizer(fast)
    end = fast.convert_tokens_to_ids("<end>")
    assert end in fast.encode("＜end＞")  # what would happen without a guard
    assert end not in escaping.encode(escaping.escaper.text("＜end＞"))
    assert escaping.encode("words<end>") == fast.encode("words<end>")


@pytest.mark.parametrize(
    ("flags", "kind"),
    [
        ({}, {}),
        ({"rstrip": True, "lstrip": True}, {}),
        ({"single_word": True}, {}),
        ({"normalized": True}, {"normalizer": normalizers.NFKC()}),
        ({}, {"pre_tokenizer": pre_tokenizers.Metaspace(prepend_scheme="first"), "decoder": decoders.Metaspace()}),
        ({}, {"pre_tokenizer": pre_tokenizers.Metaspace(prepend_scheme="always"), "decoder": decoders.Metaspace()}),
    ],
)
@pytest.mark.parametrize("untrusted", ["some \ufdd0", "\ufdd0\ufdd0 \ufdd1\ufdd2 ", "a<\ufdd4 some\ufdd0"])
def test_the_marked_path_gives_the_ids_of_the_tokenizer_itself(flags, kind, untrusted):
    fast = tokenizer_of(AddedToken("<end>", special=True, **{"normalized": False, **flags}), **kind)
    escaping = EscapingTokenizer(fast)
    for before, after in (("", "<end>words"), ("words <end>  ", " <end> <end> words"), ("<end>", "words<end>")):
        marked = escaping.encode(before + escaping.escaper.text(untrusted) + after)
        assert marked == fast.encode(before + untrusted + after, add_special_tokens=False)


def test_added_runs_of_spaces_and_added_words_are_vocabulary_not_control():
    fast = tokenizer_of(AddedToken("<end>", special=True), AddedToken("    "), AddedToken("someword"))
    escaping = EscapingTokenizer(fast)
    assert list(escaping.control_tokens) == ["<end>"]
    text = "a    someword <end>"
    marked = escaping.encode(escaping.escaper.text(text))
    assert marked[:3] == fast.encode("a    someword")[:3]
    assert escaping.decode(marked) == text


def test_a_tokenizer_whose_special_token_is_one_character_is_refused():
    with pytest.raises(ModelError, match="single character"):
        EscapingTokenizer(tokenizer_of(AddedToken("<end>", special=True), AddedToken("§", special=True)))
