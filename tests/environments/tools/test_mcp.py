"""Tools of a real MCP server, over stdio and over HTTP: what it does and what goes wrong with it."""

import asyncio
import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from byte_renderer import END, VOCAB_SIZE, ByteRenderer, say
from byte_renderer import call as ask
from ports import held_port, number_of
from verbatim.core.errors import ComponentError, UsageError
from verbatim.core.types import ToolCall
from verbatim.environments.tools import McpTools, ToolManager
from verbatim.inference.scripted import ScriptedSampler
from verbatim.rollouts import MultiTurnRollout
from waiting import HANGS
from waiting import wait_until as until

pytestmark = [pytest.mark.extras, pytest.mark.realtime]

SERVER = str(Path(__file__).with_name("mcp_server.py"))


def stdio(**options):
    return McpTools.stdio(sys.executable, [SERVER], **{"connect_timeout": HANGS, **options})


@pytest.fixture(scope="module")
def tools():
    with stdio() as source:
        yield ToolManager(source.tools)


async def dispatch(manager, name, patience=HANGS, **arguments):
    outcome = await manager.dispatch(ToolCall(name=name, arguments=arguments, id="call_0"), timeout=patience)
    return outcome.error_kind, outcome.message["content"]


def run(manager, name, **arguments):
    return asyncio.run(dispatch(manager, name, **arguments))


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@contextlib.contextmanager
def http_server(port):
    process = subprocess.Popen([sys.executable, SERVER, str(port)])
    try:
        until(lambda: socket.socket().connect_ex(("127.0.0.1", port)) == 0)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.kill()
        process.wait()


# ---- what it offers and answers


def test_the_schemas_are_the_servers_own(tools):
    function = tools["add"].schema["function"]
    assert function["description"] == "Add two numbers.\n\nBoth are whole."
    assert {name: about["type"] for name, about in function["parameters"]["properties"].items()} == {
        "a": "integer",
        "b": "integer",
    }
    assert function["parameters"]["required"] == ["a", "b"]
    assert "description" not in tools["pid"].schema["function"]


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("add", {"a": 2, "b": 3}, (None, "5")),
        ("lines", {}, (None, "one\ntwo")),
        ("add", {"a": "2", "b": 3}, ("invalid_arguments", "Error: add: a: '2' is not of type 'integer'")),
        ("add", {"a": 2}, ("invalid_arguments", "Error: add: 'b' is a required property")),
        (
            "refuse",
            {"reason": "closed on " + "Sundays " * 100},
            ("exception", "Error: refuse failed: Error executing tool refuse: closed on " + "Sundays " * 100),
        ),
        (
            "picture",
            {},
            (
                "exception",
                "Error: picture failed: it answered with image data (image/png), and only text "
                "can be read here. Ask for text, or do without.",
            ),
        ),
    ],
)
def test_whatever_the_server_answers_becomes_text_or_a_counted_message(tools, name, arguments, expected):
    assert run(tools, name, **arguments) == expected


def test_a_long_answer_is_cut_like_any_other(tools):
    call = ToolCall(name="long", arguments={"length": 3_000_000}, id="call_0")
    outcome = asyncio.run(tools.dispatch(call, timeout=HANGS, output_limit=1000))
    assert (outcome.error_kind, len(outcome.message["content"])) == ("oversize", 1000)
    assert outcome.message["content"].endswith("[cut: the answer had 3000000 characters]")


def test_many_calls_share_the_session_and_get_their_own_answers(tools):
    async def many():
        return await asyncio.gather(*(dispatch(tools, "add", a=i, b=1000) for i in range(100)))

    assert asyncio.run(many()) == [(None, str(i + 1000)) for i in range(100)]


def test_a_call_that_takes_too_long_is_given_up_and_the_others_go_on(tools, tmp_path):
    never, soon = str(tmp_path / "never"), tmp_path / "soon"

    async def three():
        other = asyncio.create_task(dispatch(tools, "wait", end=str(soon)))
        given_up = await dispatch(tools, "wait", patience=0.3, end=never)
        assert not other.done()
        soon.touch()
        return given_up, await other, await dispatch(tools, "add", a=1, b=2)

    (kind, text), *others = asyncio.run(three())
    assert (kind, text) == ("timeout", "Error: wait did not answer within 0.3 seconds. Try something smaller.")
    assert others == [(None, "waited"), (None, "3")]


