"""One request's failure fails that request; what the engine cannot survive is said to everybody, at once."""

from __future__ import annotations

import asyncio
import doctest
import os
import shutil
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from step_gate import decoder_of, engine_of, held

from campaigns import sized
from pairs import all_rows, pairs
from verbatim.core import machine_faults
from verbatim.core.errors import EngineDead, ModelError, RecordError, SamplerFault
from verbatim.core.sampling import MOST_STOP_IDS
from verbatim.inference import SampleRequest, SamplingParams
from verbatim.inference.cancelled import num_tokens_drawn
from verbatim.inference.embedded import engine, engine_thread, messages
from verbatim.inference.embedded.decoder import Decoder
from verbatim.inference.embedded.engine import TorchSampler
from verbatim.inference.embedded.engine_thread import THREAD_ENDED
from verbatim.inference.embedded.settings import TorchSettings
from verbatim.inference.sampler import watch_engine
from verbatim.models import loading
from waiting import HANGS, until

pytestmark = [pytest.mark.usefixtures("kernel"), pytest.mark.realtime]
VOCAB = 97


def request(prompt=(1, 2, 3), seed=0, session="", **params):
    return SampleRequest(
        prompt_ids=np.array(prompt, np.int32), params=SamplingParams(**params), seed=seed, session=session
    )


def make(folder, **config):
    config = {"max_batch_size": 4, "deterministic": True, **config}
    return TorchSampler(folder, config=TorchSettings(device="cpu", **config), context_length=256, num_threads=1)


async def together(sampler, requests):
    """All of them reach the engine before it takes the first."""
    with held(sampler):
        calls = [asyncio.create_task(sampler.generate(r)) for r in requests]
        await asyncio.sleep(0)
    return await asyncio.gather(*calls, return_exceptions=True)


def bits(completion):
    return completion.ids.tobytes(), completion.logprobs.tobytes(), completion.policy_versions.tobytes()


def damaged(source, folder, name, at, value):
    """A copy of a model with one number changed."""
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors[name].view(-1)[at] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_what_each_allocator_says_is_known():
    assert doctest.testmod(machine_faults).failed == 0


# ---- stop ids


def test_more_stop_ids_than_the_bound_are_refused_with_their_number_and_not_all_of_them():
    with pytest.raises(ValueError, match=r"stop_token_ids = .* at most 4096 ids, found 1000000") as refused:
        SamplingParams(stop_token_ids=tuple(range(10**6)))
    assert len(str(refused.value)) < 300
    SamplingParams(stop_token_ids=tuple(range(MOST_STOP_IDS)))


async def test_a_stop_id_outside_of_the_vocabulary_is_refused_naming_its_position(models):
    sampler = make(models["tied"])
    with pytest.raises(RecordError, match=f"stop_token_ids: id 500 at position 1 is outside the vocabulary of {VOCAB}"):
        await sampler.generate(request(stop_token_ids=(5, 500)))
    assert len((await sampler.generate(request(max_tokens=3))).ids) == 3
    await sampler.close()


async def test_the_stop_ids_of_one_request_are_not_held_by_those_that_come_after(models):
    sampler = make(models["tied"], max_batch_size=1)
    before = await sampler.generate(request(max_tokens=30))
    await sampler.generate(request(max_tokens=30, stop_token_ids=tuple(range(VOCAB)) * 42))
    assert bits(await sampler.generate(request(max_tokens=30))) == bits(before)
    assert sum(len(ids) for ids in decoder_of(sampler).table.stop_ids) == 0
    await sampler.close()


# ---- weights


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
async def test_weights_that_are_not_finite_are_refused_before_any_is_replaced(models, tmp_path, value):
    """Not even those of the tensors that come before the damaged one are taken."""
    folder = damaged(models["tied_later"], tmp_path / "w", "model.norm.weight", 7, value)
    sampler = make(models["tied"])
    before = await sampler.generate(request(max_tokens=15))
    logprobs = await sampler.prompt_logprobs(np.arange(VOCAB, dtype=np.int32))
    with pytest.raises(ModelError, match=r"model\.norm\.weight holds numbers that are not finite"):
        await sampler.update_weights(folder, 1)
    assert sampler.policy_version == 0
    assert (await sampler.prompt_logprobs(np.arange(VOCAB, dtype=np.int32))).tobytes() == logprobs.tobytes()
    assert bits(await sampler.generate(request(max_tokens=15))) == bits(before)
    await sampler.close()


