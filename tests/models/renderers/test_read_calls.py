"""What is read from a completion is what was sampled: valid calls come back exactly, damaged ones are never read as
other calls.

A call that was read from a damaged text is right if the format, asked to write it, writes what stands in that text.
"""

import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from families import FAMILIES, MORE, WITHOUT_TEMPLATE, family_renderer, source_renderer
from random_calls import TOOLS, RandomCalls, canonical, functions, written
from random_dialogues import byte_tokenizer

from campaigns import sized
from verbatim.core.errors import EnvironmentFault, ModelError
from verbatim.models.renderers import RENDERERS, create_renderer
from verbatim.models.renderers.bare_values import typed
from verbatim.models.renderers.responses import types_of
from verbatim.models.renderers.tagged_calls import ArgumentTags

PARTS = sized(2, 8)
FOLDER = Path(__file__).parent / "data" / "trl_templates"
REFUSES = ("family gemma4",)
"""Formats that write some texts so that nobody could read them back: keys without quotes or an escape."""


NOT_READ = {
    "cohere",
    "cohere2",
    "deepseek_r1_distill",
    "diffusion_gemma",
    "gemma",
    "gemma3",
    "gemma4",
    "gemma4_v2",
    "gemma4_v3",
    "gemma4_v4",
    "gemma4_v5",
    "idefics3",
    "lfm2",
    "llama3",
    "llava_next",
    "phi3",
    "phi3_5",
    "qwen2_5_vl",
    "smolvlm",
}
"""Templates whose calls cannot be read, also as trl patched them: most write no tools."""
TEMPLATES = [
    file.stem for file in sorted(FOLDER.glob("*.jinja")) if file.stem.removesuffix("_training") not in NOT_READ
]


@cache
def renderer_of(name):
    kind, _, name = name.partition(" ")
    if kind == "template":
        return create_renderer("template", byte_tokenizer((FOLDER / f"{name}.jinja").read_text(encoding="utf-8")))
    return source_renderer(name) if name in WITHOUT_TEMPLATE else family_renderer(name)


FAMILY_NAMES = [*FAMILIES, *MORE, *WITHOUT_TEMPLATE]
FORMATS = [*(f"family {name}" for name in FAMILY_NAMES), *(f"template {name}" for name in TEMPLATES)]


def most_calls(name):
    return 1 if "gpt" in name or "llama" in name else 2


def read(renderer, prompt, ids):
    return renderer.parse_response(np.asarray(ids, dtype=np.int32), prompt, TOOLS).tool_calls


@cache
def marks_of(name):
    """The parts of the format's syntax, as a damage puts them in and takes them out."""
    syntax = syntax_of(renderer_of(name))
    if syntax is None:
        return ["<|message|>", "<|channel|>", "to=functions.", "<|call|>", "json", "<|tool_call>", "call:", '<|"|>']
    tags = [syntax.tags.key, syntax.tags.value, syntax.tags.ends] if syntax.tags else []
    pieces = [syntax.before, syntax.opens, syntax.closes, syntax.after_name, *tags]
    return [*pieces, *(word for piece in pieces for word in piece.split()), "</parameter>", "</function>"]


def block_of(name, call):
    """The text with which the format writes one call, without what encloses several."""
    renderer, one = renderer_of(name), {"id": call.id or f"functions.{call.name}:0", "type": "function"}
    _, ids = written(renderer, [{**one, "function": {"name": call.name, "arguments": call.arguments}}])
    text = renderer.decode(ids)
    for stop in (renderer.decode([token]) for token in renderer.stop_token_ids):
        text = text.removesuffix(stop)
    syntax = syntax_of(renderer)
    if syntax is None:
        return text[text.index("to=" if "gpt" in name else "<|tool_call>") :]
    if syntax.form == "python":
        return text[text.index("[") + 1 : text.rindex("]")]
    text = text[text.index(syntax.opens.split()[0]) if syntax.opens else 0 :]
    return text.removeprefix(syntax.opens).strip("[] ") if syntax.listed else text[: end_of(syntax, text)]


def end_of(syntax, text):
    if not syntax.closes:
        return len(text)
    last = syntax.closes.split()[-1]
    return text.rindex(last) + len(last)


def syntax_of(renderer):
    return getattr(renderer, "_syntax", None)


def not_in_the_text(name, text, wanted, calls):
    """Calls that were read and are neither those that were written nor stand in the text, with what the format writes
    for them."""
    found = []
    for call in calls:
        if call.status != "ok" or functions([as_function(call)])[0] in wanted:
            continue
        try:
            block = block_of(name, call)
        except EnvironmentFault as error:
            found.append((call, str(error)))
            continue
        if canonical(alike(block)) not in canonical(alike(text)) and not is_in_another_order(name, call, block, text):
            found.append((call, block))
    return found


