"""A rollout engine as a Ray actor: the documented lines, and what comes back is what comes out here."""

import asyncio
import contextlib
import re
import threading
from concurrent.futures import Future
from pathlib import Path

import pytest

from byte_renderer import VOCAB_SIZE, ByteRenderer, call, say
from e2e.tiny_runs import build_tiny_model
from rollouts.chat_server import chat_server
from rollouts.players import contents, double, scripted, two_turns
from rollouts.ray_session import local_ray
from verbatim import Example, Trajectory
from verbatim.core.errors import UsageError
from verbatim.environments.tools import ToolManager
from verbatim.inference.embedded.settings import TorchSettings
from verbatim.inference.http.sampler import HttpSampler
from verbatim.inference.http.server import serve_sampler
from verbatim.inference.openai import OpenAI
from verbatim.inference.scripted import ScriptedSampler
from verbatim.models.loading import load_tokenizer
from verbatim.models.renderers import create_renderer
from verbatim.rollouts import APIMultiTurnRollout, MultiTurnRollout
from waiting import HANGS

pytestmark = [pytest.mark.extras, pytest.mark.realtime]
__all__ = ["local_ray"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return build_tiny_model(tmp_path_factory.mktemp("ray") / "model")


def ask(number):
    return {"messages": [{"role": "user", "content": f"double {number}"}], "id": f"ask-{number}", "answer": 2 * number}


def settings(**more):
    return {"sampler": scripted(), "template": ByteRenderer(), "tool_manager": ToolManager([double]), **more}


def same(found, expected):
    assert [contents(t) for t in found] == [contents(t) for t in expected]
    assert all(isinstance(t, Trajectory) for t in found) and len(found) > 0


def test_the_documented_lines_run_word_by_word(local_ray):
    ray = local_ray
    sampler, template, tool_manager, trajectories = scripted(), ByteRenderer(), ToolManager([double]), [ask(4)]
    rollout_actor = MultiTurnRollout.remote(sampler=sampler, template=template, tool_manager=tool_manager)
    results = ray.get(rollout_actor.__call__.remote(trajectories))
    assert results[0]["turns"] == 2
    assert results[0]["messages"][1]["tool_calls"][0]["function"]["name"] == "double"
    assert [m["role"] for m in results[0]["messages"]] == ["user", "assistant", "tool", "assistant"]


def test_an_actor_returns_what_the_rollout_returns_here_call_after_call(local_ray):
    actor, rollout = MultiTurnRollout.remote(**settings(seed=5)), MultiTurnRollout(**settings(seed=5))
    for number in (1, 2):
        given = [ask(number), Example(id="e", messages=tuple(ask(8)["messages"])), ask(number)]
        found = local_ray.get(actor.__call__.remote(given))
        same(found, rollout(given))
        assert found[0].turns[1].extends(found[0].turns[0])
        assert found[0].info["task"] == {"answer": 2 * number}


def test_trajectories_can_be_given_and_settings_changed_for_one_call(local_ray):
    actor, rollout = MultiTurnRollout.remote(**settings()), MultiTurnRollout(**settings())
    first = local_ray.get(actor.__call__.remote([ask(1)], max_turns=1))
    same(first, rollout([ask(1)], max_turns=1))
    assert first[0]["stop_reason"] == "max_turns"
    same(local_ray.get(actor.run.remote(first)), rollout(first))


def test_a_function_makes_the_sampler_inside_of_the_actor_and_a_models_template_travels(local_ray, model):
    def sampler():
        from verbatim.inference.embedded.engine import TorchSampler

        return TorchSampler(model, config=TorchSettings(deterministic=True), context_length=200)

    template = create_renderer("template", load_tokenizer(model))
    more = {"template": template, "max_trajectory_tokens": 120}
    actor = MultiTurnRollout.remote(**settings(sampler=sampler, **more))
    engine = sampler()
    same(local_ray.get(actor.__call__.remote([ask(3)])), MultiTurnRollout(**settings(sampler=engine, **more))([ask(3)]))


async def test_a_served_sampler_is_drawn_from_over_http(local_ray):
    served = scripted()
    async with serve_sampler(served) as server:
        actor = MultiTurnRollout.remote(**settings(sampler=HttpSampler(server.url)))
        found = await actor.__call__.remote([ask(3), ask(4)])
    assert len(served.requests) == 4
    same(found, await MultiTurnRollout(**settings()).run([ask(3), ask(4)]))


def test_an_engine_of_this_process_is_refused_with_what_to_do(local_ray, model):
    from verbatim.inference.embedded.engine import TorchSampler

    engine = TorchSampler(model, config=TorchSettings(), context_length=200)
    with pytest.raises(UsageError, match=r"TorchSampler cannot be sent.*lives in this process.*HttpSampler\("):
        MultiTurnRollout.remote(**settings(sampler=engine))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"success_callback": threading.Lock().acquire_lock}, r"^success_callback: a \w+ cannot be sent to an actor"),
        ({"max_turn": 3}, "MultiTurnRollout.remote: got an unexpected keyword argument 'max_turn'"),
        (
            {"template": threading.Lock()},
            r"^template: a lock cannot be sent.* let the actor create it: template=lambda",
        ),
    ],
)
def test_what_cannot_travel_is_refused_before_anything_starts(local_ray, wrong, message):
    with pytest.raises(UsageError, match=message):
        MultiTurnRollout.remote(**settings(**wrong))


