"""A taskset of verifiers, played offline through verifiers' own servers, becomes our trajectories, exact to the id."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from byte_renderer import END, VOCAB_SIZE, ByteRenderer
from e2e.tiny_runs import assert_ledger_adds_up, build_tiny_model, num_sampled, trajectory_lines
from verbatim import Trajectory, build_samples
from verbatim.core.errors import ComponentError, EnvironmentFault, UsageError
from verbatim.core.types import StopReason, Turn
from verbatim.environments.resolve import create_environment
from verbatim.inference import SampleRequest, SamplingParams
from verbatim.inference.sampler import Completion
from verbatim.inference.scripted import ScriptedSampler
from verbatim.rollouts import AgentLoop, EpisodeLimits, GroupRun, Recorder, RolloutSetup
from verbatim.rollouts.gateway.verifiers.serving import TraceSession
from waiting import HANGS, until

pytestmark = [pytest.mark.extras, pytest.mark.realtime]

TASKS = Path(__file__).parent / "verifiers_tasks"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("verifiers") / "model")


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Any:
    from verbatim.models.loading import load_tokenizer

    return load_tokenizer(model)


@pytest.fixture(autouse=True)
def tasksets(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Importable here and in the processes of tool servers."""
    monkeypatch.syspath_prepend(str(TASKS))
    monkeypatch.setenv("PYTHONPATH", str(TASKS))
    yield
    for name in ("adds_taskset", "judged_taskset", "sums_taskset"):
        sys.modules.pop(name, None)


def make(model: Path, **args: Any) -> Any:
    return create_environment("verifiers", {"taskset": "adds-taskset", "tokenizer": str(model), **args})


def scripted(tokenizer: Any, speak: Callable[[str], str], **fields: Any) -> ScriptedSampler:
    """Says `speak(prompt)`, both as text."""

    def script(request: SampleRequest) -> list[int]:
        return tokenizer.encode(speak(tokenizer.decode(request.prompt_ids)), add_special_tokens=False)

    return ScriptedSampler(script=script, vocab_size=len(tokenizer), **{"context_length": 384, **fields})


async def play(
    environment: Any,
    sampler: ScriptedSampler,
    tokenizer: Any,
    *,
    example: int = 0,
    size: int = 2,
    max_turns: int = 16,
    temperature: float = 1.0,
) -> list[Trajectory]:
    from verbatim.models.renderers import create_renderer

    setup = RolloutSetup(
        env="adds",
        environment=environment,
        sampler=sampler,
        renderer=create_renderer("auto", tokenizer),
        params=SamplingParams(max_tokens=64, temperature=temperature),
        slots=asyncio.Semaphore(8),
        limits=EpisodeLimits(max_turns=max_turns, max_context=384),
    )
    run = GroupRun(setup, environment.examples("train")[example], index=0, size=size, run_seed=0)
    return list((await run.run()).trajectories)


def adds(prompt: str) -> str:
    """The sum of the two numbers that the user said, at once."""
    a, b = re.search(r"<.im_start.>user\n(\d+) (\d+)", prompt).groups()
    return f"{int(a) + int(b)}<|im_end|>"


def calls_add(prompt: str) -> str:
    if "<tool_response>" in prompt:
        return re.findall(r"<tool_response>\n(.*)", prompt)[-1] + "<|im_end|>"
    return '<tool_call>\n{"name": "add_tools_add", "arguments": {"a": 1, "b": 2}}\n</tool_call><|im_end|>'


def text_of(tokenizer: Any, *parts: Any) -> str:
    return tokenizer.decode([i for part in parts for i in part])


async def test_the_class_of_a_taskset_is_an_environment_with_the_runs_own_tokenizer(tokenizer):
    environment = create_environment("adds_taskset.Adds")
    (trajectory,) = await play(environment, scripted(tokenizer, adds), tokenizer, example=2, size=1)
    assert (trajectory.error, trajectory.reward) == (None, 2.5)


