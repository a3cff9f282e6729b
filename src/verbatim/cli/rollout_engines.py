"""Defines the two engines of `verbatim rollout`: a chat-completions server, and the [inference] of a run."""

from __future__ import annotations

import argparse
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from verbatim.config import load_config
from verbatim.core.errors import UsageError
from verbatim.core.sampling import SamplingParams
from verbatim.inference.chat.client import OpenAI
from verbatim.inference.sampler import Sampler
from verbatim.inference.scripted import ScriptedSampler
from verbatim.models.catalog import folder_of
from verbatim.rollouts import APIMultiTurnRollout, MultiTurnRollout
from verbatim.rollouts.conversation_rollout import ConversationRollout
from verbatim.rollouts.seeds import derive_seed
from verbatim.run.precision import resolve_sampler
from verbatim.run.rollouts import check_backend, make_renderer, make_sampler
from verbatim.run.tables import component_tables

Work: TypeAlias = Callable[[ConversationRollout], Awaitable[None]]
"""A function that plays all jobs with the given rollout."""

_OF_A_CHAT_SERVER: Mapping[str, Any] = {"api_key_env": None, "extra_body": {}, "request_timeout": 600.0}
"""Options that apply only to a chat server, with their defaults."""


@dataclass(frozen=True, kw_only=True)
class Engine:
    """Plays conversations."""

    model: str
    """The model's name, folder or hub id, on which results depend."""
    settings: Mapping[str, Any]
    """Further settings on which results depend, by option; options that were not typed are left out."""
    play: Callable[[Work, int], Coroutine[Any, Any, None]]
    """Opens a rollout and does the work with it. The number argument is the number of tasks done by earlier commands;
    it changes the seed, so that no seed is used twice."""


def engine_of(args: argparse.Namespace) -> Engine:
    """The engine that the options select. Its settings are checked, but it is not started.

    Raises:
        UsageError: options exclude each other, a setting cannot be used, or there is no server at a URL.
        ConfigError: there is a mistake in the file of --inference.
    """
    if args.inference is None:
        if args.overrides:
            raise UsageError(
                f"verbatim rollout has no option {args.overrides[0]}; see verbatim rollout --help. Keys "
                "of a run's file are options with --inference FILE"
            )
        if args.base_url is None or args.model is None:
            raise UsageError(
                "verbatim rollout needs a server and the model's name there, --base-url URL --model NAME; "
                "or a run's file that says how to sample, --inference FILE"
            )
        return _over_chat(args)
    typed = [name for name in ("base_url", *_OF_A_CHAT_SERVER) if getattr(args, name) is not None]
    if args.user_model is not None:  # --request-timeout then applies to that model's server
        typed = [name for name in typed if name != "request_timeout"]
    if typed:
        raise UsageError(
            f"--{typed[0].replace('_', '-')} is for a chat server, and --inference samples by a run's "
            "file; leave out one of the two"
        )
    return _over_inference(args)


def _over_chat(args: argparse.Namespace) -> Engine:
    """The engine that samples from a chat-completions server."""
    own = {
        name: default if getattr(args, name) is None else getattr(args, name)
        for name, default in _OF_A_CHAT_SERVER.items()
    }
    api = OpenAI(
        model=args.model, base_url=args.base_url, api_key_env=own["api_key_env"], request_timeout=own["request_timeout"]
    )
    rollout = APIMultiTurnRollout(api=api, extra_body=own["extra_body"], seed=args.seed, **_settings(args))

    async def play(work: Work, num_done: int) -> None:
        await work(rollout)

    settings = {"extra_body": own["extra_body"]} if own["extra_body"] else {}
    return Engine(model=args.model, settings=settings, play=play)


def _over_inference(args: argparse.Namespace) -> Engine:
    """The engine that samples with a run's [inference]."""
    from verbatim.models.loading import load_tokenizer

    config = load_config(args.inference, args.overrides, component_tables())
    model = args.model or config.model.name
    if model is None:
        raise UsageError(
            f"{args.inference} builds its model when it is trained; name a trained one: --model "
            f"runs/{args.inference.stem}/latest/final"
        )
    model = folder_of(model)
    check_backend(config)
    config = resolve_sampler(config, model)
    renderer = make_renderer(config.orchestrator.renderer, load_tokenizer(model))
    settings = _settings(args)

    def rollout(sampler: Sampler, num_done: int) -> MultiTurnRollout:
        seed = derive_seed(args.seed or 0, num_done)
        return MultiTurnRollout(sampler=sampler, template=renderer, seed=seed, progress=None, **settings)

    # A rollout is made once now, so that a bad setting is refused before a server is started.
    rollout(ScriptedSampler(script=[], vocab_size=1, context_length=1), 0)

    async def play(work: Work, num_done: int) -> None:
        sampler = await make_sampler(config, model, kept_sets=False)
        try:
            await work(rollout(sampler, num_done))
        finally:
            await sampler.close()

    sampler = f"{args.inference} with inference.backend = {config.inference.backend}"
    return Engine(model=str(model), settings={"inference": sampler}, play=play)


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """The settings of both engines."""
    try:
        params = SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens)
    except ValueError as error:
        raise UsageError(str(error)) from None
    return {
        "sampling_params": params,
        "max_turns": args.max_turns,
        "concurrency": args.concurrency,
        "trajectory_timeout": args.trajectory_timeout,
        "trace_dir": args.trace_dir,
    }