def test_what_is_wrong_with_a_call_is_raised_here(local_ray):
    actor = MultiTurnRollout.remote(**settings())
    with pytest.raises(UsageError, match=r"trajectories\[0\] is a int"):
        local_ray.get(actor.__call__.remote([1]))
    wrong = MultiTurnRollout.remote(**settings(sampler=lambda: "engine"))
    with pytest.raises(UsageError, match="sampler: the function returned a str, which has no `generate`"):
        local_ray.get(wrong.__call__.remote([ask(1)]))


def test_a_call_that_waits_holds_up_no_other(local_ray):
    def trouble(index, request):
        return "hang" if "hang" in bytes(i for i in request.prompt_ids.tolist() if i < 256).decode() else None

    def sampler():
        return ScriptedSampler(script=lambda r: say("ok"), vocab_size=VOCAB_SIZE, context_length=100, trouble=trouble)

    actor = MultiTurnRollout.remote(**settings(sampler=sampler))
    hanging = actor.__call__.remote([{"messages": [{"role": "user", "content": "hang"}]}])
    (result,) = local_ray.get(actor.__call__.remote([ask(1)]), timeout=HANGS)
    assert result["messages"][-1]["content"] == "ok"
    assert local_ray.wait([hanging], timeout=0) == ([], [hanging])


def test_a_rollout_over_a_chat_server_is_an_actor_too(local_ray):
    def add(a: int, b: int) -> int:
        """Add."""
        return a + b

    with chat_server() as server:
        api = OpenAI(model="m", base_url=server.url)
        options = {"api": api, "tool_manager": ToolManager([add]), "extra_body": {"return_token_ids": True}}
        conversation = {"messages": [{"role": "user", "content": "3 4 5"}]}
        actor = APIMultiTurnRollout.remote(**options)
        found = local_ray.get(actor.__call__.remote([conversation]))
        same(found, APIMultiTurnRollout(**options)([conversation]))
    assert found[0]["messages"][-1]["content"] == "12"


def test_the_documentations_snippet_runs_and_a_familys_renderer_travels(local_ray, model):
    page = (Path(__file__).parents[2] / "docs" / "rollouts.md").read_text(encoding="utf-8")
    (snippet,) = [s for s in re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S) if "import ray" in s]
    end = create_renderer("auto", load_tokenizer(model)).stop_token_ids[0]
    sampler = ScriptedSampler(script=lambda r: [5, 6, end], vocab_size=512, context_length=300)
    with served_elsewhere(sampler) as url:
        snippet = snippet.replace("http://127.0.0.1:8000", url).replace("path/to/model", str(model))
        names = {"__name__": "__main__"}
        exec(compile(snippet, "docs/rollouts.md", "exec"), names)
        tools = ToolManager([names["add"]])
        here = MultiTurnRollout(sampler=names["sampler"], template=names["template"], tool_manager=tools)
        same(names["results"], here(names["trajectories"]))
    assert names["template"].name != "template"
    (result,) = names["results"]
    assert result.turns[0].completion_ids.tolist() == [5, 6, end]
    assert (result["turns"], result["stop_reason"], result.error) == (1, "stop", None)


@contextlib.contextmanager
def served_elsewhere(sampler):
    """A server in an event loop of its own, for callers that block."""
    address, stop = Future(), threading.Event()

    async def serve():
        async with serve_sampler(sampler) as server:
            address.set_result(server.url)
            await asyncio.to_thread(stop.wait)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        yield address.result(timeout=HANGS)
    finally:
        stop.set()
        thread.join()


def test_the_script_of_these_tests_calls_a_tool_first():
    """Of the helpers: the first completion of an episode calls, the second speaks."""
    sampler = scripted()
    rollout = MultiTurnRollout(sampler=sampler, template=ByteRenderer(), tool_manager=ToolManager([double]))
    (result,) = rollout([ask(3)])
    assert [two_turns(r) for r in sampler.requests] == [t.completion_ids.tolist() for t in result.turns]
    assert result.turns[0].completion_ids.tolist() == call("double", number=sampler.requests[0].seed % 100)
