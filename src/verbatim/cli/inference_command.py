"""`verbatim inference FILE`: starts only a run's inference backend, for a run on another host."""

from __future__ import annotations

import argparse
import asyncio
import logging
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from rich.console import Console

from verbatim.cli import exit_status
from verbatim.cli.argument_types import number
from verbatim.cli.serve_command import key_of, until_stopped
from verbatim.config import import_object, load_config
from verbatim.config.schema import RunConfig
from verbatim.config.sections import table_of
from verbatim.core.errors import UsageError
from verbatim.core.plain_console import PlainConsole
from verbatim.inference.backends import INSTALLERS, STANDING, Listening
from verbatim.inference.http.server import LAST_PORT, as_others_reach
from verbatim.inference.pool.settings import ServerSettings
from verbatim.models.catalog import folder_of
from verbatim.rollouts.main_loop import run_until_asked
from verbatim.run.logs import log_to_console
from verbatim.run.precision import resolve_sampler
from verbatim.run.recipes import run_file
from verbatim.run.rollouts import backend_inputs, check_backend, inference_settings, make_sampler
from verbatim.run.tables import component_tables

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
"""Hosts that are reachable only from this machine, so a server on them needs no key."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments: FILE, where to listen, and --install."""
    parser.epilog = "Ctrl-C ends it, with exit status 0"
    add = parser.add_argument
    add(
        "file",
        type=run_file,
        metavar="FILE",
        nargs="?",
        help="the run's TOML file, or a recipe's name; its [inference] configures the server",
    )
    add("--install", type=Path, metavar="DIR", help="make a Python environment with vLLM in DIR, and do nothing else")
    add(
        "--build",
        choices=("auto", "cuda", "cpu"),
        default="auto",
        help="with --install: which build of vLLM (auto: for CUDA if there is a driver)",
    )
    add("--model", metavar="FOLDER", help="the initial weights, instead of the file's model.name")
    add("--host", default="127.0.0.1", help="the address to listen on (127.0.0.1: this machine only)")
    port = number(int, f"1 to {LAST_PORT}", lambda value: 1 <= value <= LAST_PORT)
    add("--port", type=port, default=8000, help="the first server's port (8000); further servers use the next ones")
    add("--api-key-env", metavar="VARIABLE", help="the environment variable with a key that every request must have")
    add(
        "--uploads",
        type=Path,
        metavar="FOLDER",
        help="accept weights over HTTP into FOLDER, with the key: for hosts that do not share the run folder",
    )
    add(
        "--weights-folder",
        type=Path,
        metavar="FOLDER",
        help="for the embedded backend without a key: accept weights from folders inside this one",
    )
    add("--logs", type=Path, metavar="FOLDER", default=Path("logs/inference"), help="the folder for the servers' logs")


def run(args: argparse.Namespace) -> int:
    """Serve until Ctrl-C or SIGTERM, or install an environment.

    Raises:
        ConfigError: FILE has a mistake.
        UsageError: an option cannot be used, or a server cannot be started.
    """
    console = PlainConsole()
    if args.install is not None:
        install = import_object(INSTALLERS["vllm"])
        python = install(args.install, args.build, lambda said: console.print(said, soft_wrap=True))
        console.print(
            f'done; in the run\'s file:\n\n[inference]\nbackend = "vllm"\n\n[inference.vllm]\npython = "{python}"',
            soft_wrap=True,
            markup=False,
        )
        return exit_status.FINISHED
    if args.file is None:
        raise UsageError("verbatim inference needs the run's TOML file, or --install DIR")
    key = key_of(args)
    if key is None and args.host not in _LOOPBACK:
        raise UsageError(
            f"--host {args.host}: anyone who can reach this server could load other weights; give it a key: "
            "--api-key-env VARIABLE"
        )
    log_to_console(PlainConsole(stderr=True), logging.INFO)
    config = load_config(args.file, args.overrides, component_tables())
    model = args.model or config.model.name
    if model is None:
        raise UsageError(f"{args.file} builds its model when it is trained; name one: --model FOLDER")
    model = folder_of(str(model))
    config = _without_urls(config)
    stands = config.inference.backend in STANDING
    if args.weights_folder is not None and (stands or not args.weights_folder.is_dir()):
        raise UsageError(
            f"--weights-folder {args.weights_folder}: expected a folder that exists, and a "
            "backend other than vllm, because vLLM servers read weights from any folder"
        )
    if inference_settings(config).shares_device:
        raise UsageError(
            f"inference.{table_of(config.inference.backend)}.colocate is for servers that a run starts "
            "next to its trainer; other servers are never put to sleep. Leave it out"
        )
    check_backend(config)
    serve = _serve_standing if stands else _serve_sampler
    run_until_asked(lambda stop: serve(config, str(model), args, key, console, stop))
    return exit_status.FINISHED


async def _serve_sampler(
    config: RunConfig, model: str, args: argparse.Namespace, key: str | None, console: Console, stop: asyncio.Event
) -> None:
    """Serve any backend that runs in this process."""
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


async def _serve_standing(
    config: RunConfig, model: str, args: argparse.Namespace, key: str | None, console: Console, stop: asyncio.Event
) -> None:
    """Run servers as separate processes, and restart each server that ends."""
    servers = import_object(STANDING[config.inference.backend])(
        backend_inputs(config, model, logs=args.logs),
        inference_settings(config),
        Listening(host=args.host, port=args.port, api_key=key, uploads=args.uploads),
    )
    console.print(f"starting {servers.named}; logs: {args.logs}", soft_wrap=True)
    stopped = asyncio.create_task(stop.wait())
    try:
        if await _is_done_before(servers.start(), stopped):
            _say_how(console, config, servers.urls, args)
            await _is_done_before(servers.keep_running(), stopped)
            console.print("stopping")
    finally:
        await servers.close()


async def _is_done_before(work: Coroutine[Any, Any, None], stopped: asyncio.Task[Any]) -> bool:
    """True if the work finished; False if the command was asked to stop before the work had finished. Exceptions of the
    work are passed on."""
    working = asyncio.create_task(work)
    try:
        await asyncio.wait({working, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            return False
        working.result()
        return True
    finally:
        working.cancel()
        await asyncio.wait({working})


def _without_urls(config: RunConfig) -> RunConfig:
    """The configuration of the servers to start, without the file's `urls`, which are for the run on the other host."""
    settings = inference_settings(config)
    if not isinstance(settings, ServerSettings):
        return config
    table = {table_of(config.inference.backend): settings.without_urls()}
    return config.model_copy(update={"inference": config.inference.model_copy(update=table)})


def _say_how(console: Console, config: RunConfig, urls: list[str], args: argparse.Namespace) -> None:
    """Print the servers' addresses as other hosts see them, and the lines for the run's file that refer to them."""
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
