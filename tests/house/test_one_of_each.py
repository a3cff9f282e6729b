"""Mechanisms that stand in one place: whoever needs one finds it there, and a fault in it is mended once."""

from __future__ import annotations

import ast
import functools
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

import verbatim
from verbatim.config.orchestrator import EnvConfig, OrchestratorConfig, SamplingConfig
from verbatim.core.episode_limits import EpisodeLimits
from verbatim.core.sampling import SamplingParams
from verbatim.rollouts import APIMultiTurnRollout, MultiTurnRollout
from verbatim.run.rollouts import limits_of

ROOT = Path(verbatim.__file__).parent

PROCESSES = {
    "core/children.py",
    "core/spare.py",  # a copy of this process, where `children` starts a program
    "inference/vllm/subreaper.py",  # it is such a process itself, and has nothing but the standard library
}
SIGNALS = {
    "core/ctrl_c.py",
    "inference/vllm/subreaper.py",  # the same: the standard library alone
}
CALLS = {
    "spawns a process": (
        {
            "Popen",
            "subprocess_exec",
            "subprocess_shell",
            "create_subprocess_exec",
            "create_subprocess_shell",
            "posix_spawn",
            "fork",
            "system",
            "popen",
        },
        PROCESSES,
    ),
    "runs a program": ({"subprocess.run", "subprocess.check_output", "subprocess.check_call"}, PROCESSES),
    "ends a group of processes": ({"killpg"}, PROCESSES),
    "handles a signal": (
        {
            "signal.signal",
            "signal.getsignal",
            "set_wakeup_fd",
            "add_signal_handler",
            "remove_signal_handler",
            "sigaction",
            "siginterrupt",
        },
        SIGNALS,
    ),
    "asks the kernel to end it with its parent": ({"prctl"}, PROCESSES),
    "serves HTTP": (
        {"uvicorn.Config", "uvicorn.Server", "uvicorn.run", "web.Application", "HTTPServer"},
        {"inference/http/connections.py"},
    ),
    "opens connections to an HTTP server": (
        {"aiohttp.ClientSession", "httpx.Client", "httpx.AsyncClient", "urlopen", "HTTPConnection"},
        {
            "inference/http/client.py",
            "rollouts/gateway/verifiers/harnesses/verbatim_chat.py",  # a program in its own sandbox
        },
    ),
    "reads JSON that a client has sent": ({"parse_json"}, {"inference/http/json_text.py"}),
    "has a model's card": ({"model_list"}, {"inference/http/app.py", "rollouts/gateway/service.py"}),
}
"""Names of functions, and the files that call them."""


@functools.cache
def parsed(source: str) -> ast.Module:
    return ast.parse(source)


def calls_in(source: str) -> Iterator[tuple[int, set[str]]]:
    """Line and possible names of each call: `f` and, of an attribute, `module.f` too."""
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name):
                yield node.lineno, {node.func.id}
            elif isinstance(node.func, ast.Attribute):
                owner = node.func.value
                name = owner.id if isinstance(owner, ast.Name) else ""
                yield node.lineno, {node.func.attr, f"{name}.{node.func.attr}"}


def elsewhere(what: str, sources: dict[str, str]) -> list[str]:
    """Calls in files where they are not expected."""
    names, files = CALLS[what]
    return [
        f"{file}:{line} {what}"
        for file, source in sources.items()
        if file not in files
        for line, called in calls_in(source)
        if called & names
    ]


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in ROOT.rglob("*.py")}


@pytest.mark.parametrize("what", CALLS)
def test_it_stands_in_one_place(what: str, sources: dict[str, str]):
    assert elsewhere(what, sources) == []


def test_a_call_elsewhere_is_found():
    source = "import os, subprocess\nsubprocess.run(['ls'])\nos.fork()\nsubprocess.Popen(['ls'])\nrun()\n"
    assert elsewhere("spawns a process", {"run/a.py": source}) == [
        "run/a.py:3 spawns a process",
        "run/a.py:4 spawns a process",
    ]
    assert elsewhere("runs a program", {"run/a.py": source}) == ["run/a.py:2 runs a program"]
    assert elsewhere("runs a program", {"core/children.py": source}) == []


def test_a_limit_of_an_episode_has_one_default():
    env = EnvConfig(id="guess_number")
    orchestrator = OrchestratorConfig(batch_size=2, group_size=2, seq_len=100, train={"env": [env]})
    assert limits_of(orchestrator, env) == EpisodeLimits(max_context=100)
    names = ("max_turns", "tool_timeout", "tool_output_limit", "tool_error", "max_malformed_retries")
    for rollout in (MultiTurnRollout, APIMultiTurnRollout):
        assert [getattr(rollout, name) for name in names] == [getattr(EpisodeLimits, name) for name in names]


