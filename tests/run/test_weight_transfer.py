"""Where a trainer meets the servers that it sends weights to, and what is refused before anything is started."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from verbatim.config import load_config
from verbatim.config.schema import RunConfig
from verbatim.core.errors import UsageError
from verbatim.inference import weight_group
from verbatim.inference.sending import WeightStore
from verbatim.run.tables import component_tables
from verbatim.run.weight_transfer import check_broadcast, own_address, refuse_unreachable

TOML = """
max_steps = 1
[model]
name = "model"
[trainer]
device = "cpu"
[inference]
backend = "vllm"
[inference.vllm]
weight_transfer = "{transfer}"
{more}
[[orchestrator.train.env]]
id = "guess_number"
"""


@pytest.fixture
def config(tmp_path: Path) -> Any:
    def made(transfer: str = "gloo", more: str = "", *overrides: str) -> RunConfig:
        (tmp_path / "run.toml").write_text(TOML.format(transfer=transfer, more=more))
        return load_config(tmp_path / "run.toml", list(overrides), component_tables())

    return made


@pytest.fixture
def routes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two networks: 10.0.0.x is reached from 10.0.0.1, 10.1.0.x from 10.1.0.1; nothing else."""

    def towards(host: str, port: int) -> str:
        if host == "127.0.0.1":
            return host
        if not host.startswith("10."):
            raise OSError("Network is unreachable")
        return host.rpartition(".")[0] + ".1"

    monkeypatch.setattr(weight_group, "address_towards", towards)


@pytest.mark.parametrize(
    ("urls", "expected"),
    [
        ([], "127.0.0.1"),
        (["http://127.0.0.1:8000"], "127.0.0.1"),
        (["http://10.0.0.7:8000", "http://10.0.0.8:8000"], "10.0.0.1"),
        (["http://localhost:8000", "http://10.0.0.8:8000"], "10.0.0.1"),
    ],
)
def test_the_address_is_that_of_the_route_to_the_servers(config, routes, urls, expected):
    assert own_address(config(more=f"urls = {urls}".replace("'", '"'))) == expected


@pytest.mark.realtime
def test_an_address_that_is_named_is_taken_and_files_need_none(config, routes):
    assert own_address(config(more='transfer_address = "localhost"\nurls = ["http://a:1"]')) == "localhost"
    assert own_address(config("files")) is None


@pytest.mark.realtime
def test_an_address_of_another_host_is_refused_with_what_to_type(config, routes):
    said = rf'transfer_address = "192\.0\.2\.1": the trainer cannot listen there .*its host \({socket.gethostname()}\)'
    with pytest.raises(UsageError, match=said):
        own_address(config(more='transfer_address = "192.0.2.1"'))  # of a network for documentation


@pytest.mark.parametrize(
    ("urls", "said"),
    [
        (
            '["http://10.0.0.7:1", "http://10.1.0.7:1"]',
            r"several addresses .*10\.0\.0\.1, 10\.1\.0\.1.*vllm\.transfer_add",
        ),
        (
            '["http://11.0.0.7:1"]',
            r"no route to .*11\.0\.0\.7: Network is unreachable.*inference\.vllm\.transfer_address",
        ),
    ],
)
def test_servers_without_one_address_of_this_host_are_refused(config, routes, urls, said):
    with pytest.raises(UsageError, match=said):
        own_address(config(more=f"urls = {urls}"))


def test_nccl_without_a_cuda_device_of_the_trainer_is_refused_where_the_trainer_is(config):
    with pytest.raises(UsageError, match=r'weight_transfer = "nccl" connects CUDA devices, and trainer.device = "cpu"'):
        check_broadcast(config("nccl"), is_trainers_host=True)
    assert check_broadcast(config("nccl"), is_trainers_host=False) is not None


def test_a_limit_that_outlasts_the_patience_of_the_other_ranks_is_refused(config):
    """Only where there are others."""
    long = "update_timeout = 600"
    assert check_broadcast(config(more=long), is_trainers_host=True) is not None
    with pytest.raises(UsageError, match=r"vllm\.update_timeout = 600, trainer\.parallel\.deadline = 600.*below"):
        check_broadcast(config("gloo", long, "--trainer.parallel.processes", "2"), is_trainers_host=True)


def test_a_trainer_on_another_host_that_listens_on_loopback_is_refused():
    refuse_unreachable(WeightStore(host="127.0.0.1", port=1, on=socket.gethostname()))
    refuse_unreachable(WeightStore(host="10.0.0.7", port=1, on="elsewhere"))
    with pytest.raises(UsageError, match=r"on host elsewhere .*on 127\.0\.0\.1.*inference\.vllm\.transfer_addres"):
        refuse_unreachable(WeightStore(host="127.0.0.1", port=1, on="elsewhere"))


def test_a_transfer_address_without_a_transfer_is_refused(config):
    with pytest.raises(UsageError, match='applies only to weight_transfer = "nccl" or "gloo", found "files"'):
        config("files", 'transfer_address = "10.0.0.1"')


def test_nccl_with_a_vllm_for_cpus_is_refused(config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    from verbatim.inference.vllm import settings
    from verbatim.run.rollouts import inference_settings

    monkeypatch.setattr(settings, "run_program", lambda *_, **__: SimpleNamespace(returncode=4))
    monkeypatch.setattr(settings.shutil, "which", lambda name: name)
    with pytest.raises(UsageError, match=r'weight_transfer = "nccl": the environment of .* has a vLLM for CPUs'):
        inference_settings(config("nccl")).check()
    inference_settings(config("gloo")).check()
