"""Measures what the prompts of a dialogue of 128 turns cost if each is bridged from the previous ids, or rendered from
scratch.

The dialogue is a user's question, followed by alternating tool calls and answers, with about 120 tokens per turn. All
prompts of the dialogue are made in four ways, one way after the other, and this is repeated several times:

- `bridge`: our renderer's bridge from the previous prompt and completion;
- `rerender`: our renderer from all messages;
- `transformers`: the tokenizer's `apply_chat_template` of all messages, with a fast tokenizer;
- `transformers_text`: the same without tokenising, that is, only the rendering.

A bridge renders the conversation once, and tokenises only the new part. Ratios are medians over the repeats.
`bridge_milliseconds` has the processor times of a new renderer's first bridge, of its 64th and of its last bridge, each
as the minimum over the repeats. Every bridged prompt is compared, id for id, with the prompt that is rendered from
scratch. `characters_at_turn_8_and_last` has the numbers of characters that were tokenised for two of the bridges. The
templates are those of published models; the merges of the tokenizer are learnt from the dialogue. Prints one JSON line
for each template.

    python benchmarks/bridge.py [--turns 128] [--repeats 4]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

TESTS = Path(__file__).parents[1] / "tests" / "models" / "renderers"
sys.path.insert(0, str(TESTS))

from random_dialogues import SPECIAL  # noqa: E402

from verbatim.models.renderers import create_renderer  # noqa: E402

TEMPLATES = ("qwen2_5", "qwen3_instruct_2507", "llama3_1", "qwen3_training")
TEXT = "the report of a search in old files found that nine ships left for Bonn with salt and iron on a cold day"
QUESTION = {"role": "user", "content": "Which ships left for Bonn?"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search the archive.",
            "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
        },
    }
]


def exchanges(number: int) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Make pairs of (message of the model, messages of the tool)."""
    pick = random.Random(0)

    def words(count: int) -> str:
        return " ".join(pick.choices(TEXT.split(), k=count))

    made = []
    for i in range(number):
        call = {
            "id": f"call{i:05d}",
            "type": "function",
            "function": {"name": "search", "arguments": {"query": words(6)}},
        }
        said = {"role": "assistant", "content": "", "tool_calls": [call]}
        made.append((said, [{"role": "tool", "name": "search", "tool_call_id": call["id"], "content": words(80)}]))
    return made


def tokenizer_for(template: str, text: str) -> PreTrainedTokenizerFast:
    """Make a byte-level tokenizer with merges learnt from the text, and with the special tokens of the template."""
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1500, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator([text], trainer)
    tokens = ["<bos>", "<eos>", *sorted(set(SPECIAL.findall(template)))]
    backend.add_special_tokens([AddedToken(token, special=True) for token in tokens])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>", chat_template=template
    )


class Meter:
    """Counts the characters that a renderer tokenises."""

    def __init__(self, renderer: Any) -> None:
        self.characters = 0
        encode = renderer.tokenizer.encode

        def counted(text: str) -> Any:
            self.characters += len(text)
            return encode(text)

        renderer.tokenizer.encode = counted


@dataclass(frozen=True)
class Turn:
    """One turn of the dialogue, and the messages that follow it."""

    completion: Any
    answers: list[dict[str, Any]]
    messages: list[dict[str, Any]]
    """All messages of the next prompt."""


def written(tokenizer: Any, dialogue: Sequence[tuple[dict[str, Any], list[dict[str, Any]]]]) -> list[Turn]:
    """Make the turns of the dialogue with the completions that the template itself writes."""
    stop = "<|eot_id|>" if "<|eot_id|>" in tokenizer.chat_template else "<|im_end|>"
    messages, made = [QUESTION], []
    for said, answers in dialogue:
        start = len(text(tokenizer, messages))
        messages = [*messages, said, *answers]
        turn = text(tokenizer, messages)[start:].partition(stop)[0] + stop
        made.append(Turn(np.asarray(tokenizer.encode(turn), dtype=np.int32), answers, messages))
    return made


