"""The command line and the environment of a vLLM server that samples exactly."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from verbatim.core.errors import UsageError
from verbatim.inference.vllm.settings import VllmSettings
from verbatim.models.sizes import linear_layers_of

PLUGIN = Path(__file__).with_name("plugin")
"""Folder of our plug-in, which vLLM finds through PYTHONPATH. Nothing is installed into vLLM's environment."""
TRANSFER_ENGINES: Mapping[str, str] = {
    "auto": "verbatim_files",
    "files": "verbatim_files",
    "http": "verbatim_files",
    "nccl": "verbatim_broadcast",
    "gloo": "verbatim_broadcast",
}
"""Name of vLLM's weight-transfer engine for each value of `weight_transfer`."""
WORKER_EXTENSION = "verbatim_vllm.WeightReport"
MIDDLEWARE = "verbatim_vllm_http.Guard"
MODEL_NAME = "policy"
"""The model's name in requests. The name is fixed, because the folder of the weights changes when a server is
restarted."""

RETURN_EXPERTS = "--enable-return-routed-experts"
RETURN_KEPT_SETS = "--return-sampling-mask"
"""This option and `RETURN_EXPERTS` need vLLM's V2 model runner, which is not the default on every platform."""

_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values that vLLM accepts for `--max-lora-rank`."""
_VERSIONS_IN_A_STEP, _VERSIONS_KEPT = 4, 16
"""`--max-loras` (adapters that one batch may use) and `--max-cpu-loras` (adapters kept in memory). A request finishes
with the adapter that it started with, so several versions are in use at the same time."""

_OF_OUR_PYTHON = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
"""Variables of our own Python environment, which would mislead the Python of vLLM's environment."""

EXACT_OPTIONS: Sequence[str] = (
    "--enable-scale-out",  # the endpoint that takes and returns token ids
    "--logprobs-mode",
    "processed_logprobs",  # logprobs of the distribution that is sampled from, after temperature and truncation
    "--generation-config",
    "vllm",  # ignore the sampling defaults in the model's generation_config.json
    "--enable-prefix-caching",
    "--enable-chunked-prefill",
    "--enable-prompt-tokens-details",  # report how many prompt tokens came from the prefix cache
)
"""Options that exact sampling needs. For a server that the run did not start, `facts` checks that the server has the
same settings."""


def server_command(
    settings: VllmSettings,
    *,
    model: str | Path,
    port: int,
    context_length: int,
    host: str = "127.0.0.1",
    adapter_rank: int | None = None,
    return_routed_experts: bool = False,
    return_kept_sets: bool = False,
) -> list[str]:
    """The command line of one server.

    Args:
        settings: The table [inference.vllm].
        model: The initial weights: a folder in Hugging Face format, or a hub id.
        port: The port to listen on.
        context_length: Maximum tokens of prompt plus completion; `settings.max_model_len` takes precedence.
        host: The address to listen on.
        adapter_rank: Rank of the LoRA adapters that updates bring; None if updates bring full weights.
        return_routed_experts: Report which experts of a mixture-of-experts model computed each token.
        return_kept_sets: Return the kept set of each token. The server then refuses requests without `top_k`.
    """
    transfer = json.dumps({"backend": TRANSFER_ENGINES[settings.weight_transfer]})
    options = [
        "--model",
        str(model),
        "--served-model-name",
        MODEL_NAME,
        "--host",
        host,
        "--port",
        str(port),
        "--dtype",
        settings.dtype,
        "--max-model-len",
        str(settings.max_model_len or context_length),
        "--tensor-parallel-size",
        str(settings.tensor_parallel_size),
        *EXACT_OPTIONS,
        "--weight-transfer-config",
        transfer,
        "--worker-extension-cls",
        WORKER_EXTENSION,
        "--middleware",
        MIDDLEWARE,
        "--disable-uvicorn-access-log",
    ]
    if settings.colocate:
        options.append("--enable-sleep-mode")
    if return_routed_experts:
        options.append(RETURN_EXPERTS)
    if return_kept_sets:
        options.append(RETURN_KEPT_SETS)
    if settings.gpu_memory_utilization is not None:
        options += ["--gpu-memory-utilization", str(settings.gpu_memory_utilization)]
    if adapter_rank is not None:
        options += lora_options(adapter_rank, linear_layers_of(model))
    return [python_of(settings), "-m", "vllm.entrypoints.openai.api_server", *options, *settings.args]


