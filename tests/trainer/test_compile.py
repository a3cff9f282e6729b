"""Compiled layers have the gradient of those that are not, and are compiled once."""

import functools

import parallel_jobs as jobs
import pytest
import setuptools  # noqa: F401  inductor imports it, which may fail where a test has imported the library's distutils
import torch
import torch._inductor.config
from parallel_ranks import crew
from test_trainer_steps import make_trainer
from trainer_helpers import make_batch, routed_samples, shared_prefixes, write_model, write_qwen_moe
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from campaigns import sized
from verbatim.core.errors import ModelError
from verbatim.models.attention import ATTENTION, register_attention
from verbatim.models.tiny import decoder_layers
from verbatim.trainer.compile import compile_layers

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def uncompiled_attention(monkeypatch):
    """What a trainer registers, later tests do not see."""
    register_attention()
    before = ALL_ATTENTION_FUNCTIONS[ATTENTION]
    yield
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, before)
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def compiled_in_this_process():
    """Without inductor's pool of processes: each would import torch first, which takes longer than to compile here."""
    with torch._inductor.config.patch(compile_threads=1):
        yield


TRACED = "eager"
"""Layers are traced and cut into pieces as always, and the pieces are not made into C++: that takes a minute of the
processor, and is torch's."""


@pytest.fixture
def backend(request, monkeypatch):
    """Of torch.compile."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=request.param))


@pytest.mark.campaign
@pytest.mark.parametrize("backend", [sized(TRACED, "inductor")], indirect=True)
@pytest.mark.parametrize(
    ("num_layers", "settings"),
    [
        (2, {"packing": "tree", "micro_batch_tokens": 40}),
        (sized(1, 2), {"packing": "rows", "micro_batch_tokens": 30, "gradient_checkpointing": True}),
        (sized(1, 2), {"packing": "tree", "lora": {"r": 4, "alpha": 8}}),
    ],
)
def test_the_gradient_is_that_of_layers_that_are_not_compiled(tmp_path, num_layers, settings, backend):
    """Each layer is traced by itself, which takes seconds."""
    model = write_model(tmp_path, sliding_window=7, tied=False, num_layers=num_layers)
    gradients_agree(model, [shared_prefixes(), make_batch(1)], **settings)


@pytest.mark.realtime
def test_layers_that_are_made_into_programs_have_the_gradient_too(tmp_path):
    """One layer and one batch of rows, because the C++ compiler needs seconds for each piece. The campaign compiles
    trees too."""
    model = write_model(tmp_path, sliding_window=7, num_layers=1)
    gradients_agree(model, [make_batch(1)], packing="rows")


def gradients_agree(model, batches, **settings):
    gradients = []
    for compiled in (True, False):
        torch._dynamo.utils.counters.clear()
        trainer = make_trainer(model, dtype="float64", compile=compiled, **settings)
        found = jobs.noted_gradients(trainer)
        for batch in batches:
            trainer.train_batch(batch)
        gradients.append(found)
        assert (torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0) == compiled
    compiled, plain = gradients
    assert max(map(jobs.apart, compiled, plain)) < 1e-10


@pytest.mark.campaign
@pytest.mark.parametrize("backend", [sized(TRACED, "inductor")], indirect=True)
@pytest.mark.parametrize(
    "settings",
    sized(
        [{"router_aux_loss_coef": 0.5, "gradient_checkpointing": True}],
        [{}, {"router_aux_loss_coef": 0.5}, {"router_aux_loss_coef": 0.5, "gradient_checkpointing": True}],
    ),
)
def test_a_mixture_of_experts_is_watched_and_told_what_to_choose_in_compiled_layers(tmp_path, settings, backend):
    layers, dense = sized((2, (0,)), (3, (1,)))
    experts = write_qwen_moe(tmp_path, norm_topk_prob=True, layers=layers, dense=dense)
    gradients, metrics = [], []
    for compiled in (True, False):
        trainer = make_trainer(experts, dtype="float64", packing="rows", compile=compiled, **settings)
        found = jobs.noted_gradients(trainer)
        metrics.append([trainer.train_batch(batch) for batch in (routed_samples(layers=layers), make_batch(1))])
        gradients.append(found)
    compiled, plain = gradients
    assert max(map(jobs.apart, compiled, plain)) < 1e-10
    assert metrics[0][0]["router/replayed"] == 1
    for one, other in zip(*metrics, strict=True):
        expected = {name: value for name, value in other.items() if name.startswith("router/")}
        assert {name: one[name] for name in expected} == pytest.approx(expected, rel=1e-10)


def test_a_layer_that_is_compiled_wrongly_is_found(sliding_qwen, monkeypatch):
    def wrong(forward, **_):
        return lambda hidden, *arguments, **rest: forward(hidden, *arguments, **rest) * 1.0001

    gradients = []
    for compile_ in (wrong, lambda forward, **_: forward):
        monkeypatch.setattr(torch, "compile", compile_)
        trainer = make_trainer(sliding_qwen, dtype="float64", compile=True)
        gradients.append(jobs.noted_gradients(trainer))
        trainer.train_batch(make_batch(1))
    assert max(map(jobs.apart, *gradients)) > 1e-6


@pytest.mark.parametrize("backend", [TRACED], indirect=True)
def test_layers_are_compiled_once_whatever_the_number_of_tokens(sliding_qwen, backend):
    trainer = make_trainer(sliding_qwen, compile=True)
    for seed in range(2):
        trainer.train_batch(make_batch(seed))
    torch._dynamo.utils.counters.clear()
    for seed in range(2, 6):
        trainer.train_batch(make_batch(seed))
    assert torch._dynamo.utils.counters["stats"].get("unique_graphs", 0) == 0


@pytest.mark.realtime
@pytest.mark.campaign
def test_two_processes_compile_their_layers(tmp_path):
    model = write_model(tmp_path, num_layers=sized(1, 2))
    with crew(2) as two:
        (found,) = two.run(
            jobs.compare_compiled,
            sized(TRACED, "inductor"),
            [
                {
                    "model": str(model),
                    "batches": [["usual", 0]],
                    "micro_batch_tokens": 40,
                    "compile": True,
                    "gradient_checkpointing": True,
                }
            ],
        )
    assert max(found["gradient"]) < 1e-10


def test_a_layer_that_cannot_be_compiled_is_refused_with_the_model(qwen, monkeypatch):
    def fails(*_, **__):
        raise RuntimeError("no C++ compiler")

    def compiled(function, **_):
        return fails

    monkeypatch.setattr(torch, "compile", compiled)
    with pytest.raises(ModelError, match=r"Qwen3ForCausalLM cannot be compiled here \(RuntimeError: no C.* compiler\)"):
        make_trainer(qwen, compile=True)


def test_attention_is_called_between_compiled_pieces_once_however_many_models_are_compiled(qwen):
    compile_layers(make_trainer(qwen).model)
    first = ALL_ATTENTION_FUNCTIONS[ATTENTION]
    compile_layers(make_trainer(qwen).model)
    assert ALL_ATTENTION_FUNCTIONS[ATTENTION] is first


def test_layers_are_not_compiled_unless_it_is_asked_for(qwen, monkeypatch):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda forward, **_: compiled.append(forward) or forward)
    model = make_trainer(qwen).model
    assert compiled == []
    make_trainer(qwen, compile=True)
    assert len(compiled) == len(decoder_layers(model))
