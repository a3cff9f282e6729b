"""Whatever a call or a tool does wrong becomes a message to the model and a counted kind."""

import asyncio
import contextlib
import contextvars
import dataclasses
import gc
import signal
import subprocess
import sys
import threading
import traceback
import weakref

import pytest

from verbatim.core.errors import ComponentError, UsageError
from verbatim.core.types import ToolCall
from verbatim.core.user_code import drop_tracebacks
from verbatim.environments.tools import FunctionTool, McpTools, Tool, ToolFailed, ToolManager, ToolResult
from waiting import HANGS, until


def look(place: str) -> str:
    """Look."""
    return f"{place}: 20"


def call(name="look", arguments=None, status="ok"):
    arguments = {"place": "Bonn"} if arguments is None else arguments
    return ToolCall(name=name, arguments=arguments, status=status, id="call_3")


async def test_a_good_call_is_answered_to_its_id():
    outcome = await ToolManager([look]).dispatch(call())
    assert outcome.message == {"role": "tool", "content": "Bonn: 20", "tool_call_id": "call_3", "name": "look"}
    assert (outcome.done, outcome.reward, outcome.error_kind) == (False, None, None)


async def test_a_tool_may_end_the_episode_and_reward_the_turn():
    def end() -> ToolResult:
        return ToolResult(content="over", done=True, reward=0.25)

    outcome = await ToolManager([end]).dispatch(call("end", {}))
    assert (outcome.done, outcome.reward, outcome.error_kind) == (True, 0.25, None)


async def test_an_unknown_tool_is_answered_with_the_nearest():
    outcome = await ToolManager([look]).dispatch(call("lok"))
    assert outcome.error_kind == "unknown_tool"
    assert outcome.message["content"] == 'Error: there is no tool lok; available: look; did you mean "look"?'


@pytest.mark.parametrize(
    ("status", "says"),
    [
        ("invalid_json", "it is not valid JSON"),
        ("unclosed_block", "it was not closed"),
        ("missing_name", "it names no tool"),
        ("malformed_structure", "its arguments a JSON object"),
    ],
)
async def test_an_unreadable_call_is_answered_not_run(status, says):
    outcome = await ToolManager([look]).dispatch(call(None, None, status))
    assert outcome.error_kind == status
    assert says in outcome.message["content"]
    assert "name" not in outcome.message


async def test_wrong_arguments_are_explained():
    outcome = await ToolManager([look]).dispatch(call(arguments={"place": 3}))
    assert outcome.error_kind == "invalid_arguments"
    assert outcome.message["content"] == "Error: look: place: input should be a valid string, found 3"


async def test_a_tool_that_raises_is_an_answer_and_a_tool_that_exits_too():
    def fails() -> str:
        raise ValueError("no such town" + "x" * 1000)

    def exits() -> str:
        raise SystemExit(3)

    async def cancels() -> str:
        raise asyncio.CancelledError

    def odd():
        return object()

    manager = ToolManager([fails, exits, cancels, FunctionTool(exits, name="exits_here", inline=True), odd])
    for name in manager:
        outcome = await manager.dispatch(call(name, {}))
        assert outcome.error_kind == "exception"
        assert outcome.message["content"].startswith(f"Error: {name} failed: ")
        assert len(outcome.message["content"]) < 600


@pytest.mark.realtime
@pytest.mark.parametrize("how", ["thread", "inline", "async", "inline, awaited"])
@pytest.mark.parametrize("error", [ValueError, ToolFailed, SystemExit, asyncio.CancelledError])
async def test_what_a_tool_held_that_raised_is_freed_with_the_outcome(how, error):
    """Without garbage collection, which a run does seldom."""

    class Large:
        pass

    def fails() -> str:
        large = Large()
        held.append(weakref.ref(large))
        raise error("no such town")

    async def fails_later() -> str:
        await asyncio.sleep(0)
        return fails()

    held = []
    function = {"async": fails_later, "inline, awaited": lambda: fails_later()}.get(how, fails)
    manager = ToolManager([FunctionTool(function, name="fails", inline=how.startswith("inline"))])
    gc.disable()
    try:
        outcome = await manager.dispatch(call("fails", {}))
        assert outcome.error_kind == "exception" and "fails failed: " in outcome.message["content"]
        if outcome.fault is not None and error is not asyncio.CancelledError:
            assert "in fails\n" in "".join(traceback.format_exception(outcome.fault))
        drop_tracebacks(outcome.fault)
        await until(lambda: held[0]() is None)  # a thread may still be on its way out of the call
    finally:
        gc.enable()