def lora_options(rank: int, layers: Sequence[str]) -> list[str]:
    """The options that a server needs for adapters of this rank on these layers.

    The layers are named because vLLM 0.32 would otherwise wrap the output head too, and crash in the first step that
    mixes a request for prompt logprobs (the canary's) with other requests.

    >>> lora_options(4, ["q_proj"])
    ['--enable-lora', '--max-lora-rank', '8', '--max-loras', '4', '--max-cpu-loras', '16', '--lora-target-modules', \
'q_proj']

    Raises:
        UsageError: the rank is larger than vLLM supports.
    """
    most = next((known for known in _RANKS if known >= rank), None)
    if most is None:
        raise UsageError(f"trainer.lora.r = {rank}, but vLLM supports ranks up to {_RANKS[-1]}")
    return [
        "--enable-lora",
        "--max-lora-rank",
        str(most),
        "--max-loras",
        str(_VERSIONS_IN_A_STEP),
        "--max-cpu-loras",
        str(_VERSIONS_KEPT),
        "--lora-target-modules",
        *layers,
    ]


def python_of(settings: VllmSettings) -> str:
    """Absolute path of the interpreter, or the unchanged setting if no such program is found."""
    return shutil.which(os.path.expanduser(settings.python)) or settings.python


def server_environment(
    settings: VllmSettings,
    replica: int,
    *,
    is_local_model: bool,
    num_threads: int | None = None,
    api_key: str | None = None,
    uploads: Path | None = None,
    needs_second_runner: bool = False,
) -> dict[str, str]:
    """The environment of one server: our own without the variables of our Python, plus variables that vLLM needs.

    Args:
        settings: The table [inference.vllm].
        replica: The replica's index, which decides its devices.
        is_local_model: True if the model is a folder. The server then runs with the Hugging Face hub offline.
        num_threads: Number of CPU threads of a server that computes on this machine's CPUs; None means all cores.
        api_key: The key that every route but /health requires; None if no key is required.
        uploads: The folder for weights that are uploaded over HTTP; None to refuse uploads.
        needs_second_runner: Use vLLM's V2 model runner.
    """
    ours = {name: value for name, value in os.environ.items() if name not in _OF_OUR_PYTHON}
    devices = settings.visible_devices(replica, ours.get("CUDA_VISIBLE_DEVICES"))
    return {
        **ours,
        "PYTHONPATH": str(PLUGIN),
        "VLLM_SERVER_DEV_MODE": "1",  # enables the routes of weight updates
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",  # the routes of adapters, which do nothing without --enable-lora
        # In seconds. Our client keeps idle connections longer than vLLM's default of 5 seconds, so requests would fail.
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "90",
        **({"HF_HUB_OFFLINE": "1"} if is_local_model else {}),
        **({"CUDA_VISIBLE_DEVICES": devices} if devices is not None else {}),
        # By default a vLLM for CPUs binds its threads to all cores, which the trainer on the same machine needs too.
        **({"OMP_NUM_THREADS": str(num_threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"} if num_threads else {}),
        **({"VLLM_USE_V2_MODEL_RUNNER": "1"} if needs_second_runner else {}),
        **({"VERBATIM_KEY": api_key} if api_key else {}),
        **({"VERBATIM_UPLOADS": str(uploads)} if uploads is not None else {}),
        **settings.env,  # comes last, so that the user's variables override ours
    }
