"""What the processes of tests do together: every function is called on all ranks, with the same arguments."""

import functools
import gc
import os
import weakref
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from trainer_helpers import cut_samples, make_batch, make_sample, routed_samples, shared_prefixes
from transformers import AutoModelForCausalLM

from verbatim.algorithms.losses import LOSSES, Loss
from verbatim.config.schema import OptimConfig, TrainerConfig
from verbatim.core.errors import RunStopped, SamplerFault, UsageError
from verbatim.trainer import optim
from verbatim.trainer import trainer as trainer_module
from verbatim.trainer.optimizer_state import local
from verbatim.trainer.parallel import failures, publish
from verbatim.trainer.parallel.sequence import SequenceGroup
from verbatim.trainer.trainer import Trainer
from waiting import HANGS, wait_until

ZERO = 1e-12
"""Gradients below this share of the largest one are rounding errors of 0."""
OPTIM = OptimConfig(lr=1e-2, weight_decay=0.1, max_grad_norm=0.5)


def trainer_of(folder, ranks, *, loss="default", dtype="float64", compute="float32", frozen=None, **settings):
    config = TrainerConfig(
        **{"optim": OPTIM, "device": "cpu", "dtype": compute, "logprob_chunk": 7, "packing": "rows", **settings}
    )
    found = loss
    if not isinstance(loss, Loss):
        name, parameters = (loss, {}) if isinstance(loss, str) else (loss["type"], {"kl_ref_tau": loss["kl_ref_tau"]})
        found = replace(LOSSES[name], parameters=parameters) if parameters else LOSSES[name]
    return Trainer(folder, config, loss=found, total_optimizer_steps=50, dtype=dtype, ranks=ranks, frozen=frozen)


def by_one(settings):
    """The same settings for one process, uncompiled."""
    return {key: value for key, value in settings.items() if key not in ("parallel", "compile")}


def batch_of(kind, seed=0):
    """Batches by name, so that a job's arguments are plain values."""
    if kind == "shared":
        return shared_prefixes(seed)
    if kind == "taught":
        return [_taught(sample, seed + i) for i, sample in enumerate(shared_prefixes(seed))]
    if kind == "cut":
        return cut_samples(seed)
    if kind == "routed":
        return routed_samples(0.8)
    if kind == "one":
        return [make_sample(9, "a", seed=seed)]
    if kind == "random":
        rng = np.random.default_rng(seed)
        count = int(rng.integers(1, 9))
        return [make_sample(int(rng.integers(2, 40)), f"t{i // 2}", seed=seed * 100 + i, chunk=i) for i in range(count)]
    return make_batch(seed)


def _taught(sample, seed):
    """The sample with a teacher's logprobs."""
    values = -4 + 0.3 * np.random.default_rng(seed).standard_normal(len(sample))
    return replace(sample, logprob_streams={"teacher": np.where(sample.loss_mask, values, 0).astype(np.float32)})


NOTED = weakref.WeakKeyDictionary()
"""By model: the gradients of its optimizer steps."""


def noted_gradients(trainer):
    """The whole gradient of each optimizer step that follows, before it is clipped, by parameter name."""
    trainer_module.clip_gradients = _note_and_clip
    return NOTED.setdefault(trainer.model, [])


def _note_and_clip(model, *rest):
    if model in NOTED:
        NOTED[model].append(
            {
                name: getattr(p.grad, "full_tensor", lambda p=p: p.grad)().clone()
                for name, p in model.named_parameters()
                if p.grad is not None
            }
        )
    return optim.clip_gradients(model, *rest)


def whole(tensor):
    return getattr(tensor, "full_tensor", lambda: tensor)()


def distances(found, expected, zero=0.0):
    """The norm of the difference over the norm for each parameter, with the parameter's name, and its norm as a share
    of the largest. A share below `zero` is a rounding error of 0: such a difference is taken over the largest norm."""
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    norms = {name: float(want.norm()) for name, want in expected.items()}
    largest = max(max(norms.values()), 1e-300)
    for name, want in expected.items():
        assert norms[name] > 0 or found[name].norm() == 0, name
        share = norms[name] / largest
        off = float((found[name] - want).norm()) / max(largest if share < zero else norms[name], 1e-300)
        yield off, name, share


def apart(found, expected):
    """Norm of the difference over the norm, the largest over parameters."""
    return max(off for off, _, _ in distances(found, expected))


def compare(ranks, cases):
    """For each case, how far gradient, metrics and logprobs of these ranks are from those of one process."""
    return [_compare(ranks, **case) for case in cases]


def compare_bfloat16(ranks, cases):
    """`compare`, computed in bfloat16."""
    return [_compare(ranks, compute="bfloat16", dtype="float32", **case) for case in cases]