def test_tokens_are_drawn_the_same_way_by_default_wherever_it_is_said():
    assert SamplingConfig().params == SamplingParams()


DOCUMENTED = {"os._exit", "sys._current_frames", "sys._getframe", "_replace", "_asdict"}
"""Public, whatever their names."""
FOREIGN = {
    "atexit._run_exitfuncs": "what a process does that ends at once: nothing public calls those functions",
    "command._actions": "argparse: completions",
    "_option_string_actions": "argparse: which options there are",
    "_registry": "vLLM",
    "_adapter_manager": "vLLM",
    "_create_tokens_logprobs": "vLLM",
    "_map_global_expert_id_to_local_expert_id": "vLLM",
    "_map_name_with_shard": "vLLM",
    "_devices": "torch: groups of processes that no `dist.init_process_group` made",
    "_Options": "the same",
    "_get_fsdp_state": "torch 2.11: gradients of parameters that one rank did not use",
    "_fsdp_param_group": "the same",
    "_forward_hooks": "torch: whether a module has any",
    "_forward_pre_hooks": "the same",
    "_buffers": "the same",
    "_local_scalar_dense": "the same",
    "_allgather_base_": "the same",
    "_reduce_scatter_base_": "the same",
    "_linear_pointwise": "the same",
    "_softmax_backward_data": "the same",
    "torch._C": "the same",
    "_disable_current_modes": "torch: what is real under a mode of fake tensors",
    "_max_prompt_len_lock": "renderers: a lock that belongs to one event loop",
    "_can_set_experts_implementation": "transformers: how a model computes",
    "_attn_implementation": "the same",
    "_is_stateful": "the same",
    "_supports_attention_backend": "the same",
    "_gradient_checkpointing_func": "the same",
    "_keys_to_ignore_on_save": "the same",
    "_compile_jinja_template": "transformers: templates are compiled as it does",
    "_PassArg": "jinja2: the same",
}
"""Private names of other packages that are used all the same, and what for. The list may become shorter."""


def private_names(sources: dict[str, str]) -> dict[str, set[str]]:
    """Names with an underscore that no source of ours defines, and the places that use them."""
    trees = {file: parsed(source) for file, source in sources.items()}
    own: set[str] = set()
    for node in (node for tree in trees.values() for node in ast.walk(tree)):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                own.add(name)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                own.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                own.add(name)
            case ast.Tuple(elts=[ast.Constant(value=str(name)), *_]):
                own.add(name)
    found: dict[str, set[str]] = {}
    for file, tree in trees.items():
        modules = {a.asname or a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
        for node in ast.walk(tree):
            names = []
            if isinstance(node, ast.Attribute) and is_private(node.attr):
                owner = ast.unparse(node.value)
                if owner in modules or node.attr not in own:
                    names = [f"{owner}.{node.attr}"]
            elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("verbatim"):
                names = [f"{node.module}.{alias.name}" for alias in node.names if is_private(alias.name)]
            for name in names:
                found.setdefault(name, set()).add(f"{file}:{node.lineno}")
    return found


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def known(name: str, names: Iterable[str]) -> bool:
    return name in names or name.rpartition(".")[2] in names


def test_private_names_of_other_packages_are_those_that_are_known(sources: dict[str, str]):
    found = private_names(sources)
    assert {name: places for name, places in found.items() if not known(name, DOCUMENTED | FOREIGN.keys())} == {}
    last = {name.rpartition(".")[2] for name in found}
    assert [name for name in FOREIGN if name not in found and name not in last] == []


def test_a_private_name_is_seen_in_every_notation():
    source = """
        import asyncio, torch.nn
        from torch.utils import _python_dispatch
        class Own:
            def __init__(self):
                self._runner = asyncio.Runner()
            def _ask(self, other):
                return other._runner._loop, other._ask(), self._shape, self.__class__, asyncio._get_running_loop()
            def _exit(self):
                torch.nn._reduction
    """
    assert private_names({"run/a.py": textwrap.dedent(source)}) == {
        "torch.utils._python_dispatch": {"run/a.py:3"},
        "other._runner._loop": {"run/a.py:8"},
        "self._shape": {"run/a.py:8"},
        "asyncio._get_running_loop": {"run/a.py:8"},
        "torch.nn._reduction": {"run/a.py:10"},
    }