async def test_what_a_task_of_a_group_held_is_freed_with_the_outcome():
    class Large:
        pass

    async def inner() -> None:
        large = Large()
        held.append(weakref.ref(large))
        known = None
        try:
            raise ValueError("no such town")
        except ValueError as error:
            known = error  # its traceback holds this frame
            raise
        finally:
            assert known

    async def fails() -> str:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(inner())
        return "done"

    held = []
    gc.disable()
    try:
        outcome = await ToolManager([fails]).dispatch(call("fails", {}))
        assert isinstance(outcome.fault, ExceptionGroup)
        drop_tracebacks(outcome.fault)
        del outcome
        await asyncio.sleep(0)
        assert held[0]() is None
    finally:
        gc.enable()


@dataclasses.dataclass(frozen=True)
class FrozenFailure(ToolFailed):
    town: str


@dataclasses.dataclass(frozen=True)
class FrozenFault(Exception):
    town: str


@pytest.mark.parametrize("error", [FrozenFailure, FrozenFault])
@pytest.mark.parametrize("inline", [False, True])
async def test_an_exception_that_is_a_frozen_dataclass_is_an_answer_and_let_go(error, inline):
    """None of its attributes can be assigned, `__traceback__` included."""

    def fails() -> str:
        raise error("Bonn")

    outcome = await ToolManager([FunctionTool(fails, inline=inline)]).dispatch(call("fails", {}))
    assert outcome.error_kind == "exception" and outcome.message["content"].endswith("Bonn")
    drop_tracebacks(outcome.fault)
    assert (outcome.fault is None) == (error is FrozenFailure)
    assert outcome.fault is None or outcome.fault.__traceback__ is None


async def test_an_inline_tool_that_cancels_its_task_fails_alone():
    """It is called on its caller's task, as others are on one of their own."""

    async def cancels_its_own() -> str:
        asyncio.current_task().cancel()
        return "done"

    def cancels() -> str:
        asyncio.current_task().cancel()
        asyncio.current_task().cancel()
        return "done"

    own, inline = ToolManager([cancels_its_own]), ToolManager([FunctionTool(cancels, inline=True)])
    one, other = await own.dispatch(call("cancels_its_own", {})), await inline.dispatch(call("cancels", {}))
    assert asyncio.current_task().cancelling() == 0
    await asyncio.sleep(0)  # nothing is left of it
    for outcome in (one, other):
        assert outcome.error_kind == "exception" and isinstance(outcome.fault, asyncio.CancelledError)
    assert one.message["content"].partition("failed")[2] == other.message["content"].partition("failed")[2]


async def test_a_caller_that_is_cancelled_as_its_inline_tool_cancels_it_is_cancelled():
    def cancels() -> str:
        asyncio.current_task().cancel()
        asyncio.get_running_loop().call_soon(dispatching.cancel)  # from outside, before it goes on
        return "done"

    manager = ToolManager([FunctionTool(cancels, inline=True)])
    dispatching = asyncio.create_task(manager.dispatch(call("cancels", {})))
    with pytest.raises(asyncio.CancelledError):
        await dispatching


def test_a_ctrl_c_while_an_inline_tool_runs_ends_its_caller():
    """`asyncio.run` answers the first one by cancelling its own task, here the one that the tool runs on."""

    def slow() -> str:
        signal.raise_signal(signal.SIGINT)
        return "done"

    async def run():
        await ToolManager([FunctionTool(slow, inline=True)]).dispatch(call("slow", {}))
        went_on.append(True)

    went_on = []
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(run())
    assert not went_on


async def test_a_tool_that_says_it_failed_is_quoted_whole():
    def fails() -> str:
        raise ToolFailed("no such town: " + "x" * 1000)

    outcome = await ToolManager([fails]).dispatch(call("fails", {}))
    assert outcome.error_kind == "exception"
    assert outcome.message["content"] == "Error: fails failed: no such town: " + "x" * 1000


async def test_a_tool_of_another_make_that_returns_nonsense_is_an_answer():
    class Odd:
        name = "odd"
        schema = {"type": "function", "function": {"name": "odd", "parameters": {}}}  # noqa: RUF012

        async def __call__(self, arguments):
            return 7

    outcome = await ToolManager([Odd()]).dispatch(call("odd", {}))
    assert outcome.error_kind == "exception"
    assert outcome.message["content"] == "Error: odd failed: it returned int, not text"