def compare_compiled(ranks, backend, cases):
    """`compare`, with this backend of torch.compile."""
    with mock.patch.object(torch, "compile", functools.partial(torch.compile, backend=backend)):
        return compare(ranks, cases)


def _compare(ranks, model, batches, **settings):
    trainer = trainer_of(Path(model), ranks, **settings)
    found = noted_gradients(trainer)
    if not ranks.leads:
        ranks.follow(trainer.obey)
        ranks.gather(None)
        return None
    taken = [batch_of(kind, seed) for kind, seed in batches]
    tokens, alone_tokens = [], []
    with mock.patch.object(SequenceGroup, "slice", autospec=True, side_effect=SequenceGroup.slice) as sliced:
        metrics = [trainer.train_batch(batch, tokens.append) for batch in taken]
    assert sliced.called == ("parallel" in settings)
    logprobs, rounded = (trainer.logprobs(taken[0], rounded=rounded) for rounded in (False, True))
    ranks.end()
    alone = trainer_of(Path(model), None, **by_one(settings))
    expected = noted_gradients(alone)
    alone_metrics = [alone.train_batch(batch, alone_tokens.append) for batch in taken]
    alone_logprobs, alone_rounded = (alone.logprobs(taken[0], rounded=rounded) for rounded in (False, True))
    ranks.gather(None)  # the others wait here, not in the next case
    return {
        "gradient": [apart(a, b) for a, b in zip(found, expected, strict=True)],
        "metrics": metrics,
        "alone": alone_metrics,
        "tokens": max(_tokens_apart(a, b) for a, b in zip(tokens, alone_tokens, strict=True)),
        "logprobs": _logprobs_apart(logprobs, alone_logprobs),
        "rounded": _logprobs_apart(rounded, alone_rounded),
    }


def _logprobs_apart(found, expected):
    return max(float(np.nanmax(np.abs(a - b))) for a, b in zip(found, expected, strict=True))


def _tokens_apart(found, expected):
    """The largest difference of what was computed for a trained token."""
    pairs = ((getattr(found, name), getattr(expected, name)) for name in ("logprobs", "gradients"))
    return max(float(np.max(np.abs(a - b))) for a, b in pairs)


def own_weights_as_reference(ranks, model, settings):
    """`ref_kl` of optimizer steps whose reference has the policy's own weights: the learning rate is 0."""
    trainer = trainer_of(
        Path(model),
        ranks,
        compute="bfloat16",
        dtype="float32",
        frozen={"reference": model},
        loss={"type": "default", "kl_ref_tau": 0.5},
        optim=OptimConfig(lr=1e-30, weight_decay=0.0),
        **settings,
    )
    if not ranks.leads:
        ranks.follow(trainer.obey)
        return None
    found = [trainer.train_batch(batch_of(kind, seed))["ref_kl"] for kind, seed in (("usual", 0), ("shared", 1))]
    ranks.end()
    return found


def campaign(ranks, cases, seeds):
    """The largest difference of a gradient, and of a metric, from those of one process: by case, over seeds."""
    worst = []
    for case in cases:
        settings = {key: value for key, value in case.items() if key not in ("model", "batches")}
        optim = OptimConfig(lr=1e-9)
        trainer = trainer_of(Path(case["model"]), ranks, optim=optim, **settings)
        found = noted_gradients(trainer)
        if not ranks.leads:
            ranks.follow(trainer.obey)
            ranks.gather(None)
            continue
        alone = trainer_of(Path(case["model"]), None, optim=optim, **by_one(settings))
        expected = noted_gradients(alone)
        figures = {"gradient": (0.0, "", 0.0), "metrics": 0.0, "steps": 0}
        for seed in seeds:
            for kind in case["batches"]:
                batch = batch_of(kind, seed)
                metrics, alone_metrics = trainer.train_batch(batch), alone.train_batch(batch)
                for name in ("loss", "grad_norm", "entropy", "trained_tokens"):
                    apart_by = abs(metrics[name] - alone_metrics[name]) / max(abs(alone_metrics[name]), 1e-9)
                    figures["metrics"] = max(figures["metrics"], apart_by)
            # A batch of two-token samples has no gradient of queries and keys but rounding errors of 0.
            figures["gradient"] = max(
                figures["gradient"],
                *(parameter for pair in zip(found, expected, strict=True) for parameter in distances(*pair, ZERO)),
            )
            figures["steps"] += len(found)
            assert len(found) == len(expected)
            found.clear()
            expected.clear()
        ranks.end()
        ranks.gather(None)
        worst.append(figures)
    return worst


def first_trees(ranks, model, sequence):
    """The figure that says whether trees were given up, where they are tried before the first batch of them."""
    trainer = trainer_of(Path(model), ranks, packing="tree", parallel={"sequence": sequence})
    if ranks.leads:
        metrics = trainer.train_batch(batch_of("shared"))
        ranks.end()
        return [trainer.packer.trees_are_right, trainer.packer.packing, metrics["packing/tree"]]
    ranks.follow(trainer.obey)
    return None