async def test_a_task_is_played_scored_and_recorded_as_it_was_sampled(model, tokenizer):
    sampler = scripted(tokenizer, adds, policy_version=7)
    trajectories = await play(make(model), sampler, tokenizer, example=2, size=3, temperature=0.7)
    for trajectory in trajectories:
        assert trajectory.error is None
        assert (trajectory.reward, trajectory.reward_parts) == (2.5, {"correct": 2.0, "brief": 0.5})
        assert trajectory.info["verifiers"] == {"calls": 0.0}
        (turn,) = trajectory.turns
        assert text_of(tokenizer, turn.prompt_ids) == "<|im_start|>user\n2 3<|im_end|>\n<|im_start|>assistant\n"
        assert text_of(tokenizer, turn.completion_ids) == "5<|im_end|>"
        expected = [sampler.logprob(int(i)) for i in turn.completion_ids]
        assert turn.logprobs.tolist() == np.array(expected, np.float32).tolist()
        assert (turn.policy_versions.tolist(), turn.temperature) == ([7] * len(turn.completion_ids), 0.7)
        assert [m["role"] for m in trajectory.messages] == ["user", "assistant"]
        assert sum(s.num_trained_tokens for s in build_samples(trajectory)) == len(turn.completion_ids)
    seeds = [request.seed for request in sampler.requests]
    assert len(set(seeds)) == 3  # each episode draws differently


async def test_tools_of_a_real_mcp_server_are_called_and_the_next_prompt_extends_what_was_sampled(model, tokenizer):
    sampler = scripted(tokenizer, calls_add)
    environment = make(model, config={"taskset": {"with_tools": True}})
    trajectories = await play(environment, sampler, tokenizer, example=1)
    assert len(trajectories) == 2
    for trajectory in trajectories:
        assert trajectory.error is None
        assert trajectory.reward == 2.5  # 1 + 2, as the task asks
        assert trajectory.info["verifiers"] == {"calls": 1.0}
        assert len(trajectory.turns) == 2
        assert trajectory.num_breaks == 0
        (sample,) = build_samples(trajectory)
        assert sample.num_trained_tokens == trajectory.num_sampled_tokens
        assert [m["role"] for m in trajectory.messages] == ["user", "assistant", "tool", "assistant"]
        assert trajectory.messages[2]["content"] == "3"
        assert trajectory.turns[0].tool_calls[0].name == "add_tools_add"


async def test_every_token_has_the_version_of_the_weights_that_drew_it(model, tokenizer):
    sampler = scripted(tokenizer, lambda prompt: "9" * 12 + "<|im_end|>")

    async def update() -> None:
        while sampler.num_drawn < 3:  # noqa: ASYNC110  (a token is drawn with each turn of the loop)
            await asyncio.sleep(0)
        await sampler.update_weights(Path("w"), 1)

    updating = asyncio.create_task(update())
    (trajectory,) = await play(make(model), sampler, tokenizer, size=1)
    await updating
    assert trajectory.error is None
    assert sorted(set(trajectory.turns[0].policy_versions.tolist())) == [0, 1]


async def test_what_is_cut_off_is_scored_and_says_so(model, tokenizer):
    endless = scripted(tokenizer, lambda prompt: "1" * 100)
    (trajectory,) = await play(make(model), endless, tokenizer, size=1)
    assert (trajectory.error, trajectory.stop_reason, trajectory.truncated) == (None, StopReason.LENGTH, True)
    assert trajectory.reward_parts == {"correct": 0.0, "brief": 0.0}
    looping = scripted(tokenizer, lambda prompt: calls_add(""))
    short = scripted(tokenizer, lambda prompt: calls_add(""), context_length=240)
    environment = make(model, config={"taskset": {"with_tools": True}})
    (one,), (other,) = await asyncio.gather(  # side by side they share the process of their tools
        play(environment, looping, tokenizer, size=1, max_turns=2), play(environment, short, tokenizer, size=1)
    )
    assert (one.error, one.stop_reason, len(one.turns)) == (None, StopReason.MAX_TURNS, 2)
    assert (other.error, other.stop_reason) == (None, StopReason.LENGTH)


async def test_a_fault_of_the_engine_is_an_error_of_its_trajectory_alone(model, tokenizer):
    sampler = scripted(tokenizer, adds, trouble={0: "fail"})
    trajectories = await play(make(model), sampler, tokenizer, size=3)
    assert sorted(t.error is not None for t in trajectories) == [False, False, True]
    (failed,) = [t for t in trajectories if t.error]
    assert failed.stop_reason is StopReason.API_ERROR
    assert failed.error == "sampler: request 0 fails: the script says so"