@pytest.mark.realtime
async def test_a_hung_tool_is_left_behind_at_its_deadline():
    release, freed = threading.Event(), asyncio.Event()

    def blocks() -> str:
        release.wait()
        return "late"

    async def swallows() -> str:
        while not freed.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await freed.wait()
        return "late"

    manager = ToolManager([blocks, swallows])
    for name in manager:
        outcome = await asyncio.wait_for(manager.dispatch(call(name, {}), timeout=0.02), HANGS)
        assert outcome.error_kind == "timeout"
        assert "within 0.02 seconds" in outcome.message["content"]
    release.set()
    freed.set()


@pytest.mark.realtime
async def test_hung_tools_do_not_hold_up_others():
    release = threading.Event()

    def blocks() -> str:
        release.wait()
        return "late"

    manager = ToolManager([blocks, look])
    hung = [asyncio.create_task(manager.dispatch(call("blocks", {}))) for _ in range(40)]
    await asyncio.sleep(0)
    assert (await asyncio.wait_for(manager.dispatch(call()), HANGS)).error_kind is None
    assert not any(task.done() for task in hung)
    release.set()
    assert {outcome.message["content"] for outcome in await asyncio.gather(*hung)} == {"late"}


async def test_cancelling_the_caller_cancels_the_tool_and_is_not_swallowed():
    begun, ended = asyncio.Event(), asyncio.Event()

    async def waits() -> str:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return ""

    task = asyncio.create_task(ToolManager([waits]).dispatch(call("waits", {})))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.wait_for(ended.wait(), HANGS)


async def test_an_answer_that_is_too_long_is_cut_to_the_limit_and_says_so():
    def long() -> ToolResult:
        return ToolResult(content="é" * 5000, done=True)

    outcome = await ToolManager([long]).dispatch(call("long", {}), output_limit=100)
    content = outcome.message["content"]
    assert len(content) == 100
    assert content.endswith("[cut: the answer had 5000 characters]")
    assert (outcome.error_kind, outcome.done) == ("oversize", True)
    exact = await ToolManager([long]).dispatch(call("long", {}), output_limit=5000)
    assert exact.error_kind is None


async def test_half_a_surrogate_pair_in_an_answer_becomes_the_replacement_character():
    def name() -> str:
        return "file-\udcff"

    outcome = await ToolManager([name]).dispatch(call("name", {}))
    assert outcome.message["content"] == "file-\ufffd"


def test_it_is_a_mapping_with_the_schemas_of_its_tools():
    manager = ToolManager([look, FunctionTool(look, name="see")])
    assert list(manager) == ["look", "see"]
    assert [schema["function"]["name"] for schema in manager.schemas] == ["look", "see"]
    assert manager["see"].name == "see"


PLACE = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}