def test_a_number_that_the_models_dtype_does_not_hold_is_not_finite_there():
    large = torch.tensor([3.4e38])
    loading.refuse_not_finite([("w", large)], "here")
    with pytest.raises(ModelError, match=r"w holds numbers that are not finite in torch\.bfloat16"):
        loading.refuse_not_finite([("w", large)], "here", {"w": torch.bfloat16})


def test_a_model_whose_weights_are_not_finite_is_refused_at_the_start(models, tmp_path):
    folder = damaged(models["tied"], tmp_path / "w", "model.layers.0.mlp.up_proj.weight", 3, float("nan"))
    with pytest.raises(ModelError, match=r"model\.layers\.0\.mlp\.up_proj\.weight holds numbers that are not finite"):
        make(folder)


@pytest.mark.parametrize("kind", ["name too long", "null character", "pipe", "folder as file", "no permission"])
async def test_a_path_that_the_system_refuses_fails_its_update_alone(models, tmp_path, kind):
    folder = tmp_path / "w"
    folder.mkdir()
    if kind == "name too long":
        folder = tmp_path / ("x" * 5000)
    elif kind == "null character":
        folder = tmp_path / "\0"
    elif kind == "pipe":
        os.mkfifo(folder / "model.safetensors")
    elif kind == "folder as file":
        (folder / "model.safetensors").mkdir()
    else:
        shutil.copytree(models["tied"], folder, dirs_exist_ok=True)
        (folder / "model.safetensors").chmod(0)
        if os.access(folder / "model.safetensors", os.R_OK):  # an administrator may read it all the same
            (folder / "model.safetensors").unlink()
    sampler = make(models["tied"])
    before = await sampler.generate(request(max_tokens=9))
    async with asyncio.timeout(HANGS):
        with pytest.raises(ModelError):
            await sampler.update_weights(folder, 1)
    assert sampler.failure is None
    assert bits(await sampler.generate(request(max_tokens=9))) == bits(before)
    await sampler.close()


async def test_weights_that_were_replaced_by_half_end_the_engine(models, monkeypatch):
    sampler = make(models["tied"])
    monkeypatch.setattr("verbatim.inference.embedded.engine.replace_weights", lambda model, weights: 1 / 0)
    with pytest.raises(SamplerFault, match="thread failed: ZeroDivisionError"):
        await sampler.update_weights(models["tied_later"], 1)
    with pytest.raises(SamplerFault, match="thread failed: ZeroDivisionError"):
        await sampler.generate(request())
    assert "ZeroDivisionError" in sampler.failure
    with pytest.raises(EngineDead, match="ZeroDivisionError"):
        await asyncio.wait_for(watch_engine(sampler), HANGS)
    await sampler.close()


# ---- memory

OUT_OF_MEMORY = {
    "numpy": MemoryError("no room"),
    "cuda": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    "cpu": RuntimeError(
        "[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory: you "
        "tried to allocate 99 bytes"
    ),
}


def fail_once(monkeypatch, owner, name, error, at):
    """The call number `at` of a function does its work and then fails, as if there had been no memory for the rest."""
    real, calls = getattr(owner, name), iter(range(10**9))

    def failing(*args, **kwargs):
        found = real(*args, **kwargs)
        if next(calls) == at:
            raise error
        return found

    monkeypatch.setattr(owner, name, failing)


WHERES = ["reserve", "forward", "account", "draw", "append"]
PLACES = (["torch", "compiled"], WHERES, list(OUT_OF_MEMORY), [0, 9])
DRAWN_ALONE = {}
"""What the requests below draw alone, with each kernel."""


