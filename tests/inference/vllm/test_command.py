"""The command line of a vLLM server, and what is refused before one is started."""

from __future__ import annotations

import json
import sys
import tomllib
from dataclasses import replace

import pytest
from pydantic import ValidationError

from verbatim.core.errors import UsageError
from verbatim.inference.vllm.command import PLUGIN, server_command, server_environment
from verbatim.inference.vllm.facts import ServerFacts, refuse_inexact
from verbatim.inference.vllm.settings import VllmSettings


def options(settings: VllmSettings, **values) -> list[str]:
    return server_command(settings, model="some/folder", port=8123, context_length=256, **values)


def test_the_command_has_all_that_exactness_needs():
    command = options(VllmSettings(python=sys.executable, args=("--enforce-eager",)))
    assert command[:3] == [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    assert command[-1] == "--enforce-eager"
    for pair in (
        ["--model", "some/folder"],
        ["--port", "8123"],
        ["--host", "127.0.0.1"],
        ["--max-model-len", "256"],
        ["--dtype", "float32"],
        ["--logprobs-mode", "processed_logprobs"],
        ["--generation-config", "vllm"],
        ["--tensor-parallel-size", "1"],
    ):
        at = command.index(pair[0])
        assert command[at : at + 2] == pair
    assert {"--enable-scale-out", "--enable-prefix-caching", "--enable-chunked-prefill"} <= set(command)
    transfer = command[command.index("--weight-transfer-config") + 1]
    assert json.loads(transfer) == {"backend": "verbatim_files"}
    assert "--gpu-memory-utilization" not in command


def test_keys_of_the_table_reach_the_command():
    settings = VllmSettings(max_model_len=512, gpu_memory_utilization=0.5, weight_transfer="nccl", dtype="bfloat16")
    command = options(settings)
    assert command[command.index("--max-model-len") + 1] == "512"
    assert command[command.index("--gpu-memory-utilization") + 1] == "0.5"
    assert json.loads(command[command.index("--weight-transfer-config") + 1]) == {"backend": "verbatim_broadcast"}
    assert settings.precision == "bfloat16"


def test_the_environment_is_ours_without_our_python(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/ours")
    monkeypatch.setenv("VIRTUAL_ENV", "/ours")
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = server_environment(VllmSettings(env={"VLLM_CPU_KVCACHE_SPACE": "1"}), 0, is_local_model=True, num_threads=1)
    assert found["PYTHONPATH"] == str(PLUGIN)
    assert "VIRTUAL_ENV" not in found and "CUDA_VISIBLE_DEVICES" not in found
    assert found["HOME"] == "/home/me"
    assert (found["VLLM_CPU_KVCACHE_SPACE"], found["VLLM_SERVER_DEV_MODE"], found["HF_HUB_OFFLINE"]) == ("1", "1", "1")
    assert (found["OMP_NUM_THREADS"], found["VLLM_CPU_OMP_THREADS_BIND"]) == ("1", "nobind")
    assert "HF_HUB_OFFLINE" not in server_environment(VllmSettings(), 0, is_local_model=False)


@pytest.mark.parametrize(
    ("settings", "visible", "expected"),
    [
        ({"replicas": 2}, None, ["0", "1"]),
        ({"replicas": 2, "tensor_parallel_size": 2}, "4,5,6,7", ["4,5", "6,7"]),
        ({"replicas": 2, "devices": ("3", "1")}, "0,1,2,3", ["3", "1"]),
        ({"replicas": 1, "tensor_parallel_size": 2}, "2,3", ["2,3"]),
    ],
)
def test_replicas_have_devices_of_their_own(monkeypatch, settings, visible, expected):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    made = VllmSettings(**settings)
    found = [server_environment(made, i, is_local_model=True)["CUDA_VISIBLE_DEVICES"] for i in range(made.replicas)]
    assert found == expected


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"urls": ("http://a:1", "http://a:1")}, "http://a:1 is listed twice"),
        ({"api_key_env": "KEY"}, "api_key_env applies only to the servers in urls"),
        ({"gpu_memory_utilization": 1.5}, "found 1.5, expected at most 1"),
        ({"replicas": 2, "devices": ("0",)}, "found 1 entries, expected one for each of the 2 replicas"),
        ({"devices": ("0",), "tensor_parallel_size": 2}, "expected 2 devices in each entry"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(settings, reason):
    with pytest.raises(ValidationError, match=reason):
        VllmSettings(**settings)


@pytest.mark.realtime
@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"python": "/no/such/python"}, 'python: there is no program "/no/such/python".*--install DIR'),
        ({"python": sys.executable}, "has no vLLM.*--install DIR"),
        ({"python": "false"}, 'python: "false" is not a Python interpreter: it ended with status 1'),
        ({"urls": ("localhost:8000",)}, "urls: url 'localhost:8000'; expected an address"),
        ({"urls": ("http://a:1",), "api_key_env": "NO_SUCH_KEY"}, "the environment variable NO_SUCH_KEY is empty"),
    ],
)
def test_what_cannot_work_on_this_machine_is_refused(settings, reason):
    with pytest.raises(UsageError, match=reason):
        VllmSettings(**settings).check()


