"""Orders reach the trainer in the order of the calls, each once, whatever fails on the way."""

import asyncio
import threading
import time
from pathlib import Path

import pytest
from transport_samples import make_sample

from verbatim.core.errors import RunStopped
from verbatim.trainer.transport import StepReport
from verbatim.trainer.transport import exchange as module
from verbatim.trainer.transport.exchange import Exchange
from verbatim.trainer.transport.remote_trainer import RemoteTrainer
from verbatim.trainer.transport.trainer_messages import TrainerMessage, to_json
from waiting import HANGS, until

pytestmark = pytest.mark.realtime


@pytest.fixture
def exchange(tmp_path):
    return Exchange.open(tmp_path / "exchange")


class TooLate(Exception):
    """An order did not come in time."""


def wait_for(exchange, number, seconds=HANGS):
    until = time.monotonic() + seconds

    def look():
        if time.monotonic() > until:
            raise TooLate

    return exchange.wait_for_message(number, look)


def report(version):
    return {
        "result": to_json(
            StepReport(version=version, weights=Path("w"), num_trained_tokens=version, metrics={}), Path("/run")
        )
    }


def serve(exchange, count, answer=report):
    """A trainer on a thread; what it was ordered."""
    seen = []

    def main():
        for number in range(1, count + 1):
            order = wait_for(exchange, number)
            seen.append(order)
            exchange.answer(number, answer(order.version))

    thread = threading.Thread(target=main)
    thread.start()
    return thread, seen


async def test_batches_that_are_handed_over_at_once_arrive_in_the_order_of_the_calls(exchange, monkeypatch):
    order, begun, go_on = exchange.send, [], threading.Event()

    def slow(number, what):
        begun.append(number)
        assert go_on.wait(HANGS)
        order(number, what)

    monkeypatch.setattr(exchange, "send", slow)
    link = RemoteTrainer(exchange, fault=lambda: None)
    thread, seen = serve(exchange, 6)
    samples = [[make_sample(version + 1)] for version in range(1, 7)]
    training = asyncio.gather(*(link.train(samples[v - 1], v, checkpoint=v == 4) for v in range(1, 7)))
    await until(lambda: begun)
    await asyncio.to_thread(int)  # threads begin what they are given in its order: nothing else was given to them
    assert begun == [1]
    go_on.set()
    reports = await training
    await asyncio.to_thread(thread.join)
    assert [r.version for r in reports] == [o.version for o in seen] == [1, 2, 3, 4, 5, 6]
    assert [o.samples[0].trajectory_id for o in seen] == ["t-2", "t-3", "t-4", "t-5", "t-6", "t-7"]
    assert [o.checkpoint for o in seen] == [False, False, False, True, False, False]
    assert list(exchange.messages.iterdir()) == list(exchange.answers.iterdir()) == []


async def test_the_number_of_an_order_that_could_not_be_written_is_free_again(exchange, monkeypatch):
    publish = module.publish_bytes

    def full(path, data):
        raise OSError(28, "No space left on device", str(path))

    link = RemoteTrainer(exchange, fault=lambda: None)
    monkeypatch.setattr(module, "publish_bytes", full)
    with pytest.raises(OSError, match="No space left"):
        await link.train([], 1)
    monkeypatch.setattr(module, "publish_bytes", publish)
    thread, seen = serve(exchange, 1)
    assert (await link.train([], 1)).version == 1
    await asyncio.to_thread(thread.join)
    assert [o.kind for o in seen] == ["train"]


async def test_an_order_that_is_cancelled_while_it_is_written_keeps_its_number(exchange, monkeypatch):
    """Else the next one would replace it, or never be looked for."""
    begun, go_on, order = threading.Event(), threading.Event(), exchange.send

    def slow(number, what):
        begun.set()
        assert go_on.wait(HANGS)
        order(number, what)

    monkeypatch.setattr(exchange, "send", slow)
    link = RemoteTrainer(exchange, fault=lambda: None)
    training = asyncio.create_task(link.train([], 1))
    await asyncio.to_thread(begun.wait, HANGS)
    training.cancel()
    closing = asyncio.create_task(link.close())
    await asyncio.sleep(0)
    go_on.set()
    await closing
    assert training.cancelled()
    assert [wait_for(exchange, n).kind for n in (1, 2)] == ["train", "stop"]


async def test_what_the_trainer_says_is_wrong_stops_the_run(exchange):
    link = RemoteTrainer(exchange, fault=lambda: None)
    thread, _ = serve(exchange, 1, answer=lambda version: {"error": "the loss is nan"})
    with pytest.raises(RunStopped, match=r"^the trainer: the loss is nan$"):
        await link.train([], 1)
    await asyncio.to_thread(thread.join)


