"""Puts a plan together: memory, bytes, seconds, and whether all of it fits."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from verbatim.config.schema import RunConfig, TrainerConfig
from verbatim.inspection.plan.batches import PlannedBatch, kept_set_bytes
from verbatim.inspection.plan.devices import Device
from verbatim.inspection.plan.fake_step import StepCase, StepMemory, measure
from verbatim.inspection.plan.live_memory import ACTIVATIONS, BATCH, LOGITS
from verbatim.inspection.plan.placement import Placement
from verbatim.inspection.plan.speed import SamplerSpeed, TrainerSpeed, sampler_speed, step_seconds, trainer_speed
from verbatim.models.source import find_source
from verbatim.run.build import frozen_models, make_loss
from verbatim.trainer.packing.cost import model_cost

MEMORY_SHARE = 0.9
"""Share of a device's memory that tensors may take; the rest is for driver, libraries and what the allocator keeps."""
UTILISATION = 0.3
"""Share of a device's peak rate of computing that is reached."""
BANDWIDTH_UTILISATION = 0.6
"""Share of its memory's bandwidth that is reached."""
_MASTER = 4
"""Bytes of a published number: float32."""


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """What is not computed, and may be said on the command line."""

    memory_share: float = MEMORY_SHARE
    """Share of a device's memory that tensors may take."""
    utilisation: float = UTILISATION
    """Share of the peak rate of computing that is reached."""
    bandwidth_utilisation: float = BANDWIDTH_UTILISATION
    """Share of the memory's bandwidth that is reached."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """What a plan is made for."""

    config: RunConfig
    """The run's configuration."""
    source: str
    """A folder or hub id with the model's configuration."""
    batch: PlannedBatch
    """What is sampled and trained in a step."""
    device: Device
    """The device of each process."""
    placement: Placement
    """Which side computes where."""
    assumed: Assumptions = Assumptions()
    """Shares of what the device has."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """What a run needs."""

    case: Case
    """What it was made for."""
    memory: StepMemory
    """Memory of the trainer's process that needs most."""
    trainer: TrainerSpeed
    """The trainer's part of a step."""
    sampler: SamplerSpeed
    """The sampler's part of a step."""
    update_bytes: int
    """Published with each step."""
    kept_set_bytes: int
    """Of the ids among which tokens are drawn, in each step's records and batch; 0 where nothing is cut."""
    needed: int
    """Bytes on the device that holds the trainer's process; on a CPU of all that computes there."""
    usable: int
    """Bytes that tensors may take there."""

    @property
    def fits(self) -> bool:
        """Whether trainer and sampler have enough memory."""
        return self.needed <= self.usable and self.sampler_fits

    @property
    def sampler_fits(self) -> bool:
        """Whether a device of the sampler's own holds its weights, and the cache of the longest trajectory."""
        if self.case.placement.where in ("beside the trainer", "elsewhere"):
            return True
        room = self.case.device.memory * self.case.placement.replicas.memory_share
        return self.sampler.memory <= room

    @property
    def tokens_that_fit(self) -> int:
        """About so many tokens of a micro-batch would fill the memory: what grows with them is taken as a straight
        line."""
        growing = sum(self.memory.parts[kind] for kind in (ACTIVATIONS, LOGITS, BATCH))
        room = self.usable - (self.needed - growing)
        return max(0, int(room / growing * self.memory.most_tokens))

    @property
    def holds_longest(self) -> bool:
        """Whether the longest trajectory fits."""
        return self.case.batch.longest <= self.tokens_that_fit

    @property
    def seconds(self) -> dict[str, float]:
        """A step, and how long each side waits in it."""
        turns = self.case.placement.where == "in turns with the trainer"
        level = 0 if turns else self.case.config.orchestrator.max_async_level
        return dict(step_seconds(self.trainer.seconds, self.sampler.seconds, level=level))


def predict(case: Case) -> Plan:
    """Measure the trainer's step on fake tensors, and compute the rest.

    Raises:
        UsageError: what the trainer would refuse: the model, or so many processes for it.
    """
    memory = measure(step_case(case))
    config, placement, device = case.config, case.placement, case.device
    cost = model_cost(memory.config)
    sampler = sampler_speed(
        case.batch,
        placement.replicas,
        cost,
        memory.config,
        device,
        num_parameters=memory.num_parameters,
        in_flight=min(
            config.orchestrator.max_concurrent,
            round(config.orchestrator.oversampling_factor * config.orchestrator.batch_size),
        ),
        utilisation=case.assumed.utilisation,
        bandwidth_utilisation=case.assumed.bandwidth_utilisation,
    )
    needed = memory.peak
    if not device.is_cuda:
        needed *= placement.processes
    if placement.where == "beside the trainer":
        needed += sampler.memory
    return Plan(
        case=case,
        memory=memory,
        sampler=sampler,
        needed=needed,
        usable=int(device.memory * case.assumed.memory_share),
        update_bytes=_MASTER * memory.num_trained,
        kept_set_bytes=kept_set_bytes(config, case.batch),
        trainer=trainer_speed(
            memory.dealt,
            cost,
            config.trainer,
            device,
            num_parameters=memory.num_parameters,
            num_trained=memory.num_trained,
            utilisation=case.assumed.utilisation,
            num_forward_models=len(frozen_models(config)),
        ),
    )


def step_case(case: Case) -> StepCase:
    """What is measured."""
    config = case.config
    frozen = list(frozen_models(config).values())
    reference = None
    if frozen:
        reference = case.source if frozen[0] is None else find_source(frozen[0])
    trainer: TrainerConfig = config.trainer
    return StepCase(
        source=case.source,
        trainer=trainer,
        loss=make_loss(config),
        samples=case.batch.samples,
        processes=case.placement.processes,
        on_cuda=case.device.is_cuda,
        seq_len=config.orchestrator.seq_len,
        reference=reference,
    )


@contextlib.contextmanager
def model_source(config: RunConfig) -> Iterator[str]:
    """A folder or hub id with the configuration of a run's model, while the block runs.

    Raises:
        ModelError: no model has that name or folder.
    """
    if config.model.name is not None:
        yield find_source(config.model.name)
        return
    from verbatim.models.build import build_config

    assert config.model.build is not None
    with tempfile.TemporaryDirectory(prefix="verbatim-plan-") as name:
        made = build_config(config.model.build, config.model.build.vocab_size)
        made.architectures = ["Qwen3ForCausalLM"]
        made.save_pretrained(Path(name))
        yield name
