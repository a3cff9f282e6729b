"""Activation offload: the same gradient, and no layer's input stays on the device."""

import contextlib
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from trainer_helpers import make_batch, write_model

from verbatim.algorithms.losses import LOSSES
from verbatim.config.schema import TrainerConfig
from verbatim.models.head import CausalLM
from verbatim.models.loading import load_model
from verbatim.trainer import offload
from verbatim.trainer.logprobs import TargetLogprobs
from verbatim.trainer.metrics import MetricSums
from verbatim.trainer.packing import pack_rows
from verbatim.trainer.recompute import checkpoint_layers
from verbatim.trainer.step import GradientPass

CPU = torch.device("cpu")
LAYERS = 2


def passed(folder, how):
    """The gradient of one step, and how many layer inputs are alive between the forward and the backward pass."""
    model = load_model(folder, dtype="float32", only_attention=False)
    checkpoint_layers(model, how)
    inputs, alive = [], []
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda _, args: inputs.append(weakref.ref(args[0])))

    class Counted(TargetLogprobs):
        def backward(self, *arguments):
            alive.append(sum(ref() is not None for ref in inputs))
            inputs.clear()
            super().backward(*arguments)

    lm = CausalLM(model)
    inputs.clear()  # those of the checks at its start
    step = GradientPass(lm=Counted(lm, 7), loss=LOSSES["default"], denominator=9, metrics=MetricSums())
    step.run(pack_rows(make_batch(), micro_batch_tokens=60, keep_whole=False))
    return {name: p.grad for name, p in model.named_parameters()}, alive


def test_layer_inputs_leave_the_device_and_the_gradient_is_the_same_bit_for_bit(tmp_path):
    folder = write_model(tmp_path)
    expected, kept = passed(folder, None)
    found, left = passed(folder, offload.ActivationOffload(CPU))  # "copied to host memory", on a CPU too
    assert kept == [LAYERS] * len(kept) and len(kept) > 1
    assert left == [0] * len(kept)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_host_memory_is_free_after_the_backward_pass():
    hooks, kept = offload.ActivationOffload(CPU).hooks(), []

    def noted(tensor):
        held = hooks.pack_hook(tensor)
        kept.append(weakref.ref(held))
        return held

    x = torch.ones(3, requires_grad=True)
    with saved_tensors_hooks(noted, hooks.unpack_hook):
        y = x.exp().sin()
    assert [held() is not None for held in kept] == [True, True]
    y.sum().backward()
    del y
    assert [held() for held in kept] == [None, None]
    assert torch.allclose(x.grad, torch.e * torch.cos(torch.tensor(torch.e)) * torch.ones(3))


class Stream:
    """Notes who waits for whom."""

    def __init__(self, name, log):
        self.name, self.log = name, log

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")


def test_copies_are_ordered_by_streams_and_come_back_one_layer_ahead(monkeypatch):
    log = []
    side, compute = Stream("side", log), Stream("compute", log)

    class Noted(torch.Tensor):
        def copy_(self, other, non_blocking=False):
            log.append(f"out {int(other[0])}" + " async" * non_blocking)
            return super().copy_(other)

        def to(self, device, non_blocking=False):
            log.append(f"back {int(self[0])}" + " async" * non_blocking)
            return self.clone()

    @contextlib.contextmanager
    def on(stream):
        log.append(f"[{stream.name}")
        yield
        log.append("]")

    def empty(shape, *, dtype, device, pin_memory):
        assert pin_memory and device == CPU
        return torch.empty(shape, dtype=dtype).as_subclass(Noted)

    cuda = SimpleNamespace(Stream=lambda device: side, stream=on, current_stream=lambda device: compute)
    monkeypatch.setattr(offload, "torch", SimpleNamespace(cuda=cuda, empty=empty))
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda t, s: log.append(f"{s.name} uses {int(t[0])}"))
    hooks = offload.ActivationOffload(torch.device("cuda")).hooks()
    kept = [hooks.pack_hook(torch.full((2,), float(number))) for number in (1, 2)]
    assert log == [
        "side waits for compute",
        "[side",
        "out 1 async",
        "]",
        "side uses 1",
        "side waits for compute",
        "[side",
        "out 2 async",
        "]",
        "side uses 2",
    ]
    log.clear()
    assert hooks.unpack_hook(kept[1]).tolist() == [2, 2]
    assert log == [
        "[side",
        "back 2 async",
        "]",
        "compute waits for side",
        "compute uses 2",
        "[side",
        "back 1 async",
        "]",
    ]
    log.clear()
    assert hooks.unpack_hook(kept[0]).tolist() == [1, 1]
    assert log == ["compute waits for side", "compute uses 1"]


def test_offload_without_checkpointing_is_refused():
    with pytest.raises(ValueError, match="set gradient_checkpointing = true too"):
        TrainerConfig(activation_offload=True)


def test_on_a_cpu_it_says_that_nothing_is_saved(caplog):
    assert offload.activation_offload(CPU) is None
    assert "saves nothing on a CPU" in caplog.text
