"""Tools that raise, hang and flood: each trajectory comes back, and what goes wrong with one changes no other."""

import asyncio
from collections import Counter

import numpy as np
import pytest

from byte_renderer import VOCAB_SIZE, ByteRenderer
from verbatim.core.types import ToolCall
from verbatim.environments.tools import ToolManager
from verbatim.inference import SamplingParams
from verbatim.inference.scripted import ScriptedSampler
from verbatim.rollouts import MultiTurnRollout

pytestmark = pytest.mark.slow

EPISODES, MAX_TURNS = 64, 8
STOPS = tuple(range(0, VOCAB_SIZE, 8))
KINDS = {"raises": "exception", "hangs": "timeout", "floods": "oversize"}


class Babble(ByteRenderer):
    """Reads any ids as a conversation: the stop id says whether a tool is called, or the answer is given."""

    stop_token_ids = STOPS

    def parse_response(self, completion_ids, prompt_ids=None, tools=None):
        parsed = super().parse_response(np.zeros(0, dtype=np.int32))
        if completion_ids[-1] // 8 % 6 == 0:
            return parsed
        call = ToolCall(name="work", arguments={"number": int(completion_ids[0])}, status="ok", raw="")
        return type(parsed)(content="", tool_calls=(call,))

    def bridge_to_next_turn(self, prev_prompt_ids, prev_completion_ids, new_messages, tools=None):
        return np.concatenate([prev_prompt_ids, prev_completion_ids, self.render_ids(new_messages)])


class Worker:
    """One trajectory's tool; `faults` are by call."""

    def __init__(self, faults):
        self.faults, self.happened, self.num_calls = faults, [], 0

    async def work(self, number: int) -> str:
        """Work."""
        fault = self.faults.get(self.num_calls)
        self.num_calls += 1
        if fault is not None:
            self.happened.append((self.num_calls - 1, fault))
        if fault == "raises":
            raise OSError("no such number")
        if fault == "hangs":
            await asyncio.Event().wait()
        return "x" * 10_000_000 if fault == "floods" else f"{number} done"


def draw_faults(seed):
    """For each trajectory, by call: 10% raise, 5% hang, 5% flood."""
    rng = np.random.default_rng(seed)
    kinds = rng.choice(["raises", "hangs", "floods", ""], size=(EPISODES, MAX_TURNS), p=[0.1, 0.05, 0.05, 0.8])
    return [{call: str(kind) for call, kind in enumerate(row) if kind} for row in kinds]


def scripted(folder):
    """Draws, as every engine does, by the request's seed and place alone."""

    def script(request):
        rng = np.random.default_rng([request.seed, len(request.prompt_ids)])
        return rng.integers(0, VOCAB_SIZE, 24).tolist()

    return ScriptedSampler(script=script, vocab_size=VOCAB_SIZE, context_length=2048)


def embedded(folder):
    """A tiny model with random weights, in deterministic mode."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    from verbatim.inference.embedded.engine import TorchSampler
    from verbatim.inference.embedded.settings import TorchSettings

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(
        Qwen3Config(
            vocab_size=VOCAB_SIZE,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            max_position_embeddings=2048,
        )
    ).save_pretrained(folder)
    config = TorchSettings(device="cpu", deterministic=True)
    return TorchSampler(folder, config=config, context_length=2048, num_threads=1)


def play(sampler, faults):
    """All trajectories, and their workers."""
    workers = [Worker(found) for found in faults]
    rollout = MultiTurnRollout(
        sampler=sampler,
        template=Babble(),
        sampling_params=SamplingParams(max_tokens=24),
        max_turns=MAX_TURNS,
        tool_timeout=0.3,
        tool_output_limit=100,
        seed=5,
    )
    tasks = [{"messages": [{"role": "user", "content": f"task {index}"}]} for index in range(EPISODES)]

    async def run():
        results = await rollout.run(tasks, tool_manager=[ToolManager([worker]) for worker in workers])
        await sampler.close()
        return results

    return asyncio.run(run()), workers


def ids_of(trajectory):
    return [(t.prompt_ids.tolist(), t.completion_ids.tolist(), t.logprobs.tolist()) for t in trajectory.turns]


REAL = pytest.param(embedded, marks=pytest.mark.realtime)


@pytest.fixture(scope="module", params=[scripted, REAL], ids=lambda make: make.__name__)
def played(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    faults = draw_faults(3)
    return play(request.param(folder), [{}] * EPISODES), play(request.param(folder), faults)


def test_every_trajectory_comes_back_without_an_error(played):
    for results, _ in played:
        assert [r["messages"][0]["content"] for r in results] == [f"task {index}" for index in range(EPISODES)]
        assert {r.error for r in results} == {None}
        assert {r["stop_reason"] for r in results} <= {"stop", "length", "max_turns"}


def test_each_fault_is_counted_where_it_happened(played):
    (calm, _), (results, workers) = played
    assert all("tool_errors" not in r.info for r in calm)
    for result, worker in zip(results, workers, strict=True):
        expected = Counter(KINDS[kind] for _, kind in worker.happened)
        assert result.info.get("tool_errors", {}) == expected
    happened = Counter(kind for worker in workers for _, kind in worker.happened)
    assert set(happened) == set(KINDS)


def test_each_fault_is_told_to_the_model_in_the_turn_that_made_the_call(played):
    _, (results, workers) = played
    says = {
        "raises": "Error: work failed: OSError: no such number",
        "hangs": "Error: work did not answer within 0.3 seconds. Try something smaller.",
        "floods": "x" * 58 + "\n[cut: the answer had 10000000 characters]",
    }
    for result, worker in zip(results, workers, strict=True):
        answers = [m["content"] for m in result["messages"] if m["role"] == "tool"]
        assert len(answers) == worker.num_calls
        for call, kind in worker.happened:
            assert answers[call] == says[kind]


def test_no_trajectory_without_a_fault_is_changed_and_no_other_before_its_fault(played):
    (calm, _), (results, workers) = played
    faultless = 0
    for before, after, worker in zip(calm, results, workers, strict=True):
        if not worker.happened:
            faultless += 1
            assert ids_of(after) == ids_of(before)
            assert after["messages"] == before["messages"]
        else:
            until = worker.happened[0][0] + 1
            assert ids_of(after)[:until] == ids_of(before)[:until]
            assert ids_of(after)[until:] != ids_of(before)[until:] or len(after.turns) == until == MAX_TURNS
    assert EPISODES / 4 < faultless < EPISODES
