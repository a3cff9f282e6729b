"""New weights reach every replica, and the canary looks at each of them, past its prefix cache and over it."""

import dataclasses
import math

import numpy as np
import pytest

from verbatim.core.errors import RunStopped
from verbatim.core.types import KeptSets
from verbatim.inference.sampler import Completion, as_replicated
from verbatim.inference.scripted import ScriptedSampler
from verbatim.run.orchestrator.weight_sync import Canary, WeightSync
from verbatim.trainer.transport import StepReport
from verbatim.trainer.transport.canary import Probes

IDS = (np.array([5, 9, 4], np.int32), np.arange(1, 9, dtype=np.int32))


def logprob(token, version):
    return -1.0 / (1 + token) - 0.01 * version


def probes(version):
    rows = tuple(np.array([logprob(int(i), version) for i in ids[1:]], np.float32) for ids in IDS)
    return Probes(token_ids=IDS, logprobs=rows)


def report(version, tmp_path):
    return StepReport(version=version, weights=tmp_path, num_trained_tokens=0, metrics={}, probes=probes(version))


class Engine(ScriptedSampler):
    """Its logprobs depend on the version; `cached_logprob` keeps for each prefix those of the version that wrote it."""

    def __init__(self, *, resets_cache=True, loads=True):
        super().__init__(script=[], vocab_size=50, context_length=64)
        self.held, self.resets_cache, self.loads, self.cache, self.asked = 0, resets_cache, loads, {}, []
        self.logprob = lambda token: logprob(token, self.held)

    async def update_weights(self, path, version):
        await super().update_weights(path, version)
        self.held = version if self.loads else self.held
        self.cache = {} if self.resets_cache else self.cache

    async def cached_logprob(self, token_ids):
        self.asked.append(("cached", len(token_ids)))
        writer = next((v for prefix, v in self.cache.items() if len(prefix) <= len(token_ids) - 1), self.held)
        self.cache[tuple(token_ids[:4])] = writer
        return logprob(int(token_ids[-1]), writer)

    async def prompt_logprobs(self, token_ids, temperature=1.0):
        self.asked.append(("whole", len(token_ids)))
        return await super().prompt_logprobs(token_ids, temperature)


class Replicas(ScriptedSampler):
    """What a `ReplicatedSampler` is told."""

    def __init__(self, *engines):
        super().__init__(script=[], vocab_size=50, context_length=64)
        self.engines, self.verdicts = engines, []

    async def check_replicas(self, check):
        self.verdicts.append([await check(engine) for engine in self.engines])

    async def update_replicas(self, path, version, check):
        for engine in self.engines:
            await check.prepare(engine)
            await engine.update_weights(path, version)
        self.policy_version = version
        await self.check_replicas(check)


async def test_each_replica_is_checked_at_the_start_and_after_every_update(tmp_path):
    sampler = Replicas(Engine(), Engine())
    sync = WeightSync(sampler, probes(0), 1e-4)
    await sync.check_first()
    for version in (1, 2):
        await sync.load(report(version, tmp_path))
    assert sampler.verdicts == [[None, None]] * 3
    assert sampler.updates == []
    assert [engine.policy_version for engine in sampler.engines] == [2, 2]


async def test_a_replica_that_kept_its_weights_or_its_cache_is_told_from_one_that_did_not(tmp_path):
    sampler = Replicas(Engine(loads=False), Engine(resets_cache=False), Engine())
    sync = WeightSync(sampler, probes(0), 1e-4)
    await sync.check_first()
    await sync.load(report(1, tmp_path))
    stale, cached, good = sampler.verdicts[1]
    assert "its logprobs differ by 0.01 on average" in stale
    assert "a new request through the prefix cache differ by 0.01 on average" in cached
    assert good is None


async def test_the_prefix_cache_is_filled_before_the_update_and_asked_first_after_it(tmp_path):
    engine = Engine()
    await WeightSync(engine, probes(0), 1e-4).load(report(1, tmp_path))
    over_it = [("cached", length) for length in (5, 6, 7, 8)]
    assert engine.asked == [("cached", 8), *over_it, ("whole", 3), ("whole", 8)]