async def test_a_dict_describes_a_function_that_says_nothing_about_itself():
    def untyped(place, **rest):
        return f"{place} {rest}"

    manager = ToolManager([{"name": "look", "description": "Look.", "parameters": PLACE, "function": untyped}])
    assert manager.schemas == [
        {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": PLACE}}
    ]
    assert (await manager.dispatch(call())).message["content"] == "Bonn {}"
    outcome = await manager.dispatch(call(arguments={"place": 3}))
    assert outcome.error_kind == "invalid_arguments"
    assert outcome.message["content"] == "Error: look: place: 3 is not of type 'string'"
    outcome = await manager.dispatch(call(arguments={}))
    assert outcome.message["content"] == "Error: look: 'place' is a required property"


async def test_what_a_dict_leaves_out_comes_from_the_function():
    assert ToolManager([{"function": look}]).schemas == ToolManager([look]).schemas
    (see,) = ToolManager([{"function": look, "name": "see", "description": "See."}]).schemas
    assert see["function"] == {**FunctionTool(look).schema["function"], "name": "see", "description": "See."}


class Town:
    """Its public methods are tools."""

    name = "Bonn"

    def __init__(self):
        self.visited = []

    def visit(self, place: str) -> int:
        """Go there."""
        self.visited.append(place)
        return len(self.visited)

    async def arrive(self, place: str) -> str:
        return place

    @staticmethod
    def find(place: str) -> str:
        return place

    def _secret(self):
        pass


async def test_every_public_method_of_an_object_is_a_tool():
    town = Town()
    manager = ToolManager([town, look])
    assert list(manager) == ["visit", "arrive", "find", "look"]
    assert (await manager.dispatch(call("visit"))).message["content"] == "1"
    assert town.visited == ["Bonn"]
    assert (await manager.dispatch(call("arrive"))).message["content"] == "Bonn"
    assert (await manager.dispatch(call("find"))).message["content"] == "Bonn"


class Trip:
    """As other trainers take it: `reset` begins an episode, every other public method is a tool."""

    def reset(self, **kwargs) -> str | None:
        """Begin."""

    def go(self, place: str) -> str:
        """Go there."""
        return place


class TypedTrip(Trip):
    def reset(self, start: str, seed: int = 0) -> str:
        """Begin at a place."""
        return start


@pytest.mark.parametrize("made", [Trip, TypedTrip])
def test_reset_begins_an_episode_and_is_no_tool(made):
    assert list(ToolManager([made()])) == ["go"]
    assert list(ToolManager([FunctionTool(TypedTrip().reset)])) == ["reset"]  # named outright, it is one


def test_tools_may_be_registered_later_all_or_none_of_them():
    manager = ToolManager()
    manager.register(look, {"function": look, "name": "see"})
    assert list(manager) == ["look", "see"]
    with pytest.raises(ComponentError, match="two tools are called 'look'"):
        manager.register({"function": look, "name": "watch"}, look)
    assert list(manager) == ["look", "see"]


async def test_calls_at_one_time_run_at_one_time():
    everybody = asyncio.Barrier(20)

    async def meet(number: int) -> int:
        await everybody.wait()
        return number

    manager = ToolManager([meet])
    outcomes = await asyncio.gather(*(manager.dispatch(call("meet", {"number": i}), timeout=HANGS) for i in range(20)))
    assert [outcome.message["content"] for outcome in outcomes] == [str(i) for i in range(20)]


@pytest.mark.parametrize(
    ("tool", "message"),
    [
        ({"name": "look"}, "has the function None; expected name, description, parameters, function"),
        ({"type": "function", "function": {"name": "look"}}, "has the key 'type'"),
        ({"function": look, "parameters": {"place": "string"}}, "expected a JSON schema such as"),
        ({"function": look, "parameters": {"type": "object", "required": "place"}}, "are not a JSON schema: 'place'"),
    ],
)
def test_a_dict_that_is_no_tool_is_refused(tool, message):
    with pytest.raises(ComponentError, match=message):
        ToolManager([tool])


def test_two_tools_of_one_name_and_things_that_are_no_tools_are_refused():
    with pytest.raises(ComponentError, match="two tools are called 'look'"):
        ToolManager([look, look])
    for thing in (7, "look", ToolResult, ToolResult(content=""), object(), None):
        with pytest.raises(ComponentError, match="is not a tool"):
            ToolManager([thing])


class SearchTool(Tool):
    """A tool as twinkle's guide has it; there its base class is abstract, here it is our protocol."""

    def __call__(self, tool_name, arguments):
        return f"{tool_name}: results for {arguments.get('query', '')}"

    def tool_info(self):
        return {"type": "function", "function": {"name": "search", "description": "Search.", "parameters": QUERY}}


QUERY = {"type": "object", "properties": {"query": {"type": "string", "description": "What."}}, "required": ["query"]}


@pytest.mark.parametrize("base", [Tool, object])
@pytest.mark.parametrize("tools", [lambda tool: [tool], lambda tool: {"search": tool}])
async def test_a_tool_of_twinkle_is_shown_and_called_as_it_says(base, tools):
    tool = type("SearchTool", (base,), dict(vars(SearchTool)))()
    manager = ToolManager(tools(tool))
    assert manager.schemas == [tool.tool_info()]
    outcome = await manager.dispatch(call("search", {"query": "Emma"}))
    assert (outcome.message["content"], outcome.error_kind) == ("search: results for Emma", None)
    assert (await manager.dispatch(call("search", {"text": "Emma"}))).error_kind == "invalid_arguments"


def test_a_tool_of_twinkle_without_a_name_is_refused():
    tool = type("Odd", (SearchTool,), {"tool_info": lambda self: {"tool_name": "search"}})()
    with pytest.raises(ComponentError, match=r"tool_info\(\) gave \{'tool_name': 'search'\}; expected a schema"):
        ToolManager([tool])


@pytest.mark.parametrize("given", [("python", "server.py"), (["python", "server.py"],), ("python", [7])])
def test_a_command_line_that_is_none_is_refused(given):
    with pytest.raises(UsageError, match=r"expected a program and a list of its arguments"):
        McpTools.stdio(*given)


def test_what_only_holds_tools_is_refused_with_how_to_give_them():
    """The methods of a connection are no tools for a model: it would close it."""
    with pytest.raises(ComponentError, match=r"a McpTools holds tools.*\[\*source\.tools\]"):
        ToolManager([McpTools.stdio("python", ["server.py"])])
    with pytest.raises(ComponentError, match=r"a ToolManager holds tools.*\[\*source\.values\(\)\]"):
        ToolManager([ToolManager([look])])
    for wrong in (look, "look", 7):
        with pytest.raises(ComponentError, match=r"expected a list of tools: ToolManager\(\[\.\.\.\]\)"):
            ToolManager(wrong)


@pytest.mark.realtime
def test_importing_the_tools_imports_no_mcp():
    heavy = ("mcp", "anyio", "jsonschema")
    script = f"import sys, verbatim.environments.tools; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_mcp_source_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "mcp", None)
    monkeypatch.delitem(sys.modules, "verbatim.environments.tools.mcp_session", raising=False)
    with pytest.raises(UsageError, match=r"pip install 'verbatim-rl\[mcp\]'"):
        McpTools.stdio("server").open()


class Unreadable(Exception):
    """An exception that cannot even say what it is."""

    def __str__(self) -> str:
        raise ValueError("no text")


async def test_an_exception_without_a_readable_message_is_an_answer_too():
    def broken() -> str:
        raise Unreadable

    outcome = await ToolManager([broken]).dispatch(call("broken", {}))
    assert outcome.message["content"] == "Error: broken failed: Unreadable: (its text cannot be read: ValueError)"
    assert (outcome.error_kind, type(outcome.fault)) == ("exception", Unreadable)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"content": None}, "it returned NoneType, not text"),
        ({"content": 5}, "it returned int, not text"),
        ({"content": "a", "done": "no"}, "it returned done='no', not True or False"),
    ],
)
async def test_a_result_of_the_wrong_types_is_a_fault_of_the_tool(given, says):
    """Without a fault the log would not have it, and a tool that does it always would fail in silence."""

    def wrong() -> ToolResult:
        return ToolResult(**given)

    outcome = await ToolManager([wrong]).dispatch(call("wrong", {}))
    assert (outcome.error_kind, outcome.message["content"]) == ("exception", f"Error: wrong failed: {says}")
    assert isinstance(outcome.fault, TypeError)
    assert says in str(outcome.fault)