def storage(ranks, model, frozen):
    """Bytes of parameters, gradients and optimizer state on each rank, and what one process has; the largest layer.

    While the models are loaded, no rank has a tensor that is larger than its rows of it.
    """
    with mock.patch.object(AutoModelForCausalLM, "from_pretrained", side_effect=AssertionError("loaded whole")):
        trainer = trainer_of(Path(model), ranks, frozen=frozen)
    held = []
    zero_grad = trainer.optimizer.zero_grad

    def count(**arguments):
        state = [t for values in trainer.optimizer.state.values() for t in values.values()]
        tensors = [x for p in trainer.models.parameters() for x in (p, p.grad)] + state
        held.append(sum(local(t).nbytes for t in tensors if t is not None))
        zero_grad(**arguments)

    trainer.optimizer.zero_grad = count
    layer = sum(p.numel() * 8 for p in trainer.model.model.layers[0].parameters())
    parameters = sum(p.numel() for p in trainer.model.parameters()) * 8
    held_frozen = sum(p.numel() for p in trainer.models.parameters()) * 8 - parameters
    if ranks.leads:
        trainer.train_batch(make_batch())
        ranks.end()
    else:
        ranks.follow(trainer.obey)
    return {"held": ranks.gather(held[0]), "layer": layer, "alone": 4 * parameters + held_frozen}


def save_and_load(ranks, model, folder, **settings):
    """Train two batches and save; train a third one, and save the weights again."""
    folder = Path(folder)
    trainer = trainer_of(Path(model), ranks, **settings)
    if ranks is not None and not ranks.leads:
        ranks.follow(trainer.obey)
        return None
    for seed in (0, 1):
        trainer.train_batch(make_batch(seed))
    trainer.save_weights(folder / "weights")
    trainer.save_state(folder / "trainer")
    metrics = trainer.train_batch(make_batch(2))
    trainer.save_weights(folder / "next")
    if ranks is not None:
        ranks.end()
    return metrics


def save_adapters(ranks, model, folder, lora):
    """`save_and_load` of low-rank adapters."""
    return save_and_load(ranks, model, folder, lora=lora)


def resume_adapters(ranks, model, folder, out, lora):
    """Take the next optimizer step after what `save_adapters` saved; or say why it is refused."""
    trainer = trainer_of(Path(model), ranks, lora=lora)
    if ranks is not None and not ranks.leads:
        ranks.follow(trainer.obey)
        return None
    said = None
    try:
        trainer.load_adapters(Path(folder) / "weights")
    except UsageError as error:
        said = str(error)
    else:
        trainer.load_state(Path(folder) / "trainer")
    metrics = trainer.train_batch(make_batch(2))
    trainer.save_weights(Path(out))
    if ranks is not None:
        ranks.end()
    return said or metrics


def save_in_small_files(ranks, model, out):
    """Save a model's weights, a layer in each file."""
    publish.SMALL_FILE = 1
    trainer = trainer_of(Path(model), ranks, dtype="float32")
    if ranks.leads:
        trainer.save_weights(Path(out))
        ranks.end()
    else:
        ranks.follow(trainer.obey)


class GlooReceivers:
    """Stands for NCCL: broadcasts to one other process, and counts the bytes that are gathered at one time."""

    def __init__(self, store):
        self.group = dist.ProcessGroupGloo(dist.FileStore(store, 2), 0, 2, timedelta(seconds=HANGS))
        self.names, self.alive, self.most = [], [], 0

    def send(self, name, tensor):
        self.group.broadcast([tensor]).wait()
        self.names.append(name)
        gc.collect()  # a group's futures hold their tensors in cycles
        self.alive = [ref for ref in self.alive if ref() is not None] + [weakref.ref(tensor)]
        self.most = max(self.most, sum(ref().nbytes for ref in self.alive))


def send(ranks, model, store, out):
    """Train a batch, save the weights and send them; the names that were sent, and the most bytes of tensors that
    were sent and are still held."""
    trainer = trainer_of(Path(model), ranks, dtype="float32")
    if not ranks.leads:
        ranks.follow(trainer.obey)
        return None
    trainer.train_batch(make_batch())
    trainer.save_weights(Path(out))
    receivers = GlooReceivers(store)
    trainer.send_weights(receivers)
    ranks.end()
    return [receivers.names, receivers.most]


class FailingReceivers:
    """Take some tensors, and then fail."""

    def __init__(self, error, after):
        self.error, self.after, self.names = error, after, []

    def send(self, name, tensor):
        if len(self.names) == self.after:
            raise self.error
        self.names.append(name)