def is_in_another_order(name, call, block, text):
    """Gemma 4 writes keys in their order; those that are read may stand in any."""
    body = block.removeprefix("<|tool_call>call:").removesuffix("<tool_call|>")
    pieces = [sorted(re.split(r"([,{}])", part)) for part in (body, call.raw)]
    return "gemma" in name and call.raw in text and pieces[0] == pieces[1]


def alike(text):
    """1E3 is 1000.0, Python's words are JSON's, and a character may be escaped or not."""
    words = {"True": "true", "False": "false", "None": "null"}
    text = re.sub(r"\d+(?:\.\d+)?[eE][-+]?\d+", lambda found: repr(float(found[0])), text)
    for character, letter in {"\a": "a", "\b": "b", "\v": "v", "\f": "f"}.items():
        text = text.replace(character, f"\\{letter}").replace(f"\\x{ord(character):02x}", f"\\{letter}")
    return re.sub(r"\b(?:True|False|None)\b", lambda found: words[found[0]], text)


def as_function(call):
    return {"name": call.name, "arguments": call.arguments}


@dataclass
class CampaignCounts:
    """What became of texts of one format."""

    valid: int = 0
    refused: list = field(default_factory=list)
    altered: list = field(default_factory=list)
    damaged: int = 0
    misread: list = field(default_factory=list)


def check(name, seed, counts):
    """One message with calls, read back; and with three damages, one at a time."""
    renderer, random_calls = renderer_of(name), RandomCalls(seed)
    calls = random_calls.calls(most_calls(name))
    prompt, ids = written(renderer, calls)
    said, text = read(renderer, prompt, ids), renderer.decode(ids)
    wanted = functions([call["function"] for call in calls])
    ok = functions([as_function(call) for call in said if call.status == "ok"])
    counts.valid += 1
    if ok != wanted or len(said) != len(wanted):
        (counts.altered if set(ok) - set(wanted) else counts.refused).append((name, seed, text, said))
    for _ in range(3):
        changed = random_calls.damaged(text, marks_of(name))
        sampled = renderer.tokenizer.unescaped.encode(changed, add_special_tokens=False)
        found = not_in_the_text(name, changed, wanted, read(renderer, prompt, sampled))
        counts.damaged += 1
        counts.misread += [(name, seed, changed, *one) for one in found]


@pytest.mark.slow
@pytest.mark.campaign
@pytest.mark.parametrize("part", range(PARTS))
def test_calls_come_back_exactly_and_damaged_ones_as_no_others(part, campaign):
    counts, row = CampaignCounts(), campaign("calls that are read back")
    damaged = campaign("damaged calls that are read")
    for name in FORMATS[part::PARTS]:
        of_format = CampaignCounts()
        for seed in range(sized(3, 340)):
            check(name, seed, of_format)
        for attribute, value in vars(of_format).items():
            setattr(counts, attribute, getattr(counts, attribute) + value)
        assert name in REFUSES or not of_format.refused, of_format.refused[:1]
        assert len(of_format.refused) < 0.6 * of_format.valid or of_format.valid < 10
    row.cases += counts.valid
    row.wrong += len(counts.altered)
    damaged.cases += counts.damaged
    damaged.wrong += len(counts.misread)
    assert (counts.altered, counts.misread) == ([], [])


@pytest.mark.slow
def test_every_template_is_here_whose_calls_can_be_read():
    files = list(FOLDER.glob("*.jinja"))
    assert len(files) >= len(TEMPLATES)
    for file in files:
        try:
            read = renderer_of(f"template {file.stem}").tool_support.read
        except ModelError:  # written for contents that are lists of parts
            read = False
        assert bool(read) == (file.stem in TEMPLATES), file.stem


def test_every_family_is_here():
    assert set(FAMILY_NAMES) == set(RENDERERS) - {"template"}


def test_a_reader_that_strips_values_is_found(monkeypatch):
    """The campaign can fail."""
    read_exactly = ArgumentTags.read

    def read_stripped(self, text, name, tools):
        arguments, status = read_exactly(self, text, name, tools)
        return {key: value.strip() if isinstance(value, str) else value for key, value in arguments.items()}, status

    monkeypatch.setattr(ArgumentTags, "read", read_stripped)
    counts = CampaignCounts()
    for seed in range(12):
        check("family qwen3.5", seed, counts)
    assert counts.altered


def test_a_reader_that_takes_what_it_finds_is_found(monkeypatch):
    """The campaign can fail."""

    def read_loosely(self, text, name, tools):
        found = re.findall(r"<parameter=(\w+)>\n(.*?)\n</parameter>", text, re.DOTALL)
        return {key: typed(value, types_of(tools, name, key)) for key, value in found}, "ok"

    monkeypatch.setattr(ArgumentTags, "read", read_loosely)
    counts = CampaignCounts()
    for seed in range(12):
        check("family qwen3.5", seed, counts)
    assert counts.altered and counts.misread
