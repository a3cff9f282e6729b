"""Low-rank adapters on a vLLM server, over a double of its routes: a new name for each version, proven before it is
used."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from inference.vllm.lora_double import RANK, LoraDouble
from inference.vllm.tiny_model import TinyModel
from inference.vllm.vllm_double import serving
from verbatim.core.errors import ModelError, SamplerFault, UsageError
from verbatim.inference import BackendInputs, SampleRequest, SamplingParams
from verbatim.inference.vllm.command import server_command, server_environment
from verbatim.inference.vllm.digests import PublishedFolder, TensorPiece, WorkerReport, digest
from verbatim.inference.vllm.replica import VllmReplica
from verbatim.inference.vllm.servers import vllm_servers
from verbatim.inference.vllm.settings import VllmSettings
from verbatim.run.orchestrator.weight_sync import WeightSync
from verbatim.trainer.transport import StepReport
from verbatim.trainer.transport.canary import Probes, probe_sequences
from waiting import HANGS, until

pytestmark = [pytest.mark.realtime, pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:peft")]
FIRST_B = "base_model.model.model.layers.0.self_attn.k_proj.lora_B.weight"


class AdaptedModel(TinyModel):
    """A trainer whose steps publish adapters of one base model, by `peft`."""

    def __init__(self, folder: Path, *, alpha: float = 4.0) -> None:
        import peft

        super().__init__(folder, tied=True)
        config = peft.LoraConfig(r=RANK, lora_alpha=alpha, target_modules="all-linear", task_type="CAUSAL_LM")
        self.adapted = peft.get_peft_model(self.model, config).eval()
        self.adapted.peft_config["default"].base_model_name_or_path = str(self.published)
        self.num_steps = 0

    def adapter_step(self, size: float = 0.05) -> Path:
        """Change every number of the adapter by about `size`, and publish it."""
        self.num_steps += 1
        generator = torch.Generator().manual_seed(self.num_steps)
        with torch.no_grad():
            for name, parameter in self.adapted.named_parameters():
                if "lora_" in name:
                    parameter.add_(torch.randn(parameter.shape, generator=generator) * size)
        path = self._folder / f"adapter{self.num_steps}"
        self.adapted.save_pretrained(path)
        return path

    def adapted_logprobs(self, ids: np.ndarray) -> np.ndarray:
        """Those of base and adapter, not merged: float32 [L - 1]."""
        tokens = torch.from_numpy(ids.astype(np.int64))
        with torch.no_grad():
            logits = self.adapted(input_ids=tokens[None]).logits[0, :-1].double()
        return logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0].float().numpy()

    def probes(self) -> Probes:
        ids = probe_sequences(self.vocab_size, 400)
        return Probes(token_ids=ids, logprobs=tuple(map(self.adapted_logprobs, ids)))


@pytest.fixture
def trainer(tmp_path: Path) -> AdaptedModel:
    return AdaptedModel(tmp_path / "weights")


@contextlib.asynccontextmanager
async def connected(trainer: AdaptedModel, **settings: Any) -> AsyncIterator[tuple[LoraDouble, VllmReplica]]:
    double = LoraDouble(trainer.published)
    async with serving(double) as url:
        replica = VllmReplica(
            url,
            **{
                "name": "replica 3",
                "model": "policy",
                "context_length": 512,
                "vocab_size": trainer.vocab_size,
                "policy_version": 0,
                "phase_timeout": HANGS,
                "adapter_rank": RANK,
                **settings,
            },
        )
        try:
            yield double, replica
        finally:
            await replica.close()


def request(length: int = 20, **params: Any) -> SampleRequest:
    ids = np.random.default_rng(length).integers(0, 280, length, dtype=np.int32)
    return SampleRequest(prompt_ids=ids, params=SamplingParams(**params), seed=0)


async def test_logprobs_and_versions_are_the_trainers_after_every_update(trainer: AdaptedModel):
    async with connected(trainer) as (_, replica):
        for version in range(4):
            if version:
                await replica.update_weights(trainer.adapter_step(), version)
            asked = request(max_tokens=12)
            found = await replica.generate(asked)
            whole = np.concatenate([asked.prompt_ids, found.ids])
            expected = trainer.adapted_logprobs(whole)[len(asked.prompt_ids) - 1 :]
            assert np.abs(found.logprobs - expected).max() < 5e-5
            assert found.policy_versions.tolist() == [version] * 12
            assert replica.policy_version == version
            scored = await replica.prompt_logprobs(whole)
            assert np.abs(scored[1:] - trainer.adapted_logprobs(whole)).max() < 5e-5


async def test_each_version_has_a_name_of_its_own_and_the_former_ones_are_unloaded(trainer: AdaptedModel):
    async with connected(trainer) as (double, replica):
        for version in (1, 2, 3):
            await replica.update_weights(trainer.adapter_step(), version)
            await replica.generate(request(max_tokens=2))
        again = trainer.adapter_step()
        await replica.update_weights(again, 4)
        await replica.update_weights(again, 4)  # as after a failed check: the version is the same, the name is not
        assert len(set(double.names)) == 3
        assert [name.partition("-")[0] for name in double.names] == ["v1", "v2", "v3"]
        assert [name.partition("-")[0] for name in double.unloaded] == ["v1", "v2", "v3", "v4"]
        assert len(set(double.unloaded)) == 4
        await replica.generate(request(max_tokens=2))
        assert list(double.adapters) == [double.names[-1]]


async def test_the_server_samples_on_while_it_loads(trainer: AdaptedModel):
    async with connected(trainer) as (double, replica):
        await replica.update_weights(trainer.adapter_step(), 1)
        assert not {"/pause", "/start_weight_update", "/update_weight_version"} & set(double.calls)
        assert double.version == "default"


async def test_a_request_in_flight_ends_with_the_adapter_that_it_began_with(trainer: AdaptedModel):
    async with connected(trainer) as (double, replica):
        await replica.update_weights(trainer.adapter_step(), 1)
        asked = request(max_tokens=30)
        before = trainer.adapted_logprobs
        double.hold(after=3)
        running = asyncio.ensure_future(replica.generate(asked))
        await until(lambda: double.num_held)
        old_names = list(double.adapters)
        reference = {name: value.detach().clone() for name, value in trainer.adapted.named_parameters()}
        await replica.update_weights(trainer.adapter_step(), 2)
        assert not running.done()
        assert set(old_names) < set(double.adapters)  # still loaded
        double.release()
        found = await running
        assert found.policy_versions.tolist() == [1] * 30
        with torch.no_grad():
            for name, value in trainer.adapted.named_parameters():
                value.copy_(reference[name])
        whole = np.concatenate([asked.prompt_ids, found.ids])
        assert np.abs(found.logprobs - before(whole)[len(asked.prompt_ids) - 1 :]).max() < 5e-5
        assert (await replica.generate(request(max_tokens=3))).policy_versions.tolist() == [2] * 3
        await replica.update_weights(trainer.adapter_step(), 3)
        assert not set(old_names) & set(double.adapters)


@pytest.mark.parametrize("size", [5e-2, 1e-6])
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("one number", r"other values: .*layers\.0\.self_attn\.k_proj\.lora_B"),
        ("a layer without", r"never loaded: .*layers\.1\.mlp\.up_proj\.lora_A.*, .*lora_B"),
    ],
)
async def test_a_wrong_adapter_is_named_and_never_sampled_from(trainer: AdaptedModel, fault, said, size):
    async with connected(trainer) as (double, replica):
        await replica.update_weights(trainer.adapter_step(), 1)
        double.fault = fault
        path = trainer.adapter_step(size)
        with pytest.raises(SamplerFault, match=f"^replica 3: .*{said}"):
            await replica.update_weights(path, 2)
        assert (await replica.generate(request(max_tokens=2))).policy_versions.tolist() == [1, 1]
        assert len(double.adapters) == 1
        double.fault = ""
        await replica.update_weights(path, 2)
        assert (await replica.generate(request(max_tokens=2))).policy_versions.tolist() == [2, 2]


async def test_the_canary_passes_and_sees_a_server_that_has_another_adapter(trainer: AdaptedModel):
    async with connected(trainer) as (double, replica):
        sync = WeightSync(replica, trainer.probes(), 1e-4)
        await sync.check_first()
        for version in (1, 2):
            path = trainer.adapter_step()
            await sync.load(
                StepReport(version=version, weights=path, num_trained_tokens=1, metrics={}, probes=trainer.probes())
            )
        ((adapter, held),) = double.adapters.items()
        double.adapters[adapter] = {name: tensor + 0.05 for name, tensor in held.items()}
        with pytest.raises(Exception, match="does not hold policy version 2"):
            await sync.check_first()


async def test_a_folder_that_is_damaged_never_reaches_the_server(trainer: AdaptedModel, tmp_path: Path):
    async with connected(trainer) as (double, replica):
        await replica.update_weights(trainer.adapter_step(), 1)
        path = shutil.copytree(trainer.adapter_step(), tmp_path / "nan")
        tensors = load_file(path / "adapter_model.safetensors")
        tensors[FIRST_B][0, 0] = torch.nan
        save_file(tensors, path / "adapter_model.safetensors")
        calls = len(double.calls)
        with pytest.raises(ModelError, match=r"k_proj\.lora_B.* not finite"):
            await replica.update_weights(path, 2)
        assert len(double.calls) == calls


async def test_what_the_server_says_against_an_adapter_is_passed_on(trainer: AdaptedModel):
    async with connected(trainer) as (double, replica):
        path = trainer.adapter_step()
        double.fails_at = "/v1/load_lora_adapter"
        with pytest.raises(SamplerFault, match=r"replica 3: load adapter: .*it burns"):
            await replica.update_weights(path, 1)


async def test_a_server_without_adapters_is_refused_with_the_options_to_add(trainer: AdaptedModel):
    async with connected(trainer) as (double, replica):
        await replica.check_server()
        double.facts["max_lora_rank"] = None
        with pytest.raises(UsageError, match=r"--enable-lora --max-lora-rank 8 .*VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"):
            await replica.check_server()
        double.facts.update(max_lora_rank=RANK, adapts_head=True)
        with pytest.raises(UsageError, match=r"adapts the output head.*add --lora-target-modules"):
            await replica.check_server()
    async with connected(trainer, adapter_rank=None) as (_, replica):
        with pytest.raises(UsageError, match="leave out --enable-lora"):
            await replica.check_server()


async def test_the_base_model_is_what_the_server_was_started_with(trainer: AdaptedModel):
    """Version 0, and a server that is started again before the first update."""
    async with connected(trainer) as (double, replica):
        await replica.prove_path(trainer.published)
        assert "/update_weights" not in double.calls
        await replica.generate(request(max_tokens=1))
        await replica.update_weights(trainer.adapter_step(), 1)
        await replica.update_weights(trainer.published, 0)
        await replica.generate(request(max_tokens=1))
        assert double.names == ["policy", "policy"]
        assert replica.policy_version == 0


def test_the_command_has_what_adapters_need(trainer: AdaptedModel):
    made = server_command(VllmSettings(), model=trainer.published, port=1, context_length=8, adapter_rank=12)
    assert made[made.index("--enable-lora") + 1 :][:2] == ["--max-lora-rank", "16"]
    layers = made[made.index("--lora-target-modules") + 1 :]
    assert layers[:7] == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert "lm_head" not in made
    assert "--enable-lora" not in server_command(VllmSettings(), model="m", port=1, context_length=8)
    environment = server_environment(VllmSettings(), 0, is_local_model=True)
    assert environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    with pytest.raises(UsageError, match=r"trainer.lora.r = 600, but vLLM supports ranks up to 512"):
        server_command(VllmSettings(), model=trainer.published, port=1, context_length=8, adapter_rank=600)


def test_nccl_and_sleeping_servers_are_refused(trainer: AdaptedModel):
    inputs = BackendInputs(model=trainer.published, context_length=64, adapter_rank=8)
    with pytest.raises(UsageError, match='"nccl" sends full weights'):
        vllm_servers(inputs, VllmSettings(weight_transfer="nccl"))
    with pytest.raises(UsageError, match="colocate puts servers to sleep"):
        vllm_servers(inputs, VllmSettings(colocate=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_digest_is_that_of_what_vllm_holds(trainer: AdaptedModel, dtype: str):
    """It loads B in its number format and multiplies it by alpha / r = 0.3 there."""
    path = trainer.adapter_step()
    config = json.loads((path / "adapter_config.json").read_text())
    (path / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": 2.4}))
    held = load_file(path / "adapter_model.safetensors")[FIRST_B].to(getattr(torch, dtype))
    held *= 2.4 / RANK
    folder = PublishedFolder(path)
    piece = TensorPiece(name=FIRST_B, dim=0, start=0, shape=tuple(held.shape), dtype=dtype)
    others = tuple(name for name in folder.shapes if name != FIRST_B)

    def fault_of(tensor: torch.Tensor) -> str | None:
        digests = ((piece, digest(tensor), "kernel"),)
        return folder.compare([WorkerReport(error=None, digests=digests, stale=(), unmapped=others)]).fault

    assert fault_of(held) is None
    assert fault_of(held / 0.3) == f"other values: {FIRST_B}"
