"""Checks a run before weights are loaded. `verbatim config` does so, and every training command before it creates a run
folder."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from verbatim.algorithms.credit import try_advantage
from verbatim.config.schema import RunConfig, TeacherConfig
from verbatim.config.sections import BackendSettings, table_of
from verbatim.core.errors import ComponentError, ModelError, UsageError
from verbatim.core.imports import refuse_without
from verbatim.core.records.experts import Routing
from verbatim.environments import ENVIRONMENTS
from verbatim.environments.resolve import corpus
from verbatim.inference.chat.client import OpenAI
from verbatim.inference.http.connection_settings import named_key
from verbatim.models.renderers.renderer import Renderer
from verbatim.models.source import find_source
from verbatim.rollouts.workers.episodes import refuse_unpicklable
from verbatim.run.build import (
    frozen_models,
    logprob_models,
    make_loss,
    make_monitors,
    make_rules,
    warn_of_useful_flat_groups,
)
from verbatim.run.environments import (
    CORPUS,
    Environments,
    check_environments,
    check_imitation,
    check_tools,
    demonstrations,
    make_environments,
    to_imitate,
)
from verbatim.run.openings import check_openings
from verbatim.run.placement import check_placement, check_turns
from verbatim.run.rollouts import check_backend, inference_settings, make_renderer, plays_elsewhere, rollout_settings
from verbatim.run.weight_transfer import check_broadcast

logger = logging.getLogger(__name__)


def check_run(
    config: RunConfig,
    environments_table: Mapping[str, Any] = ENVIRONMENTS,
    *,
    starts_both: bool = True,
    plays: bool = True,
    told: Callable[[Renderer], None] | None = None,
) -> Environments:
    """Refuse a run that could not start. Names of components were already resolved by `load_config`.

    Environments are created, their examples are read, and one episode of each is opened. Components are created with
    their parameters. The conversations to imitate are read, from their file or from the environments' demonstrations.
    The model's tokenizer, chat template and renderer are tried on all of these (see `check_imitation` and
    `check_openings`). Weights are checked for presence, not loaded. The only network request is to the hub, for a model
    given by id.

    Args:
        config: The run's configuration.
        environments_table: The environments by id.
        starts_both: True if this process starts both trainer and sampler; both then see the same devices.
        plays: True if this process runs episodes.
        told: Called with the renderer once all checks have passed.

    Returns:
        The environments, so that the caller need not create them again.

    Raises:
        UsageError: a check failed; the message says what was found and what was expected.
    """
    # Cheap checks first: the later ones may import torch, which takes seconds.
    environments = make_environments(config, environments_table)
    check_environments(config, environments)
    _check_advantages(config, environments)
    make_monitors(config)
    _check_loss(config)
    warn_of_unread_tables(config)
    warn_of_useful_flat_groups(config)
    conversations = to_imitate(config, environments)
    rollout_settings(config).check()
    _check_runners(config, environments)
    _check_devices(config)
    check_turns(config, inference_settings(config))
    settings = check_backend(config)
    starts_both = starts_both and config.cluster is None  # Ray chooses nodes and devices
    check_broadcast(config, is_trainers_host=starts_both)
    if starts_both:
        check_placement(config, settings)
    if config.orchestrator.teacher is not None:
        _check_teacher(config.orchestrator.teacher)
    for name, model in frozen_models(config).items():
        if model is not None:
            _check_frozen(model, name, config)
    _check_trainer(config)
    renderer = renderer_of(config, environments)
    check_tools(config, environments, renderer)
    check_imitation(config, conversations, renderer)
    if plays:
        check_openings(config, environments, renderer)
    if told is not None:
        told(renderer)
    return environments


def _check_advantages(config: RunConfig, environments: Environments) -> None:
    """Build the rules of each environment, including the filters, and try each custom advantage."""
    for label, rules in make_rules(config, environments).items():
        env, _ = environments.train[label]
        if (env.advantage or config.orchestrator.advantage).custom_path is not None:
            try:
                try_advantage(rules.advantage)
            except ComponentError as error:
                raise ComponentError(f"environment {label!r}: {error}") from error


def _check_loss(config: RunConfig) -> None:
    """Try a custom loss on a small batch."""
    if config.trainer.loss.custom_path is None:
        return  # built-in losses need no trial, and torch takes seconds to import
    from verbatim.algorithms.losses.results import try_loss

    try:
        try_loss(make_loss(config), streams=[*logprob_models(config), *frozen_models(config)])
    except ComponentError as error:
        raise ComponentError(f"trainer.loss: {error}") from error


def warn_of_unread_tables(config: RunConfig) -> None:
    """Log each table of a backend that is not selected, because the table's keys have no effect."""
    orchestrator = config.orchestrator
    envs = (*orchestrator.train.env, *(orchestrator.eval.env if orchestrator.eval is not None else ()))
    # An isolated environment uses worker processes even with the local backend.
    isolated = ["processes"] if any(env.isolated for env in envs) else []
    sections = {"inference": (config.inference, []), "orchestrator.rollout": (orchestrator.rollout, isolated)}
    for path, (section, also_read) in sections.items():
        for name, settings in section:
            if isinstance(settings, BackendSettings) and name not in (table_of(section.backend), *also_read):
                logger.warning('[%s.%s] is not read: %s.backend = "%s"', path, name, path, section.backend)