def test_the_plugin_is_part_of_a_wheel():
    package = PLUGIN.parents[2]
    config = tomllib.loads((package.parents[1] / "pyproject.toml").read_text())
    patterns = config["tool"]["setuptools"]["package-data"]["verbatim"]
    shipped = {path for pattern in patterns for path in package.glob(pattern)}
    files = {path for path in PLUGIN.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert {"METADATA", "entry_points.txt", "verbatim_vllm.py"} <= {path.name for path in files}
    assert files <= shipped


def test_experts_are_returned_where_the_run_asks_for_them():
    asked = options(VllmSettings(), return_routed_experts=True)
    assert "--enable-return-routed-experts" in asked
    assert [part for part in asked if part != "--enable-return-routed-experts"] == options(VllmSettings())
    made = server_environment(VllmSettings(), 0, is_local_model=True, needs_second_runner=True)
    assert made["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    assert "VLLM_USE_V2_MODEL_RUNNER" not in server_environment(VllmSettings(), 0, is_local_model=True)


def test_kept_sets_are_returned_where_the_run_cuts_the_distribution():
    asked = options(VllmSettings(), return_kept_sets=True)
    assert [part for part in asked if part != "--return-sampling-mask"] == options(VllmSettings()) != asked


FACTS = ServerFacts(
    model="m",
    vocab_size=10,
    max_model_len=64,
    logprobs_mode="processed_logprobs",
    generation_config="vllm",
    prefix_caching=True,
    chunked_prefill=True,
    speculative=False,
    weight_transfer="x",
    unsupported_heads=None,
)


def test_kept_sets_that_are_not_returned_or_not_wanted_refuse_a_server():
    how = {"name": "it", "transfer": "x", "vocab_size": 10, "context_length": 64}
    returning = replace(FACTS, returns_kept_sets=True)
    refuse_inexact(returning, **how, return_kept_sets=True)
    with pytest.raises(
        UsageError, match=r"add --return-sampling-mask, which vLLM 0\.32 has, and .* VLLM_USE_V2_MODEL_R"
    ):
        refuse_inexact(FACTS, **how, return_kept_sets=True)
    with pytest.raises(UsageError, match="refuses requests without top_k: leave out --return-sampling-mask"):
        refuse_inexact(returning, **how)


def test_a_server_that_does_not_return_experts_is_refused_where_they_are_asked_for():
    facts = FACTS
    how = {"name": "it", "transfer": "x", "vocab_size": 10, "context_length": 64}
    refuse_inexact(facts, **how)
    with pytest.raises(UsageError, match="add --enable-return-routed-experts, and the environment variable VLLM_USE"):
        refuse_inexact(facts, **how, return_routed_experts=True)
    refuse_inexact(replace(facts, returns_routed_experts=True), **how, return_routed_experts=True)
