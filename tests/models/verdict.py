"""Is a model accepted and right, or refused by name? Our trainer, sampler and files against plain `transformers`."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from models.architectures import Architecture, tiny_model
from verbatim.algorithms.losses import LOSSES
from verbatim.config.schema import OptimConfig, TrainerConfig
from verbatim.core.errors import UsageError
from verbatim.core.sampling import SamplingParams
from verbatim.core.types import TrainingSample
from verbatim.inference.embedded.engine import TorchSampler
from verbatim.inference.embedded.settings import TorchSettings
from verbatim.inference.sampler import SampleRequest
from verbatim.models.head import CausalLM
from verbatim.models.loading import load_model
from verbatim.trainer.device_batch import DeviceBatch
from verbatim.trainer.packing import PACKERS
from verbatim.trainer.trainer import Trainer

SEQ_LEN = 72
UPDATES = 2
FLOAT64 = 1e-5
"""Of logprobs, and of gradients over their norm: norms, routers and some softmaxes are float32 in any model."""
FLOAT32 = 5e-3
"""The same where a class does not compute in float64, and between sampler, trainer and files."""


@dataclass
class Verdict:
    """What became of one configuration."""

    architecture: str
    name: str = ""
    """Of its class."""
    trainer: str = ""
    """"trees", "rows" or "refused"."""
    sampler: str = ""
    """"yes" or "refused"."""
    reasons: list[str] = field(default_factory=list)
    """What the refusals said."""
    faults: list[str] = field(default_factory=list)
    """What was accepted and is wrong, or failed otherwise than by a refusal. There must not be any."""
    worst: dict[str, float] = field(default_factory=dict)
    """The largest differences: of logprobs, of gradients over their norm."""

    def hold(self, what: str, difference: float, most: float) -> None:
        """Note a difference, and whether it is a fault."""
        self.worst[what] = max(difference, self.worst.get(what, 0.0))
        if not difference <= most:
            self.faults.append(f"{what} differ by {difference:.2g}")

    def refusing(self, run: Callable[[], Any]) -> Any:
        """What it returns; None where it refused. Anything else that is raised is a fault."""
        try:
            return run()
        except UsageError as error:
            self.reasons.append(str(error))
        except Exception as error:  # noqa: BLE001 - whatever it is, it is a finding
            self.faults.append(f"{type(error).__name__}: {str(error)[:200]}")
        return None


def judge(architecture: Architecture, folder: Path) -> Verdict:
    """Make a tiny model and try everything that it is accepted for."""
    verdict = Verdict(str(architecture))
    try:
        model = tiny_model(architecture)
    except Exception as error:  # noqa: BLE001 - transformers raises whatever it likes
        verdict.trainer = verdict.sampler = "not made"
        verdict.reasons.append(f"{type(error).__name__}: {str(error).strip().splitlines()[0][:160]}")
        return verdict
    verdict.name = type(model).__name__
    model.save_pretrained(folder)
    rng = np.random.default_rng(0)
    samples = branching_samples(rng)
    _judge_packings(verdict, folder, samples)
    _judge_updates(verdict, folder, samples, rng)
    return verdict


def branching_samples(rng: np.random.Generator, vocab_size: int = 96) -> list[TrainingSample]:
    """Two trajectories of samples that share prefixes, each longer than the windows of a tiny model."""
    trunk, samples = rng.integers(0, vocab_size, 22), []
    for name in "ab":
        history = np.concatenate([trunk, rng.integers(0, vocab_size, 7)])
        for turn in range(2):
            ids = np.concatenate([history, rng.integers(0, vocab_size, 9 + 4 * turn)]).astype(np.int32)
            samples.append(_sample(ids, name, len(history)))
            history = ids[:-2]
    samples.append(_sample(rng.integers(0, vocab_size, 41).astype(np.int32), "c", 3))
    return samples


def _sample(ids: np.ndarray, trajectory: str, first: int) -> TrainingSample:
    mask = np.arange(len(ids)) >= first
    return TrainingSample(
        token_ids=ids,
        loss_mask=mask,
        logprobs=np.where(mask, -4.0, np.nan).astype(np.float32),
        advantages=np.where(mask, 1.0 if trajectory == "a" else -0.5, 0).astype(np.float32),
        chunk_ids=np.where(mask, 0, -1).astype(np.int32),
        policy_versions=np.where(mask, 0, -1).astype(np.int32),
        temperatures=np.ones(len(ids), dtype=np.float32),
        trajectory_id=trajectory,
    )


# ---- packing against plain transformers


def _judge_packings(verdict: Verdict, folder: Path, samples: list[TrainingSample]) -> None:
    """What the trainer takes, and its logprobs and gradients: all together as rows, as trees, and one at a time."""
    trainer = verdict.refusing(lambda: _trainer(folder, "auto"))
    verdict.trainer = "refused" if trainer is None else "rows" if trainer.packer.packing == "rows" else "trees"
    if trainer is None:
        return
    if trainer.packer.packing == "rows":
        trees = verdict.refusing(lambda: _trainer(folder, "tree"))
        if trees is not None:
            verdict.faults.append("auto falls back to rows, but trees are accepted")
    packings = ["rows", "tree"] if verdict.trainer == "trees" else ["rows"]
    dtype, tolerance = torch.float64, FLOAT64
    try:
        own = plain(folder, dtype)
        expected, expected_grad = plain_gradient(own, samples)
    except (RuntimeError, TypeError, ValueError):
        dtype, tolerance = torch.float32, FLOAT32
        own = plain(folder, dtype)
        reference = verdict.refusing(lambda: plain_gradient(own, samples))
        if reference is None:
            return
        expected, expected_grad = reference
    verdict.worst["precision"] = 64.0 if dtype is torch.float64 else 32.0
    ours = load_model(folder, only_attention=False)
    ours.to(dtype)
    _eager_experts(ours, dtype)
    lm = CausalLM(ours)
    for packing in packings:
        for title, batches in ((packing, [samples]), (f"{packing} one at a time", [[s] for s in samples])):
            found = verdict.refusing(lambda p=packing, b=batches: packed_gradient(lm, b, p, samples))
            if found is not None:
                logprobs, grad = found
                verdict.hold(f"logprobs of {title}", difference(logprobs, expected), tolerance)
                verdict.hold(f"gradients of {title}", gradient_difference(grad, expected_grad), tolerance * 10)


def _trainer(folder: Path, packing: str) -> Trainer:
    config = TrainerConfig(optim=OptimConfig(lr=1e-2), device="cpu", packing=packing)
    return Trainer(folder, config, loss=LOSSES["default"], total_optimizer_steps=UPDATES, seq_len=SEQ_LEN)


def plain(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The model as `transformers` runs it."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    _eager_experts(model, dtype)
    return model


def _eager_experts(model: Any, dtype: torch.dtype) -> None:
    """The fused product of experts has no float64."""
    if dtype is torch.float64 and hasattr(model.config.get_text_config(), "_experts_implementation"):
        model.set_experts_implementation("eager")


def plain_logprobs(model: Any, ids: np.ndarray) -> Tensor:
    """log p(token t | tokens before) for t >= 1, one sequence by itself."""
    tokens = torch.from_numpy(np.array(ids)).long()
    logits = model(input_ids=tokens[None], use_cache=False).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]


def plain_gradient(model: Any, samples: list[TrainingSample]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Logprobs of what is trained, and the gradient of their sum, each weighted by its place."""
    logprobs, total = [], 0.0
    for sample in samples:
        (at,) = np.nonzero(sample.loss_mask)
        found = plain_logprobs(model, sample.token_ids)[at - 1]
        logprobs.append(found.detach())
        total = total + (found * torch.cos(torch.from_numpy(at).to(found.dtype))).sum()
    return logprobs, _backward(model, total)