def test_a_rollout_brings_an_event_loop_of_its_own_also_where_one_is_running():
    def script(request):
        prompt = request.prompt_ids.tolist()
        return say("done") if prompt.count(END) > 1 else ask("add", a=20, b=22)

    sampler = ScriptedSampler(script=script, vocab_size=VOCAB_SIZE, context_length=2000)
    tasks = [{"messages": [{"role": "user", "content": f"{i}"}]} for i in range(16)]

    async def notebook():
        async with stdio() as source:
            rollout = MultiTurnRollout(sampler=sampler, template=ByteRenderer(), tool_manager=ToolManager(source.tools))
            return [*rollout(tasks), *rollout(tasks), *await rollout.run(tasks)]

    results = asyncio.run(notebook())
    assert [r["messages"][2]["content"] for r in results] == ["42"] * 48


def test_a_prefix_tells_tools_of_one_name_apart(tools):
    with stdio(prefix="second_") as source:
        both = ToolManager([*tools.values(), *source.tools])
        assert run(both, "add", a=1, b=2) == run(both, "second_add", a=1, b=2) == (None, "3")
        assert both["second_add"].schema["function"]["name"] == "second_add"


# ---- what goes wrong


def test_a_server_that_died_in_between_is_started_again_before_the_next_call(tmp_path):
    with stdio() as source:
        manager = ToolManager(source.tools)
        _, first = run(manager, "pid")
        assert run(manager, "die_later", log=str(tmp_path / "now")) == (None, "later")
        (tmp_path / "now").touch()
        until(lambda: source._session._link.over.is_set())  # the end of its output has been read
        kind, second = run(manager, "pid")
        assert (kind, second.isdigit(), second == first) == (None, True, False)
    until(lambda: not is_alive(int(second)))


def test_a_call_under_way_when_the_server_dies_fails_and_is_not_sent_again(tmp_path):
    with stdio() as source:
        manager = ToolManager(source.tools)
        _, first = run(manager, "pid")

        async def together():
            begun = tmp_path / "begun"
            waiting = asyncio.create_task(dispatch(manager, "wait", end=str(tmp_path / "never"), log=str(begun)))
            await asyncio.to_thread(until, begun.exists)
            return [await dispatch(manager, "die", log=str(tmp_path / "log")), await waiting]

        for kind, text in asyncio.run(together()):
            assert kind == "exception"
            assert "the call may or may not have been carried out" in text
        assert (tmp_path / "log").read_text() == "dies\n"

        async def after():
            return await asyncio.gather(*(dispatch(manager, "pid") for _ in range(8)))

        answers = asyncio.run(after())
        assert {kind for kind, _ in answers} == {None}
        assert len({text for _, text in answers} - {first}) == 1, "all of them wait for one new server"


def test_a_server_that_cannot_be_started_again_fails_each_call_once_and_soon(tmp_path):
    script = tmp_path / "server.py"
    script.write_text(Path(SERVER).read_text())
    with McpTools.stdio(sys.executable, [str(script)], connect_timeout=HANGS) as source:
        manager = ToolManager(source.tools)
        starts, go = tmp_path / "starts", tmp_path / "go"
        script.write_text(
            f"import pathlib, time\nopen({str(starts)!r}, 'a').write('x')\n"
            f"while not pathlib.Path({str(go)!r}).exists():\n    time.sleep(0.01)\nraise SystemExit(1)"
        )
        run(manager, "die")

        async def together():
            calls = [asyncio.create_task(dispatch(manager, "add", a=1, b=1)) for _ in range(20)]
            await asyncio.to_thread(until, starts.exists)
            go.touch()  # by then all of them wait
            return await asyncio.gather(*calls)

        answers = asyncio.run(together())
        assert {kind for kind, _ in answers} == {"exception"}
        assert "its server cannot be reached: " in answers[0][1]
        assert starts.read_text() == "x", "one attempt for all of them"


