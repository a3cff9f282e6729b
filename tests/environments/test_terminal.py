"""The tasks of the terminal, played in its real sandbox, and what its demonstrated player can and cannot do."""

import asyncio
import json
import random
from pathlib import Path

import pytest

from byte_renderer import VOCAB_SIZE, ByteRenderer, call, say
from environments.tools.sandbox_output import what_sandboxes_say
from rollouts.clocks import set_forward
from verbatim.config import load_config
from verbatim.core.errors import UsageError
from verbatim.core.types import Example, StopReason, ToolCall, Trajectory
from verbatim.environments import Demonstrates, Environment
from verbatim.environments.resolve import create_environment
from verbatim.environments.terminal import NAMES, NUMBERS, WORDS, Task, Terminal, TerminalSession, demonstrate
from verbatim.environments.tools import ToolManager, isolation
from verbatim.environments.tools import sandbox as sandbox_module
from verbatim.environments.tools.isolation import NO_ISOLATION, SandboxLimits
from verbatim.inference import SamplingParams
from verbatim.inference.scripted import ScriptedSampler
from verbatim.rollouts import EpisodeLimits, GroupRun, RolloutSetup
from verbatim.run.tables import component_tables
from waiting import HANGS, until

RECIPE = Path(__file__).parents[2] / "recipes" / "terminal_ipa.toml"
EXAMPLE = Example(id="x", payload={"word": "birch", "files": {"cup.txt": ["apple", 17], "map.txt": ["birch", 42]}})


PATIENT = SandboxLimits(timeout=HANGS)


@pytest.fixture(autouse=True)
def no_deadline_of_a_sandbox_passes_by_itself(monkeypatch):
    monkeypatch.setattr(sandbox_module, "START_SECONDS", HANGS)
    monkeypatch.setattr(sandbox_module, "GRACE_SECONDS", HANGS)
    monkeypatch.setattr("verbatim.rollouts.episode.CLOSING", 2 * HANGS)  # an episode closes its sandbox


async def episode(*completions, max_turns: int = 16) -> Trajectory:
    """One scripted episode of the example."""
    script = list(completions)
    setup = RolloutSetup(
        env="terminal",
        environment=Terminal(limits=PATIENT),
        renderer=ByteRenderer(),
        sampler=ScriptedSampler(script=lambda request: script.pop(0), vocab_size=VOCAB_SIZE, context_length=4000),
        params=SamplingParams(),
        slots=asyncio.Semaphore(1),
        limits=EpisodeLimits(max_turns=max_turns, timeout=9 * HANGS, tool_timeout=9 * HANGS),
    )
    (trajectory,) = (await GroupRun(setup, EXAMPLE, index=0, size=1, run_seed=0).run()).trajectories
    assert trajectory.error is None
    return trajectory


def heard(trajectory: Trajectory) -> list[str]:
    return [message["content"] for message in trajectory.messages if message["role"] == "tool"]


@pytest.mark.realtime
async def test_looking_reading_and_submitting_earns_1():
    trajectory = await episode(
        call("bash", command="ls"),
        call("bash", command="grep -l birch *"),
        call("bash", command="cat map.txt"),
        call("submit", answer=42),
    )
    assert heard(trajectory) == ["cup.txt\nmap.txt", "map.txt", "birch\n42", "right"]
    assert (trajectory.reward, trajectory.reward_parts) == (1.0, {"correct": 1.0})
    assert (trajectory.stop_reason, trajectory.truncated) == (StopReason.STOP, False)


@pytest.mark.realtime
async def test_the_wrong_number_earns_0_and_ends_the_episode():
    trajectory = await episode(call("bash", command="cat cup.txt"), call("submit", answer=17))
    assert heard(trajectory) == ["apple\n17", "wrong"]
    assert trajectory.reward == 0.0


@pytest.mark.realtime
async def test_talk_earns_nothing():
    assert (await episode(say("42"))).reward == 0.0


@pytest.mark.realtime
async def test_the_shell_keeps_its_state_within_an_episode_and_the_next_starts_afresh():
    again = (call("bash", command="cd /; rm /tmp/work/*"), call("bash", command="pwd; ls /tmp/work"), say("?"))
    assert heard(await episode(*again))[1] == "/"
    assert heard(await episode(call("bash", command="ls"), say("?"))) == ["cup.txt\nmap.txt"]


@pytest.mark.realtime
async def test_a_command_that_hangs_is_answered_and_the_episode_goes_on(monkeypatch):
    said = what_sandboxes_say(monkeypatch)
    hangs = (call("bash", command="echo runs; sleep 1e9"), call("submit", answer=42))
    playing = asyncio.create_task(episode(*hangs))
    await until(lambda: b"runs\n" in said)
    set_forward()
    trajectory = await asyncio.wait_for(playing, HANGS)
    assert heard(trajectory)[0].startswith(f"runs\n[stopped: it took more than {HANGS:g} s")
    assert trajectory.reward == 1.0


@pytest.mark.realtime
async def test_an_episode_without_a_submission_in_time_earns_0():
    trajectory = await episode(call("bash", command="ls"), call("submit", answer=42), max_turns=2)
    assert (trajectory.reward, trajectory.stop_reason) == (0.0, StopReason.MAX_TURNS)