async def test_several_agents_are_recorded_under_their_names_and_a_judge_is_context_only(model, tokenizer):
    sampler = scripted(tokenizer, lambda prompt: "yes<|im_end|>" if "judge" in prompt else "11<|im_end|>")
    trajectories = await play(make(model, taskset="judged-taskset"), sampler, tokenizer)
    assert len(trajectories) == 2
    for trajectory in trajectories:
        assert trajectory.error is None
        assert (trajectory.reward, trajectory.reward_parts) == (1.0, {"judged": 1.0})
        solver, judge = trajectory.turns
        assert (solver.agent, judge.agent) == ("solver", "judge")
        assert (judge.trained, solver.trained) == (False, True)
        (sample,) = [s for s in build_samples(trajectory) if s.num_trained_tokens]
        assert sample.num_trained_tokens == len(solver.completion_ids)
        assert [m["content"] for m in trajectory.messages] == ["5 6", "11"]


TRAIN = """\
max_steps = 2
[model]
name = "{model}"
[orchestrator]
batch_size = 8
group_size = 4
seq_len = 384
max_async_level = 0
sampling = {{ max_tokens = 1 }}   # a random token is brief, or it is not: rewards differ, so that something is learned
buffer = {{ online_difficulty_filtering = false }}
filters = []
[trainer]
separate_process = false
[[orchestrator.train.env]]
id = "verifiers"
args = {{ taskset = "adds-taskset", tokenizer = "{model}" }}
"""


def test_a_model_is_trained_on_it(model, tmp_path):
    (tmp_path / "run.toml").write_text(TRAIN.format(model=model))
    command = [sys.executable, "-m", "verbatim.cli", "rl", "run.toml", "--run-dir", "run"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=2 * HANGS)
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-2000:]
    last = assert_ledger_adds_up(tmp_path / "run")
    logged = trajectory_lines(tmp_path / "run")
    assert len(logged) == 16
    assert all(t["error"] is None and set(t["reward_parts"]) == {"correct", "brief"} for t in logged)
    assert last["ledger/trained"] == sum(map(num_sampled, logged))


async def test_nothing_is_left_when_the_last_episode_ends(model, tokenizer):
    before = asyncio.all_tasks()
    await play(make(model), scripted(tokenizer, adds), tokenizer)
    assert asyncio.all_tasks() == before


async def test_an_episode_that_is_cancelled_leaves_nothing_either(model, tokenizer):
    sampler = scripted(tokenizer, adds, trouble=lambda index, request: "hang")
    before = asyncio.all_tasks()
    playing = asyncio.create_task(play(make(model), sampler, tokenizer))
    await until(lambda: sampler.num_in_flight == 2)
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    await until(lambda: not sampler.num_in_flight)
    assert asyncio.all_tasks() == before


