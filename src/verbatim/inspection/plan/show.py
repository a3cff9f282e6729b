"""Prints a plan for people: its assumptions, memory, durations, and what to change if the run does not fit into
memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from verbatim.core.texts import counted
from verbatim.inspection.plan.changes import Suggestion
from verbatim.inspection.plan.devices import GIB
from verbatim.inspection.plan.live_memory import (
    ACTIVATIONS,
    BATCH,
    GATHERED,
    GRADIENTS,
    LOGITS,
    OPTIMIZER,
    REFERENCE,
    WEIGHTS,
)
from verbatim.inspection.plan.predict import Plan

_KINDS: Mapping[str, str] = {
    WEIGHTS: "weights",
    OPTIMIZER: "optimizer state",
    GRADIENTS: "gradients",
    REFERENCE: "reference model",
    GATHERED: "gathered from other processes",
    ACTIVATIONS: "activations",
    LOGITS: "logits of a chunk of targets",
    BATCH: "ids and positions of micro-batches",
}


def show_plan(plan: Plan, console: Console) -> None:
    """Print a plan."""
    for part in (_head(plan), _memory(plan), _speed(plan), _waiting(plan)):
        console.print(part, soft_wrap=isinstance(part, str))
    if plan.fits:
        console.print(Text.assemble(("it fits", "bold green"), f": {_gib(plan.needed)} of {_gib(plan.usable)}"))
        return
    console.print(Text.assemble(("it does not fit", "bold red"), f": {problem(plan)}"))
    console.print("\nNow measuring possible changes, one at a time.", style="dim")


def problem(plan: Plan) -> str:
    """One sentence that says why the run of a plan does not fit into memory."""
    case, device = plan.case, plan.case.device.name
    if plan.needed > plan.usable:
        most = plan.tokens_that_fit
        longest = case.batch.longest
        said = f"{_gib(plan.needed)} are needed and {_gib(plan.usable)} can be used on {device}"
        if not most:
            return f"{said}; the memory held between steps is already too much"
        said += f"; micro-batches of about {most:,} tokens would fit"
        if longest > most:
            said += (
                f", and the longest trajectory has {longest:,}: lower orchestrator.seq_len, or let several "
                "processes share it (trainer.parallel.sequence)"
            )
        return said
    return (
        f"the sampler needs {_gib(plan.sampler.weights)} for weights on each of its devices, which leaves no room "
        "for keys and values: raise inference.vllm.tensor_parallel_size, or set inference.vllm.dtype = "
        '"bfloat16"'
    )


def _head(plan: Plan) -> RenderableType:
    case, memory = plan.case, plan.memory
    config = case.config
    trained = "all trained" if memory.num_trained == memory.num_parameters else f"{memory.num_trained:,} trained"
    table = _grid()
    name = config.model.name or "[model.build]"
    table.add_row("model", f"{name}: {memory.num_parameters:,} parameters, {trained}")
    processes, inside = case.placement.processes, config.trainer.parallel.processes
    on = f"{processes} processes, each on one" if processes > 1 else "1 process on"
    to_set = "" if processes == inside else f" (--trainer.parallel.processes {processes}; the file has {inside})"
    table.add_row("trainer", f"{on} {case.device.name}{to_set}, {_how(plan)}")
    table.add_row("sampler", f"{_sampler(plan)}")
    table.add_row("lengths", case.batch.said)
    assumed = case.assumed
    table.add_row(
        "assumed",
        f"{assumed.utilisation:.0%} of the peak compute rate, "
        f"{assumed.bandwidth_utilisation:.0%} of the memory bandwidth, "
        f"{assumed.memory_share:.0%} of the memory for tensors",
    )
    return table


def _how(plan: Plan) -> str:
    trainer, memory = plan.case.config.trainer, plan.memory
    parts = [trainer.dtype, memory.packing]
    if trainer.gradient_checkpointing:
        parts.append("gradient checkpointing")
    if trainer.lora is not None:
        parts.append(f"adapters of rank {trainer.lora.r}")
    if trainer.router_aux_loss_coef:
        parts.append("the load-balancing loss")
    if trainer.compile:
        parts.append("measured as if its layers were not compiled")
    passes = max(map(len, memory.dealt))
    parts.append(f"{counted(passes, 'micro-batch', 'micro-batches')} of up to {memory.most_tokens:,} tokens")
    return ", ".join(parts)


def _sampler(plan: Plan) -> str:
    placement = plan.case.placement
    replicas = placement.replicas
    each = f" of {replicas.devices_each} devices each" if replicas.devices_each > 1 else ""
    return (
        f"{counted(replicas.count, 'replica', 'replicas')}{each}, {replicas.dtype}, {placement.where}; up to "
        f"{counted(plan.sampler.in_flight, 'sequence', 'sequences')} in each"
    )


def _memory(plan: Plan) -> RenderableType:
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1))
    table.add_column(
        "memory of the trainer's largest process" if plan.case.placement.processes > 1 else "memory of the trainer"
    )
    table.add_column("GiB", justify="right")
    for kind, said in _KINDS.items():
        if plan.memory.parts.get(kind):
            table.add_row(said, _in_gib(plan.memory.parts[kind]))
    table.add_row("at the peak of a step", _in_gib(plan.memory.peak), style="bold")
    table.add_row("between steps", _in_gib(plan.memory.between_steps), style="dim")
    # On a CPU, trainer and sampler share one memory.
    if not plan.case.device.is_cuda and plan.case.placement.processes > 1:
        table.add_row(
            f"all {plan.case.placement.processes} processes on this machine",
            _in_gib(plan.memory.peak * plan.case.placement.processes),
        )
    if plan.case.placement.where == "beside the trainer":
        copies = ", their packed copy" if plan.sampler.packed else ""
        table.add_row(f"the sampler on the same device: weights{copies}, keys and values", _in_gib(plan.sampler.memory))
    return table


def _speed(plan: Plan) -> RenderableType:
    trainer, sampler = plan.trainer, plan.sampler
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1))
    table.add_column("a step")
    table.add_column("seconds", justify="right")
    table.add_column("")
    exchange = ""
    if trainer.exchange_seconds:
        longer = "longer than" if trainer.exchange_seconds > trainer.compute_seconds else "overlapped with"
        exchange = f"; {_seconds(trainer.exchange_seconds)} s of exchange, {longer} the computation"
    table.add_row(
        "sampler",
        _seconds(sampler.seconds),
        f"{plan.case.batch.sampled_tokens:,} tokens, {sampler.tokens_per_second:,.0f} per second, bound by "
        f"{sampler.bound_by}",
    )
    table.add_row(
        "trainer",
        _seconds(trainer.seconds),
        f"{trainer.tokens:,} tokens, {trainer.tokens_per_second:,.0f} per second{exchange}",
    )
    table.add_row("weights published", "", f"{_gib(plan.update_bytes)} in each step")
    if plan.kept_set_bytes:
        each = plan.kept_set_bytes / plan.case.batch.sampled_tokens
        table.add_row("kept sets", "", f"{_gib(plan.kept_set_bytes)} in each step, {each:,.0f} bytes for each token")
    return table


def _waiting(plan: Plan) -> str:
    orchestrator, seconds = plan.case.config.orchestrator, plan.seconds
    if plan.case.placement.where == "in turns with the trainer" or orchestrator.max_async_level == 0:
        return f"Trainer and sampler take turns: a step takes {_seconds(seconds['step'])} s.\n"
    side = "trainer" if seconds["trainer_waits"] > 0 else "sampler"
    ahead = counted(orchestrator.max_async_level, "batch", "batches")
    return (
        f"Trainer and sampler work at the same time: a step takes {_seconds(seconds['step'])} s, of which the {side} "
        f"waits {_seconds(seconds[f'{side}_waits'])} s. Rollouts start with weights at most {ahead} old.\n"
    )


def show_changes(changes: Sequence[Suggestion], console: Console) -> None:
    """Print the changes that were tried, with the memory that each needs."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1))
    table.add_column("with", overflow="fold")
    table.add_column("GiB", justify="right")
    table.add_column("")
    for change in changes:
        if change.needed is None:
            table.add_row(change.typed, "", Text(f"refused: {change.refused}", style="dim"))
        else:
            said = Text("fits", style="bold green") if change.fits else Text("")
            table.add_row(change.typed, _in_gib(change.needed), said)
    console.print(table)


def _grid() -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()
    return table


def _in_gib(num_bytes: float) -> str:
    """Format a size in GiB, with two significant digits if the size is small.

    >>> _in_gib(3 * GIB), _in_gib(GIB / 320)
    ('3.00', '0.0031')
    """
    gib = num_bytes / GIB
    return f"{gib:,.2f}" if gib >= 0.1 or not gib else f"{gib:.2g}"


def _gib(num_bytes: float) -> str:
    return f"{_in_gib(num_bytes)} GiB"


def _seconds(seconds: float) -> str:
    return f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:.3g}"