async def test_an_inline_function_runs_without_a_task_and_what_it_gives_to_await_with_one():
    tasks = []

    def look(at: str):
        tasks.append(asyncio.current_task())
        return f"{at} it is"

    def wait(for_ever: bool):
        async def later():
            tasks.append(asyncio.current_task())
            await (asyncio.Event().wait() if for_ever else asyncio.sleep(0))
            return "waited"

        return later()

    def leave():
        raise SystemExit(3)

    tools = ToolManager([FunctionTool(f, inline=True, description="") for f in (look, wait, leave)])
    assert (await tools.dispatch(ToolCall(name="look", arguments={"at": "Bonn"}))).message["content"] == "Bonn it is"
    assert (await tools.dispatch(ToolCall(name="wait", arguments={"for_ever": False}))).message["content"] == "waited"
    late = await tools.dispatch(ToolCall(name="wait", arguments={"for_ever": True}), timeout=0.01)
    assert late.error_kind == "timeout"
    left = await tools.dispatch(ToolCall(name="leave", arguments={}))
    assert left.error_kind == "exception" and "sys.exit(3)" in left.message["content"]
    assert isinstance(left.fault.__cause__, SystemExit)
    own = asyncio.current_task()
    assert tasks[0] is own and own not in tasks[1:]


async def test_what_an_inline_function_gives_to_await_sees_the_context_variables_that_it_set():
    place = contextvars.ContextVar("place", default="nowhere")

    def look():
        async def there():
            return place.get()

        place.set("Bonn")
        return there()

    tools = ToolManager([FunctionTool(look, inline=True, description="")])
    assert (await tools.dispatch(ToolCall(name="look", arguments={}))).message["content"] == "Bonn"
    assert place.get() == "nowhere"


async def test_a_subclass_of_an_inline_function_tool_is_called_by_its_own_call():
    class Loud(FunctionTool):
        async def __call__(self, arguments):
            return ToolResult(content="LOUD")

    def look() -> str:
        return "quiet"

    tools = ToolManager([Loud(look, inline=True, description="")])
    assert (await tools.dispatch(ToolCall(name="look", arguments={}))).message["content"] == "LOUD"