async def check_end_of_memory(models, monkeypatch, kernel, where, error, at):
    """Memory ends at the call number `at` of a part of a pass: the longest of four sequences fails, and the others draw
    what they draw alone."""
    requests = [request(range(1, 4 + 9 * k), seed=k, max_tokens=20) for k in range(4)]
    if kernel not in DRAWN_ALONE:
        alone = make(models["tied"])
        DRAWN_ALONE[kernel] = [bits(await alone.generate(r)) for r in requests]
        await alone.close()
    expected = DRAWN_ALONE[kernel]
    sampler = make(models["tied"])
    decoder = decoder_of(sampler)
    owner, name = {
        "reserve": (decoder.cache, "reserve"),
        "forward": (decoder.forward, "hidden"),
        "account": (decoder, "_account"),
        "draw": (decoder.forward, "draw"),
        "append": (decoder.table, "append"),
    }[where]
    # `add` reserves too, once for each request, before the first pass does.
    fail_once(monkeypatch, owner, name, OUT_OF_MEMORY[error], at + 4 * (where == "reserve"))
    try:
        ends = await together(sampler, requests)
        assert isinstance(ends[3], SamplerFault)
        assert [bits(end) for end in ends[:3]] == expected[:3]
        assert "memory was not enough for a sequence of" in str(ends[3])
        assert sampler.failure is None
        stats = sampler.stats()
        assert stats.sampled_tokens == 60 + num_tokens_drawn(ends[3])
        assert (stats.num_running, stats.num_waiting) == (0, 0)
        assert bits(await sampler.generate(requests[3])) == expected[3]
    finally:
        await sampler.close()


@pytest.mark.slow
@pytest.mark.campaign
@pytest.mark.parametrize(
    ("kernel", "where", "error", "at"), sized(pairs(*PLACES), all_rows(*PLACES)), indirect=["kernel"]
)
async def test_without_memory_the_longest_sequence_fails_and_the_others_go_on_with_the_same_tokens(
    models, monkeypatch, campaign, kernel, where, error, at
):
    """Wherever in a pass memory ends: in the first one (the prompts) or in a later one."""
    await check_end_of_memory(models, monkeypatch, kernel, where, error, at)
    campaign("places where memory ends in the sampler").add()


async def test_an_engine_that_gives_up_another_sequence_is_found_out(models, monkeypatch, kernel):
    monkeypatch.setattr(Decoder, "largest", 0)
    with pytest.raises(AssertionError):
        await check_end_of_memory(models, monkeypatch, kernel, "forward", "numpy", 9)


async def test_the_room_of_the_sequence_that_failed_is_given_back(models, monkeypatch, kernel):
    sampler = make(models["tied"])
    decoder = decoder_of(sampler)
    fail_once(monkeypatch, decoder.forward, "hidden", MemoryError(), 3)
    short, long = await together(sampler, [request(max_tokens=12), request([5] * 200, max_tokens=12)])
    assert isinstance(long, SamplerFault)
    assert len(short.ids) == 12
    assert (decoder.cache.capacity if kernel == "torch" else 64 * decoder.cache.used) == 64
    await sampler.close()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError("no room"), "out of memory: no room"),
        (ZeroDivisionError("a bug"), "ZeroDivisionError: a"),
    ],
)
async def test_a_request_that_cannot_be_taken_fails_alone(models, monkeypatch, error, said):
    sampler = make(models["tied"])
    first = await sampler.generate(request(max_tokens=20))
    real = decoder_of(sampler).table.start

    def start(slot, asked, reused, version):
        if asked.seed == 7:
            raise error
        real(slot, asked, reused, version)

    monkeypatch.setattr(decoder_of(sampler).table, "start", start)
    ends = await together(sampler, [request(seed=seed, max_tokens=20) for seed in (0, 7, 0)])
    assert isinstance(ends[1], SamplerFault) and said in str(ends[1])
    assert bits(ends[0]) == bits(ends[2]) == bits(first)
    assert sampler.failure is None
    await sampler.close()


