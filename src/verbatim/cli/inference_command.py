"""`verbatim inference FILE`: starts only the inference backend of a run, for a run on another host."""

from __future__ import annotations

import argparse
import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from verbatim.cli import exit_status
from verbatim.cli.serve_command import key_of, run_until_asked, until_stopped
from verbatim.config import load_config
from verbatim.config.schema import RunConfig
from verbatim.config.sections import table_of
from verbatim.core.errors import SamplerFault, UsageError
from verbatim.core.machine_faults import describe
from verbatim.core.plain_console import PlainConsole
from verbatim.inference.http.server import LAST_PORT, as_others_reach
from verbatim.inference.pool.settings import ServerSettings
from verbatim.models.catalog import folder_of
from verbatim.run.logs import log_to_console
from verbatim.run.precision import resolve_sampler
from verbatim.run.recipes import run_file
from verbatim.run.rollouts import check_backend, inference_settings, make_sampler
from verbatim.run.tables import component_tables

if TYPE_CHECKING:
    from verbatim.inference.vllm.process import ServerProcess
    from verbatim.inference.vllm.settings import VllmSettings

logger = logging.getLogger(__name__)

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0
"""Seconds before a server that ended is started again; doubled each time."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare FILE, where to listen, and --install."""
    parser.epilog = "Ctrl-C ends it, with exit status 0"
    add = parser.add_argument
    add(
        "file",
        type=run_file,
        metavar="FILE",
        nargs="?",
        help="the run's TOML file, or a recipe's name; its [inference] says what is started",
    )
    add("--install", type=Path, metavar="DIR", help="make a Python environment with vLLM in DIR, and do nothing else")
    add(
        "--build",
        choices=("auto", "cuda", "cpu"),
        default="auto",
        help="with --install: which vLLM (auto: for CUDA where there is a driver)",
    )
    add("--model", metavar="FOLDER", help="the weights to begin with, instead of the file's model.name")
    add("--host", default="127.0.0.1", help="the address to listen on (127.0.0.1: this machine only)")
    add("--port", type=int, default=8000, help="of the first server (8000); the next ones follow")
    add("--api-key-env", metavar="VARIABLE", help="the variable with a key that every request must bring")
    add(
        "--uploads",
        type=Path,
        metavar="FOLDER",
        help="take weights over HTTP into FOLDER, with the key: for hosts that do not share the run folder",
    )
    add(
        "--weights-folder",
        type=Path,
        metavar="FOLDER",
        help="of a server of this package's engine without a key: it takes weights from folders in this one",
    )
    add("--logs", type=Path, metavar="FOLDER", default=Path("logs/inference"), help="for what servers print")


def run(args: argparse.Namespace) -> int:
    """Serve until Ctrl-C or SIGTERM, or make an environment.

    Raises:
        ConfigError: what is wrong with FILE.
        UsageError: an option that cannot be used; a server that cannot be started.
    """
    console = PlainConsole()
    if args.install is not None:
        from verbatim.inference.vllm.install import install_vllm

        python = install_vllm(args.install, args.build, lambda said: console.print(said, soft_wrap=True))
        console.print(
            f'done; in the run\'s file:\n\n[inference]\nbackend = "vllm"\n\n[inference.vllm]\npython = "{python}"',
            soft_wrap=True,
            markup=False,
        )
        return exit_status.FINISHED
    if args.file is None:
        raise UsageError("verbatim inference needs the run's TOML file, or --install DIR")
    key = _key(args)
    log_to_console(PlainConsole(stderr=True), logging.INFO)
    config = load_config(args.file, args.overrides, component_tables())
    model = args.model or config.model.name
    if model is None:
        raise UsageError(f"{args.file} builds its model when it is trained; name one: --model FOLDER")
    model = folder_of(str(model))
    config = _without_urls(config)
    is_vllm = config.inference.backend == "vllm"
    if args.weights_folder is not None and (is_vllm or not args.weights_folder.is_dir()):
        raise UsageError(
            f"--weights-folder {args.weights_folder}: expected a folder that exists, and another "
            "backend than vllm, whose servers read any folder"
        )
    if args.uploads is not None and key is None:
        raise UsageError(
            "--uploads needs a key, because whoever reaches the server could load other weights: --api-key-env VARIABLE"
        )
    if inference_settings(config).shares_device:
        raise UsageError(
            f"inference.{table_of(config.inference.backend)}.colocate is for servers that a run starts "
            "beside its trainer; it puts no others to sleep. Leave it out"
        )
    check_backend(config)
    serve = _serve_vllm if is_vllm else _serve_sampler
    run_until_asked(lambda stop: serve(config, str(model), args, key, console, stop))
    return exit_status.FINISHED


def _key(args: argparse.Namespace) -> str | None:
    if not 1 <= args.port <= LAST_PORT:
        raise UsageError(f"--port {args.port}: expected 1 to {LAST_PORT}")
    key = key_of(args)
    if key is None and args.host not in _LOOPBACK:
        raise UsageError(
            f"--host {args.host}: whoever reaches this server could load other weights; give it a key: "
            "--api-key-env VARIABLE"
        )
    return key


