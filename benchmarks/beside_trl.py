"""Compares the episodes per second of whole training runs with those of TRL's GRPOTrainer, on the same job and machine.

The job (`beside_trl_job.py`) is a game of four guesses, written as a class with `reset` and a tool. TRL takes the class
as its `environment_factory`, and Verbatim takes it as a `ToolClass`. Groups have 16 episodes, steps have 128 episodes,
and the temperature is 1. The model is a Qwen3 with 0.9M parameters (4 layers, width 128, untied embeddings), a plain
byte-level tokenizer, and the chat template of Qwen3 that TRL ships. It is warm-started on games. The learning rate is
so small that every step has the same amount of work. If `--venv` does not exist, a Python environment with TRL is
created there. The runs take turns; each figure is the median over the rounds.

With `--empty-thoughts`, the model is first taught to begin each turn with an empty thinking block, as Qwen3 does in its
non-thinking mode. Qwen3's template leaves such blocks out of the history. Verbatim then runs a second time, with
`history = "template"`, which renders each prompt from scratch, so that no turn extends the turn before it.

Prints one JSON line. Run: python benchmarks/beside_trl.py [--empty-thoughts] [--venv .venv-trl] [--rounds 3]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from beside_trl_job import conversations
from demo_runs import CoresBusy, finish, train_metrics, verbatim

TRL = "1.16.0"
HERE = Path(__file__).parent
TEMPLATES = HERE.parent / "tests" / "models" / "renderers" / "data" / "trl_templates"
PUBLISHED = "qwen3.jinja"
WITH_BLOCKS = "qwen3_training.jinja"
"""A template that writes an empty thinking block at the start of each turn without a thought, whatever follows the
turn."""
LEVELS = {"synchronous": 0, "asynchronous": 1, "two_batches_ahead": 2}
"""The `max_async_level` of each of Verbatim's runs, by the name of the run."""
ANEW = "rendered_again"
EPISODES = 128
"""Number of episodes in a step."""
TOKENS = 512
"""Maximum number of tokens in an episode, including the tools' answers."""
SKIPPED = 3
"""Number of first steps of a run that are left out, because they compile, warm up and fill queues."""
ENDS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")

RUN = """
max_steps = {steps}
[model]
name = "{model}"
[orchestrator]
batch_size = {episodes}
group_size = 16
seq_len = 1024
max_async_level = {level}
sampling = {{ temperature = 1.0, max_tokens = 48 }}
renderer = {{ history = "{history}" }}
[[orchestrator.train.env]]
import_path = "beside_trl_env.Game"
max_turns = 5
[trainer.optim]
lr = 1e-30
[checkpoint]
interval = 100000
[inference.torch]
max_batch_size = 128
"""
ENVIRONMENT = """
from beside_trl_job import GuessTheNumber, rows
from verbatim.environments import ToolClass


def Game():
    return ToolClass(GuessTheNumber, rows())
"""


def environment_with_trl(folder: Path) -> Path:
    """Create an environment with TRL if it is missing, and return its Python. Its torch and transformers are of the
    same releases as in this environment."""
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    releases = {"trl": TRL, **{name: version(name).partition("+")[0] for name in ("torch", "transformers")}}
    pins = ["jmespath", *(f"{name}=={release}" for name, release in releases.items())]
    subprocess.run([python, "-m", "pip", "install", "-q", *pins], check=True)
    return python


def make_model(folder: Path, taught_with: str, steps: int = 400, games: int = 2000) -> Path:
    """The model, warm-started on what this template writes, as a Hugging Face folder with the published template."""
    shown = conversations(games, seed=0)
    template = (TEMPLATES / taught_with).read_text(encoding="utf-8")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_pairs(json.dumps(shown[:200])),
        chat_template=template,
        eos_token=ENDS[2],
        pad_token=ENDS[0],
        model_max_length=1024,
        clean_up_tokenization_spaces=False,
    )
    end, pad = tokenizer.convert_tokens_to_ids([ENDS[2], ENDS[0]])
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        eos_token_id=end,
        pad_token_id=pad,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=[end, pad], pad_token_id=pad)
    model.save_pretrained(folder / "random")
    tokenizer.save_pretrained(folder / "random")
    data = folder / "games.jsonl"
    data.write_text("".join(json.dumps(each) + "\n" for each in shown))
    run = folder / "warm_start.toml"
    run.write_text(
        RUN.format(steps=1, model=folder / "random", level=0, history="verbatim", episodes=EPISODES)
        + f"""
[warm_start]
steps = {steps}
batch_size = 8
data = "{data}"
optim = {{ lr = 3e-3, schedule = "cosine", warmup_steps = 20 }}
"""
    )
    finish(verbatim("sft", str(run), "--run-dir", str(folder / "sft"), cwd=folder, PYTHONPATH=search_path(folder)))
    taught = folder / "sft" / "warm_start"
    tokenizer.chat_template = (TEMPLATES / PUBLISHED).read_text(encoding="utf-8")
    tokenizer.save_pretrained(taught)
    return taught


