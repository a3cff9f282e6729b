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
"""A folder for PYTHONPATH: vLLM finds our weight-transfer engine there; nothing is installed into its environment."""
TRANSFER_ENGINES: Mapping[str, str] = {
    "auto": "verbatim_files",
    "files": "verbatim_files",
    "http": "verbatim_files",
    "nccl": "verbatim_broadcast",
    "gloo": "verbatim_broadcast",
}
"""`weight_transfer` to the name of the engine in vLLM."""
WORKER_EXTENSION = "verbatim_vllm.WeightReport"
MIDDLEWARE = "verbatim_vllm_http.Guard"
MODEL_NAME = "policy"
"""What the model is called in requests, whatever folder its weights are from."""

RETURN_EXPERTS = "--enable-return-routed-experts"
RETURN_KEPT_SETS = "--return-sampling-mask"
"""Both need vLLM's second model runner, which is not its default everywhere."""

_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of `--max-lora-rank`."""
_VERSIONS_IN_A_STEP, _VERSIONS_KEPT = 4, 16
"""Adapters of requests that are computed together, and those that are in memory: a request ends with the adapter that
it began with, however many versions come meanwhile."""

_OF_OUR_PYTHON = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")

EXACT_OPTIONS: Sequence[str] = (
    "--enable-scale-out",  # the endpoint for token ids
    "--logprobs-mode",
    "processed_logprobs",  # of the distribution that was sampled from
    "--generation-config",
    "vllm",  # the model's own sampling defaults stay off
    "--enable-prefix-caching",
    "--enable-chunked-prefill",
    "--enable-prompt-tokens-details",  # how many tokens came from the prefix cache
)
"""What exactness needs; `control` checks the same of servers that exist."""


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
    """The command of one server.

    Args:
        settings: Its table.
        model: A folder in Hugging Face format, or a hub id: the weights to begin with.
        port: Where it listens.
        context_length: Most tokens of prompt and completion together, where the settings do not say.
        host: Where it listens.
        adapter_rank: Rank of the low-rank adapters that updates bring; None: they bring whole weights.
        return_routed_experts: Whether it returns the experts of a mixture that computed each token.
        return_kept_sets: Whether it returns the ids among which it drew each token; then it takes no request without
            `top_k`.
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
    """What a server needs for adapters of this rank beside these layers.

    They are named because vLLM 0.32 would otherwise wrap the output head too, and end at the first step that has a
    request for prompt logprobs (the canary's) beside others.

    >>> lora_options(4, ["q_proj"])
    ['--enable-lora', '--max-lora-rank', '8', '--max-loras', '4', '--max-cpu-loras', '16', '--lora-target-modules', \
'q_proj']

    Raises:
        UsageError: a rank that vLLM does not take.
    """
    most = next((known for known in _RANKS if known >= rank), None)
    if most is None:
        raise UsageError(f"trainer.lora.r = {rank}, but vLLM takes ranks up to {_RANKS[-1]}")
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
    """The interpreter, as an absolute path where it is one of a folder."""
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
    """The environment of one server: ours without what belongs to our Python, and what vLLM needs.

    Args:
        settings: Its table.
        replica: The replica's index, which decides its devices.
        is_local_model: Whether the model is a folder: then the hub is not asked for anything.
        num_threads: For a server that computes on this machine's processors; None: all of them.
        api_key: What every route but /health needs; None: no key.
        uploads: The folder for weights that arrive over HTTP; None: they cannot.
        needs_second_runner: Whether it needs vLLM's second model runner.
    """
    ours = {name: value for name, value in os.environ.items() if name not in _OF_OUR_PYTHON}
    devices = settings.visible_devices(replica, ours.get("CUDA_VISIBLE_DEVICES"))
    return {
        **ours,
        "PYTHONPATH": str(PLUGIN),
        "VLLM_SERVER_DEV_MODE": "1",  # the routes of weight updates
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",  # the routes of adapters, which do nothing without --enable-lora
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "90",  # seconds; vLLM's own 5 end before our client gives up an idle connection
        **({"HF_HUB_OFFLINE": "1"} if is_local_model else {}),
        **({"CUDA_VISIBLE_DEVICES": devices} if devices is not None else {}),
        # A vLLM for CPUs would bind its threads to all cores.
        **({"OMP_NUM_THREADS": str(num_threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"} if num_threads else {}),
        **({"VLLM_USE_V2_MODEL_RUNNER": "1"} if needs_second_runner else {}),
        **({"VERBATIM_KEY": api_key} if api_key else {}),
        **({"VERBATIM_UPLOADS": str(uploads)} if uploads is not None else {}),
        **settings.env,
    }