async def _serve_sampler(
    config: RunConfig, model: str, args: argparse.Namespace, key: str | None, console: Console, stop: asyncio.Event
) -> None:
    """One server of any backend that computes in this process."""
    from verbatim.inference.http.server import serve_sampler

    sampler = await make_sampler(resolve_sampler(config, model), model, logs=args.logs)
    try:
        async with serve_sampler(
            sampler,
            host=args.host,
            port=args.port,
            api_key=key,
            uploads=args.uploads,
            weights_folder=args.weights_folder,
        ) as server:
            _say_how(console, config, [server.url], args)
            await until_stopped(sampler, stop)
    finally:
        await sampler.close()


async def _serve_vllm(
    config: RunConfig, model: str, args: argparse.Namespace, key: str | None, console: Console, stop: asyncio.Event
) -> None:
    """The replicas of [inference.vllm], each started again when it ends."""
    _refuse_taken_ports(args, _settings(config).replicas)
    processes = _make_processes(config, model, args, key)
    console.print(
        f"starting {len(processes)} vLLM {'server' if len(processes) == 1 else 'servers'}; logs: {args.logs}",
        soft_wrap=True,
    )
    try:
        starting = asyncio.create_task(_start_all(processes, config))
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait({starting, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            return
        starting.result()
        _say_how(console, config, [process.url for process in processes], args)
        async with asyncio.TaskGroup() as group:
            deadline = _settings(config).start_timeout
            watching = [group.create_task(_keep_running(process, deadline)) for process in processes]
            await stopped
            for task in watching:
                task.cancel()
        console.print("stopping")
    finally:
        await asyncio.gather(*(process.stop() for process in processes))


def _refuse_taken_ports(args: argparse.Namespace, replicas: int) -> None:
    from verbatim.inference.vllm.process import is_taken

    last = args.port + replicas - 1
    if last > LAST_PORT:
        raise UsageError(f"--port {args.port}: {replicas} servers need ports up to {last}, the last is {LAST_PORT}")
    for port in range(args.port, last + 1):
        if is_taken(args.host, port):
            raise UsageError(
                f"--port {args.port}: another process listens on port {port}; {replicas} servers need the "
                f"ports {args.port} to {last}, give another --port"
            )


def _make_processes(config: RunConfig, model: str, args: argparse.Namespace, key: str | None) -> list[ServerProcess]:
    from verbatim.inference.vllm.process import make_process

    settings = _settings(config)
    uploads = args.uploads.resolve() if args.uploads is not None else None
    return [
        make_process(
            settings,
            replica,
            model=model,
            port=args.port + replica,
            context_length=config.orchestrator.seq_len,
            logs=args.logs,
            host=args.host,
            api_key=key,
            adapter_rank=config.trainer.lora.r if config.trainer.lora is not None else None,
            return_routed_experts=config.inference.return_routed_experts,
            uploads=uploads / f"replica_{replica}" if uploads is not None else None,
        )
        for replica in range(settings.replicas)
    ]


def _without_urls(config: RunConfig) -> RunConfig:
    """The configuration of the servers to start: a run on another host finds them by the file's `urls`."""
    settings = inference_settings(config)
    if not isinstance(settings, ServerSettings):
        return config
    table = {table_of(config.inference.backend): settings.without_urls()}
    return config.model_copy(update={"inference": config.inference.model_copy(update=table)})


def _settings(config: RunConfig) -> VllmSettings:
    from verbatim.inference.vllm.settings import VllmSettings

    settings = inference_settings(config)
    assert isinstance(settings, VllmSettings)
    return settings


async def _start_all(processes: Sequence[ServerProcess], config: RunConfig) -> None:
    await asyncio.gather(*(process.start(_settings(config).start_timeout) for process in processes))


async def _keep_running(process: ServerProcess, deadline: float) -> None:
    pause = _FIRST_PAUSE
    while True:
        await process.ended()
        logger.warning("%s ended (%s); starting it again", process.name, process.how_it_ended())
        await asyncio.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
        try:
            await process.start(deadline)
            pause = _FIRST_PAUSE
        except SamplerFault as fault:
            logger.warning("%s", fault)
        except OSError as error:  # a full disk, no process to be had: both may pass
            logger.warning("%s could not be started again: %s", process.name, describe(error))


def _say_how(console: Console, config: RunConfig, urls: list[str], args: argparse.Namespace) -> None:
    """The servers' addresses, as another host reaches them, and the lines of the run's file that find them."""
    urls = [as_others_reach(url, args.host) for url in urls]
    for url in urls:
        console.print(url, soft_wrap=True)
    if isinstance(inference_settings(config), ServerSettings):
        listed = ", ".join(f'"{url}"' for url in urls)
        lines = [f"[inference.{table_of(config.inference.backend)}]", f"urls = [{listed}]"]
        lines += [f'api_key_env = "{args.api_key_env}"'] if args.api_key_env else []
        broadcast = inference_settings(config).broadcast
        transfer = "http" if args.uploads is not None else broadcast.kind if broadcast is not None else None
        lines += [f'weight_transfer = "{transfer}"'] if transfer is not None else []
        console.print("in the run's file:", *lines, sep="\n", soft_wrap=True, markup=False)
