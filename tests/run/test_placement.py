"""A trainer and vLLM on one device are refused unless they take turns, with what to type; this machine needs no GPU."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from e2e.tiny_runs import LOTS, TOML, build_tiny_model, snapshot, workplace
from inference.vllm.double_server import fake_python
from verbatim.cli.main import main
from verbatim.core.errors import ConfigError
from verbatim.inference.vllm.settings import VllmSettings


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("placement") / "model")


@pytest.fixture
def place(tmp_path: Path, model: Path, monkeypatch):
    """A run over vLLM, on a machine with four CUDA devices; the current directory."""
    devices = {"auto": "cuda", "cuda": "cuda"}
    monkeypatch.setattr("verbatim.models.loading.resolve_device", lambda name: torch.device(devices.get(name, name)))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with workplace(tmp_path, {"lots": LOTS}):
        (tmp_path / "run.toml").write_text(TOML.format(model=model) + 'import_path = "lots.Lots"\n')
        (tmp_path / "vllm").mkdir()
        fake_python(tmp_path / "vllm")
        yield tmp_path


def config(*options: str) -> int:
    return main(
        ["config", "run.toml", "--inference.backend", "vllm", "--inference.vllm.python", "vllm/python", *options]
    )


def refused(capsys, *options: str) -> str:
    assert config(*options) == 2
    return " ".join(capsys.readouterr().err.split())


TRAINER, REPLICAS = "--trainer.device", "--inference.vllm.replicas"
DEVICES, COLOCATE = "--inference.vllm.devices", "--inference.vllm.colocate"
SIZE = "--inference.vllm.tensor-parallel-size"

OVERLAPS = {
    "both on the first": ([], None, "0", 'Type trainer.device = "cuda:1"'),
    "by its number": ([TRAINER, "cuda:1", REPLICAS, "2"], None, "1", 'Type trainer.device = "cuda:2"'),
    "the second of two": ([TRAINER, "cuda:1", SIZE, "2"], None, "1", 'Type trainer.device = "cuda:2"'),
    "by name": ([TRAINER, "cuda:2", DEVICES, '["2"]'], None, "2", 'Type trainer.device = "cuda:0"'),
    "the first that is seen": ([], "4,5", "4", 'Type trainer.device = "cuda:1"'),
    "seen by another number": ([TRAINER, "cuda:1", DEVICES, '["5"]'], "4,5", "5", 'Type trainer.device = "cuda:0"'),
    "its environment decides": (
        [TRAINER, "cuda:3", "--inference.vllm.env", '{ CUDA_VISIBLE_DEVICES = "3" }'],
        None,
        "3",
        'Type trainer.device = "cuda:0"',
    ),
    "no other": ([], "6", "6", "No other device is visible here; choose another trainer.device"),
}


@pytest.mark.realtime
@pytest.mark.parametrize("case", OVERLAPS)
def test_an_overlap_is_refused_with_what_to_type(place, capsys, monkeypatch, case):
    options, visible, device, what = OVERLAPS[case]
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    said = refused(capsys, *options)
    assert f"is CUDA device {device}, which inference.vllm also takes" in said
    assert what in said
    assert "To share one device, type inference.vllm.colocate = true and orchestrator.max_async_level = 0" in said


APART = {
    "the trainer is on a CPU": ([TRAINER, "cpu"], None),
    "another device": ([TRAINER, "cuda:1"], None),
    "the replicas begin after it": ([DEVICES, '["1", "2"]', REPLICAS, "2"], None),
    "seen by other numbers": ([TRAINER, "cuda:1", DEVICES, '["4"]'], "4,5"),
    "servers elsewhere": (["--inference.vllm.urls", '["http://127.0.0.1:9"]'], None),
    "they take turns": ([COLOCATE, "true"], None),
}


@pytest.mark.realtime
@pytest.mark.parametrize("case", APART)
def test_sides_on_devices_of_their_own_or_that_take_turns_are_not_refused(place, capsys, monkeypatch, case):
    options, visible = APART[case]
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert config(*options) == 0, capsys.readouterr().err


@pytest.mark.realtime
def test_without_cuda_nothing_overlaps(place, capsys, monkeypatch):
    monkeypatch.setattr("verbatim.models.loading.resolve_device", lambda name: torch.device("cpu"))
    assert config() == 0, capsys.readouterr().err


@pytest.mark.realtime
def test_a_vllm_for_cpus_takes_no_cuda_device_and_cannot_share_one(place, capsys):
    (place / "vllm" / "python").write_text("#!/bin/sh\nexit 4\n")
    assert config() == 0, capsys.readouterr().err
    assert "inference.vllm.colocate: the environment of" in refused(capsys, COLOCATE, "true")


@pytest.mark.realtime
def test_a_run_that_is_refused_leaves_nothing_behind(place, capsys):
    before = snapshot(place)
    assert main(["rl", "run.toml", "--inference.backend", "vllm", "--inference.vllm.python", "vllm/python"]) == 2
    assert "To share one device" in " ".join(capsys.readouterr().err.split())
    assert snapshot(place) == before


def test_rollouts_ahead_of_a_trainer_that_takes_turns_are_refused(place, capsys):
    said = refused(capsys, COLOCATE, "true", "--orchestrator.max-async-level", "1")
    assert "found orchestrator.max_async_level = 1, expected 0: type orchestrator.max_async_level = 0" in said


@pytest.mark.realtime
def test_sharing_what_is_not_shared_is_said(place, caplog):
    with caplog.at_level(logging.WARNING):
        assert config(COLOCATE, "true", TRAINER, "cuda:1") == 0
    assert "taking turns only costs time; leave out colocate" in caplog.text


@pytest.mark.realtime
def test_a_teacher_that_is_loaded_here_has_a_device_of_its_own(place, capsys, model):
    teacher = f'{{ model = "{model}", device = "cuda" }}'
    opd = ["--orchestrator.training-mode", "opd", "--orchestrator.teacher", teacher, COLOCATE, "true"]
    said = refused(capsys, *opd)
    assert (
        "orchestrator.teacher.device = 'cuda' is CUDA device 0, one of those that inference.vllm takes (0). Type "
        'orchestrator.teacher.device = "cuda:1", or serve it' in said
    )


def test_servers_that_run_for_others_are_not_put_to_sleep(place, capsys, model):
    assert (
        main(
            [
                "inference",
                "run.toml",
                "--inference.backend",
                "vllm",
                "--inference.vllm.python",
                "vllm/python",
                COLOCATE,
                "true",
            ]
        )
        == 2
    )
    assert "colocate is for servers that a run starts" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"urls": ("http://a:1",)}, "cannot put the servers in urls to sleep"),
        ({"weight_transfer": "nccl"}, "the trainer has already left the device"),
    ],
)
def test_keys_that_do_not_go_with_sharing_are_refused(more, said):
    with pytest.raises((ConfigError, ValueError), match=said):
        VllmSettings(colocate=True, **more)
