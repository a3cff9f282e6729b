"""A run whose inference backend and monitor are a user's own, named in TOML by their import paths."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from e2e.tiny_runs import LOTS, TOML, assert_ledger_adds_up, build_tiny_model, train_lines, workplace
from verbatim.cli.main import main

MINE = '''
import json

from verbatim.config import BackendSettings
from verbatim.inference import BackendInputs
from verbatim.inference.embedded.engine import TorchSampler
from verbatim.inference.embedded.settings import TorchSettings


class MySettings(BackendSettings):
    batch: int = 2
    log: str | None = None


class MySampler:
    """The embedded engine behind a class of one's own, which notes the weights that it is given."""

    def __init__(self, inputs: BackendInputs, settings: MySettings) -> None:
        self._engine = TorchSampler(inputs.model, config=TorchSettings(max_batch_size=settings.batch),
                                    context_length=inputs.context_length, policy_version=inputs.policy_version)
        self._log = settings.log
        self._note(opened=settings.batch)

    def _note(self, **what):
        with open(self._log, "a") as file:
            file.write(json.dumps(what) + "\\n")

    def __getattr__(self, name):
        return getattr(self._engine, name)

    async def update_weights(self, path, version):
        self._note(version=version)
        await self._engine.update_weights(path, version)


class MyMonitor:
    def __init__(self, run, file: str = "mine.txt") -> None:
        self.file = (run.folder / file).open("a")

    def on_step(self, step, metrics, distributions):
        self.file.write(f"{step} {metrics['rollouts']:.0f}\\n")

    def on_eval(self, step, env, metrics): ...

    def close(self):
        self.file.write("closed\\n")
        self.file.close()
'''

NO_SAMPLER = """
from verbatim.config import BackendSettings


def generate_only(inputs, settings: BackendSettings):
    return type("Half", (), {"generate": print})()
"""

OWN = """\
[inference]
backend = "mine.MySampler"
[inference.MySampler]
batch = 5
log = "sampler.jsonl"
[monitor.notes]
type = "mine.MyMonitor"
file = "notes.txt"
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("own") / "model")


@pytest.mark.slow
def test_a_backend_and_a_monitor_of_ones_own_work_from_toml(model: Path, tmp_path: Path):
    with workplace(tmp_path / "work", {"lots": LOTS, "mine": MINE}) as folder:
        text = TOML.replace("[inference.torch]\nmax_batch_size = 8\n", "").format(model=model)
        (folder / "run.toml").write_text(text + 'import_path = "lots.Lots"\n' + OWN)
        assert main(["rl", "run.toml", "--run-dir", "run"]) == 0
        assert_ledger_adds_up(folder / "run")
        assert [line["step"] for line in train_lines(folder / "run")] == [1, 2]
        assert (folder / "run" / "notes.txt").read_text() == "1 8\n2 8\nclosed\n"
        noted = [json.loads(line) for line in (folder / "sampler.jsonl").read_text().splitlines()]
        assert noted == [{"opened": 5}, {"version": 1}, {"version": 2}]
        assert "[inference.MySampler]\nbatch = 5\n" in (folder / "run" / "config.toml").read_text()


@pytest.mark.slow
def test_a_backend_that_gives_no_sampler_is_refused_before_anything_is_sampled(model: Path, tmp_path: Path, capsys):
    with workplace(tmp_path / "work", {"lots": LOTS, "half": NO_SAMPLER}) as folder:
        text = TOML.replace("[inference.torch]\nmax_batch_size = 8\n", "").format(model=model)
        (folder / "run.toml").write_text(text + 'import_path = "lots.Lots"\n')
        assert main(["rl", "run.toml", "--run-dir", "run", "--inference.backend", "half.generate_only"]) == 2
    assert (
        "inference.backend = 'half.generate_only' gave a Half without update_weights, prompt_logprobs, close; expected "
        "a verbatim.inference.Sampler"
    ) in " ".join(capsys.readouterr().err.split())