def packed_gradient(
    lm: CausalLM, batches: list[list[TrainingSample]], packing: str, samples: list[TrainingSample]
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The same by our packing."""
    found = {id(sample): torch.zeros(0) for sample in samples}
    total: Any = 0.0
    for batch in batches:
        named = [_renamed(sample, i) for i, sample in enumerate(batch)]
        rows: list[list[tuple[int, Tensor]]] = [[] for _ in batch]
        for micro_batch in PACKERS[packing](named, micro_batch_tokens=10_000, keep_whole=False):
            on_device = DeviceBatch(micro_batch, torch.device("cpu"))
            logits = lm.logits(on_device.hidden(lm))
            logprobs = logits.log_softmax(-1).gather(1, on_device.target_ids_M[:, None])[:, 0]
            total = total + (logprobs * torch.cos(on_device.offsets_M.to(logprobs.dtype))).sum()
            targets = micro_batch.targets
            for at, (number, offset) in enumerate(zip(targets.trajectories, targets.offsets, strict=True)):
                rows[int(micro_batch.trajectory_ids[int(number)])].append((int(offset), logprobs[at].detach()))
        for sample, row in zip(batch, rows, strict=True):
            found[id(sample)] = torch.stack([value for _, value in sorted(row, key=lambda pair: pair[0])])
    return [found[id(sample)] for sample in samples], _backward(lm.model, total)


def _renamed(sample: TrainingSample, number: int) -> TrainingSample:
    return TrainingSample(
        **{**{name: getattr(sample, name) for name in sample.__dataclass_fields__}, "trajectory_id": str(number)}
    )


def _backward(model: Any, total: Any) -> dict[str, Tensor]:
    total.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def difference(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest one, infinite where a number is missing or is none."""
    if [len(x) for x in found] != [len(x) for x in expected]:
        return float("inf")
    gaps = torch.cat([(a.double() - b.double()).abs() for a, b in zip(found, expected, strict=True)])
    return float(gaps.nan_to_num(nan=torch.inf).max())


def gradient_difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Over the parameters, norm of the difference over the norm, at least a hundredth of the largest norm."""
    floor = 1e-2 * max(float(g.norm()) for g in expected.values())
    worst = 0.0
    for name in found.keys() | expected.keys():
        zero = torch.zeros(())
        a, b = found.get(name, zero), expected.get(name, zero)
        worst = max(worst, float((a - b).norm().nan_to_num(nan=torch.inf)) / max(float(b.norm()), floor))
    return worst


# ---- sampler against trainer over weight updates, and what is saved


def _judge_updates(verdict: Verdict, folder: Path, samples: list[TrainingSample], rng: np.random.Generator) -> None:
    trainer = None if verdict.trainer == "refused" else verdict.refusing(lambda: _trainer(folder, "auto"))
    config = TorchSettings(max_batch_size=4, device="cpu", prefill_chunk=13)
    sampler = verdict.refusing(lambda: TorchSampler(folder, config=config, context_length=SEQ_LEN))
    verdict.sampler = "refused" if sampler is None else "yes"
    try:
        _judge_sampled(verdict, sampler, trainer, folder, rng)
        for version in range(1, 1 + (UPDATES if trainer is not None else 0)):
            saved = folder.parent / f"v{version}"
            if verdict.refusing(partial(_train, trainer, samples, saved)) is None:
                verdict.faults.append("a step of an accepted model was refused")
                return
            _judge_saved(verdict, trainer, saved, samples)
            if sampler is not None:
                verdict.refusing(lambda to=saved, v=version: asyncio.run(sampler.update_weights(to, v)))
                if sampler.policy_version != version:
                    verdict.faults.append("the sampler did not take the new weights")
            _judge_sampled(verdict, sampler, trainer, saved, rng)
    finally:
        if sampler is not None:
            asyncio.run(sampler.close())


def _train(trainer: Trainer, samples: list[TrainingSample], folder: Path) -> dict[str, float]:
    metrics = trainer.train_batch(samples)
    trainer.save_weights(folder)
    return metrics


def _judge_sampled(
    verdict: Verdict, sampler: TorchSampler | None, trainer: Trainer | None, folder: Path, rng: np.random.Generator
) -> None:
    """What is sampled has the logprobs of plain `transformers` on the same weights, and of the trainer."""
    if sampler is None:
        return
    prompts = [rng.integers(0, 96, length).astype(np.int32) for length in (5, 19, 30)]
    sampled = verdict.refusing(lambda: asyncio.run(_generate(sampler, prompts)))
    if sampled is None:
        verdict.faults.append("an accepted model was not sampled from")
        return
    own, recorded = plain(folder), [logprobs for _, logprobs in sampled]
    firsts = [len(prompt) for prompt in prompts]
    with torch.no_grad():
        expected = [plain_logprobs(own, ids)[first - 1 :] for first, (ids, _) in zip(firsts, sampled, strict=True)]
    verdict.hold("sampled logprobs", difference(recorded, expected), FLOAT32)
    if trainer is not None:
        asked = [_sample(ids, str(i), first) for i, (first, (ids, _)) in enumerate(zip(firsts, sampled, strict=True))]
        scored = verdict.refusing(lambda: trainer.logprobs(asked)) or [np.zeros(0)] * len(asked)
        by_trainer = [torch.from_numpy(x[first:]) for first, x in zip(firsts, scored, strict=True)]
        verdict.hold("logprobs of sampler and trainer", difference(recorded, by_trainer), FLOAT32)


async def _generate(sampler: TorchSampler, prompts: list[np.ndarray]) -> list[tuple[np.ndarray, Tensor]]:
    """Of each prompt: prompt and completion, and the recorded logprobs of the latter."""
    params = SamplingParams(max_tokens=24)
    done = await asyncio.gather(
        *(
            sampler.generate(SampleRequest(prompt_ids=prompt, params=params, seed=i, session=str(i)))
            for i, prompt in enumerate(prompts)
        )
    )
    return [
        (np.concatenate([prompt, c.ids]), torch.from_numpy(c.logprobs.copy()))
        for prompt, c in zip(prompts, done, strict=True)
    ]


@torch.no_grad()
def _judge_saved(verdict: Verdict, trainer: Trainer, folder: Path, samples: list[TrainingSample]) -> None:
    """What was written, as `transformers` loads it, has the logprobs of what was trained."""
    scored = verdict.refusing(lambda: trainer.logprobs(samples))
    own = verdict.refusing(lambda: plain(folder))
    if scored is None or own is None:
        return
    expected = [plain_logprobs(own, s.token_ids)[np.nonzero(s.loss_mask)[0] - 1] for s in samples]
    found = [torch.from_numpy(x[s.loss_mask]) for x, s in zip(scored, samples, strict=True)]
    verdict.hold("saved logprobs", difference(found, expected), FLOAT32)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Refusals are returned, so what the library logs of them need not be shown meanwhile."""
    loggers = [logging.getLogger(name) for name in ("verbatim", "transformers")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
