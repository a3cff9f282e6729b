"""Draws projects: environments of several shapes, sound and with one flaw, demonstrations, chat templates, keys."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from e2e.tiny_runs import SIZES

TASK = '''
import types

from verbatim import Example
from verbatim.core.errors import NoDemonstrations
from verbatim.environments import Episode, Reply
from verbatim.environments.environment import Demonstration, tool_exchange
from verbatim.environments.tools import FunctionTool


def look(at: str) -> str:
    """Look somewhere.

    Args:
        at: Where.
    """
    return "rain"


LOOK = FunctionTool(look)
GO, DONE = {"role": "user", "content": "go"}, {"role": "assistant", "content": "done"}


class Said(Episode):
    """One turn; earns something by its seed, whatever is said: every group has a gradient."""

    def __init__(self, words, seed):
        self.messages = [{"role": "user", "content": "go " * words}]
        self.earned = seed % 100 / 100

    async def score(self, trajectory):
        return self.earned


class Tooled(Said):
    tools = (LOOK,)


class Asked(Said):
    async def reply(self, message):
        return Reply(messages=[GO])


class Owned(Said):
    async def run(self, agent):
        first = await agent.sample(self.messages, tools=(LOOK,))
        await agent.sample([*self.messages, first, GO])


class WithUser(Said):
    """The policy plays its own user."""

    async def run(self, agent):
        answer = await agent.sample(self.messages)
        said = await agent.sample([GO], agent="user", trained=False)
        await agent.sample([*self.messages, answer, {"role": "user", "content": said["content"]}])


SHAPES = {"single turn": Said, "tools": Tooled, "multi-turn": Asked, "own flow": Owned, "chat user": WithUser}


async def raises(self, trajectory):
    raise ValueError("no such answer")


async def gives_text(self, trajectory):
    return "1.0"


async def gives_nan(self, trajectory):
    return float("nan")


PLAYED = {"a score that raises": raises, "a score as a text": gives_text, "a score that is no number": gives_nan}


def duck(episode, *names):
    return types.SimpleNamespace(**{name: getattr(episode, name) for name in names})


def flawed(episode, flaw):
    if flaw == "no score":
        return duck(episode, "messages", "tools", "reply", "state_key", "close")
    if flaw == "no reply":
        return duck(episode, "messages", "tools", "score", "state_key", "close")
    if flaw == "the base's score":
        bare = Episode()
        bare.messages = episode.messages
        return bare
    if flaw == "a plain score":
        episode.score = lambda trajectory: 1.0
    if flaw == "a plain reply":
        episode.reply = lambda message: Reply(done=True)
    if flaw == "messages as a text":
        episode.messages = "go"
    if flaw == "a message without content":
        episode.messages = [{"role": "user"}]
    if flaw == "a message of parts":
        episode.messages = [{"role": "user", "content": ["go"]}]
    if flaw == "tools as a number":
        episode.tools = 7
    if flaw in PLAYED:
        episode.score = types.MethodType(PLAYED[flaw], episode)
    return episode


def demonstration(flaw):
    answer = {"a list": ["a", "b"], "a table": {"a": 1}, "a number": 7}.get(flaw, "rain")
    call = tool_exchange("look", {"at": "Bonn"}, answer)
    messages, tools = [GO, *call, DONE], [LOOK.schema]
    if flaw == "arguments as a list":
        call[0]["tool_calls"][0]["function"]["arguments"] = ["Bonn"]
    if flaw == "calls as a table":
        call[0]["tool_calls"] = {"function": {"name": "look", "arguments": {}}}
    if flaw == "no such tool":
        tools = []
    if flaw == "a thought as a list":
        messages[-1] = {**DONE, "reasoning_content": ["hm"]}
    if flaw == "an answer as a number":
        messages[-1] = {"role": "assistant", "content": 3}
    if flaw == "no question":
        messages = [DONE]
    if flaw == "an unknown role":
        messages = [{"role": "narrator", "content": "once"}, *messages]
    if flaw == "too long":
        messages = [{"role": "user", "content": "go " * 2000}, DONE]
    return Demonstration(messages=messages, tools=tools)


class Task:
    def __init__(self, shape, flaw="", words=(3,), system=False):
        self.shape, self.flaw, self.words, self.system = shape, flaw, words, system

    def examples(self, split):
        return [Example(id=str(n), payload={"words": words}) for n, words in enumerate(self.words)]

    async def start(self, example, seed):
        if self.flaw == "a start that raises" or (self.flaw == "a start that raises once" and example.id == "0"):
            raise OSError("the shop is closed")
        episode = SHAPES[self.shape](example.payload["words"], seed)
        if self.system:
            episode.messages = [{"role": "system", "content": "be short"}, *episode.messages]
        return flawed(episode, self.flaw)


class Shown(Task):
    def __init__(self, demonstrated, at=0, **task):
        super().__init__(**task)
        self.demonstrated, self.at = demonstrated, at

    def demonstrations(self, count, seed):
        if self.demonstrated == "none with these settings":
            raise NoDemonstrations("nothing is shown with these settings")
        return [demonstration(self.demonstrated if n == self.at else "") for n in range(count)]
'''
SHAPES = ("single turn", "tools", "multi-turn", "own flow", "chat user")
FLAWS = ("no score", "no reply", "the base's score", "a plain score", "a plain reply", "messages as a text",
         "a message without content", "a message of parts", "tools as a number", "a start that raises",
         "a start that raises once")  # fmt: skip
PLAYED = ("a score that raises", "a score as a text", "a score that is no number")
"""Known when an episode is played: `verbatim env check` does that."""
DEMONSTRATED = ("a list", "a table", "a number", "arguments as a list", "calls as a table", "no such tool",
                "a thought as a list", "an answer as a number", "no question", "an unknown role", "too long",
                "none with these settings")  # fmt: skip
LENGTHS = ((3, 3, 3), (3, 2000, 3), (2000, 2000, 2000))
WITHOUT_TOOLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WITHOUT_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
TEMPLATES = ("its own", "without tools", "without system")


def write_models(model: Path, folder: Path) -> None:
    """The tiny model with each of the chat templates."""
    for name in TEMPLATES:
        shutil.copytree(model, folder / name.replace(" ", "-"))
    (folder / "without-tools" / "chat_template.jinja").write_text(WITHOUT_TOOLS)
    own = folder / "without-system" / "chat_template.jinja"
    own.write_text(WITHOUT_SYSTEM + own.read_text())


@dataclass(frozen=True, kw_only=True)
class Project:
    """One run's tables, and what was drawn for them."""

    flaw: str
    demonstrated: str | None
    tables: dict[str, Any]
    conversations: str | None
    """The text of `talk.jsonl`, where the warm start reads one."""

    def write(self, folder: Path) -> None:
        """`run.toml`, and what it reads."""
        (folder / "run.toml").write_text(tomli_w.dumps(self.tables))
        if self.conversations is not None:
            (folder / "talk.jsonl").write_text(self.conversations)


