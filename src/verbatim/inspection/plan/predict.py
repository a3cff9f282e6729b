"""Makes a plan: memory, transfer sizes, durations, and whether the run fits into memory."""

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
"""Share of a device's memory that is assumed to be available to tensors. The rest is for the driver, libraries and the
allocator's cache."""
UTILISATION = 0.3
"""Share of a device's peak compute rate that is assumed to be reached."""
BANDWIDTH_UTILISATION = 0.6
"""Share of a device's memory bandwidth that is assumed to be reached."""
_MASTER = 4
"""Bytes per published parameter (float32)."""


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """Values that a plan assumes, and that the command line can change."""

    memory_share: float = MEMORY_SHARE
    """Share of a device's memory that is available to tensors."""
    utilisation: float = UTILISATION
    """Share of the peak compute rate that is reached."""
    bandwidth_utilisation: float = BANDWIDTH_UTILISATION
    """Share of the memory bandwidth that is reached."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """The input of a plan."""

    config: RunConfig
    """The run's configuration."""
    source: str
    """A folder or hub id from which the model's configuration can be read."""
    batch: PlannedBatch
    """The batch that is sampled and trained in a step."""
    device: Device
    """The device of each process."""
    placement: Placement
    """The devices of trainer and sampler."""
    assumed: Assumptions = Assumptions()
    """The shares of memory and speed to assume."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """The predicted memory and durations of a run."""

    case: Case
    """The input of the plan."""
    memory: StepMemory
    """Memory of the trainer process that needs the most memory."""
    trainer: TrainerSpeed
    """Durations of the trainer's part of a step."""
    sampler: SamplerSpeed
    """Durations of the sampler's part of a step."""
    update_bytes: int
    """Size in bytes of the weights that each step publishes."""
    kept_set_bytes: int
    """Size in bytes of the kept sets in each step's records and batch; 0 if sampling keeps all ids."""
    needed: int
    """Memory in bytes that is needed on the device of one trainer process. On a CPU, the memory that trainer and
    sampler together need on the machine."""
    usable: int
    """Memory in bytes that is available to tensors on that device, or on that machine."""

    @property
    def fits(self) -> bool:
        """True if trainer and sampler have enough memory."""
        return self.needed <= self.usable and self.sampler_fits

    @property
    def sampler_fits(self) -> bool:
        """True if each device of the sampler has enough memory for weights and cache. Always True for a sampler that
        has no separate devices."""
        if self.case.placement.where in ("beside the trainer", "elsewhere"):
            return True
        room = self.case.device.memory * self.case.placement.replicas.memory_share
        return self.sampler.memory <= room

    @property
    def tokens_that_fit(self) -> int:
        """The approximate number of tokens in a micro-batch that just fits into memory.

        The memory of activations, logits and the batch is assumed to be proportional to the number of tokens.
        """
        growing = sum(self.memory.parts[kind] for kind in (ACTIVATIONS, LOGITS, BATCH))
        room = self.usable - (self.needed - growing)
        return max(0, int(room / growing * self.memory.most_tokens))

    @property
    def holds_longest(self) -> bool:
        """True if a micro-batch with the longest trajectory fits into memory."""
        return self.case.batch.longest <= self.tokens_that_fit

    @property
    def seconds(self) -> dict[str, float]:
        """The duration of a step in seconds, and the seconds that trainer and sampler wait in a step."""
        turns = self.case.placement.where == "in turns with the trainer"
        level = 0 if turns else self.case.config.orchestrator.max_async_level
        return dict(step_seconds(self.trainer.seconds, self.sampler.seconds, level=level))


def predict(case: Case) -> Plan:
    """Measure the trainer's step on fake tensors and compute the rest of the plan.

    Raises:
        UsageError: the trainer would reject the model, or the number of processes for it.
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
    """Make the description of the step whose memory is measured."""
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
    """Yield a folder or hub id from which the configuration of the run's model can be read. It is valid while the block
    runs.

    Raises:
        ModelError: there is no model with that name or in that folder.
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