async def test_the_taskset_that_the_documentation_shows_is_played(model, tokenizer, tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "environments.md").read_text()
    (source,) = re.findall(r"^```python\n(# sums_taskset.py\n.*?)^```", page, re.MULTILINE | re.DOTALL)
    (table,) = re.findall(
        r"^```toml\n(.*?taskset = .*?)^```", page.split("## Verifiers environments")[1], re.MULTILINE | re.DOTALL
    )
    (tmp_path / "sums_taskset.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    (env,) = tomllib.loads(table)["orchestrator"]["train"]["env"]
    environment = create_environment(env["id"], {**env["args"], "tokenizer": str(model)})
    assert [len(environment.examples(split)) for split in ("train", "eval")] == [10, 5]
    right = scripted(tokenizer, lambda prompt: "5<|im_end|>")
    assert [t.reward for t in await play(environment, right, tokenizer, example=4)] == [1.0, 1.0]
    assert [t.reward for t in await play(environment, right, tokenizer, example=3)] == [0.0, 0.0]


# ---- the trace against what was served


def traced(*nodes: dict[str, Any]) -> Any:
    return SimpleNamespace(
        nodes=[
            SimpleNamespace(**{"parent": None, "sampled": False, "mask": [], "logprobs": [], **node}) for node in nodes
        ]
    )


TURN = Turn(prompt_ids=[1, 2, 3], completion_ids=[4, 5], logprobs=[-0.5, -0.25])
USER: dict[str, Any] = {"token_ids": [1, 2]}
SAID: dict[str, Any] = {
    "parent": 0,
    "sampled": True,
    "token_ids": [3, 4, 5],
    "mask": [False, True, True],
    "logprobs": [-0.5, -0.25],
}


def test_a_trace_that_holds_what_was_served_is_accepted():
    from verbatim.rollouts.gateway.verifiers.trace import check_served

    check_served([traced(USER, SAID)], [TURN])
    check_served([traced(USER, SAID), traced(USER, SAID)], [TURN, TURN])
    untrained = dataclasses.replace(TURN, logprobs=None)
    check_served([traced(USER, SAID)], [untrained])  # of an engine that gives no logprobs


@pytest.mark.parametrize(
    ("nodes", "turns", "said"),
    [
        ([USER, {**SAID, "logprobs": [-0.5, -0.3]}], [TURN], "1 sampled messages of the trace were not served"),
        ([USER, {**SAID, "token_ids": [3, 4, 6]}], [TURN], "1 of 1 served completions are in no trace"),
        ([{"token_ids": [1, 9]}, SAID], [TURN], "not served like this"),
        ([USER, SAID], [TURN, TURN], "1 of 2 served completions are in no trace"),
        ([USER, SAID], [], "1 sampled messages"),
        ([USER], [TURN], "1 of 1 served"),
        ([USER, {**SAID, "mask": [True, False, True]}], [TURN], "not all at its end"),
        ([USER, {**SAID, "logprobs": [-0.5]}], [TURN], "one logprob each"),
    ],
)
def test_a_trace_that_differs_anywhere_is_refused(nodes, turns, said):
    from verbatim.rollouts.gateway.verifiers.trace import check_served

    with pytest.raises(EnvironmentFault, match=said):
        check_served([traced(*nodes)], turns)


async def test_a_trace_that_was_changed_is_never_trained(model, tokenizer, monkeypatch):
    from verbatim.rollouts.gateway.verifiers import trace as verifiers_trace

    honest = verifiers_trace.check_served

    def changed(traces: Any, turns: Any) -> None:
        traces[0].nodes[-1].token_ids[-1] += 1
        honest(traces, turns)

    monkeypatch.setattr(verifiers_trace, "check_served", changed)
    (trajectory,) = await play(make(model), scripted(tokenizer, adds), tokenizer, size=1)
    assert "not served like this" in trajectory.error
    assert trajectory.reward is None


# ---- configuration


def test_tasks_are_selected_as_verifiers_selects_them(model):
    environment = make(model, train={"limit": 3}, eval={"skip": 3}, config={"taskset": {"size": 5}})
    assert [e.id for e in environment.examples("train")] == ["task-0", "task-1", "task-2"]
    assert [e.id for e in environment.examples("eval")] == ["task-3", "task-4"]
    with pytest.raises(UsageError, match="no split 'test'"):
        environment.examples("test")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"taskset": "no-such-taskset"}, "no-such-taskset"),
        ({"config": {"taskset": {"sizes": 5}}}, "sizes"),
        ({"config": {"agent": {"harness": {"id": "no-such-harness"}}}}, "no-such-harness"),
        ({"train": {"limits": 5}}, "limits"),
    ],
)
def test_what_verifiers_refuses_is_refused_when_the_environment_is_made(model, args, said):
    with pytest.raises(ComponentError, match=said):
        make(model, **args)


async def test_recorded_experts_are_not_sent_to_verifiers_which_reads_another_format():
    class Mixture(ScriptedSampler):
        async def generate(self, request: SampleRequest) -> Completion:
            drawn = await super().generate(request)
            count = len(request.prompt_ids) + len(drawn.ids) - 1
            return dataclasses.replace(drawn, routed_experts=np.zeros((count, 1, 1), dtype=np.uint8))

    sampler = Mixture(script=[[5, END]], vocab_size=VOCAB_SIZE, context_length=300)
    loop = AgentLoop(
        sampler=sampler,
        renderer=ByteRenderer(),
        params=SamplingParams(),
        limits=EpisodeLimits(),
        seed=0,
        recorder=Recorder(VOCAB_SIZE),
    )
    trace: Any = SimpleNamespace(id="a", agent=SimpleNamespace(name="agent", trainable=True))
    request = SampleRequest(prompt_ids=np.array([1, 2]), params=SamplingParams(stop_token_ids=(END,)), seed=0)
    served = await TraceSession(loop, trace).complete(request)
    assert served.routed_experts is None
    assert served.ids.tolist() == [5, END]
    (turn,) = loop.turns
    assert len(turn.routed_experts) == 3