async def test_a_request_that_failed_halfway_leaves_no_prefix_behind(models, monkeypatch):
    """Its slot held another sequence's keys when it failed: whoever takes it next computes its own."""
    sevens, longer = request([7] * 6, max_tokens=9), request([7] * 7, max_tokens=9)
    alone = make(models["tied"])
    expected = await alone.generate(longer)
    await alone.close()
    sampler = make(models["tied"], max_batch_size=2)
    await sampler.generate(sevens)
    await sampler.generate(request(range(1, 40), session="a", max_tokens=2))
    with monkeypatch.context() as patched:
        fail_once(patched, decoder_of(sampler).cache, "copy_prefix", MemoryError(), 0)
        with pytest.raises(SamplerFault, match="out of memory"):
            await sampler.generate(request([*range(1, 40), 5], session="c", max_tokens=2))
    assert bits(await sampler.generate(longer)) == bits(expected)
    await sampler.close()


async def test_logprobs_of_a_prompt_that_memory_is_not_enough_for_fail_alone(models, monkeypatch):
    sampler = make(models["tied"])

    def fail(*args):
        raise MemoryError("no room")

    with monkeypatch.context() as patched:
        patched.setattr("verbatim.inference.embedded.torch_forward.sequence_logprobs", fail)
        patched.setattr("verbatim.inference.embedded.compiled.forward.CompiledForward._head", fail)
        with pytest.raises(SamplerFault, match="failed on this request: out of memory: no room"):
            await sampler.prompt_logprobs(np.array([1, 2], np.int32))
    assert not getattr(decoder_of(sampler).cache, "used", 0)
    assert np.isfinite(await sampler.prompt_logprobs(np.array([1, 2], np.int32))).tolist() == [False, True]
    await sampler.close()


