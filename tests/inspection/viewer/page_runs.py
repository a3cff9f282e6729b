"""Run folders for the tests of the page: a tokenizer of bytes, several environments, and texts that try to get out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from viewer_runs import make_run

from verbatim.core.trajectories import TrajectoryOutcome
from verbatim.core.types import Trajectory, Turn

HOSTILE = {
    "script": "<script>window.hacked = 1; alert(1)</script>",
    "closing": "</div></main></body></html><script>window.hacked = 2</script>",
    "image": '<img src="https://example.invalid/x.png" onerror="window.hacked = 3">',
    "svg": '<svg xmlns="http://www.w3.org/2000/svg" onload="window.hacked = 4"><script>hacked = 5</script></svg>',
    "frame": '<iframe srcdoc="<script>parent.hacked = 6</script>"></iframe>',
    "markdown": "[click](javascript:window.hacked=7) ![x](https://example.invalid/y.png) <https://example.invalid>",
    "attribute": '" autofocus onfocus="window.hacked = 8" x="',
    "template": "${window.hacked = 9} {{constructor.constructor('window.hacked = 10')()}} <%= 1 %>",
    "style": "<style>body { display: none }</style><link rel=stylesheet href=https://example.invalid/z.css>",
    "base": "<base href=https://example.invalid/><meta http-equiv=refresh content='0;url=https://example.invalid/'>",
    "bidi": "user\u202e\u2066// admin\u2069\u2066 only\u2069 \u200f\u061c end",
    "terminal": "\x1b[2J\x1b[31mred\x1b]0;title\x07\x1b]8;;https://example.invalid\x1b\\link\x9b1m\x08\x7f",
    "controls": "a\x00b\x01c\rd\x0be\x0cf\x85g\u2028h\ufeffi\u200bj\u00adk",
    "surrogate": "half \ud83d of a pair, and \udce9",
    "combining": "Z" + "\u0301\u0489" * 400 + " tall",
    "wide": "W" * 3_000,
    "right to left": "שלום עולם مرحبا بالعالم",
    "emoji": "👩\u200d💻 family 👨\u200d👩\u200d👧",
    "entities": "&lt;b&gt; &amp; &#x3c;script&#x3e;",
    "prototype": "__proto__ constructor toString",
}
"""By name."""


def write_tokenizer(folder: Path) -> None:
    """A tokenizer in which each byte is a token, the id in the order of GPT-2's alphabet."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))


def encoder(folder: Path) -> Any:
    """Gives the ids of a text; of lone surrogates those of their escapes."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def encode(text: str) -> list[int]:
        whole = text.encode("utf-8", "backslashreplace").decode()
        return tokenizer.encode(whole, add_special_tokens=False).ids

    return encode


def episode(encode: Any, name: str, *, said: str = "42", asked: str = "What is it?", **fields: Any) -> Trajectory:
    """Two turns of an assistant that calls a tool, then answers."""
    opening = encode(f"user: {asked}\nassistant: ")
    call, reply = encode("guess(7)<|end|>"), encode("\ntool: higher\nassistant: ")
    answer = encode(said + "<|end|>")
    # A logprob of -0.01, -0.02 and so on: a test knows the one of each token.
    turns = [
        Turn(
            prompt_ids=opening,
            completion_ids=call,
            policy_versions=[3] * len(call),
            logprobs=[-0.01 * (i + 1) for i in range(len(call))],
        ),
        Turn(
            prompt_ids=[*opening, *call, *reply],
            completion_ids=answer,
            policy_versions=[4] * len(answer),
            logprobs=np.full(len(answer), -0.5),
        ),
    ]
    messages = [
        {"role": "user", "content": asked},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "guess", "arguments": {"number": 7}}}],
        },
        {"role": "tool", "content": "higher", "tool_call_id": "c1"},
        {"role": "assistant", "content": said},
    ]
    return Trajectory(
        **{
            "example_id": f"example-{name}",
            "trajectory_id": name,
            "env": "game",
            "group_id": "g0",
            "turns": turns,
            "messages": messages,
            "stop_reason": "stop",
            "reward": 1.0,
            "advantage": 0.5,
            **fields,
        }
    )


def outcome(each: Trajectory, reason: str | None = None, flags: Sequence[str] = ()) -> TrajectoryOutcome:
    """Trained with trainer logprobs that are 0.1 above the sampler's, or dropped."""
    if reason is not None:
        return TrajectoryOutcome.of_dropped(each, reason, flags)
    trainer = tuple(np.asarray(turn.logprobs, dtype=np.float32) + np.float32(0.1) for turn in each.turns)
    gradients = tuple(np.full(len(turn.completion_ids), -0.5, dtype=np.float32) for turn in each.turns)
    return TrajectoryOutcome(
        trajectory=each,
        turns=("trained",) * len(each.turns),
        flags=tuple(flags),
        trainer_logprobs=trainer,
        gradients=gradients,
    )


def step_metrics(step: int) -> dict[str, float]:
    return {
        "reward/mean": 0.1 * step,
        "success": 0.1 * step,
        "completion_tokens": 20.0 + step,
        "turns": 2.0,
        "mismatch_kl": 0.001 * step,
        "grad_norm": 0.3,
        "staleness/mean": 1.0,
        "staleness/max": 2,
        "ledger/sampled": 100 * step,
        "ledger/trained": 70 * step,
        "ledger/pending": 10 * step,
        "ledger/dropped/filter:zero_advantage": 20 * step,
        "ledger/masked_by_loss": 0,
        "time/step": 2.0,
        "time/sampler_idle": 0.5,
        "time/trainer_idle": 1.5,
        "time/weight_sync": 0.25,
        "seconds": 0.4,
    }


def make_page_run(folder: Path, *, name: str = "tries", steps: int = 6, hostile: bool = False) -> Path:
    """A run of `steps` steps: in each a group of four of "game" and one of "maze" that a filter drops.

    With `hostile`, one more step of a trajectory for each of `HOSTILE`.
    """
    write_tokenizer(folder / "model")
    encode = encoder(folder / "model")
    by_step: dict[int, list[TrajectoryOutcome]] = {}
    for step in range(1, steps + 1):
        group = f"g{step}"
        outcomes = [
            outcome(
                episode(
                    encode,
                    f"t{step}-{i}",
                    group_id=group,
                    sample_index=i,
                    reward=i / 4,
                    advantage=i / 4 - 0.375,
                    said=f"the answer of {step}-{i}",
                )
            )
            for i in range(4)
        ]
        dropped = episode(
            encode,
            f"m{step}",
            env="maze",
            group_id=f"m{step}",
            reward=0.0,
            advantage=0.0,
            stop_reason="length",
            truncated=True,
        )
        by_step[step] = [*outcomes, outcome(dropped, "filter:zero_advantage", ["zero_advantage"])]
    if hostile:
        by_step[steps + 1] = [
            outcome(
                episode(
                    encode,
                    f"hostile-{i}",
                    said=text,
                    asked=f"{kind}: {text}",
                    example_id=text,
                    env="hostile",
                    group_id="h",
                    sample_index=i,
                    error=f"environment: {text}",
                    info={text: text},
                )
            )
            for i, (kind, text) in enumerate(HOSTILE.items())
        ]
    config = f'name = "{name}"\nmax_steps = 20\nseed = 0\n[model]\nname = "somewhere/else"\n'
    metrics = [(step, step_metrics(step)) for step in range(1, steps + 1)]
    return make_run(folder, by_step, metrics=metrics, config=config)