def send_in_vain(ranks, model, out):
    """What failing receivers raise, and how many tensors they took; then a batch is trained, and the weights saved."""
    trainer = trainer_of(Path(model), ranks, dtype="float32")
    if not ranks.leads:
        ranks.follow(trainer.obey)
        return None
    found = []
    for error, after in (
        (SamplerFault("replica 1 is gone"), 3),
        (RuntimeError("NCCL error: remote process exited"), 0),
        (MemoryError("1 GiB"), 5),
    ):
        receivers = FailingReceivers(error, after)
        try:
            trainer.send_weights(receivers)
        except SamplerFault as fault:
            found.append([str(fault), len(receivers.names)])
    trainer.train_batch(make_batch())
    trainer.save_weights(Path(out))
    ranks.end()
    return found


def die_in_send(ranks, model):
    """What rank 0 hears where rank 1 fails while weights are sent, and how many tensors were."""
    trainer = trainer_of(Path(model), ranks, dtype="float32")
    if not ranks.leads:
        assert ranks.next_order()["do"] == "send_weights"
        ranks.failures.tell(MemoryError("1 GiB"))
        os._exit(1)
    receivers = FailingReceivers(None, after=-1)
    try:
        trainer.send_weights(receivers)
    except RunStopped as error:
        return [str(error), len(receivers.names)]
    return None


def resume(ranks, folder, out):
    """Take the next optimizer step after what `save_and_load` saved, and save the weights."""
    trainer = trainer_of(Path(folder) / "weights", ranks)
    if ranks is not None and not ranks.leads:
        ranks.follow(trainer.obey)
        return None
    trainer.load_state(Path(folder) / "trainer")
    metrics = trainer.train_batch(make_batch(2))
    trainer.save_weights(Path(out))
    if ranks is not None:
        ranks.end()
    return metrics


def _poisoned(inputs):
    out = LOSSES["default"](inputs)
    bad = bool((inputs.chunk_ids == 3).any())
    return replace(out, loss=out.loss * (float("nan") if bad else 1.0))


def _refusing(inputs):
    if bool((inputs.chunk_ids == 3).any()):
        raise ValueError("no such chunk")
    return LOSSES["default"](inputs)


def bad_losses(ranks, model, sequence=1):
    """What a loss that fails on one rank's trajectories raises, and whether the ranks go on together."""
    said = []
    for function, good in ((_poisoned, 1), (_refusing, 1)):
        loss = Loss(function, level="sequence")
        trainer = trainer_of(Path(model), ranks, loss=loss, micro_batch_tokens=20, parallel={"sequence": sequence})
        if not ranks.leads:
            ranks.follow(trainer.obey)
            ranks.gather(None)
            continue
        before = {name: whole_on_leader(p) for name, p in trainer.model.named_parameters()}
        try:
            trainer.train_batch(make_batch())
        except (RunStopped, UsageError) as error:
            said.append([type(error).__name__, str(error)])
        same = all(torch.equal(whole_on_leader(p), before[name]) for name, p in trainer.model.named_parameters())
        metrics = trainer.train_batch([s for s in make_batch(good) if s.trajectory_id == "a"])
        said[-1] += [same, metrics["trained_tokens"]]
        ranks.end()
        ranks.gather(None)
    return said


def shorten_deadline(ranks, seconds):
    """This rank waits no longer for the others from here on."""
    for group in list(dist.distributed_c10d._world.pg_map):
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)
    ranks.deadline = ranks.failures._deadline = seconds


def hang(ranks, folder):
    """What rank 0 hears where rank 1 does not come to what all do together, by a deadline that is short from the moment
    on when it hangs."""
    folder = Path(folder)
    if not ranks.leads:
        ranks.next_order()
        (folder / "hangs").touch()
        wait_until((folder / "told").exists)
        return None
    told = []
    for _ in range(2):
        try:
            with mock.patch.object(failures, "GRACE", 0.2), ranks.lead("meet"):
                wait_until((folder / "hangs").exists)
                shorten_deadline(ranks, 1)
                ranks.most(1)
        except RunStopped as error:
            told.append(str(error))
    (folder / "told").touch()
    return [*told, os.getpid()]


def die(ranks, how):
    """What rank 0 hears where rank 1 fails in the middle of something."""
    if not ranks.leads:
        ranks.next_order()
        if how == "reports":
            ranks.failures.tell(MemoryError("1 GiB"))
        os._exit(1)
    try:
        with ranks.lead("meet"):
            ranks.most(1)
    except RunStopped as error:
        return str(error)
    return None


def whole_on_leader(parameter):
    return local(parameter).detach().clone()


def same_weights(one, other):
    """The largest relative difference of two folders' weights."""
    from safetensors.torch import load_file

    def read(folder):
        return {k: v for path in sorted(Path(folder).glob("*.safetensors")) for k, v in load_file(path).items()}

    return apart(read(one), read(other))
