"""Who is dead, frozen or stuck is said, by counting; what the clock on the wall says is nobody's business."""

import json
import os
import time

import pytest

from verbatim.trainer.transport import heartbeat as heartbeat_module
from verbatim.trainer.transport.files import publish_json
from verbatim.trainer.transport.heartbeat import Heartbeat, PeerWatch
from waiting import wait_until

LOOK = 0.25


class Peer:
    """The other side's file, and this side's clock."""

    def __init__(self, folder, stall_timeout=60.0):
        self.path, self.now, self.beats, self.progress = folder / "peer.json", 1000.0, 0, 0
        self.watch = PeerWatch(
            self.path, name="the trainer", heartbeat_timeout=10.0, stall_timeout=stall_timeout, clock=lambda: self.now
        )

    def beat(self, *, moves=True, doing="training on batch 3", wants_to_stop=False):
        self.beats += 1
        self.progress += moves
        publish_json(
            self.path,
            {
                "pid": 4711,
                "beats": self.beats,
                "progress": self.progress,
                "doing": doing,
                "wants_to_stop": wants_to_stop,
            },
        )

    def look_for(self, seconds, *, alive=False):
        """Look every now and then for so long; the last thing that was seen."""
        fault = None
        for _ in range(round(seconds / LOOK)):
            if alive:
                self.beat(moves=False)
            self.now += LOOK
            fault = self.watch.fault()
        return fault


@pytest.fixture
def peer(tmp_path):
    return Peer(tmp_path)


def test_a_side_that_beats_and_moves_on_has_no_fault(peer):
    for _ in range(100):
        peer.beat()
        assert peer.look_for(1) is None


def test_silence_up_to_the_timeout_is_no_fault_and_beyond_it_is(peer):
    peer.beat()
    assert peer.watch.fault() is None
    assert peer.look_for(10) is None
    fault = peer.look_for(LOOK)
    assert (
        fault == "the trainer (process 4711) has given no sign of life for 10 s; its last report was: training "
        "on batch 3"
    )
    peer.beat()
    assert peer.watch.fault() is None  # it lives after all


def test_a_side_that_was_never_seen_has_two_minutes_to_start(tmp_path):
    peer = Peer(tmp_path, stall_timeout=600.0)
    assert peer.look_for(120) is None
    assert peer.look_for(LOOK) == "the trainer has given no sign of life for 120 s; its last report was: starting"


def test_beats_without_progress_up_to_the_timeout_are_no_fault_and_beyond_it_are(peer):
    peer.beat()
    assert peer.watch.fault() is None
    assert peer.look_for(60, alive=True) is None
    assert (
        peer.look_for(LOOK, alive=True)
        == "the trainer (process 4711) is stuck: for 60 s it has been training on batch 3"
    )


def test_a_counter_that_starts_anew_is_a_sign_of_life(peer):
    """A process that was started again counts from 1."""
    for _ in range(50):
        peer.beat()
        peer.look_for(1)
    peer.beats = 0
    peer.look_for(9)
    peer.beat()
    assert peer.look_for(10) is None


def test_a_process_that_stood_still_itself_accuses_nobody_of_it(peer):
    """A frozen container: when it goes on, the other side has not beaten either."""
    peer.beat()
    assert peer.watch.fault() is None
    peer.now += 3600
    assert peer.watch.fault() is None
    assert peer.look_for(8) is None
    assert "no sign of life" in peer.look_for(2)  # but from now on it listens


@pytest.mark.realtime
def test_a_wall_clock_that_jumps_changes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(heartbeat_module, "BEAT_SECONDS", 0.005)
    year, wall = 365 * 86_400, time.time
    with Heartbeat(tmp_path / "beat.json") as heartbeat:
        watch = PeerWatch(tmp_path / "beat.json", name="the trainer", heartbeat_timeout=5.0, stall_timeout=5.0)
        for jump in (0, 10 * year, -10 * year):
            monkeypatch.setattr(time, "time", lambda jump=jump: wall() + jump)
            before = read_beats(tmp_path)
            heartbeat.progress("working")
            wait_until(lambda before=before: read_beats(tmp_path) > before + 2)
            assert watch.fault() is None


def read_beats(folder):
    return json.loads((folder / "beat.json").read_bytes())["beats"]


@pytest.mark.realtime
def test_the_process_what_it_does_and_that_somebody_wants_it_to_end_are_told(tmp_path, monkeypatch):
    monkeypatch.setattr(heartbeat_module, "BEAT_SECONDS", 0.005)
    now = [0.0]
    with Heartbeat(tmp_path / "beat.json") as heartbeat:
        watch = PeerWatch(
            tmp_path / "beat.json", name="the trainer", heartbeat_timeout=0.5, stall_timeout=9.0, clock=lambda: now[0]
        )
        heartbeat.progress("training on batch 12")
        wait_until(lambda: b"batch 12" in (tmp_path / "beat.json").read_bytes())
        assert watch.fault() is None
        assert not watch.wants_to_stop
        heartbeat.ask_to_stop()
        wait_until(lambda: watch.fault() is None and watch.wants_to_stop)
    watch.fault()
    now[0] += 1.0
    assert (
        watch.fault() == f"the trainer (process {os.getpid()}) has given no sign of life for 1 s; its last report was: "
        "training on batch 12"
    )


@pytest.mark.realtime
def test_a_heart_beats_on_where_its_folder_is_gone(tmp_path, monkeypatch):
    monkeypatch.setattr(heartbeat_module, "BEAT_SECONDS", 0.005)
    beats, publish = [], heartbeat_module.publish_json

    def counted(*given):
        beats.append(1)
        publish(*given)

    monkeypatch.setattr(heartbeat_module, "publish_json", counted)
    (tmp_path / "run").mkdir()
    with Heartbeat(tmp_path / "run" / "beat.json"):
        (tmp_path / "run").rename(tmp_path / "elsewhere")
        wait_until(lambda: len(beats) > 5)
        (tmp_path / "run").mkdir()
        wait_until((tmp_path / "run" / "beat.json").exists)


@pytest.mark.realtime
def test_a_heart_beats_on_after_a_beat_that_there_was_no_memory_for(tmp_path, monkeypatch):
    """The first beat on the thread."""
    monkeypatch.setattr(heartbeat_module, "BEAT_SECONDS", 0.01)
    calls = []

    def full(*given):
        calls.append(given)
        if len(calls) == 2:
            raise MemoryError

    monkeypatch.setattr(heartbeat_module, "publish_json", full)
    with Heartbeat(tmp_path / "beat.json"):
        wait_until(lambda: len(calls) >= 8)


def test_a_damaged_sign_of_life_counts_as_none_and_the_next_one_replaces_it(tmp_path):
    peer = Peer(tmp_path)
    peer.beat()
    assert peer.look_for(5) is None
    for content in (b"", b"\xff", b'{"pid": 1}'):
        peer.path.write_bytes(content)
        assert peer.watch.fault() is None
    assert "no sign of life" in peer.look_for(20)
    peer.beat()
    assert peer.watch.fault() is None