@pytest.mark.realtime
async def test_the_state_is_what_has_been_tried():
    session = await Terminal(limits=PATIENT).start(EXAMPLE, seed=0)
    assert session.state_key() == ""
    for command in ("ls", "cat map.txt", "ls"):
        await session.bash(command)
    assert session.state_key() == "cat map.txt\nls"
    await session.close()


def test_a_task_is_a_word_in_one_of_its_files():
    for example in [*Terminal().examples("train"), *Terminal().examples("eval")]:
        task = Task(**example.payload)
        assert len(task.files) == 4
        assert set(task.files) <= set(NAMES)
        words, numbers = zip(*task.files.values(), strict=True)
        assert set(words) <= set(WORDS)
        assert set(numbers) <= set(NUMBERS)
        assert len(set(words)) == len(set(numbers)) == 4
        assert task.answer == numbers[words.index(task.word)]


def test_held_out_tasks_are_not_trained_on_and_both_are_the_same_every_time():
    train, held_out = Terminal().examples("train"), Terminal().examples("eval")
    assert (len(train), len(held_out)) == (400, 100)
    tasks = [json.dumps(example.payload) for example in (*train, *held_out)]
    assert len(set(tasks)) == len({example.id for example in (*train, *held_out)}) == 500
    assert Terminal().examples("train") == train
    assert Terminal(num_train=3).examples("train") == train[:3]


@pytest.mark.realtime
async def test_demonstrations_are_what_the_real_shell_says():
    tasks = [Task(**example.payload) for example in Terminal().examples("train")[:10]]
    for seed, task in enumerate(tasks):
        messages = demonstrate(task, random.Random(seed))
        example = Example(id="x", payload={"word": task.word, "files": task.files})
        session = await Terminal(limits=PATIENT).start(example, seed=0)
        assert list(session.messages) == messages[:2]
        tools = ToolManager(session.tools)
        for asked, answered in zip(messages[2::2], messages[3::2], strict=True):
            function = asked["tool_calls"][0]["function"]
            outcome = await tools.dispatch(ToolCall(name=function["name"], arguments=function["arguments"]))
            assert outcome.message["content"] == answered["content"]
            assert outcome.done == (function["name"] == "submit")
        await session.close()


def test_demonstrations_know_what_to_do_and_slip():
    shown = Terminal().demonstrations(4000, seed=1)
    assert Terminal().demonstrations(9, seed=1) == Terminal().demonstrations(9, seed=1)
    assert Terminal().demonstrations(9, seed=1) != Terminal().demonstrations(9, seed=2)
    assert isinstance(Terminal(), Demonstrates)
    for demonstration in shown:
        roles = [message["role"] for message in demonstration.messages]
        assert roles == ["system", "user", *["assistant", "tool"] * (len(roles) // 2 - 1)]
        assert len(roles) in (8, 10)
    # By hand: the right word is asked for in 0.6 + 0.4 / 8 = 0.65 of them, and then the right file is read in
    # 0.6 + 0.4 / 4 = 0.7; after another word in 3/7 * 0.4 / 4 + 4/7 / 4 = 0.186. That is 0.65 * 0.7 + 0.35 * 0.186 =
    # 0.52, of which 0.6 + 0.4 / 40 = 0.61 submit its number, and of the others 0.01: 0.322.
    right = sum(demonstration.messages[-1]["content"] == "right" for demonstration in shown)
    assert right / len(shown) == pytest.approx(0.322, abs=0.025)
    assert {len(demonstration.messages) for demonstration in shown} == {8, 10}


def test_it_is_an_environment_with_two_tools():
    assert isinstance(create_environment("terminal"), Environment)
    names = [tool.name for tool in TerminalSession(Task(**EXAMPLE.payload)).tools]
    assert names == ["bash", "submit"]
    assert Terminal().best_constant_policy_success() == 1 / 40


def test_the_limits_of_its_sandbox_are_a_table_of_its_arguments():
    made = create_environment("terminal", {"limits": {"memory_mb": 64, "timeout": 1.5}})
    assert made == Terminal(limits=SandboxLimits(memory_mb=64, timeout=1.5))


def test_the_recipe_is_short_and_isolates():
    assert len(RECIPE.read_text().splitlines()) <= 40
    config = load_config(RECIPE, tables=component_tables())
    (env,) = config.orchestrator.train.env
    assert create_environment("terminal", env.args) == Terminal()
    assert not Terminal().unsafe_allow
    assert (config.trainer.loss.type, config.orchestrator.advantage.type) == ("ipa", "chunk_returns")
    assert config.orchestrator.formulate_mode == "traj"


def test_impossible_rules_and_splits_are_refused():
    with pytest.raises(UsageError, match="num_files = 9; expected 1 to 8"):
        Terminal(num_files=9)
    with pytest.raises(UsageError, match="no split 'test'"):
        Terminal().examples("test")


def test_without_isolation_it_is_refused_unless_the_user_insists(monkeypatch):
    def missing(*given):
        raise FileNotFoundError("there is no bwrap")

    monkeypatch.setattr(isolation, "ISOLATIONS", (isolation.Isolation(name="bubblewrap", command=missing),))
    with pytest.raises(UsageError, match=r"there is no bwrap.*unsafe_allow = true"):
        create_environment("terminal")
    assert create_environment("terminal", {"unsafe_allow": True}) == Terminal(unsafe_allow=True)
    assert isolation.find_isolation(unsafe_allow=True) is NO_ISOLATION
