"""Runs that sample through servers of the embedded engine that exist."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from e2e.tiny_runs import (
    LOTS,
    TOML,
    assert_ledger_adds_up,
    build_tiny_model,
    steps_so_far,
    train_lines,
    trajectory_lines,
    workplace,
)
from inference.serving import TorchServer
from ports import held_port, number_of
from verbatim.cli.main import main
from verbatim.run import trainer_process
from waiting import wait_until

pytestmark = pytest.mark.realtime

SERVERS = """\
[inference.torch]
urls = ["{one}", "{other}"]
api_key_env = "SERVERS_KEY"
"""


HELD = (
    LOTS
    + '''
from pathlib import Path


class Held(Lots):
    """After the episodes of four steps no more begin until the file `struck` is there, and then after those of ten no
    more until `mended` is there: the steps between them are sampled by one server."""

    num_started = 0

    async def start(self, example, seed):
        self.num_started += 1
        for steps, name in ((4, "struck"), (10, "mended")):
            while self.num_started > 8 * steps and not Path(name).exists():
                await asyncio.sleep(0.01)
        return await super().start(example, seed)
'''
)


@pytest.mark.slow
def test_a_run_goes_on_while_one_of_two_servers_is_lost_and_started_again(tmp_path, monkeypatch):
    monkeypatch.setenv("SERVERS_KEY", "a-secret-key")
    monkeypatch.setattr("verbatim.inference.pool.servers._ASK_EVERY", 0.05)
    model = build_tiny_model(tmp_path / "model")
    one, other = (TorchServer(model, context_length=384, api_key="a-secret-key").start() for _ in range(2))
    table = SERVERS.format(one=one.url, other=other.url)
    toml = TOML.replace("[inference.torch]\nmax_batch_size = 8\n", table).replace("max_steps = 2", "max_steps = 14")
    run = tmp_path / "run"

    def strike() -> None:
        try:
            wait_until(lambda: len(steps_so_far(run)) >= 3)
            one.stop()
            seen = len(steps_so_far(run))
            (tmp_path / "struck").touch()
            wait_until(lambda: len(steps_so_far(run)) >= seen + 2)
            one.start()
            wait_until(lambda: one.engine is not None and one.engine.policy_version > 0)
        finally:
            for name in ("struck", "mended"):
                (tmp_path / name).touch()

    striking = threading.Thread(target=strike)
    with workplace(tmp_path, {"lots": HELD}):
        Path("run.toml").write_text(toml.format(model=model) + 'import_path = "lots.Held"\n')
        striking.start()
        try:
            assert main(["rl", "run.toml", "--run-dir", str(run)]) == 0
        finally:
            striking.join()
            for server in (one, other):
                server.stop()
    steps = train_lines(run)
    assert [line["step"] for line in steps] == list(range(1, 15))
    assert min(line["metrics"]["replicas/serving"] for line in steps) == 1
    last = assert_ledger_adds_up(run)
    assert last["replicas/lost"] == 1
    assert all(line["metrics"]["mismatch_kl"] < 1e-8 for line in steps)  # max_async_level = 0: the newest weights only
    versions = {v for t in trajectory_lines(run) for turn in t["turns"] for v in turn["policy_versions"]}
    assert versions == set(range(14))


@pytest.mark.slow
def test_servers_of_ours_return_the_kept_sets_of_a_cut_distribution(tmp_path, monkeypatch):
    monkeypatch.setenv("SERVERS_KEY", "a-secret-key")
    model = build_tiny_model(tmp_path / "model")
    one, other = (TorchServer(model, context_length=384, api_key="a-secret-key").start() for _ in range(2))
    toml = TOML.replace("[inference.torch]\nmax_batch_size = 8\n", SERVERS.format(one=one.url, other=other.url))
    toml = toml.replace("max_tokens = 8", "max_tokens = 8, top_p = 0.8")
    run = tmp_path / "run"
    with workplace(tmp_path, {"lots": LOTS}):
        Path("run.toml").write_text(toml.format(model=model) + 'import_path = "lots.Lots"\n')
        try:
            assert main(["rl", "run.toml", "--run-dir", str(run)]) == 0
        finally:
            for server in (one, other):
                server.stop()
    assert_ledger_adds_up(run)
    for line in train_lines(run):
        assert line["metrics"]["mismatch_kl"] < 1e-8 and line["metrics"]["kept_ids/cut"] > 0.5


def test_servers_are_asked_before_anything_is_prepared(tmp_path, monkeypatch, capsys):
    """Not after a warm start of hours."""
    monkeypatch.setattr("verbatim.inference.http.client.FIRST_PAUSE", 0.002)
    monkeypatch.setenv("SERVERS_KEY", "a-secret-key")
    monkeypatch.setattr(trainer_process, "trainer_inside", lambda *_: pytest.fail("the trainer is made"))
    model = build_tiny_model(tmp_path / "model")
    with held_port() as held:
        port = number_of(held)
        table = f'[inference.torch]\nurls = ["http://127.0.0.1:{port}"]\napi_key_env = "SERVERS_KEY"\n'
        toml = TOML.replace("[inference.torch]\nmax_batch_size = 8\n", table.replace("{", "{{").replace("}", "}}"))
        with workplace(tmp_path, {"lots": LOTS}):
            Path("run.toml").write_text(toml.format(model=model) + 'import_path = "lots.Lots"\n')
            assert main(["rl", "run.toml"]) == 1
            assert not list(Path().glob("runs/run/2*"))
    assert f"127.0.0.1:{port}" in capsys.readouterr().err
