"""A vLLM server that leaves its device to the trainer: it comes back with the published weights, or not at all."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from inference.vllm.test_replica import connected, controlling, request, tied, trainer
from verbatim.core.errors import SamplerFault
from verbatim.inference.vllm.command import server_command
from verbatim.inference.vllm.settings import VllmSettings
from waiting import until

pytestmark = pytest.mark.realtime

__all__ = ["tied", "trainer"]


async def test_it_wakes_up_with_the_published_weights_and_nothing_cached(trainer):
    """The double's weights and cache are gone when it falls asleep, as those of a GPU are."""
    async with connected(trainer) as (double, replica):
        await replica.prove_path(trainer.published)
        assert replica.seconds_waking is None
        ids = trainer.ids(140)
        await replica.cached_logprob(ids)
        for version in (1, 2):
            await replica.sleep()
            assert double.asleep == {"weights", "kv_cache"}
            await replica.update_weights(trainer.step(f"v{version}", 1e-3), version)
            assert double.asleep == set()
            expected = trainer.logprobs(ids)
            assert await replica.cached_logprob(ids) == pytest.approx(expected[-1], abs=5e-5)
            assert np.abs((await replica.prompt_logprobs(ids))[1:] - expected).max() < 5e-5
            completion = await replica.generate(request(ids[:10], max_tokens=3))
            assert completion.policy_versions.tolist() == [version] * 3
        assert replica.seconds_waking > 0


async def test_its_cache_wakes_up_last_because_it_computes_from_then_on(tied):
    async with connected(tied) as (double, replica):
        await replica.sleep()
        await replica.update_weights(tied.step("v1", 1e-3), 1)
        assert double.calls == [
            "/sleep",
            "/pause",
            "/wake_up",
            "/start_weight_update",
            "/update_weights",
            "/finish_weight_update",
            "/collective_rpc",
            "/update_weight_version",
            "/weight_info",
            "/reset_prefix_cache",
            "/wake_up",
            "/resume",
        ]
        double.calls.clear()
        await replica.update_weights(tied.step("v2", 1e-3), 2)
        assert "/wake_up" not in double.calls


@pytest.mark.parametrize("fault", ["stale layer", "update skipped", "version not advanced"])
async def test_one_whose_weights_are_wrong_computes_nothing_until_it_is_mended(tied, fault):
    async with connected(tied) as (double, replica):
        await replica.prove_path(tied.published)
        await replica.sleep()
        double.fault = fault
        path = tied.step("v1", 1e-3)
        with pytest.raises(SamplerFault, match=r"^replica 3: "):
            await replica.update_weights(path, 1)
        assert (double.asleep, double.running.is_set()) == ({"kv_cache"}, False)
        double.fault = ""
        await replica.update_weights(path, 1)
        assert (double.asleep, double.running.is_set()) == (set(), True)
        ids = tied.ids(20)
        assert np.abs((await replica.prompt_logprobs(ids))[1:] - tied.logprobs(ids)).max() < 5e-5


@pytest.mark.parametrize(("route", "phase"), [("/sleep", "sleep"), ("/wake_up", "wake up weights")])
async def test_a_phase_that_fails_is_named_with_its_replica(tied, route, phase):
    async with connected(tied) as (double, replica):
        double.fails_at = route
        with pytest.raises(SamplerFault, match=f"^replica 3: {phase}: http.* status 500"):
            await replica.sleep()
            await replica.update_weights(tied.step("v1", 1e-3), 1)


HANGING = {
    "sleep": ("/sleep", lambda control: control.sleep()),
    "wake up weights": ("/wake_up", lambda control: control.wake_up("weights", is_last=False)),
}


@pytest.mark.parametrize("phase", HANGING)
async def test_a_phase_that_hangs_is_named_with_its_replica_and_its_limit(tied, phase):
    route, call = HANGING[phase]
    async with connected(tied) as (double, replica):
        double.hangs_at = route
        with pytest.raises(SamplerFault, match=rf"^replica 3: {phase}: no answer within 0\.2 s$"):
            async with controlling(replica, phase_timeout=0.2) as control:
                await call(control)


@pytest.mark.slow
async def test_a_server_that_says_that_it_still_sleeps_is_named(tied):
    async with connected(tied) as (double, replica):
        await replica.sleep()
        double.fault = "stays asleep"
        double.asleep = {"kv_cache"}
        with pytest.raises(
            SamplerFault, match=r"replica 3: wake up kv_cache: the server replied .*sleeping.*, expected awake"
        ):
            await replica.update_weights(tied.step("v1", 1e-3), 1)


async def test_a_request_in_flight_ends_before_the_server_sleeps(tied):
    async with connected(tied) as (double, replica):
        double.hold(after=3)
        running = asyncio.create_task(replica.generate(request(tied.ids(5), max_tokens=20)))
        await until(lambda: double.num_held)
        sleeping = asyncio.create_task(replica.sleep())
        await until(lambda: "/sleep" in double.calls)
        double.release()
        completion, _ = await asyncio.gather(running, sleeping)
        assert len(completion.ids) == 20 and np.isfinite(completion.logprobs).all()
        assert double.asleep


def test_a_colocated_server_is_started_with_its_sleep_mode():
    command = [server_command(VllmSettings(colocate=on), model="m", port=1, context_length=8) for on in (True, False)]
    assert ["--enable-sleep-mode" in found for found in command] == [True, False]