async def test_many_questions_between_two_steps_do_not_hold_up_completions(models, monkeypatch):
    """At most one is answered between two steps, and decoding then has three times as long as that took: by a clock on
    which a question takes 2 s and a step takes 1 s, six steps."""
    now, order = [0.0], []
    monkeypatch.setattr(engine_thread, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    sampler = make(models["tied"])

    def takes(seconds, name, work):
        def timed(*given):
            order.append(name)
            now[0] += seconds
            return work(*given)

        return timed

    decoder = decoder_of(sampler)
    monkeypatch.setattr(decoder, "step", takes(1.0, "step", decoder.step))
    monkeypatch.setattr(
        decoder_of(sampler), "prompt_logprobs", takes(2.0, "question", decoder_of(sampler).prompt_logprobs)
    )
    with held(sampler):  # all of them reach the engine before it takes the first
        running = asyncio.create_task(sampler.generate(request(max_tokens=60)))
        questions = [asyncio.create_task(sampler.prompt_logprobs(np.ones(20, np.int32))) for _ in range(30)]
        await asyncio.sleep(0)
    assert len((await running).ids) == 60
    await asyncio.gather(*questions)
    last = len(order) - order[::-1].index("step")
    assert order[:last] == (["question"] + ["step"] * 6) * (last // 7) + order[: last % 7]
    assert order[:last].count("question") >= 10
    assert order[last:] == ["question"] * (30 - order[:last].count("question"))
    await sampler.close()


@pytest.mark.parametrize("error", OUT_OF_MEMORY)
async def test_weights_that_memory_is_not_enough_to_read_fail_their_update_alone(models, monkeypatch, error):
    """The folder is not at fault: it is no `ModelError`, and the next update takes it."""
    sampler = make(models["tied"])
    before = await sampler.generate(request(max_tokens=9))

    def fail(*args):
        raise OUT_OF_MEMORY[error]

    with monkeypatch.context() as patched:
        patched.setattr("verbatim.inference.embedded.engine.read_weights", fail)
        with pytest.raises(SamplerFault, match="cannot be loaded as weights: out of memory"):
            await sampler.update_weights(models["tied_later"], 1)
    assert (sampler.failure, sampler.policy_version) == (None, 0)
    assert bits(await sampler.generate(request(max_tokens=9))) == bits(before)
    await sampler.update_weights(models["tied_later"], 1)
    assert sampler.policy_version == 1
    await sampler.close()


@pytest.mark.parametrize("cancelled", [False, True], ids=["waits", "is cancelled"])
async def test_an_engine_that_cannot_even_say_why_it_dies_is_not_waited_for(models, monkeypatch, cancelled):
    """Without memory its thread fails, and fails again as it is about to answer."""
    sampler = make(models["tied"])

    def fail(*args):
        raise MemoryError

    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    monkeypatch.setattr(engine, "_LOOK_EVERY", 0.01)
    monkeypatch.setattr(engine_of(sampler), "_shut_down", fail)
    monkeypatch.setattr(engine_of(sampler), "_take", fail)
    calls = [
        asyncio.create_task(call)
        for call in (sampler.generate(request()), sampler.prompt_logprobs(np.array([1, 2], np.int32)))
    ]
    if cancelled:
        await asyncio.sleep(0)  # both are sent
        engine_of(sampler).thread.join()  # nothing else of this loop runs before the call is cancelled
        calls[0].cancel()
    async with asyncio.timeout(HANGS):
        said = await asyncio.gather(*calls, return_exceptions=True)
    assert str(said[1]) == sampler.failure == THREAD_ENDED
    assert isinstance(said[0], asyncio.CancelledError) if cancelled else str(said[0]) == sampler.failure
    with pytest.raises(SamplerFault, match="thread has ended"):
        await asyncio.wait_for(sampler.generate(request()), HANGS)


async def test_without_sequences_no_pass_is_begun_that_memory_may_not_be_enough_for(models, monkeypatch):
    sampler = make(models["tied"])

    def full():
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(decoder_of(sampler).table, "snapshot", full)
        assert len(await sampler.prompt_logprobs(np.array([1, 2], np.int32))) == 2
        await sampler.prompt_logprobs(np.array([1, 2], np.int32))  # what came after the first is over
    assert sampler.failure is None
    assert len((await sampler.generate(request(max_tokens=3))).ids) == 3
    await sampler.close()


async def test_what_an_engine_had_drawn_is_counted_also_where_it_dies_without_a_word(models, monkeypatch):
    sampler = make(models["tied"])

    def fail(*args):
        raise MemoryError

    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    monkeypatch.setattr(engine, "_LOOK_EVERY", 0.01)
    monkeypatch.setattr(engine_of(sampler), "_shut_down", fail)
    step, drawn = decoder_of(sampler).step, []

    def five_steps():
        if len(drawn) == 5:
            raise ZeroDivisionError
        drawn.append(1)
        return step()

    monkeypatch.setattr(decoder_of(sampler), "step", five_steps)
    with pytest.raises(SamplerFault, match="thread has ended") as failed:
        await asyncio.wait_for(sampler.generate(request(max_tokens=20)), HANGS)
    assert num_tokens_drawn(failed.value) == sampler.stats().sampled_tokens == 5


async def test_an_answer_that_memory_was_not_enough_to_deliver_arrives_all_the_same(models, monkeypatch):
    sampler, complaints = make(models["tied"]), []
    before = await sampler.generate(request(max_tokens=9))
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context["exception"]))
    monkeypatch.setattr(engine, "_LOOK_EVERY", 0.01)
    deliver, calls = messages.deliver, iter(range(99))

    def full(replies):
        if next(calls) == 0:
            raise MemoryError
        deliver(replies)

    monkeypatch.setattr(messages, "deliver", full)
    async with asyncio.timeout(HANGS):
        assert bits(await sampler.generate(request(max_tokens=9))) == bits(before)
    await until(lambda: complaints)  # the engine's thread may say it only after the answer was found
    assert [type(complaint) for complaint in complaints] == [MemoryError]
    await sampler.close()


async def test_a_request_that_the_engine_dies_of_while_it_takes_it_is_answered_too(models, monkeypatch):
    def full(message: object) -> None:
        raise MemoryError

    monkeypatch.setattr(engine, "_LOOK_EVERY", 0.01)
    sampler = make(models["tied"])
    monkeypatch.setattr(engine_of(sampler), "_take", full)
    with pytest.raises(SamplerFault, match="the sampler's thread failed: out of memory"):
        await asyncio.wait_for(sampler.generate(request()), timeout=HANGS)
    await sampler.close()