def _check_runners(config: RunConfig, environments: Environments) -> None:
    # Ray pickles more than `pickle` does, so it checks with its own function when it starts (`packed_plan`).
    if config.orchestrator.rollout.backend not in ("local", "processes"):
        return
    for made in (environments.train, environments.eval):
        for label, (env, _) in made.items():
            if plays_elsewhere(config.orchestrator, env):
                refuse_unpicklable(label, env.id or str(env.import_path), env.args)


def _check_devices(config: RunConfig) -> None:
    """Refuse devices that this machine does not have."""
    teacher, cluster = config.orchestrator.teacher, config.cluster
    places = [("trainer.device", config.trainer.device)] if cluster is None or not cluster.places("trainer") else []
    if teacher is not None and teacher.base_url is None:
        places.append(("orchestrator.teacher.device", teacher.device))
    for where, device in places:
        if device in ("auto", "cpu"):
            continue  # the CPU is always available, and torch takes seconds to import
        from verbatim.models.loading import resolve_device

        try:
            resolve_device(device)
        except UsageError as error:
            raise UsageError(f"{where}: {error}") from error


def _check_teacher(teacher: TeacherConfig) -> None:
    """Refuse a teacher without weights, or with an invalid URL or key."""
    if teacher.base_url is None:
        from verbatim.models.loading import check_weights

        check_weights(teacher.model)
        return
    try:  # fails on an invalid URL, or on an environment variable without a key
        OpenAI(model=teacher.model, base_url=teacher.base_url, api_key_env=teacher.api_key_env)
        named_key(teacher.base_url, teacher.api_key_env)
    except UsageError as error:
        raise UsageError(f"orchestrator.teacher.{error}") from error
    refuse_without("aiohttp", extra="api", what="a teacher behind orchestrator.teacher.base_url")


def _check_frozen(model: str, name: str, config: RunConfig) -> None:
    """Refuse a reference model that cannot score the policy's tokens."""
    from verbatim.models.loading import check_model_config, check_weights

    try:
        check_weights(model)
        check_model_config(model, context_length=config.orchestrator.seq_len)
    except ModelError as error:
        raise ModelError(f"trainer.{name}.model: {error}") from error
    if config.model.name is None:
        return  # the model is built with its own tokenizer, so only the trainer can compare the two models
    from verbatim.models.sizes import vocab_size_of

    own, found = (vocab_size_of(find_source(source)) for source in (config.model.name, model))
    if own != found:
        raise ModelError(
            f"trainer.{name}.model: {model!r} has {found} tokens, and model.name = {config.model.name!r} has {own}: it "
            "cannot score the tokens that the policy samples; name a model with the same tokenizer, or leave the key "
            "out to use the model that the run starts from"
        )


def _check_trainer(config: RunConfig) -> None:
    """Refuse trainer settings that this model does not support."""
    lora, coefficient = config.trainer.lora, config.trainer.router_aux_loss_coef
    if lora is not None:
        model_config = _model_config(config)
        from verbatim.trainer.lora import check_adapters

        check_adapters(model_config, lora)
    if coefficient:
        model_config = _model_config(config)
        from verbatim.trainer.router_loss import check_router_loss

        check_router_loss(model_config)
    find_routing(config)


def find_routing(config: RunConfig) -> Routing | None:
    """The expert routing that recorded experts must match, or None if routed experts are not recorded.

    Raises:
        ModelError: the model has no experts whose routing can be recorded and replayed.
    """
    if not config.inference.return_routed_experts:
        return None
    model_config = _model_config(config)
    from verbatim.models.experts import check_replay

    return check_replay(model_config)


def _model_config(config: RunConfig) -> Any:
    """The model's `transformers` configuration."""
    if config.model.name is not None:
        find_source(config.model.name)  # refuse a missing folder or id before torch is imported
    from transformers import AutoConfig, Qwen3Config

    from verbatim.models.refusal import refusing

    if config.model.name is None:
        assert config.model.build is not None
        # `[model.build]` makes a Qwen3 model. The checks need its class and layers, not its widths.
        return Qwen3Config(num_hidden_layers=config.model.build.num_layers)
    with refusing(f"the config.json of model {config.model.name!r} cannot be read"):
        return AutoConfig.from_pretrained(find_source(config.model.name))


def renderer_of(config: RunConfig, environments: Environments) -> Renderer:
    """The renderer of the run's model. If the run builds its model, the renderer has the tokenizer that the model will
    get.

    Raises:
        ModelError: the model does not exist, or cannot be trained with this configuration.
        ComponentError: there are no demonstrations to train a tokenizer on.
    """
    if config.model.name is not None:
        find_source(config.model.name)  # refuse a missing folder or id before torch is imported
        from verbatim.models.loading import check_model_config, check_weights, load_tokenizer

        check_weights(config.model.name)
        check_model_config(config.model.name, context_length=config.orchestrator.seq_len)
        tokenizer = load_tokenizer(config.model.name)
    else:
        from verbatim.models.trained_tokenizer import build_tokenizer  # does not import torch

        assert config.model.build is not None
        texts = corpus(demonstrations(environments, CORPUS, config.seed))
        tokenizer = build_tokenizer(
            texts, vocab_size=config.model.build.vocab_size, context_length=config.model.build.context_length
        )
    return make_renderer(config.orchestrator.renderer, tokenizer)
