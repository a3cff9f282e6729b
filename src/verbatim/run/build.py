"""Builds the parts that turn episodes into training: dispatcher, group rules, loss, schedule, monitors."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verbatim.algorithms.curriculum import ExampleSchedule, PoolRules
from verbatim.algorithms.losses import Loss
from verbatim.config import resolve
from verbatim.config.schema import ComponentConfig, RunConfig, TeacherConfig
from verbatim.config.sections import table_of
from verbatim.core.errors import ComponentError
from verbatim.core.records.failed import MAX_FAILED
from verbatim.core.records.fields import REFERENCE, TEACHER
from verbatim.core.texts import numbered
from verbatim.core.trajectories import Ledger
from verbatim.environments.resolve import examples_of
from verbatim.logs.monitors.monitor import METHODS, OpenMonitor, fault_of
from verbatim.models.catalog import folder_of
from verbatim.rollouts import RolloutSetup, derive_seed
from verbatim.run.environments import Environments
from verbatim.run.orchestrator.assemble import GroupRules
from verbatim.run.orchestrator.dispatcher import Dispatcher
from verbatim.run.orchestrator.staleness import capped_settings
from verbatim.run.rollouts import inference_settings
from verbatim.run.tables import component_tables

if TYPE_CHECKING:
    from verbatim.inference.teacher import Teacher
    from verbatim.run.orchestrator.eval_progress import EvalProgress
    from verbatim.run.orchestrator.schedule import RunSchedule

logger = logging.getLogger(__name__)


def make_monitors(config: RunConfig) -> dict[str, OpenMonitor]:
    """The monitors of [monitor], by the name of their table. They are not started yet.

    Raises:
        UsageError: a required package is missing, a monitor rejects its parameters, or its class has a method whose
            name resembles a monitor method but is not one.
    """
    table = component_tables().monitors
    made: dict[str, OpenMonitor] = {}
    for key, component in config.monitor.components.items():
        made[key] = resolve(component, table, what="monitor", where=f"monitor.{key}")
        kind = getattr(made[key], "func", None)  # a monitor class comes wrapped in a functools.partial
        if isinstance(kind, type) and any(hasattr(kind, name) for name in METHODS) and (fault := fault_of(kind)):
            raise ComponentError(f"[monitor.{key}]: {kind.__qualname__} {fault}")
    return made


def make_rules(config: RunConfig, environments: Environments) -> dict[str, GroupRules]:
    """For each environment, the rules by which its groups become training samples."""
    tables, orchestrator = component_tables(), config.orchestrator
    # Filters are skipped if they read a value that has no meaning in this training mode.
    unknown = {"advantages"} if follows_a_teacher(config) else set()
    if orchestrator.training_mode == "sft":  # a teacher's responses have no sampling logprobs
        unknown.add("logprobs")
    filters: dict[str, Any] = {}
    for i, component in enumerate(orchestrator.filters):
        own = component.custom_path
        name = numbered(component.type if own is None else table_of(own), filters)
        rule = resolve(component, tables.filters, what="filter", where=f"orchestrator.filters.{i}")
        if getattr(rule, "reads", None) in unknown:
            continue
        if getattr(rule, "action", None) not in ("drop", "monitor"):
            raise ComponentError(
                f'orchestrator.filters.{i}: {name} has no action "drop" or "monitor"; expected a frozen dataclass with '
                "an `action` field and `__call__(trajectory) -> bool`"
            )
        filters[name] = rule
    rules = {}
    for label, (env, _) in environments.train.items():
        component = env.advantage or orchestrator.advantage
        sampling = env.sampling or orchestrator.sampling
        advantage = resolve(component, tables.advantages, what="advantage", where="orchestrator.advantage")
        rules[label] = GroupRules(
            advantage=advantage,
            length_penalty=env.length_penalty or orchestrator.length_penalty,
            filters=filters,
            strategy=env.trajectory_strategy or orchestrator.trajectory_strategy,
            on_break=env.on_break or orchestrator.on_break,
            max_length=orchestrator.seq_len,
            max_off_policy_steps=orchestrator.max_off_policy_steps,
            needs_logprobs=orchestrator.training_mode != "sft",
            needs_rewards=needs_rewards(config),
            reads_turn_rewards=(
                orchestrator.training_mode != "rl"  # rewards are optional in the other modes
                or not getattr(advantage, "compares_rewards", False)
            ),
            truncated_sampling=(
                orchestrator.training_mode != "sft"
                and sampling.accept_truncation_mismatch
                and sampling.params.truncates
            ),
        )
    return rules


def make_dispatcher(
    config: RunConfig, environments: Environments, setups: Mapping[str, RolloutSetup], ledger: Ledger
) -> Dispatcher:
    """The dispatcher, which keeps the configured number of rollouts in flight."""
    orchestrator = config.orchestrator
    for sentence in capped_settings(orchestrator):
        logger.warning("%s", sentence)
    schedule = ExampleSchedule(
        {label: examples_of(environment, label, "train") for label, environment in environments.by_label.items()},
        {label: env.ratio for label, (env, _) in environments.train.items()},
        seed=derive_seed(config.seed, "schedule"),
        pool_rules=PoolRules(**orchestrator.buffer.model_dump(exclude={"online_difficulty_filtering"})),
    )
    return Dispatcher(
        schedule=schedule,
        setups=setups,
        ledger=ledger,
        group_size=orchestrator.group_size,
        groups_per_batch=orchestrator.batch_size // orchestrator.group_size,
        max_async_level=orchestrator.max_async_level,
        max_off_policy_steps=orchestrator.max_off_policy_steps,
        oversampling_factor=orchestrator.oversampling_factor,
        run_seed=config.seed,
        max_steps=config.max_steps,
        online_difficulty_filtering=(
            orchestrator.buffer.online_difficulty_filtering and orchestrator.training_mode == "rl"
        ),
        needs_rewards=needs_rewards(config),
    )


def warn_of_useful_flat_groups(config: RunConfig) -> None:
    """Warn where online difficulty filtering drops groups that would have a gradient.

    Groups of equal rewards lack a gradient only if the advantage compares rewards within the group. They do have a
    gradient if the advantage has no baseline, if there is a teacher, or if there is a KL term to a reference.
    """
    orchestrator = config.orchestrator
    if not orchestrator.buffer.online_difficulty_filtering or orchestrator.training_mode != "rl":
        return
    if follows_a_teacher(config):
        logger.warning(
            "online difficulty filtering drops groups whose rewards are all equal, but trainer.loss.teacher_tau learns "
            "from these groups too; set orchestrator.buffer.online_difficulty_filtering = false"
        )
    if make_loss(config).reads_a_reference:
        logger.warning(
            "online difficulty filtering drops groups whose rewards are all equal, so the term of "
            "trainer.loss.kl_ref_tau holds the policy near the reference only in the remaining groups. To apply the "
            "term to all groups, set "
            "orchestrator.buffer.online_difficulty_filtering = false, and use a list of filters without zero_advantage"
        )
    for env in orchestrator.train.env:
        advantage = env.advantage or orchestrator.advantage
        if advantage.type == "chunk_returns" and advantage.parameters.get("baseline", "none") == "none":
            logger.warning(
                "environment %r: online difficulty filtering drops groups whose rewards are all equal, but the "
                'advantage "chunk_returns" without a baseline learns from them; set baseline = "group", or '
                "online_difficulty_filtering = false",
                env.label,
            )


def make_schedule(config: RunConfig, eval_setups: Mapping[str, RolloutSetup]) -> RunSchedule:
    """The number of steps, and the intervals of evaluations and checkpoints."""
    from verbatim.run.orchestrator.schedule import RunSchedule
    from verbatim.trainer.transport.canary import tolerance_of

    evaluation = config.orchestrator.eval
    return RunSchedule(
        max_steps=config.max_steps,
        eval_setups=list(eval_setups.values()),
        eval_interval=evaluation.interval if evaluation else config.max_steps,
        eval_episodes=evaluation.episodes if evaluation else 0,
        eval_examples=evaluation.examples if evaluation else None,
        eval_seed=evaluation.seed if evaluation else 0,
        checkpoint_interval=config.checkpoint.interval,
        keeps_best=config.checkpoint.keep_best is not None,
        learns_from_advantages=not follows_a_teacher(config) and config.trainer.loss.custom_path is None,
        canary_tolerance=(
            config.inference.canary_tolerance
            or tolerance_of(config.trainer.dtype, inference_settings(config).precision)
        ),
        checks_kept_sets=config.needs_kept_sets,
        shares_device=inference_settings(config).shares_device,
    )


def make_progress(config: RunConfig) -> EvalProgress:
    """The state that evaluations update: the best checkpoint, and early stopping."""
    from verbatim.run.orchestrator.eval_progress import BestEvaluation, EarlyStopping, EvalProgress

    keep, evaluation = config.checkpoint.keep_best, config.orchestrator.eval
    stop = evaluation.early_stopping if evaluation is not None else None

    return EvalProgress(
        best=BestEvaluation(criterion=keep) if keep is not None else None,
        early_stopping=EarlyStopping(rule=stop) if stop is not None else None,
        played=_played(config),
        max_failed=max_failed(config),
    )


def max_failed(config: RunConfig) -> float:
    """The largest share of failed episodes that an evaluation may have and still be used in comparisons."""
    return config.orchestrator.eval.max_failed if config.orchestrator.eval is not None else MAX_FAILED


def _played(config: RunConfig) -> dict[str, Any]:
    """The settings that determine which episodes an evaluation plays.

    Evaluations are comparable only if these settings are equal. The environments are stored as a digest because their
    arguments may contain an API key.
    """
    evaluation = config.orchestrator.eval
    if evaluation is None:
        return {}
    envs = [
        (env.label, env.id, env.import_path, env.args, env.max_turns, str(env.sampling or config.orchestrator.sampling))
        for env in evaluation.env or config.orchestrator.train.env
    ]
    digest = hashlib.sha256(json.dumps(envs, sort_keys=True, default=str).encode()).hexdigest()
    return {
        "orchestrator.eval.seed": evaluation.seed,
        "orchestrator.eval.episodes": evaluation.episodes,
        "orchestrator.eval.examples": evaluation.examples,
        "the evaluated environments": digest,
    }


def logprob_models(config: RunConfig) -> dict[str, TeacherConfig]:
    """The models that score the sampled tokens, by the name of the logprob stream that the loss reads."""
    orchestrator = config.orchestrator
    if orchestrator.teacher is None or orchestrator.training_mode == "sft":
        return {}
    return {TEACHER: orchestrator.teacher}


def make_logprob_models(config: RunConfig) -> dict[str, Teacher]:
    """Load the models of `logprob_models`, or connect to their servers."""
    from verbatim.inference.teacher import make_teacher

    return {name: make_teacher(model) for name, model in logprob_models(config).items()}


def frozen_models(config: RunConfig) -> dict[str, str | None]:
    """The frozen models that the trainer holds in addition to the policy, by the name of the logprob stream that the
    loss reads. The value is a folder or hub id, or None for the model that the run starts from."""
    reference = config.trainer.reference
    if reference is None and not make_loss(config).reads_a_reference:
        return {}
    return {REFERENCE: reference.model if reference is not None else None}


def needs_first_model(config: RunConfig) -> bool:
    """True if a trainer that resumes from a checkpoint also needs the model that the run started from: an adapter
    checkpoint does not contain its base model, and a reference model is never updated."""
    return config.trainer.lora is not None or None in frozen_models(config).values()


def named_weights(config: RunConfig) -> str | None:
    """The name under which the trainer records the initial weights: their path or hub id; None if these weights do not
    exist before the run is prepared, because the model is built or warm-started."""
    if config.model.name is None or config.warm_start is not None:
        return None
    path = Path(folder_of(config.model.name))
    return str(path.resolve() if path.exists() else path)


def needs_rewards(config: RunConfig) -> bool:
    """True if a rollout without a reward cannot be trained on."""
    return config.orchestrator.training_mode == "rl" and bool(make_loss(config).reads_rewards)


def follows_a_teacher(config: RunConfig) -> bool:
    """True if the loss reads a teacher's logprobs; tokens then have a gradient even if their advantage is 0."""
    return config.orchestrator.training_mode != "rl" or bool(make_loss(config).reads_a_teacher)


def make_loss(config: RunConfig) -> Loss:
    """The loss of the training mode with its parameters, or the custom loss that replaces it.

    A custom function receives each trajectory as a whole, and its sum is divided by the number of trained tokens.
    """
    losses, component, mode = component_tables().losses, config.trainer.loss, config.orchestrator.training_mode
    # The losses of the other modes are fixed: only those parameters of [trainer.loss] that the loss accepts are passed
    # on.
    if mode != "rl" and component.custom_path is None:
        name, of_mode = next((name, loss) for name, loss in losses.items() if loss.training_mode == mode)
        read = signature(of_mode.function).parameters
        shared = {parameter: value for parameter, value in component.parameters.items() if parameter in read}
        if ignored := sorted(component.parameters.keys() - shared):
            logger.warning('training_mode = "%s" does not read trainer.loss.{%s}', mode, ", ".join(ignored))
        component = ComponentConfig(type=name, **shared)
    loss = resolve(component, losses, what="loss", where="trainer.loss")
    return loss if isinstance(loss, Loss) else Loss(loss, level="sequence")
