"""Texts of ids: whole characters as they are, bytes as bytes; and the doctor's words at breaks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from viewer_runs import make_run, read, trained, trajectory

from verbatim.core.types import Turn
from verbatim.inspection.viewer.tokenizer import RunTokenizer, find_tokenizer


def byte_level(folder: Path) -> RunTokenizer:
    """Ids 0 to 255 are the bytes, in the order of their values; 256 joins two of them, 257 is a control token."""
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    encode = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str
    by_byte = {byte: encode(chr(byte))[0][0] for byte in range(128)}
    by_byte |= {byte: encode(chr(byte))[0][0][1] for byte in range(128, 192)}
    rest = [character for character in characters if character not in by_byte.values()]
    by_byte |= dict(zip(range(192, 256), sorted(rest), strict=True))  # Latin letters, then the first that follow
    vocab = {by_byte[byte]: byte for byte in range(256)} | {by_byte[0x68] + by_byte[0x69]: 256}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>")])
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>", "chat_template": "{{ 1 }}"}))
    return RunTokenizer(folder)


def test_bytes_that_are_no_whole_character_are_shown_as_bytes(tmp_path: Path):
    tokenizer = byte_level(tmp_path / "model")
    found = tokenizer.pieces([0x68, 0x20, 0x0A, 0x00, 0xC3, 0xA9, 256, 257, 999, 0x68])
    assert found["pieces"] == {
        0x68: "h",
        0x20: " ",
        0x0A: "\n",
        0x00: "\x00",
        0xC3: "\\xc3",
        0xA9: "\\xa9",
        256: "hi",
        257: "<|end|>",
    }
    assert (found["byte_pieces"], found["special"]) == ([0xA9, 0xC3], [257])
    assert tokenizer.decode([0xC3, 0xA9, 257]) == "é<|end|>"
    assert tokenizer.eos_token_id == 257 and tokenizer.chat_template == "{{ 1 }}" and len(tokenizer) == 258


def test_pieces_of_a_sentencepiece_vocabulary_keep_their_spaces(tmp_path: Path):
    vocab = {"<0xF0>": 0, "<0x41>": 1, "\u2581Hello": 2, "o": 3, "\u2581": 4, "<0xZZ>": 5}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    found = RunTokenizer(tmp_path).pieces(range(6))
    assert found["pieces"] == {0: "\\xf0", 1: "A", 2: " Hello", 3: "o", 4: " ", 5: "<0xZZ>"}
    assert found["byte_pieces"] == [0]


def test_the_tokenizer_is_found_in_the_run_or_where_its_configuration_says(tmp_path: Path):
    byte_level(tmp_path / "elsewhere")
    run = make_run(tmp_path / "run", config=f'[model]\nname = "{tmp_path / "elsewhere"}"\n')
    assert find_tokenizer(run) == tmp_path / "elsewhere"
    byte_level(run / "weights" / "v000003")
    byte_level(run / "weights" / "v000012")
    assert find_tokenizer(run) == run / "weights" / "v000012"
    byte_level(run / "model")
    assert find_tokenizer(run) == run / "model"


def test_a_damaged_tokenizer_leaves_ids_and_a_reason(tmp_path: Path):
    run = make_run(tmp_path / "run", {1: [trained(trajectory("t"))]})
    (run / "model").mkdir()
    (run / "model" / "tokenizer.json").write_text("{")
    view = read(run)
    assert view.trajectory("t")["pieces"] == {} and view.about()["tokenizer"] is None
    assert "tokenizer.json is not a tokenizer" in view.about()["tokenizer_problem"]


def test_ids_that_the_tokenizer_lacks_have_no_text_and_breaks_are_explained_without_it(tmp_path: Path):
    turns = (Turn(prompt_ids=[1, 2], completion_ids=[5000]), Turn(prompt_ids=[1, 3], completion_ids=[0x68]))
    run = make_run(tmp_path / "run", {1: [trained(trajectory("t", turns=turns))]})
    byte_level(run / "model")
    found = read(run).trajectory("t")
    assert set(found["pieces"]) == {1, 2, 3, 0x68}
    assert found["turns"][1]["break"]["reason"] == "unknown"


def test_a_break_is_told_in_the_doctors_words(tmp_path: Path):
    """The answer `hi` was sampled as one token and came back as two."""
    end = [257]
    first = Turn(prompt_ids=[*b"ask:", *end], completion_ids=[256, *end], logprobs=[-1.0, -1.0])
    again = Turn(prompt_ids=[*b"ask:", *end, *b"hi", *end, *b"more", *end], completion_ids=[0x68, *end])
    run = make_run(tmp_path / "run", {1: [trained(trajectory("t", turns=(first, again)))]})
    byte_level(run / "model")
    found = read(run).trajectory("t")["turns"]
    assert found[0]["break"] is None
    said = found[1]["break"]
    assert said["reason"] == "retokenised"
    assert said["words"][0].startswith("re-tokenised: ")
    assert said["words"][1] == "compared with turn 0, it differs from token 5 on"
    assert "recorded: hi" in said["words"] and "sent: h i" in said["words"]
    assert any("the conversation was rendered again" in line for line in said["words"])


@pytest.mark.parametrize("text", ["hi", "e\u0301", "\U0001f642"])
def test_the_pieces_of_any_text_hold_its_bytes(tmp_path: Path, text: str):
    tokenizer = byte_level(tmp_path / "model")
    raw = text.encode()
    found = tokenizer.pieces(raw)
    shown = "".join(found["pieces"][byte] for byte in raw)
    assert shown == "".join(chr(byte) if byte < 128 else f"\\x{byte:02x}" for byte in raw)