async def test_a_sampler_without_replicas_is_refused_by_the_run_itself(tmp_path):
    sync = WeightSync(Engine(resets_cache=False), probes(0), 1e-4)
    await sync.check_first()
    with pytest.raises(RunStopped, match=r"does not hold policy version 1, .* through the prefix cache differ"):
        await sync.load(report(1, tmp_path))


@pytest.mark.parametrize("last_good", [0, 1])
async def test_after_a_step_smaller_than_the_tolerance_old_weights_are_told_from_new_ones(tmp_path, last_good):
    engine = Engine()
    sync = WeightSync(engine, probes(0), 0.1)
    await sync.check_first()
    for version in range(1, last_good + 1):
        await sync.load(report(version, tmp_path))
    engine.loads = False
    with pytest.raises(RunStopped, match=r"differ by 0\.01 on average .* only 0 from those of the previous weights"):
        await sync.load(report(last_good + 1, tmp_path))


@pytest.mark.parametrize(("rounding", "passes"), [(None, False), (0.0024, False), (0.0026, True)])
async def test_what_rounding_explains_is_allowed_at_the_start_and_after_updates(tmp_path, rounding, passes):
    """The sampler is 0.01 away from the trainer at each version; allowed are 4 times the rounding that was measured."""
    engine = Engine()
    engine.logprob = lambda token: logprob(token, engine.held) - 0.01
    first, later = (dataclasses.replace(probes(version), rounding=rounding) for version in (0, 7))
    sync = WeightSync(engine, first, 1e-3)
    if not passes:
        with pytest.raises(RunStopped, match=r"differ by 0\.01 on average"):
            await sync.check_first()
        return
    await sync.check_first()
    assert sync.metrics() == {}
    await sync.load(dataclasses.replace(report(7, tmp_path), probes=later))
    assert sync.metrics() == pytest.approx({"weights/canary": 0.01, "weights/canary_allowed": 0.0104}, rel=1e-3)


class Cutting(Engine):
    """Draws the id 9 of three that it keeps, whose probabilities are 1/2, 1/4 and 1/8."""

    def __init__(self, *, kept, drawn):
        super().__init__()
        self.answer = Completion(
            ids=np.array([9], np.int32),
            logprobs=np.array([math.log(drawn)], np.float32),
            policy_versions=None,
            stop_reason="length",
            kept_sets=kept and KeptSets.of([kept]),
        )

    async def generate(self, request):
        assert request.params.needs_kept_sets and len(request.prompt_ids) == 3
        return self.answer

    async def prompt_logprobs(self, token_ids, temperature=1.0):
        scores = await super().prompt_logprobs(token_ids, temperature)
        if len(token_ids) == 4:
            scores[-1] = math.log({7: 1 / 2, 9: 1 / 4, 12: 1 / 8}[int(token_ids[-1])])
        return scores


@pytest.mark.parametrize(
    ("kept", "drawn", "said"),
    [
        ([7, 9, 12], 2 / 7, None),  # 1/4 of 7/8
        ([7, 9, 12], 1 / 4, "differ by 0.13 on average from those computed over the returned kept set"),
        ([7, 9], 2 / 7, "differ by 0.15 on average"),  # 1/3
        (None, 2 / 7, "returns no kept set for a token sampled with top_k = 4"),
    ],
)
async def test_a_cut_distribution_is_that_of_the_ids_that_were_kept(kept, drawn, said):
    engine = Cutting(kept=kept, drawn=drawn)
    sync = WeightSync(engine, probes(0), 1e-3, cuts=True)
    if said is None:
        await sync.check_first()
    else:
        with pytest.raises(RunStopped, match=said):
            await sync.check_first()
    await WeightSync(engine, probes(0), 1e-3).check_first()


async def test_without_probes_nothing_is_asked(tmp_path):
    engine = Engine()
    canary = Canary(None, before=None, tolerance=1e-4)
    await canary.prepare(engine)
    assert await canary(engine) is None
    assert engine.asked == []


def test_a_replicated_sampler_is_known_without_reading_its_properties():
    class Reads(Replicas):
        @property
        def context_length(self):
            raise AssertionError("read")

        @context_length.setter
        def context_length(self, value):
            pass

    sampler = Reads()
    assert as_replicated(sampler) is sampler
    assert as_replicated(Engine()) is None
