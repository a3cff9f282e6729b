"""A trainer broadcasts its weights to two servers, doubles of vLLM's, over gloo; one of them fails in many ways."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from inference.vllm.group_sender import GroupSender
from inference.vllm.test_server_pool import Trained
from inference.vllm.tiny_model import TinyModel
from inference.vllm.vllm_double import VllmDouble, serving
from verbatim.core.errors import RunStopped, UsageError
from verbatim.inference import SampleRequest, SamplingParams
from verbatim.inference.backends import BackendInputs
from verbatim.inference.pool.replica import TooSlow
from verbatim.inference.pool.servers import ServerPool
from verbatim.inference.sending import SendOrder, SendReport, WeightStore
from verbatim.inference.vllm.backend import vllm_backend
from verbatim.inference.vllm.broadcast import WeightBroadcast
from verbatim.inference.vllm.plugin.verbatim_weight_group import GroupOver, WeightGroup, address_towards
from verbatim.inference.vllm.settings import VllmSettings
from waiting import HANGS, until

pytestmark = pytest.mark.realtime


@pytest.fixture
def trained(tmp_path: Path) -> Trained:
    return Trained(TinyModel(tmp_path / "weights", tied=True))


class Run:
    """A pool over two doubles, and the trainer that sends to them."""

    def __init__(self, trained: Trained) -> None:
        self.trained, self.sender = trained, GroupSender(trained.trainer.model)
        self.doubles = [VllmDouble(trained.trainer.published) for _ in range(2)]
        for double in self.doubles:
            double.facts["weight_transfer"] = "verbatim_broadcast"

    @contextlib.asynccontextmanager
    async def opened(self, *, update_timeout: float = HANGS) -> AsyncIterator[ServerPool]:
        async with contextlib.AsyncExitStack() as stack:
            urls = [await stack.enter_async_context(serving(double)) for double in self.doubles]
            settings = VllmSettings(urls=tuple(urls), weight_transfer="gloo", update_timeout=update_timeout)
            folder = self.trained.trainer.published
            pool = await vllm_backend(BackendInputs(model=folder, context_length=512, sender=self.sender), settings)
            assert isinstance(pool, ServerPool)
            stack.push_async_callback(pool.close)
            await pool.check_replicas(self.trained.canary())
            yield pool

    async def update(self, pool: ServerPool) -> None:
        """Bring the next version."""
        self.path, version, canary = self.trained.step(1e-3)
        await pool.update_replicas(self.path, version, canary)

    def arrived(self) -> list[bool | None]:
        """For each double: whether a broadcast brought exactly the published tensors; None = it read the folder."""
        published = load_file(self.path / "model.safetensors")
        return [None if d.received is None else same(d.received, published) for d in self.doubles]


def same(found: dict[str, torch.Tensor], published: dict[str, torch.Tensor]) -> bool:
    return found.keys() == published.keys() and all(
        found[name].dtype == tensor.dtype and torch.equal(bits(found[name]), bits(tensor))
        for name, tensor in published.items()
    )


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


@pytest.mark.slow
async def test_each_version_arrives_at_both_bit_for_bit_in_one_group(trained: Trained):
    run = Run(trained)
    async with run.opened() as pool:
        for _ in range(3):
            await run.update(pool)
            assert run.arrived() == [True, True]
        found = pool.metrics()
        assert found["replicas/failed_checks"] == found["replicas/lost"] == 0
        assert found["replica/0/policy_version"] == found["replica/1/policy_version"] == 3
    assert [(order.version, order.size) for order in run.sender.orders] == [(0, 3), (1, 3), (2, 3), (3, 3)]
    assert len({order.group for order in run.sender.orders}) == 1
    assert [report.fault for report in run.sender.reports] == [None] * 4
    assert run.sender.reports[1].num_bytes == sum(t.nbytes for t in load_file(run.path / "model.safetensors").values())


@pytest.mark.slow
async def test_a_server_that_fails_in_the_middle_ends_the_group_and_the_next_update_makes_another(trained: Trained):
    """Both read the folder, and nothing that they have in flight is lost."""
    run = Run(trained)
    async with run.opened() as pool:

        def fail(number: int) -> None:
            if number == 4:
                raise MemoryError("no room for the fifth tensor")

        for double in run.doubles:
            double.hold(after=5)
        request = SampleRequest(prompt_ids=trained.trainer.ids(12), params=SamplingParams(max_tokens=20), seed=0)
        in_flight = [asyncio.create_task(pool.generate(request)) for _ in range(2)]
        await until(lambda: all(double.num_held for double in run.doubles))
        run.doubles[1].after_tensor = fail
        await run.update(pool)
        assert run.arrived() == [None, None]
        for double in run.doubles:
            double.release()
        for completion in await asyncio.gather(*in_flight):
            assert len(completion.ids) == 20 and completion.num_lost_tokens == 0
            assert completion.policy_versions is not None
            assert completion.policy_versions.tolist() == [0] * 5 + [1] * 15
        assert "no room for the fifth tensor" in str(run.sender.reports[-1].fault)
        run.doubles[1].after_tensor = lambda number: None
        await run.update(pool)
        assert run.arrived() == [True, True]
        found = pool.metrics()
        assert found["replicas/failed_checks"] == found["replicas/lost"] == found["replicas/requests_resent"] == 0
        assert found["replica/0/policy_version"] == found["replica/1/policy_version"] == 2
    first, second, third = (order.group for order in run.sender.orders)
    assert first == second != third


@pytest.mark.slow
@pytest.mark.parametrize("route", ["/pause", "/start_weight_update"])
async def test_a_server_that_fails_before_holds_the_other_up_in_nothing(trained: Trained, route: str):
    """The other one receives alone; the failed one is loaded again from the folder."""
    run = Run(trained)
    async with run.opened() as pool:
        run.doubles[1].fails_at, run.doubles[1].fails_once = route, True
        await run.update(pool)
        assert run.arrived() == [True, None]
        assert run.sender.orders[-1].size == 2 and run.sender.orders[-1].group != run.sender.orders[0].group
        assert pool.metrics()["replicas/serving"] == 2
        await run.update(pool)
        assert run.arrived() == [True, True]
    assert [report.fault for report in run.sender.reports] == [None] * 3


@pytest.mark.slow
async def test_a_server_that_refuses_to_receive_ends_the_wait_of_the_others(trained: Trained):
    run = Run(trained)
    async with run.opened() as pool:
        run.doubles[1].fails_at, run.doubles[1].fails_once = "/update_weights", True
        await run.update(pool)
        assert "it burns" in str(run.sender.reports[-1].fault)
        assert pool.metrics()["replicas/serving"] == 2
        await run.update(pool)
        assert run.arrived() == [True, True]


class Hang:
    """A server hangs in the middle of a broadcast until the test has seen what that does to the others."""

    def __init__(self, double: VllmDouble) -> None:
        self.begun, self._over, double.after_tensor = threading.Event(), threading.Event(), self._wait

    def _wait(self, number: int) -> None:
        if number == 4:
            self.begun.set()
            self._over.wait()
            raise MemoryError("the hang is over")

    def __enter__(self) -> Hang:
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()


@pytest.mark.slow
async def test_the_trainer_waits_for_a_server_that_hangs_no_longer_than_the_limit(trained: Trained):
    run = Run(trained)
    async with run.opened() as pool:
        cast(Any, run.sender.broadcaster)._group._seconds = 0.5
        with Hang(run.doubles[1]):
            updating = asyncio.create_task(run.update(pool))
            await until(lambda: len(run.sender.reports) == 2)
            assert "rank 0: a broadcast took more than 0.5 s" in str(run.sender.reports[-1].fault)
        await updating
        assert run.sender.orders[-1].seconds == 0.8 * HANGS  # the phase has some time left to end
        assert run.arrived() == [None, None]


@pytest.mark.slow
async def test_a_server_that_hangs_in_the_middle_is_given_up_and_comes_back(
    trained: Trained, monkeypatch: pytest.MonkeyPatch
):
    """When its phase has taken too long."""
    run = Run(trained)
    async with run.opened() as pool:
        with Hang(run.doubles[1]) as hang:
            receive = WeightBroadcast.load

            async def receive_slowly(broadcast: WeightBroadcast, name: str, control: Any) -> bool:
                load = control.load

                async def takes_too_long(info: object) -> None:
                    control.load, loading = load, asyncio.create_task(load(info))
                    await until(hang.begun.is_set)
                    loading.cancel()
                    raise TooSlow("replica 1: load weights: no answer within 1 s")

                if name.startswith("replica 1") and not hang.begun.is_set():
                    control.load = takes_too_long
                return await receive(broadcast, name, control)

            monkeypatch.setattr(WeightBroadcast, "load", receive_slowly)
            await run.update(pool)
            assert "replica 1: load weights: no answer within 1 s" in str(run.sender.reports[-1].fault)
            assert run.arrived()[0] is None
            run.doubles[1].after_tensor = lambda number: None
            await until(lambda: pool.metrics()["replicas/serving"] == 2)
            await run.update(pool)
            assert run.sender.reports[-1].fault is None
            assert run.arrived() == [True, True]


@pytest.mark.slow
async def test_servers_that_outlive_a_run_make_another_group_with_the_trainer_of_the_next(trained: Trained):
    run = Run(trained)
    async with run.opened():
        pass
    first = run.sender.orders
    run.sender = GroupSender(trained.trainer.model)
    async with run.opened() as pool:
        await run.update(pool)
        assert run.arrived() == [True, True]
    assert {order.group for order in run.sender.orders}.isdisjoint(order.group for order in first)


class Receiving:
    """A `VllmControl` of one worker that receives whatever is sent."""

    def __init__(self) -> None:
        self.was_asked = False

    async def num_workers(self) -> int:
        """What a replica is asked when it arrives."""
        self.was_asked = True
        return 1

    async def load(self, info: object) -> None:
        pass


class Sending:
    """A `WeightSender` that keeps its orders."""

    store = WeightStore(host="127.0.0.1", port=1, on="here")

    def __init__(self) -> None:
        self.orders: list[SendOrder] = []

    async def send(self, order: SendOrder) -> SendReport:
        self.orders.append(order)
        return SendReport()


@pytest.mark.parametrize("leaves_first", [False, True])
async def test_a_replica_that_is_given_up_while_it_waits_keeps_nothing_from_the_others(leaves_first: bool):
    """As the pool does it: the call is cancelled, and the replica leaves."""
    sender: Any = Sending()
    broadcast = WeightBroadcast(sender, kind="gloo", update_timeout=600.0)
    lost, lives = (cast(Any, Receiving()) for _ in range(2))
    broadcast.expect(["replica 0", "replica 1"], 1)
    waiting = asyncio.create_task(broadcast.load("replica 0", lost))
    await until(lambda: lost.was_asked)
    waiting.cancel()
    await asyncio.wait([waiting])
    if leaves_first:
        broadcast.leave("replica 0")
    arriving = asyncio.create_task(broadcast.load("replica 1", lives))
    await until(lambda: lives.was_asked)
    broadcast.leave("replica 0")
    assert await asyncio.wait_for(arriving, HANGS) is True
    assert [order.size for order in sender.orders] == [2] if leaves_first else [3]


@pytest.mark.slow
async def test_a_trainer_that_fails_ends_the_update(trained: Trained):
    run = Run(trained)
    async with run.opened() as pool:
        run.sender.raises = RunStopped("the trainer: rank 1 of the trainer was ended by SIGKILL")
        with pytest.raises(RunStopped, match="rank 1 of the trainer was ended by SIGKILL"):
            await run.update(pool)


async def test_weights_that_do_not_arrive_at_the_start_are_refused_with_what_to_type(trained: Trained):
    run = Run(trained)

    def fail(number: int) -> None:
        raise OSError("connection refused")

    run.doubles[0].after_tensor = fail
    with pytest.raises(
        UsageError,
        match=r'weight_transfer = "gloo": the trainer.s tensors do not reach .*'
        r"connection refused.*inference\.vllm\.transfer_address",
    ):
        async with run.opened():
            pass


async def test_another_nccl_than_the_trainers_is_refused(trained: Trained):
    from verbatim.inference.vllm.facts import ServerFacts, refuse_inexact

    double = VllmDouble(trained.trainer.published)
    facts = {key: value for key, value in double.facts.items() if key in ServerFacts.__annotations__}
    facts |= {"weight_transfer": "verbatim_broadcast", "nccl": "2.27.5"}
    vocab_size = int(facts["vocab_size"])
    asked = {"name": "replica 0", "transfer": "verbatim_broadcast", "vocab_size": vocab_size, "context_length": 64}
    refuse_inexact(ServerFacts(**facts), nccl="2.27.5", **asked)
    with pytest.raises(UsageError, match=r"its NCCL is 2\.27\.5 and the trainer's is 2\.28\.3"):
        refuse_inexact(ServerFacts(**facts), nccl="2.28.3", **asked)


@pytest.mark.slow
async def test_a_rank_that_does_not_come_is_said_to_the_others_at_the_limit(trained: Trained):
    sender = GroupSender(trained.trainer.model)
    server = dist.TCPStore(sender.store.host, sender.store.port, is_master=False)
    with pytest.raises(GroupOver, match=r"rank 0: waiting for the other ranks took more than 0\.5 s"):
        WeightGroup(server, "g", rank=0, size=2, kind="gloo", device=torch.device("cpu"), seconds=0.5, layout={})
    with pytest.raises(GroupOver, match="rank 0: waiting for the other ranks took more"):
        WeightGroup(server, "g", rank=1, size=2, kind="gloo", device=torch.device("cpu"), seconds=HANGS)


def test_the_address_towards_this_host_is_loopback():
    assert address_towards("127.0.0.1", 1) == "127.0.0.1"