def test_a_call_with_less_time_than_a_start_takes_does_not_stop_the_start(tmp_path):
    script, go, starts = (tmp_path / name for name in ("server.py", "go", "starts"))
    noted = f"import pathlib, time\nopen({str(starts)!r}, 'a').write('x')\n"
    waits = f"while not pathlib.Path({str(go)!r}).exists():\n    time.sleep(0.01)\n"
    script.write_text(noted + waits + Path(SERVER).read_text())
    go.touch()
    with McpTools.stdio(sys.executable, [str(script)], connect_timeout=HANGS) as source:
        manager = ToolManager(source.tools)
        go.unlink()
        run(manager, "die")
        assert run(manager, "add", patience=0.05, a=1, b=2)[0] == "timeout"
        go.touch()
        assert run(manager, "add", a=1, b=2) == (None, "3")
        assert starts.read_text() == "xx"  # the first one, and the one that went on


def test_a_server_that_hangs_as_a_whole_costs_its_calls_their_time_and_leaves_nothing_behind():
    with stdio() as source:
        manager = ToolManager(source.tools)
        _, pid = run(manager, "pid")
        os.kill(int(pid), signal.SIGSTOP)  # it answers neither calls nor a polite request to end
        assert run(manager, "add", patience=0.3, a=1, b=2)[0] == "timeout"
    until(lambda: not is_alive(int(pid)))


def test_tools_that_change_are_shown_after_a_refresh_and_managers_keep_what_was_shown():
    with stdio() as source:
        before = ToolManager(source.tools)
        run(before, "exchange_tools")
        assert "add" in before
        kind, text = run(before, "add", a=1, b=2)
        assert (kind, text) == ("exception", "Error: add failed: Unknown tool: add")
        source.refresh()
        after = ToolManager(source.tools)
        assert "add" not in after
        assert run(after, "subtract", a=5, b=3) == (None, "2")


def test_nothing_is_left_of_a_source_that_is_closed():
    with stdio() as source:
        manager = ToolManager(source.tools)
        _, pid = run(manager, "pid")
        assert is_alive(int(pid))
    until(lambda: not is_alive(int(pid)))
    assert run(manager, "add", a=1, b=2) == ("exception", "Error: add failed: its source is closed")
    with pytest.raises(UsageError, match="is not open; write `with McpTools"):
        _ = source.tools
    source.close()
    with source:
        assert run(ToolManager(source.tools), "add", a=1, b=2) == (None, "3")


def test_a_source_whose_opening_is_cancelled_leaves_nothing_behind(tmp_path):
    script, pid, go = (tmp_path / name for name in ("server.py", "pid", "go"))
    noted = f"import os, pathlib, time\nopen({str(pid)!r}, 'w').write(str(os.getpid()))\n"
    waits = f"while not pathlib.Path({str(go)!r}).exists():\n    time.sleep(0.01)\n"
    script.write_text(noted + waits + Path(SERVER).read_text())

    async def cancelled():
        async def use():
            async with McpTools.stdio(sys.executable, [str(script)], connect_timeout=HANGS):
                pass

        task = asyncio.create_task(use())
        await asyncio.to_thread(until, lambda: pid.exists() and pid.read_text())
        task.cancel()
        go.touch()  # it could not be open before
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    until(lambda: not is_alive(int(pid.read_text())))


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (McpTools.stdio("no-such", ["x"]), "no-such x: its server cannot be reached: FileNotFoundError"),
        (
            McpTools.stdio(sys.executable, ["-c", "1"], connect_timeout=HANGS),
            "its server cannot be reached: MCPError: Connection closed",
        ),
        (
            McpTools.stdio("sleep", ["infinity"], connect_timeout=0.2),
            "sleep infinity: its server did not answer within 0.2 s",
        ),
    ],
)
def test_a_server_that_is_not_there_is_refused_when_the_source_is_opened(source, says):
    with pytest.raises(ComponentError, match=says):
        source.open()


def test_an_address_where_nothing_listens_is_refused_when_the_source_is_opened():
    with held_port() as held, pytest.raises(ComponentError, match="its server cannot be reached: ConnectError"):
        McpTools.http(f"http://127.0.0.1:{number_of(held)}/mcp").open()


