"""Mistakes of a first day, each as a person makes it: files, and what is typed."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

RUN = """\
max_steps = 1
[model]
name = "{model}"
[orchestrator]
batch_size = 8
group_size = 4
seq_len = 384
sampling = {{ max_tokens = 8 }}
{more}[[orchestrator.train.env]]
{env}
"""
"""A run of one step; `more` are further keys of [orchestrator]."""

ENVIRONMENT = """
from verbatim import Example
from verbatim.environments import Episode
from verbatim.environments.tools import FunctionTool


class Ask(Episode):
    messages = ({{"role": "user", "content": "Say yes."}},)
    {attributes}

    async def score(self, trajectory):
        {score}


class MyEnv:
    def examples(self, split):
        return {examples}

    {start} start(self, example, seed):
        return Ask()
"""


def environment(
    *,
    attributes: str = "",
    score: str = "return 1.0",
    examples: str = '[Example(id="a"), Example(id="b")]',
    start: str = "async def",
) -> str:
    """A module with one environment, with something wrong in one place."""
    return ENVIRONMENT.format(attributes=attributes, score=score, examples=examples, start=start)


ROWS = '{"question": "2 + 2?", "answer": "4"}\n{"question": "3 + 3?", "answer": "6"}\n'
REWARD = "def exact(completion, answer):\n    return float(completion == answer)\n"
MINE = 'import_path = "my_env.MyEnv"'


def no_space(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    """Every file that is written meets a full disk."""

    def full(*args: Any, **more: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)


def without(*packages: str) -> Callable[[pytest.MonkeyPatch, Path], None]:
    """These packages are not installed."""

    def hide(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
        import importlib.util

        find = importlib.util.find_spec
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name, package=None: None if name in packages else find(name, package)
        )
        for package in packages:
            monkeypatch.setitem(__import__("sys").modules, package, None)

    return hide


def taken_port(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    """Another program listens where the command wants to; its number is in the file `port`."""
    taken = socket.socket()
    taken.bind(("127.0.0.1", 0))
    taken.listen()
    (place / "port").write_text(str(taken.getsockname()[1]))
    monkeypatch.setattr("verbatim.taken_port", taken, raising=False)  # kept open until the test is over


def an_old_run(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    """The folder `run` holds a run."""
    from verbatim.cli.main import main

    main(["rl", "run.toml", "--run-dir", "run"])


def no_key(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def empty_model(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    (place / "empty").mkdir()
    (place / "empty" / "notes.txt").write_text("x")


def template_without_tools(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    """The model's chat template writes messages and no tools."""
    import shutil

    shutil.copytree((place / "model").resolve(), place / "plain")
    (place / "plain" / "chat_template.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


def other_folder(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    """The command is typed one folder above the project."""
    (place / "project").mkdir()
    for name in ("run.toml", "my_env.py"):
        (place / name).rename(place / "project" / name)


@dataclass(frozen=True)
class Mistake:
    """One mistake."""

    name: str
    """As in the table of first_day.md."""
    command: str
    """What is typed after `verbatim`."""
    env: str = MINE
    """The environment's lines in run.toml."""
    more: str = ""
    """Further lines of [orchestrator]."""
    tables: str = ""
    """Further tables, at the end of run.toml."""
    files: Mapping[str, str] = field(default_factory=dict)
    prepare: Callable[[pytest.MonkeyPatch, Path], None] | None = None
    run: str | None = None
    """Instead of run.toml."""
    status: int = 2


def my_env(**wrong: str) -> dict[str, str]:
    return {"my_env.py": environment(**wrong)}


CHECK = "env check my_env:MyEnv --examples 2"
TOOLS = "\n\n    @property\n    def tools(self): return [self.look]"
DATA = {"tasks.jsonl": ROWS, "my_rewards.py": REWARD}
MISTAKES = (
    Mistake("A key is that of another trainer", "config run.toml --trainer.optim.learning-rate 1e-4", files=my_env()),
    Mistake("A table is misspelt", "config run.toml", files=my_env(), tables="[trainer.optimizer]\nlr = 1e-4\n"),
    Mistake("A number is a text", "config run.toml --orchestrator.batch-size many", files=my_env()),
    Mistake("group_size does not divide batch_size", "rl run.toml --orchestrator.group-size 3", files=my_env()),
    Mistake("group_size is 1", "rl run.toml --orchestrator.group-size 1", files=my_env()),
    Mistake("The file is no TOML", "rl run.toml", run="[model\nname = 3\n"),
    Mistake("There is no such file", "rl my_run.toml"),
    Mistake("A Python file in place of the TOML file", "rl my_env.py", files=my_env()),
    Mistake("No environment", "rl run.toml", run='[model]\nname = "model"\n'),
    Mistake("The model's folder is not there", "rl run.toml --model.name models/qwen", files=my_env()),
    Mistake("The model's folder holds no model", "rl run.toml --model.name ./empty", files=my_env(),
            prepare=empty_model),
    Mistake("The chat template knows no tools", "rl run.toml --model.name ./plain", env='id = "guess_number"',
            prepare=template_without_tools),
    Mistake("A bundled environment is misspelt", "rl run.toml", env='id = "guess_numbr"'),
    Mistake("The environment's module is not found", "rl run.toml", env='import_path = "my_envs.MyEnv"',
            files=my_env()),
    Mistake("The class is misspelt", "rl run.toml", env='import_path = "my_env.MyEnvironment"', files=my_env()),
    Mistake("The module has a syntax error", "rl run.toml", files={"my_env.py": "class MyEnv\n"}),
    Mistake("The module imports what is not installed", "rl run.toml", files={"my_env.py": "import no_such_package\n"}),
    Mistake("An argument of the environment is misspelt", "rl run.toml", env='id = "guess_number"\nargs = { hgh = 9 }'),
    Mistake("No examples", "rl run.toml", files=my_env(examples="[]")),
    Mistake("Two examples with one id", "rl run.toml", files=my_env(examples='[Example(id="a"), Example(id="a")]')),
    Mistake("start is not async", "rl run.toml", files=my_env(start="def")),
    Mistake("A tool's argument has no type", CHECK, status=1,
            files=my_env(attributes=f"def look(self, at): ...{TOOLS}")),
    Mistake("A tool has no description", CHECK, status=1,
            files=my_env(attributes=f"def look(self, at: str): ...{TOOLS}")),
    Mistake("The score is a text", CHECK, files=my_env(score='return "good"'), status=1),
    Mistake("The score is NaN", CHECK, files=my_env(score='return float("nan")'), status=1),
    Mistake("score is not async", CHECK, status=1,
            files={"my_env.py": environment().replace("async def score", "def score")}),
    Mistake("The score raises", CHECK, files=my_env(score='raise KeyError("answer")'), status=1),
    Mistake("Every reward is the same", CHECK, files=my_env(), status=1),
    Mistake("The reward function names no field of the data", "rl run.toml", files={
        **DATA, "my_rewards.py": REWARD.replace("answer", "target")},
        env='import_path = "my_rewards.exact"\nargs = { data = "tasks.jsonl", prompt = "question" }'),
    Mistake("The data's prompt has another name", "rl run.toml", files=DATA,
            env='import_path = "my_rewards.exact"\nargs = { data = "tasks.jsonl" }'),
    Mistake("The data file is not there", "rl run.toml", files=DATA,
            env='import_path = "my_rewards.exact"\nargs = { data = "train.jsonl" }'),
    Mistake("A class of another trainer without a reward", "rl run.toml", env='import_path = "my_env.Vault"', files={
        "my_env.py": "class Vault:\n    def reset(self, **kwargs): ...\n    def enter(self, code: int): 'Enter.'\n"}),
    Mistake("No demonstrations for a model made of nothing", "rl run.toml", files=my_env(),
            run=f"[model.build]\nhidden_size = 32\n[[orchestrator.train.env]]\n{MINE}\n"),
    Mistake("An extra is not installed", "rl run.toml", files=my_env(), prepare=without("peft"),
            tables="[trainer.lora]\nr = 4\n"),
    Mistake("vLLM is not installed", "rl run.toml --inference.backend vllm", files=my_env(), prepare=without("vllm")),
    Mistake("No key for the judge", "rl run.toml", files=my_env(), prepare=no_key,
            env='id = "judged"\nargs = { environment = "my_env.MyEnv", judge = { model = "gpt-5-mini" } }'),
    Mistake("The run folder holds another run", "rl run.toml --run-dir run", files={
        "my_env.py": environment(score="return len(trajectory.messages[-1]['content']) / 100")}, prepare=an_old_run),
    Mistake("Nothing to resume", "rl run.toml --resume", files=my_env()),
    Mistake("The run folder has other files in it", "rl run.toml --run-dir .", files=my_env()),
    Mistake("The disk is full", "rl run.toml", files=my_env(), prepare=no_space, status=1),
    Mistake("The port is taken", "serve model --port PORT", prepare=taken_port),
    Mistake("No GPU", "rl run.toml --trainer.device cuda", files=my_env()),
    Mistake("No GPU for nccl", "rl run.toml --inference.vllm.weight-transfer nccl", files=my_env(),
            tables='[inference]\nbackend = "vllm"\n[inference.vllm]\nurls = ["http://127.0.0.1:9"]\n'),
    Mistake("The prompt does not fit into seq_len", f"{CHECK} --seq-len 2", files=my_env(), status=1),
    Mistake("The server of a rollout is not there",
            "rollout tasks.jsonl --base-url http://127.0.0.1:9/v1 --model m --out out.jsonl",
            files={"tasks.jsonl": '{"messages": [{"role": "user", "content": "Hi"}]}\n'}, status=1),
    Mistake("The command is typed in another folder", "config project/run.toml", files=my_env(), prepare=other_folder,
            status=0),
)  # fmt: skip
