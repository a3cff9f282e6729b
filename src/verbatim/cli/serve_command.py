"""`verbatim serve MODEL`: serves a model over HTTP, for rollouts, evaluation and data collection."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from verbatim.cli import exit_status
from verbatim.cli.argument_types import COUNT, number
from verbatim.core.errors import UsageError
from verbatim.core.plain_console import PlainConsole
from verbatim.inference.chat.protocol import UNENFORCEABLE, Options
from verbatim.inference.http.limits import ServerLimits
from verbatim.inference.http.server import LAST_PORT
from verbatim.inference.sampler import Sampler, watch_engine
from verbatim.models.catalog import folder_of
from verbatim.rollouts.main_loop import run_until_asked
from verbatim.run.logs import log_to_console

_CONTEXT = 4096
"""Default context length in tokens, if the model has at least that many positions."""
_CHAT_PROCESSES = 2
"""Number of render processes; one of them is reserved for small requests."""
_REFUSAL_SECONDS = 0.25
"""Delay of an error response, in seconds, so that a client that repeats an invalid request costs less."""
_SWITCH_SECONDS = 1e-4
"""Switch interval of Python's global lock, in seconds. The engine needs the lock after every operation; with the
default of 5 ms it would wait much longer for the event loop's thread."""
_LAST_ANSWERS = 1.0
"""Time in seconds for which a server whose engine has died still answers pending requests, with the engine's error."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments: MODEL, where to listen, and how to sample."""
    parser.epilog = "Ctrl-C ends it, with exit status 0; clients of OpenAI's API need /v1 after the address"
    add = parser.add_argument
    add("model", metavar="MODEL", help="a folder in Hugging Face format, or a hub id")
    add("--host", default="127.0.0.1", help="the address to listen on (127.0.0.1: this machine only)")
    port = number(int, f"0 (any free port) to {LAST_PORT}", lambda value: 0 <= value <= LAST_PORT)
    add("--port", type=port, default=8000, help="(8000); 0 selects a free port")
    add("--name", help="the model's name in requests (the folder's name)")
    add("--renderer", default="auto", metavar="NAME", help='chat format (auto); "none" serves token ids only')
    add("--tools", choices=("hermes",), help="write tools into the messages, for a chat template without tools")
    add(
        "--later-system",
        choices=("fold", "refuse"),
        default="fold",
        help="a system or developer message that the format cannot render: merge it into another, or answer 400 (fold)",
    )
    add("--api-key-env", metavar="VARIABLE", help="the environment variable with a key that every request must have")
    add(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help='a host name allowed in requests, in addition to the address ("*": any); not needed with a key',
    )
    add(
        "--accept",
        action="append",
        default=[],
        choices=sorted(UNENFORCEABLE),
        metavar="FIELD",
        help="accept a field of chat requests that cannot be honoured, without effect: "
        f"{', '.join(sorted(UNENFORCEABLE))}; repeatable",
    )
    add(
        "--weights-folder",
        type=Path,
        metavar="FOLDER",
        help="accept other weights from folders inside this one (without it: from anywhere, with the key)",
    )
    add("--uploads", type=Path, metavar="FOLDER", help="accept other weights over HTTP into this folder, with the key")
    add("--context-length", type=COUNT, metavar="N", help=f"maximum length in tokens (the model's, up to {_CONTEXT})")
    add("--max-batch-size", type=COUNT, default=64, metavar="N", help="sequences decoded together (64)")
    add(
        "--dtype",
        choices=("float32", "bfloat16", "auto"),
        default="float32",
        help="(float32); auto: bfloat16 if measured to be faster here; float32 for tiny models",
    )
    add("--device", default="auto", help="(auto: CUDA if available)")
    add("--return-routed-experts", action="store_true", help="return with each completion the experts that computed it")
    add("--deterministic", action="store_true", help="same request and seed give the same bits in any batch")
    add("--threads", type=COUNT, metavar="N", help="number of threads for matrix products on a CPU")
    add("--seed", type=int, metavar="N", help="base of the seeds of requests that have none")


