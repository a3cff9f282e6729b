"""Tries changes that may make a plan fit into memory, first each change alone and then several together, and reports
the memory that each needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from verbatim.config.schema import LoraConfig
from verbatim.core.errors import UsageError
from verbatim.inspection.plan.batches import assumed_batch
from verbatim.inspection.plan.live_memory import LOGITS
from verbatim.inspection.plan.placement import may_be_several
from verbatim.inspection.plan.predict import Case, Plan, predict

_SMALL_CHUNK = 256
_LARGE_SHARE = 0.05
"""If the logits take less than this share of the peak memory, a smaller chunk of logits is not suggested."""


@dataclass(frozen=True, kw_only=True)
class Suggestion:
    """A change to the command line, and its effect on the plan."""

    typed: str
    """The change as command-line options."""
    needed: int | None
    """Predicted memory needed on the trainer's device in bytes; None if the trainer rejects the change."""
    fits: bool
    """True if the run fits into memory with the change."""
    refused: str = ""
    """The reason why the trainer rejects the change; empty if the trainer accepts it."""


def tried_changes(plan: Plan) -> list[Suggestion]:
    """Measure the changes that apply to a plan, in the same way as the plan itself.

    The last suggestion combines the changes that do not affect what is trained, that is, all except adapters and
    shorter sequences.
    """
    found: list[Suggestion] = []
    together, typed = plan.case, []
    for change in _possible(plan):
        found.append(_tried(change.typed, change.to(plan.case)))
        if change.keeps_what_is_trained and not found[-1].refused:
            together = change.to(together)
            typed.append(change.typed)
    if len(typed) > 1:
        found.append(_tried(" ".join(typed), together))
    return found


@dataclass(frozen=True)
class _Possible:
    typed: str
    to: Callable[[Case], Case]
    keeps_what_is_trained: bool = True


def _possible(plan: Plan) -> Iterator[_Possible]:
    case = plan.case
    trainer = case.config.trainer
    if not trainer.gradient_checkpointing:
        yield _Possible("--trainer.gradient-checkpointing true", _set(gradient_checkpointing=True))
    if not trainer.activation_offload and case.device.is_cuda:
        yield _Possible(
            "--trainer.gradient-checkpointing true --trainer.activation-offload true",
            _set(gradient_checkpointing=True, activation_offload=True),
        )
    if trainer.dtype == "float32" and case.device.is_cuda:
        yield _Possible("--trainer.dtype bfloat16", _set(dtype="bfloat16"))
    fewer = max(case.batch.longest, plan.memory.most_tokens // 2)
    if fewer < plan.memory.most_tokens:
        yield _Possible(f"--trainer.micro-batch-tokens {fewer}", _set(micro_batch_tokens=fewer))
    if trainer.logprob_chunk > _SMALL_CHUNK and plan.memory.parts[LOGITS] > _LARGE_SHARE * plan.memory.peak:
        yield _Possible(f"--trainer.logprob-chunk {_SMALL_CHUNK}", _set(logprob_chunk=_SMALL_CHUNK))
    if case.device.is_cuda and may_be_several(case.config, case.placement):
        more = 2 * case.placement.processes
        yield _Possible(
            f"--trainer.parallel.processes {more}", lambda c: replace(c, placement=replace(c.placement, processes=more))
        )
    if case.device.is_cuda and case.placement.processes > trainer.parallel.sequence == 1 and not plan.holds_longest:
        share = case.placement.processes
        yield _Possible(
            f"--trainer.parallel.sequence {share}",
            _set(parallel=trainer.parallel.model_copy(update={"sequence": share})),
        )
    if trainer.lora is None:
        yield _Possible("--trainer.lora.r 32", _set(lora=LoraConfig()), keeps_what_is_trained=False)
    if case.batch.is_assumed:
        yield _Possible(
            f"--orchestrator.seq-len {case.config.orchestrator.seq_len // 2}", _shorter, keeps_what_is_trained=False
        )


def _tried(typed: str, case: Case) -> Suggestion:
    try:
        plan = predict(case)
    except UsageError as error:
        return Suggestion(typed=typed, needed=None, fits=False, refused=str(error))
    return Suggestion(typed=typed, needed=plan.needed, fits=plan.fits)


def _set(**keys: Any) -> Callable[[Case], Case]:
    """Make a change that sets keys of the `[trainer]` table."""

    def to(case: Case) -> Case:
        trainer = case.config.trainer.model_copy(update=keys)
        return replace(case, config=case.config.model_copy(update={"trainer": trainer}))

    return to


def _shorter(case: Case) -> Case:
    orchestrator = case.config.orchestrator
    half = orchestrator.model_copy(update={"seq_len": orchestrator.seq_len // 2})
    config = case.config.model_copy(update={"orchestrator": half})
    return replace(case, config=config, batch=assumed_batch(config))