# ---- over HTTP


def test_over_http_it_is_the_same_also_after_the_server_was_restarted(monkeypatch):
    """Two clients of one server: "legacy" speaks the protocol with sessions, which a restarted server does not know."""
    from verbatim.environments.tools import mcp_session

    client, managers = mcp_session.Client, []
    with contextlib.ExitStack() as stack:
        port = number_of(stack.enter_context(held_port()))
        with http_server(port) as url:
            for mode in ("auto", "legacy"):
                monkeypatch.setattr(mcp_session, "Client", functools.partial(client, mode=mode))
                settings = {"headers": {"Authorization": "Bearer x"}, "connect_timeout": HANGS}
                managers.append(ToolManager(stack.enter_context(McpTools.http(url, **settings)).tools))
                assert run(managers[-1], "add", a=2, b=3) == (None, "5")
                assert run(managers[-1], "add", a="2", b=3)[0] == "invalid_arguments"
        assert [run(manager, "add", a=2, b=3)[0] for manager in managers] == ["exception"] * 2
        with http_server(port):
            for manager, mode in zip(managers, ("auto", "legacy"), strict=True):
                monkeypatch.setattr(mcp_session, "Client", functools.partial(client, mode=mode))
                kinds = [run(manager, "add", a=2, b=3)[0] for _ in range(2)]
                assert kinds[-1] is None


def test_a_session_that_the_server_has_forgotten_is_begun_again_once(monkeypatch):
    from verbatim.environments.tools import mcp_session

    left, pids = [], []

    class Forgetful(mcp_session.Client):
        async def call_tool(self, name, arguments):
            pids.append((await super().call_tool("pid")).content[0].text)
            if left:
                raise left.pop()
            return await super().call_tool(name, arguments)

    monkeypatch.setattr(mcp_session, "Client", Forgetful)
    refused = ("exception", "Error: add failed: its server refused: Session not found")
    with stdio() as source:
        for times, expected in ((1, (None, "5")), (2, refused)):
            left[:], pids[:] = [mcp_session.MCPError(-32600, "Session not found")] * times, []
            assert run(ToolManager(source.tools), "add", a=2, b=3) == expected
            assert len(set(pids)) == len(pids) == 2


def raw(tools, result=None):
    """A server that lists and answers with whatever JSON."""
    server = str(Path(__file__).with_name("mcp_raw_server.py"))
    return McpTools.stdio(sys.executable, [server, json.dumps([tools, result or {}])], connect_timeout=HANGS)


GOOD = {"name": "good", "inputSchema": {"type": "object"}}


@pytest.mark.parametrize(
    ("bad", "where"),
    [
        ({"name": "bad"}, "tools.1.inputSchema"),
        ({"inputSchema": {"type": "object"}}, "tools.1.name"),
        ({"name": 3, "inputSchema": {"type": "object"}}, "tools.1.name"),
        ("text", "tools.1"),
        ({"name": "bad", "inputSchema": {"type": "array"}}, "tools.1.inputSchema.type"),
        ({"name": "bad", "inputSchema": {"type": "object"}, "description": 5}, "tools.1.description"),
    ],
)
def test_one_invalid_tool_of_a_list_is_named(bad, where):
    with pytest.raises(ComponentError, match=rf"MCP server .*: it lists an invalid MCP tool: {where}: found") as told:
        raw([GOOD, bad]).open()
    assert "pydantic" not in str(told.value)


@pytest.mark.parametrize(
    ("result", "says"),
    [
        ({"content": "x"}, "an invalid MCP result: content: found 'x'"),
        ({"content": [{"type": "nonsense"}]}, "an invalid MCP result: content.0"),
        ({"content": [], "structuredContent": {"a": "x"}}, "a wrong result: "),
    ],
)
def test_an_answer_that_is_no_result_is_a_failure_of_its_tool(result, says):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    with raw([{**GOOD, "outputSchema": schema}], result) as source:
        kind, content = run(ToolManager(source.tools), "good")
    assert (
        kind == "exception" and content.startswith("Error: good failed: its server answered with ") and says in content
    )
    assert "pydantic" not in content and len(content) < 500
