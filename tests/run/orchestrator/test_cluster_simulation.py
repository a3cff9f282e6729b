"""`benchmarks/cluster.py` on a few servers: nothing is lost, and the throughput is what arithmetic says."""

import asyncio
import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def cluster():
    """The benchmark's names, which is no package."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        import cluster_clock
        import cluster_simulation

        yield SimpleNamespace(**(vars(cluster_clock) | vars(cluster_simulation)))


def run(cluster, **settings):
    """The simulation of a setting, after its end. The processor takes no time but what a setting says."""
    setting = cluster.Setting(**{"steps": 3, "warm_up": 2, "group": 4, **settings})
    with cluster.virtual_runner(0.0 if setting.core == "free" else 1.0, clock=lambda: 0.0) as runner:

        async def main():
            simulation = cluster.Simulation(setting, cluster.running())
            await simulation.run()
            return simulation

        return runner.run(main())


def measured(simulation):
    """Counts where the measured steps begin and where they end."""
    warm_up, steps, marks = simulation.setting.warm_up, simulation.setting.steps, simulation.notes.marks
    return marks[warm_up - 1], marks[warm_up + steps - 1]


@pytest.fixture(scope="module")
def regular(cluster):
    """Turns of 320 tokens at 100 tokens/s however many there are, tools of 2 s, 3 turns, no faults, quick updates."""
    return {
        "curve": cluster.Curve(step=0.01, step_per_request=0.0, prefill=1e12),
        "work": cluster.Workload(
            turns=(3, 3), completion=320.0, completion_sigma=0.0, tool=2.0, tool_p99=2.0, fails=0.0
        ),
        "faults": dataclasses.replace(cluster.Faults(), seconds_between=0.0, request=0.0, slow_share=0.0, update=1e-6),
    }


@pytest.mark.slow
def test_the_throughput_is_what_arithmetic_says(cluster, regular):
    """An episode takes 3 x 3.2 + 2 x 2 = 13.6 s and samples 960 tokens; 64 of them are under way all the time. They
    begin together, so what is measured are two whole lives of them, 8 batches."""
    simulation = run(
        cluster, servers=2, per_server=32, batch_share=0.25, train_share=0.1, level=8, warm_up=4, steps=8, **regular
    )
    first, last = measured(simulation)
    assert (last.drawn - first.drawn) / (last.at - first.at) == pytest.approx(64 * 960 / 13.6, rel=0.02)
    assert simulation.ideal == pytest.approx(64 * 960 / 13.6, rel=0.001)


@pytest.mark.slow
def test_a_slow_trainer_holds_the_servers_back(cluster, regular):
    """A step cannot be shorter than the trainer's, which is three times the servers' 16 / 64 * 13.6 s."""
    simulation = run(cluster, servers=2, per_server=32, batch_share=0.25, train_share=3.0, **regular)
    first, last = measured(simulation)
    assert (last.at - first.at) / 3 == pytest.approx(3 * 16 * 13.6 / 64, rel=0.02)


@pytest.mark.slow
def test_when_servers_die_and_requests_fail_every_token_is_booked_once(cluster):
    """What the servers said they drew is what the ledger sampled; what was lost with them is dropped for it."""
    faults = cluster.Faults(seconds_between=100.0, restart=20.0, request=0.02, slow_share=0.3)
    simulation = run(cluster, servers=4, per_server=8, steps=1, faults=faults)
    world, ledger = simulation.world, simulation.ledger
    assert world.num_deaths >= 5
    assert simulation.pool.metrics()["replicas/requests_resent"] >= 5
    assert ledger.sampled == world.told
    assert ledger.dropped["lost_replica"] > 0
    assert ledger.trained > 0
    pending = simulation.dispatcher.num_pending_tokens
    assert ledger.sampled == ledger.trained + sum(ledger.dropped.values()) + pending


def test_the_processor_time_of_code_is_charged_and_that_of_what_is_simulated_is_not(cluster):
    used = [0.0]

    async def work():
        loop = cluster.running()
        used[0] += 3.0
        await asyncio.sleep(0)
        before = loop.time()
        with loop.uncharged:
            used[0] += 5.0
        await asyncio.sleep(0)
        return before, loop.time(), loop.code_seconds, loop.simulated_seconds

    for charge, seconds in ((1.0, 3.0), (0.0, 0.0)):
        used[0] = 0.0
        with cluster.virtual_runner(charge, clock=lambda: used[0]) as runner:
            assert runner.run(work()) == (seconds, seconds, 3.0, 5.0)


@pytest.mark.slow
def test_a_charged_processor_takes_time(cluster, regular):
    """The same run on one core of which every message takes half a second: 2 servers cannot be kept busy."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(cluster.WIRE, "generate", 0.5)
        simulation = run(cluster, servers=2, per_server=8, batch_share=0.5, core="wire", **regular)
    first, last = measured(simulation)
    assert (last.turns - first.turns) / (last.at - first.at) < 2.0  # two messages in a second, 16 * 3 / 13.6 without
    assert (last.turns - first.turns) / (last.at - first.at) > 1.5