async def test_a_state_that_the_trainer_left_is_moved_to_where_it_is_wanted(exchange, tmp_path):
    left, wanted = exchange.states / "v000003", tmp_path / "wanted"
    (left / "weights").mkdir(parents=True)
    (left / "weights" / "a").write_text("1")
    wanted.mkdir()
    answer = {"result": {"in_run": f"exchange/{exchange.folder.name}/states/v000003"}}
    thread, seen = serve(exchange, 1, answer=lambda version: answer)
    await RemoteTrainer(exchange, fault=lambda: None).save(wanted, 3)
    await asyncio.to_thread(thread.join)
    assert [(order.kind, order.version) for order in seen] == [("save", 3)]
    assert (wanted / "weights" / "a").read_text() == "1"
    assert not left.exists()


@pytest.mark.parametrize("of_the_run", [True, False])
async def test_no_other_folder_is_moved_for_a_state(exchange, tmp_path, of_the_run):
    other = (exchange.run / "checkpoints" if of_the_run else tmp_path) / "step_000002"
    other.mkdir(parents=True)
    (other / "a").write_text("1")
    (wanted := tmp_path / "wanted").mkdir()
    said = {"in_run": "checkpoints/step_000002"} if of_the_run else str(other)
    thread, _ = serve(exchange, 1, answer=lambda version: {"result": said})
    with pytest.raises(RunStopped, match=r"left its state in .*step_000002, expected a folder in .*states"):
        await RemoteTrainer(exchange, fault=lambda: None).save(wanted, 2)
    await asyncio.to_thread(thread.join)
    assert (other / "a").read_text() == "1"
    assert not list(wanted.iterdir())


async def test_a_trainer_that_is_gone_ends_the_wait_for_its_answer(exchange):
    link = RemoteTrainer(exchange, fault=lambda: "the trainer was ended by SIGKILL")
    with pytest.raises(RunStopped, match="the trainer was ended by SIGKILL"):
        await asyncio.wait_for(link.train([], 1), HANGS)
    with pytest.raises(RunStopped, match="SIGKILL"):
        await asyncio.wait_for(link.watch(), HANGS)


async def test_the_last_answer_of_a_trainer_that_has_ended_counts(exchange):
    """It answers, then ends: both are seen at the same look."""

    def fault():
        exchange.answer(1, report(1))
        return "the trainer ended with status 0"

    found = await asyncio.wait_for(RemoteTrainer(exchange, fault=fault).train([], 1), HANGS)
    assert found.version == 1


async def test_a_trainer_is_let_go_also_where_nothing_can_be_written(exchange):
    exchange.messages.rmdir()
    await RemoteTrainer(exchange, fault=lambda: None).close()


def test_waiting_for_an_order_ends_where_the_look_raises(exchange):
    with pytest.raises(TooLate):
        wait_for(exchange, 1, seconds=0.01)
    exchange.send(1, TrainerMessage(kind="stop"))
    assert wait_for(exchange, 1).kind == "stop"


def test_an_answer_is_taken_once(exchange):
    assert exchange.take_answer(1) is None
    exchange.answer(1, {"result": None})
    assert exchange.take_answer(1) == {"result": None}
    assert exchange.take_answer(1) is None


def test_a_session_serves_one_orchestrator(exchange):
    other = Exchange(exchange.folder)
    assert not exchange.is_attached
    assert exchange.attach()
    assert exchange.is_attached
    assert not other.attach()


def test_what_a_killed_session_left_is_never_read_again(tmp_path):
    root = tmp_path / "exchange"
    assert Exchange.current(root) is None
    first = Exchange.open(root)
    first.send(1, TrainerMessage(kind="train", version=9))
    first.answer(1, report(9))
    first.attach()
    second = Exchange.open(root)
    current = Exchange.current(root)
    assert current is not None
    assert current.folder == second.folder != first.folder
    assert not first.folder.exists()
    assert current.take_answer(1) is None
    assert list(current.messages.iterdir()) == []
    assert current.read_ready() is None
    assert current.attach()


@pytest.mark.parametrize("content", [b"", bytes(16), b"\xff\xfe", b"../../elsewhere", b"a\n"])
def test_a_session_whose_name_the_power_took_away_is_no_session(tmp_path, content):
    (tmp_path / "current").write_bytes(content)
    assert Exchange.current(tmp_path) is None


def test_a_sign_of_life_that_the_power_took_away_is_none(exchange):
    for content in (b"", bytes(80), b"{", b"[1]", b'{"beats": 3}'):
        exchange.trainer_beat.write_bytes(content)
        assert exchange.beats() is None


def test_what_a_killed_trainer_was_writing_is_removed_and_nothing_else(exchange):
    exchange.answer(1, {"step": 1})
    kept = sorted(path for path in exchange.folder.rglob("*"))
    (exchange.folder / ".trainer.json.tmp").write_bytes(b'{"pid"')
    (exchange.answers / ".000002.json.tmp").write_bytes(b"")
    exchange.remove_temporary()
    assert sorted(exchange.folder.rglob("*")) == kept
    Exchange(exchange.folder / "nowhere").remove_temporary()