def run(args: argparse.Namespace) -> int:
    """Load the model, serve until Ctrl-C or SIGTERM, then clean up.

    Raises:
        UsageError: the variable for the key is empty, a folder does not exist, or the address is in use.
        ModelError: the model cannot be loaded.
        EngineDead: the engine can no longer answer; a supervisor may restart the process.
    """
    api_key = key_of(args)
    if args.weights_folder is not None and not args.weights_folder.is_dir():
        raise UsageError(f"--weights-folder {args.weights_folder}: there is no such folder")
    console = PlainConsole()
    log_to_console(PlainConsole(stderr=True), logging.WARNING)
    run_until_asked(lambda stop: _serve(args, api_key, console, stop))
    return exit_status.FINISHED


def key_of(args: argparse.Namespace) -> str | None:
    """The key in the environment variable that --api-key-env names.

    Raises:
        UsageError: the variable is empty, or --uploads needs a key and there is no key.
    """
    if args.api_key_env is None:
        if args.uploads is not None:
            raise UsageError(
                "--uploads needs a key, because otherwise anyone who can reach the server could load other "
                "weights; add --api-key-env VARIABLE"
            )
        return None
    key = os.environ.get(args.api_key_env)
    if not key:
        raise UsageError(f"--api-key-env {args.api_key_env}: that variable is empty; put the key into it")
    return key


async def _serve(args: argparse.Namespace, api_key: str | None, console: Console, stop: asyncio.Event) -> None:
    """Serve until stopped."""
    from verbatim.inference.http.server import serve_sampler

    renderer = _make_renderer(args)
    sampler = _make_sampler(args, console)
    sys.setswitchinterval(_SWITCH_SECONDS)
    try:
        async with serve_sampler(
            sampler,
            host=args.host,
            port=args.port,
            renderer=renderer,
            model=args.name or Path(args.model).name,
            api_key=api_key,
            seed=args.seed,
            weights_folder=args.weights_folder,
            uploads=args.uploads,
            allow_hosts=args.allow_host,
            chat_processes=_CHAT_PROCESSES,
            options=Options(unenforced=frozenset(args.accept)),
            limits=ServerLimits(refusal_seconds=_REFUSAL_SECONDS),
        ) as server:
            console.print(
                f"{server.model} at {server.url} (OpenAI's clients: {server.url}/v1)"
                if renderer is not None
                else f"{server.model} at {server.url} (token ids only)",
                soft_wrap=True,
            )
            await until_stopped(sampler, stop)
            console.print("stopping")
    finally:
        await sampler.close()


async def until_stopped(sampler: Sampler, stop: asyncio.Event) -> None:
    """Wait for Ctrl-C or SIGTERM.

    Raises:
        EngineDead: the engine died.
    """
    ends = [asyncio.ensure_future(end) for end in (stop.wait(), watch_engine(sampler))]
    try:
        done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for end in done:
            if end.exception() is not None:
                await asyncio.sleep(_LAST_ANSWERS)  # so that pending requests get the error
            end.result()
    finally:
        for end in ends:
            end.cancel()


def _make_renderer(args: argparse.Namespace) -> Any:
    if args.renderer == "none":
        return None
    from verbatim.models.loading import load_tokenizer
    from verbatim.models.renderers import create_renderer

    return create_renderer(args.renderer, load_tokenizer(args.model), tools=args.tools, later_system=args.later_system)


def _make_sampler(args: argparse.Namespace, console: Console) -> Any:
    from verbatim.inference.embedded.engine import TorchSampler
    from verbatim.inference.embedded.settings import TorchSettings
    from verbatim.run.precision import resolve_server

    config = TorchSettings(
        max_batch_size=args.max_batch_size,
        dtype=args.dtype,
        device=args.device,
        deterministic=args.deterministic,
        num_threads=args.threads,
    )
    if config.dtype == "auto":
        config, choice = resolve_server(config, args.model)
        console.print(f"dtype {choice.dtype}: {choice.reason}", soft_wrap=True)
    context = args.context_length or min(_CONTEXT, _positions(folder_of(args.model)))
    return TorchSampler(
        args.model,
        config=config,
        context_length=context,
        num_threads=args.threads,
        return_routed_experts=args.return_routed_experts,
    )


def _positions(model: str) -> int:
    """The number of positions in the model's configuration, or the default context length if the configuration has no
    such number.

    This function does not check whether the model can be loaded: the engine does that.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(model)
    except (OSError, ValueError):
        return _CONTEXT
    return int(getattr(config.get_text_config(), "max_position_embeddings", None) or _CONTEXT)