def draw(seed: int, models: Path) -> Project:
    """The project of a seed. About half of them have one flaw: in the environment, its demonstrations, the lengths of
    its prompts, the chat template, or the file of conversations."""
    rng = random.Random(f"project {seed}")
    wrong = rng.choice(("", "", "", "", "environment", "environment", "shown", "shown", "length", "template", "data"))
    flaw = rng.choice((*FLAWS, *PLAYED)) if wrong == "environment" else ""
    demonstrated = rng.choice(DEMONSTRATED) if wrong == "shown" else rng.choice((None, "", ""))
    task: dict[str, Any] = {"shape": rng.choice(SHAPES), "flaw": flaw, "system": rng.random() < 0.2}
    task["words"] = list(rng.choice(LENGTHS[1:]) if wrong == "length" else LENGTHS[0])
    if demonstrated is not None:
        task |= {"demonstrated": demonstrated, "at": rng.choice((0, 3))}
    env = {"import_path": "task.Task" if demonstrated is None else "task.Shown", "args": task}
    group = rng.choice((2, 4))
    orchestrator: dict[str, Any] = {
        "train": {"env": [{**env, "max_turns": rng.randint(1, 3)}]},
        "group_size": group,
        "batch_size": group * rng.randint(1, 2),
        "seq_len": rng.choice((200, 384)),
        "max_async_level": rng.randint(0, 1),
        "filters": [],
        "sampling": {"max_tokens": 8},
        "trajectory_strategy": rng.choice(("interleaved", "branching")),
        "advantage": {"type": rng.choice(("default", "normalized", "rloo"))},
        "renderer": {"name": rng.choice(("auto", "template")), "history": rng.choice(("verbatim", "template"))},
    }
    if rng.random() < 0.2:
        orchestrator["train"]["env"].append(
            {"import_path": "task.Shown", "name": "second", "args": {"demonstrated": "", "shape": "tools"}}
        )
    if rng.random() < 0.2:
        orchestrator["eval"] = {"episodes": 3, "interval": 1}
    builds = demonstrated is not None and rng.random() < 0.3
    template = rng.choice(TEMPLATES[1:] if wrong == "template" else TEMPLATES[:1]).replace(" ", "-")
    tables: dict[str, Any] = {
        "max_steps": 1,
        "run_dir": "run",
        "model": {"build": SIZES.model_dump()} if builds else {"name": str(models / template)},
        "orchestrator": orchestrator,
        "trainer": {"separate_process": False, "loss": {"type": rng.choice(("default", "ppo", "gspo"))}},
        "monitor": {"save_trajectories": False},
    }
    conversations = None
    if wrong == "data" or (demonstrated is not None and rng.random() < 0.7):
        tables["warm_start"] = {"steps": 1, "batch_size": 2, "conversations": rng.choice((4, 20))}
        if wrong == "data" or (wrong != "shown" and rng.random() < 0.3):
            tables["warm_start"]["data"] = "talk.jsonl"
            content = rng.choice((["done"], 3)) if wrong == "data" else "done"
            said = [{"role": "user", "content": "go"}, {"role": "assistant", "content": "done"}]
            rows = [said] * 3 + [[said[0], {"role": "assistant", "content": content}]]
            conversations = "".join(json.dumps({"messages": row}) + "\n" for row in rows)
    return Project(flaw=flaw, demonstrated=demonstrated, tables=tables, conversations=conversations)