def byte_pairs(text: str) -> Tokenizer:
    """Train a byte-level BPE tokenizer with 512 ids and the usual splitting into words."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=512 - len(ENDS) - len(MARKS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text], trainer)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in ENDS])
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in MARKS])
    return tokenizer


def search_path(folder: Path) -> str:
    return os.pathsep.join([str(folder), str(HERE), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)


def ours(
    folder: Path,
    model: Path,
    steps: int,
    level: int,
    history: str = "verbatim",
    episodes: int = EPISODES,
    tables: str = "",
) -> dict[str, Any]:
    """Episodes per second of a run, whose file ends with `tables`, and what it sampled."""
    file = Path(tempfile.mkdtemp(dir=folder)) / "run.toml"
    text = RUN.format(steps=steps, model=model, level=level, history=history, episodes=episodes)
    file.write_text(text + tables)
    run = file.parent / "run"
    process = verbatim("rl", str(file), "--run-dir", str(run), cwd=folder, PYTHONPATH=search_path(folder))
    busy = CoresBusy(process, run, SKIPPED, steps)
    finish(process)
    found = train_metrics(run)[SKIPPED:]
    rate = episodes * len(found) / sum(each["time/step"] for each in found)
    return {
        "rate": rate,
        "cores_busy": busy.share(),
        **{
            name: statistics.mean(each[name] for each in found)
            for name in ("turns", "completion_tokens", "reward/mean", "samples")
        },
    }


def theirs(
    folder: Path,
    python: Path,
    model: Path,
    steps: int,
    device: str = "cpu",
    episodes: int = EPISODES,
    tokens: int = TOKENS,
) -> dict[str, Any]:
    """The same of TRL, with at most so many tokens in an episode."""
    command = [python, HERE / "beside_trl_run.py", model, str(steps), device, str(episodes), str(tokens)]
    with (folder / "trl.log").open("w") as log:
        told = subprocess.run(command, check=True, cwd=folder, stdout=subprocess.PIPE, stderr=log, text=True).stdout
    found = json.loads(told.splitlines()[-1])
    seconds = found["seconds"][SKIPPED:]
    names = found["steps"][-1]
    return {
        "rate": episodes * len(seconds) / sum(seconds),
        **{name: statistics.mean(each[name] for each in found["steps"][SKIPPED:]) for name in names},
    }


def rendered_again(folder: Path, model: Path, steps: int) -> dict[str, Any]:
    """Run Verbatim with `history = "template"`, so that the template renders every prompt from scratch."""
    return {f"{side}_{ANEW}": ours(folder, model, steps, level, "template") for side, level in LEVELS.items()}


def medians(found: Sequence[dict[str, Any]]) -> dict[str, float]:
    return {name: round(statistics.median(each[name] for each in found), 3) for name in found[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", type=Path, default=Path(".venv-trl"), help="environment with TRL, made if missing")
    parser.add_argument("--empty-thoughts", action="store_true", help="a model whose turns begin with an empty block")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12, help="of each run; the first three are left out")
    args = parser.parse_args()
    python = environment_with_trl(args.venv.absolute())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "beside_trl_env.py").write_text(ENVIRONMENT)
        model = make_model(folder, WITH_BLOCKS if args.empty_thoughts else PUBLISHED)
        rounds = [
            {
                "trl": theirs(folder, python, model, args.steps),
                **{side: ours(folder, model, args.steps, level) for side, level in LEVELS.items()},
                **(rendered_again(folder, model, args.steps) if args.empty_thoughts else {}),
            }
            for _ in range(args.rounds)
        ]
    sides = {side: medians([each[side] for each in rounds]) for side in rounds[0]}
    best = max(sides[side]["rate"] for side in LEVELS)
    ratio = [max(each[side]["rate"] for side in LEVELS) / each["trl"]["rate"] for each in rounds]
    gains = {
        side: [round(each[side]["rate"] / each[f"{side}_{ANEW}"]["rate"], 2) for each in rounds]
        for side in LEVELS
        if args.empty_thoughts
    }
    print(
        json.dumps(
            {
                "benchmark": "beside_trl",
                "trl": TRL,
                "empty_thoughts": args.empty_thoughts,
                "over_rendered_again": gains,
                "episodes_per_second": {side: sides[side]["rate"] for side in sides},
                "times_as_fast": round(best / sides["trl"]["rate"], 2),
                "of_each_round": [round(each, 2) for each in ratio],
                "what_was_sampled": sides,
                "rounds": args.rounds,
                "steps": args.steps,
                "threads": torch.get_num_threads(),
            }
        )
    )


if __name__ == "__main__":
    sys.exit(main())
