"""A thread of each rank looks for failures of the others, because the rank itself may wait for them."""

import threading
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from verbatim.core.errors import ComponentError, RunStopped, UsageError
from verbatim.trainer.parallel import failures
from verbatim.trainer.parallel.failures import Failure, Failures, kind_of
from waiting import HANGS, wait_until

pytestmark = pytest.mark.realtime


@pytest.fixture(autouse=True)
def looks_often(monkeypatch):
    monkeypatch.setattr(failures, "_LOOK_SECONDS", 0.02)


@pytest.fixture
def store(tmp_path):
    return dist.FileStore(str(tmp_path / "store"), 3)


class Looks:
    """Counts how often the watching thread looks: whether ranks have ended, it asks each time."""

    def __init__(self, ended=()):
        self.num, self.ended = 0, dict(ended)

    def __call__(self):
        self.num += 1
        return self.ended


def heard(mine, act, until, **how):
    """What the watch of a rank ended it for, while that waited until this holds."""
    ends, before = [], set(threading.enumerate())
    with mine.watched(lambda failure, _: ends.append(failure), **how):
        (watch,) = set(threading.enumerate()) - before
        act()
        wait_until(lambda: until(ends))
    watch.join(HANGS)
    return ends


def has_ended(ends):
    return ends


@pytest.mark.slow
def test_a_rank_ends_for_the_first_failure_of_another(store):
    def fail():
        Failures(store, 2, 3).tell(RuntimeError("Connection closed by peer [127.0.0.1]"))
        Failures(store, 1, 3).tell(UsageError("a bad record"))
        Failures(store, 2, 3).tell(RunStopped("too late"))

    (found,) = heard(Failures(store, 0, 3), fail, has_ended)
    assert found == Failure(rank=1, said="a bad record", kind="usage")


def test_a_rank_does_not_end_for_a_failure_of_its_own_nor_for_those_who_only_lost_the_others(store):
    """A watch that has seen a failure looks no more."""
    looks = Looks()
    mine = Failures(store, 0, 3, ended=looks)
    for fail in (
        lambda: Failures(store, 1, 3).tell(RuntimeError("gloo: timed out")),
        lambda: mine.tell(RunStopped("no memory")),
    ):

        def act(fail=fail):
            fail()
            looks.num = 0

        assert heard(mine, act, lambda ends: ends or looks.num >= 3) == []


def test_a_rank_that_hears_of_it_by_itself_is_not_ended(store):
    """Rank 0 has a while to come out of what it does, and to say it where people read it."""
    looks = Looks({1: "was ended by SIGKILL"})
    mine = Failures(store, 0, 3, ended=looks)
    assert heard(mine, lambda: None, lambda ends: looks.num, patience=HANGS) == []


@pytest.mark.slow
def test_a_process_that_has_ended_is_a_failure(store):
    ended = {}
    mine = Failures(store, 0, 3, ended=lambda: ended)
    (found,) = heard(mine, lambda: ended.update({2: "was ended by SIGKILL"}), has_ended)
    assert found == Failure(rank=2, said="it was ended by SIGKILL", kind="run")


@pytest.mark.slow
def test_a_store_that_is_gone_ends_a_rank():
    def make(is_master, port):
        return dist.TCPStore("127.0.0.1", port, is_master=is_master, wait_for_workers=False)

    served = [make(True, 0)]
    mine = Failures(make(False, served[0].port), 1, 2)
    assert heard(mine, served.clear, has_ended) == [None]


def test_ranks_that_do_not_come_are_named_when_the_deadline_has_passed(store, monkeypatch):
    now = [0.0]

    def sleep(seconds):
        now[0] += seconds

    monkeypatch.setattr(failures, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    with pytest.raises(RunStopped, match=r"^rank 0 of the trainer, rank 2 of the trainer did not start within 200 s"):
        Failures(store, 1, 3, deadline=200).introduce()
    assert 200 < now[0] < 200.1


@pytest.mark.parametrize(
    "error, kind",
    [
        (UsageError("x"), "usage"),
        (ComponentError("x"), "component"),
        (RunStopped("x"), "run"),
        (KeyError("x"), "run"),
        (OSError(28, "No space left on device"), "run"),
        (KeyboardInterrupt(), "interrupted"),
    ],
)
def test_a_failure_keeps_its_kind(error, kind):
    assert kind_of(error) == kind


def test_a_refusal_because_of_a_failing_disk_is_no_mistake_of_the_user():
    error = UsageError("cannot be read")
    error.__cause__ = OSError(5, "Input/output error")
    assert kind_of(error) == "run"