def bridged(renderer: Any, dialogue: Sequence[Turn], seconds: list[float] | None = None) -> list[Any]:
    """Bridge every prompt after the first from the previous prompt. The duration of each bridge is added to
    `seconds`."""
    prompts = [renderer.render_ids([QUESTION], TOOLS)]
    for turn in dialogue:
        started = time.thread_time()
        prompts.append(renderer.bridge_to_next_turn(prompts[-1], turn.completion, turn.answers, TOOLS))
        if seconds is not None:
            seconds.append(time.thread_time() - started)
    return prompts[1:]


def text(tokenizer: Any, messages: Sequence[Any], **how: Any) -> Any:
    """Render messages with `transformers`."""
    how = {"tokenize": False, **how}
    return tokenizer.apply_chat_template(messages, tools=TOOLS, add_generation_prompt=True, return_dict=False, **how)


def measure(name: str, turns: int, repeats: int) -> dict[str, Any]:
    """Run the benchmark for one template; returns its figures."""
    template = (TESTS / "data" / "trl_templates" / f"{name}.jinja").read_text(encoding="utf-8")
    dialogue = exchanges(turns)
    tokenizer = tokenizer_for(template, json.dumps(dialogue))
    played = written(tokenizer, dialogue)
    seconds: list[dict[str, float]] = []
    each: list[list[float]] = []
    for _ in range(repeats):
        renderer = create_renderer("template", tokenizer)
        each.append([])
        ways: dict[str, Callable[[], list[Any]]] = {
            "bridge": partial(bridged, renderer, played, each[-1]),
            "rerender": lambda r=renderer: [r.render_ids(turn.messages, TOOLS) for turn in played],
            "transformers": lambda: [text(tokenizer, turn.messages, tokenize=True) for turn in played],
            "transformers_text": lambda: [text(tokenizer, turn.messages) for turn in played],
        }
        made: dict[str, list[Any]] = {}
        took: dict[str, float] = {}
        for way, make in ways.items():
            started = time.perf_counter()
            made[way] = make()
            took[way] = time.perf_counter() - started
        for number, prompts in enumerate(zip(made["bridge"], made["rerender"], made["transformers"], strict=True)):
            ours, anew, theirs = prompts
            assert ours is not None, f"{name}: the prompt after turn {number + 1} is not bridged"
            assert ours.tolist() == anew.tolist() == theirs, f"{name}: the prompt after turn {number + 1} differs"
        seconds.append(took)
    fastest = [round(1000 * min(took), 2) for took in zip(*each, strict=True)]
    return {
        "benchmark": "bridge",
        "template": name,
        "turns": turns,
        "tokens": len(made["bridge"][-1]),
        "characters_at_turn_8_and_last": characters(tokenizer, played),
        "bridge_milliseconds": [fastest[0], fastest[turns // 2 - 1], fastest[-1]],
        "bridge_seconds": round(statistics.median(took["bridge"] for took in seconds), 3),
        **{
            f"{way}_over_bridge": round(statistics.median(took[way] / took["bridge"] for took in seconds), 1)
            for way in ways
            if way != "bridge"
        },
    }


def characters(tokenizer: Any, played: Sequence[Turn]) -> list[int]:
    """The numbers of characters that are tokenised for the 8th and for the last bridge."""
    renderer = create_renderer("template", tokenizer)
    prompts = [renderer.render_ids([QUESTION], TOOLS), *bridged(renderer, played)]
    meter, counts = Meter(renderer), []
    for number in (7, len(played) - 1):
        meter.characters = 0
        turn = played[number]
        renderer.bridge_to_next_turn(prompts[number], turn.completion, turn.answers, TOOLS)
        counts.append(meter.characters)
    return counts


def main() -> None:
    """Run the benchmark and print the results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=4)
    arguments = parser.parse_args()
    for name in TEMPLATES:
        print(json.dumps(measure(name, arguments.turns, arguments.repeats)), flush=True)


if __name__ == "__main__":
    main()
