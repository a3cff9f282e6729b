import asyncio
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from step_gate import StepGate, decoder_of, engine_of
from transformers import AutoModelForCausalLM, Qwen3Config

from verbatim.core.errors import ModelError, RecordError, SamplerFault, UsageError
from verbatim.core.types import StopReason
from verbatim.inference import Sampler, SampleRequest, SamplingParams
from verbatim.inference.cancelled import num_tokens_drawn
from verbatim.inference.embedded.engine import TorchSampler
from verbatim.inference.embedded.settings import TorchSettings
from verbatim.models.native.cores import CoreShare
from waiting import HANGS, until, wait_until

pytestmark = [pytest.mark.usefixtures("kernel"), pytest.mark.realtime]
VOCAB = 97


def request(prompt=(1, 2, 3), seed=0, session="", **params):
    return SampleRequest(
        prompt_ids=np.array(prompt, np.int32), params=SamplingParams(**params), seed=seed, session=session
    )


def make(folder, context_length=128, **config):
    config.setdefault("max_batch_size", 4)
    return TorchSampler(
        folder, config=TorchSettings(device="cpu", **config), context_length=context_length, num_threads=1
    )


@pytest.fixture
async def sampler(models):
    sampler = make(models["tied"])
    yield sampler
    await sampler.close()


def reference(model, ids, temperature=1.0):
    with torch.no_grad():
        logits = model(torch.tensor(ids, dtype=torch.int64)[None]).logits[0].double() / temperature
    return logits.log_softmax(-1)[:-1].gather(-1, torch.tensor(ids[1:], dtype=torch.int64)[:, None])[:, 0].numpy()


async def test_it_is_a_sampler(sampler):
    assert isinstance(sampler, Sampler)
    assert (sampler.vocab_size, sampler.context_length, sampler.policy_version) == (VOCAB, 128, 0)


async def test_a_completion_has_one_logprob_and_one_version_for_each_id(sampler, references):
    completion = await sampler.generate(request(max_tokens=20, temperature=0.8))
    assert completion.stop_reason is StopReason.LENGTH
    assert len(completion.ids) == len(completion.logprobs) == len(completion.policy_versions) == 20
    assert completion.ids.dtype == np.int32 and completion.logprobs.dtype == np.float32
    assert set(completion.policy_versions.tolist()) == {0}
    expected = reference(references["tied"], [1, 2, 3, *completion.ids], 0.8)[2:]
    assert np.abs(completion.logprobs - expected).max() <= 5e-5


async def test_more_requests_than_places_are_all_answered_each_with_its_own_parameters(sampler):
    requests = [request((i, 5, 7), seed=i, max_tokens=i + 1, temperature=0.5 + i / 10) for i in range(20)]
    together = await asyncio.gather(*(sampler.generate(r) for r in requests))
    assert [len(c.ids) for c in together] == [i + 1 for i in range(20)]
    assert sampler.stats().completions == 20
    assert sampler.stats().sampled_tokens == 210


async def test_a_stop_id_ends_the_completion_and_belongs_to_it(sampler):
    free = (await sampler.generate(request(max_tokens=30))).ids.tolist()
    stop = free[7]
    completion = await sampler.generate(request(max_tokens=30, stop_token_ids=(stop, 96)))
    assert completion.ids.tolist() == free[: free.index(stop) + 1]
    assert completion.stop_reason is StopReason.STOP


async def test_a_stop_id_as_the_last_allowed_token_is_a_stop(sampler):
    free = (await sampler.generate(request(max_tokens=30))).ids.tolist()
    at = next(i for i in range(5, 30) if free[i] not in free[:i])
    completion = await sampler.generate(request(max_tokens=at + 1, stop_token_ids=(free[at],)))
    assert (len(completion.ids), completion.stop_reason) == (at + 1, StopReason.STOP)


async def test_a_full_context_ends_the_completion_for_length(sampler):
    completion = await sampler.generate(request(np.ones(120), max_tokens=50))
    assert (len(completion.ids), completion.stop_reason) == (8, StopReason.LENGTH)


async def test_greedy_tokens_are_the_most_likely_with_logprob_zero(sampler, references):
    completion = await sampler.generate(request(max_tokens=12, temperature=0.0))
    ids = torch.tensor([1, 2, 3, *completion.ids])[None]
    with torch.no_grad():
        best = references["tied"](ids).logits[0].argmax(-1)[2:-1]
    assert completion.ids.tolist() == best.tolist()
    assert completion.logprobs.tolist() == [0.0] * 12


async def test_truncated_logprobs_are_of_the_truncated_distribution(sampler, references):
    completion = await sampler.generate(request(max_tokens=25, top_k=3))
    ids = [1, 2, 3, *completion.ids]
    with torch.no_grad():
        logits = references["tied"](torch.tensor(ids)[None]).logits[0, 2:-1].double()
    best, order = logits.topk(3)
    rank = (order == torch.tensor(completion.ids)[:, None]).nonzero()[:, 1]
    expected = best.log_softmax(-1).gather(-1, rank[:, None])[:, 0].numpy()
    assert np.abs(completion.logprobs - expected).max() <= 5e-5


async def test_randomness_follows_seed_and_position_not_the_split_into_turns(models):
    sampler = make(models["tied"], deterministic=True)
    whole = await sampler.generate(request(seed=11, max_tokens=20))
    first = await sampler.generate(request(seed=11, max_tokens=8))
    rest = await sampler.generate(request((1, 2, 3, *first.ids), seed=11, max_tokens=12))
    other = await sampler.generate(request(seed=12, max_tokens=20))
    await sampler.close()
    assert [*first.ids, *rest.ids] == whole.ids.tolist()
    assert other.ids.tolist() != whole.ids.tolist()


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "at least one token id"),
        ([1, 2, 97], "id 97 at position 2 is outside the vocabulary of 97"),
        ([1, -4], "id -4 at position 1"),
        ([1] * 128, "128 ids leave no room in a context of 128"),
    ],
)
async def test_prompts_that_no_model_could_continue_are_refused(sampler, prompt, message):
    with pytest.raises(RecordError, match=message):
        await sampler.generate(request(np.array(prompt, np.int32)))
    assert len((await sampler.generate(request(max_tokens=3))).ids) == 3


async def test_the_next_turn_computes_only_what_is_new(sampler):
    first = await sampler.generate(request(range(1, 41), session="a", max_tokens=10))
    before = sampler.stats()
    await sampler.generate(request([*range(1, 41), *first.ids, 7, 7], session="a", max_tokens=2))
    after = sampler.stats()
    assert after.prefix_hit_tokens - before.prefix_hit_tokens == 49
    assert after.prefill_tokens - before.prefill_tokens == 3


async def test_new_weights_arrive_between_two_steps_and_lose_nothing(models, references, monkeypatch):
    sampler = make(models["tied"], context_length=500)
    gate = StepGate(sampler, monkeypatch, tokens=600, calls=3)
    running = [asyncio.create_task(sampler.generate(request((i, 9), seed=i, max_tokens=400))) for i in range(3)]
    await until(lambda: sampler.stats().sampled_tokens >= 600)
    await sampler.update_weights(models["tied_later"], 5)
    gate.open()
    assert sampler.policy_version == 5
    for i, completion in enumerate(await asyncio.gather(*running)):
        versions = completion.policy_versions
        assert len(completion.ids) == 400 and (np.diff(versions) >= 0).all() and set(versions.tolist()) == {0, 5}
        for version, name in ((0, "tied"), (5, "tied_later")):
            expected = reference(references[name], [i, 9, *completion.ids])[1:]
            delta = np.abs(completion.logprobs - expected)[versions == version]
            assert np.median(delta) <= 1e-6 and delta.max() <= 5e-5
    await sampler.close()


async def test_no_new_request_reads_a_cache_of_other_weights_that_had_the_same_version(models, references):
    """A run may load its own version 0 into a server that another run has left."""
    sampler = TorchSampler(
        models["tied"],
        config=TorchSettings(device="cpu", max_batch_size=4),
        context_length=128,
        num_threads=1,
        on_weight_update="keep",
    )
    prompt = range(1, 61)
    await sampler.generate(request(prompt, session="a", max_tokens=4))
    await sampler.update_weights(models["tied_later"], 0)
    before = sampler.stats().prefix_hit_tokens
    completion = await sampler.generate(request(prompt, session="b", max_tokens=4))
    assert sampler.stats().prefix_hit_tokens == before
    expected = reference(references["tied_later"], [*prompt, *completion.ids])[-4:]
    assert np.abs(completion.logprobs - expected).max() <= 5e-5
    await sampler.close()


async def test_weights_that_do_not_fit_change_nothing(models, tmp_path):
    sampler = make(models["tied"], deterministic=True)
    before = await sampler.generate(request(max_tokens=15))
    wrong = tmp_path / "wrong"
    shutil.copytree(models["tied"], wrong)
    tensors = load_file(wrong / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(65)
    save_file(tensors, wrong / "model.safetensors")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "model.safetensors").write_bytes(b"not a tensor")
    for folder in (tmp_path / "missing", wrong, models["untied"], tmp_path / "damaged"):
        with pytest.raises(ModelError):
            await sampler.update_weights(folder, 1)
    after = await sampler.generate(request(max_tokens=15))
    await sampler.close()
    assert sampler.policy_version == 0
    assert after.ids.tolist() == before.ids.tolist()
    assert after.logprobs.tobytes() == before.logprobs.tobytes()
    assert set(after.policy_versions.tolist()) == {0}


async def test_prompt_logprobs_are_those_of_a_whole_forward_pass(models, references):
    for name in ("tied", "half_sliding", "sliding"):
        sampler = make(models[name])
        ids = np.random.default_rng(0).integers(0, VOCAB, 100).astype(np.int32)
        logprobs = await sampler.prompt_logprobs(ids, temperature=0.7)
        await sampler.close()
        assert logprobs.dtype == np.float32 and np.isnan(logprobs[0])
        assert np.abs(logprobs[1:] - reference(references[name], ids, 0.7)).max() <= 5e-5


async def test_prompt_logprobs_refuse_what_has_none(sampler):
    assert np.isnan(await sampler.prompt_logprobs(np.array([4], np.int32))).tolist() == [True]
    with pytest.raises(RecordError, match="outside the vocabulary"):
        await sampler.prompt_logprobs(np.array([1, 100], np.int32))
    with pytest.raises(RecordError, match="the context holds 128"):
        await sampler.prompt_logprobs(np.ones(129, np.int32))
    with pytest.raises(RecordError, match="temperature"):
        await sampler.prompt_logprobs(np.ones(3, np.int32), temperature=0.0)


async def test_a_cancelled_call_frees_its_place(models, monkeypatch):
    sampler = make(models["tied"], max_batch_size=1, context_length=500)
    gate = StepGate(sampler, monkeypatch, tokens=6)
    long = asyncio.create_task(sampler.generate(request(max_tokens=490)))
    waiting = asyncio.create_task(sampler.generate(request(max_tokens=490)))
    await until(lambda: sampler.stats().sampled_tokens >= 6)
    waiting.cancel()
    long.cancel()
    short = asyncio.create_task(sampler.generate(request(max_tokens=3)))
    await asyncio.wait([long, waiting])
    gate.open()
    assert len((await asyncio.wait_for(short, HANGS)).ids) == 3
    assert long.cancelled() and waiting.cancelled()
    assert sampler.stats().completions == 1
    await sampler.close()


async def test_a_cancelled_call_says_how_many_tokens_were_drawn_for_it(models, monkeypatch):
    """Running, waiting for a place, and cancelled twice; what was drawn for all calls is what the engine drew."""
    sampler = make(models["tied"], max_batch_size=2, context_length=500)
    StepGate(sampler, monkeypatch, tokens=10, calls=4)

    async def tokens_of(seed):
        with pytest.raises(asyncio.CancelledError) as caught:
            await sampler.generate(request(seed=seed, max_tokens=490))
        return num_tokens_drawn(caught.value)

    calls = [asyncio.create_task(tokens_of(seed)) for seed in range(4)]
    await until(lambda: sampler.stats().sampled_tokens >= 10)
    for call in reversed(calls):  # those that wait first: they are to get no place
        call.cancel()
        call.cancel()
    drawn = await asyncio.gather(*calls)
    assert drawn[0] > 3 and drawn[1] > 3 and drawn[2:] == [0, 0]
    assert sum(drawn) == sampler.stats().sampled_tokens
    await sampler.close()


async def test_a_deadline_around_a_call_is_a_timeout_and_its_tokens_are_known(models, monkeypatch):
    sampler = make(models["tied"], context_length=500)
    StepGate(sampler, monkeypatch, tokens=9)
    await sampler.generate(request(max_tokens=2))
    with pytest.raises(TimeoutError) as caught:
        async with asyncio.timeout(0.05):
            await sampler.generate(request(max_tokens=490))
    assert num_tokens_drawn(caught.value.__cause__) == sampler.stats().sampled_tokens - 2
    await sampler.close()


async def test_a_call_that_is_cancelled_when_its_completion_is_ready_says_so_too(models):
    sampler = make(models["tied"])
    call = asyncio.create_task(sampler.generate(request(max_tokens=5)))
    await asyncio.sleep(0)
    wait_until(lambda: sampler.stats().completions)  # this event loop is not to hear of the answer yet
    assert sampler.stats().sampled_tokens == 5
    call.cancel()
    with pytest.raises(asyncio.CancelledError) as caught:
        await call
    assert num_tokens_drawn(caught.value) == 5
    await sampler.close()


@pytest.mark.parametrize("numbers", [True, False])
async def test_a_call_that_fails_says_how_many_tokens_were_drawn_for_it(models, numbers):
    """Logits that are no numbers fail the sequence, anything else the engine and all its sequences."""
    sampler = make(models["tied"], context_length=500)
    decoder = decoder_of(sampler)
    draw, step, steps = decoder.forward.draw, decoder.step, iter(range(10**9))
    if numbers:
        decoder.forward.draw = lambda hidden, *rest: draw(hidden * (np.nan if next(steps) >= 20 else 1.0), *rest)
    else:
        decoder.step = lambda: step() if next(steps) < 20 else 1 / 0
    ends = await asyncio.gather(
        *(sampler.generate(request(seed=seed, max_tokens=490)) for seed in range(3)), return_exceptions=True
    )
    assert all(isinstance(end, SamplerFault) for end in ends)
    assert sum(num_tokens_drawn(end) for end in ends) == sampler.stats().sampled_tokens > 10
    await sampler.close()


async def test_closing_ends_what_is_in_flight_as_cancelled_with_what_it_has(models, monkeypatch):
    sampler = make(models["tied"], max_batch_size=1, context_length=500)
    StepGate(sampler, monkeypatch, tokens=6)
    running = asyncio.create_task(sampler.generate(request(max_tokens=490)))
    await until(lambda: sampler.stats().sampled_tokens == 6)
    waiting = asyncio.create_task(sampler.generate(request(max_tokens=490)))
    await asyncio.sleep(0)
    await sampler.close()
    await sampler.close()
    assert (await running).stop_reason is (await waiting).stop_reason is StopReason.CANCELLED
    assert len((await running).ids) == len((await running).logprobs) > 5
    assert len((await waiting).ids) == 0
    with pytest.raises(SamplerFault, match="closed"):
        await sampler.generate(request())
    with pytest.raises(SamplerFault, match="closed"):
        await sampler.prompt_logprobs(np.ones(3, np.int32))


def test_one_sampler_serves_several_event_loops_one_after_the_other(models):
    sampler = make(models["tied"])

    async def once(seed):
        return await asyncio.gather(*(sampler.generate(request(seed=seed + i, max_tokens=5)) for i in range(6)))

    first, second = asyncio.run(once(0)), asyncio.run(once(0))
    assert [c.ids.tolist() for c in first] == [c.ids.tolist() for c in second]
    asyncio.run(sampler.close())


def test_a_loop_that_is_gone_does_not_stop_the_engine(models):
    sampler = make(models["tied"])

    async def leave():
        task = asyncio.ensure_future(sampler.generate(request(max_tokens=100)))
        await asyncio.sleep(0)
        return task

    loop = asyncio.new_event_loop()
    task = loop.run_until_complete(leave())
    loop.close()
    task._log_destroy_pending = False
    assert len(asyncio.run(sampler.generate(request(max_tokens=120))).ids) == 120
    asyncio.run(sampler.close())


async def test_a_failure_of_the_engine_reaches_everyone_and_every_later_call(models, monkeypatch):
    sampler = make(models["tied"], max_batch_size=1, context_length=500)
    gate = StepGate(sampler, monkeypatch, tokens=6)
    tasks = [asyncio.create_task(sampler.generate(request(max_tokens=490))) for _ in range(3)]
    await until(lambda: sampler.stats().sampled_tokens >= 6)

    def explode():
        raise ZeroDivisionError("the sky fell")

    monkeypatch.setattr(decoder_of(sampler), "step", explode)
    gate.open()
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(outcome, SamplerFault)
        assert isinstance(outcome.__cause__, ZeroDivisionError) and outcome.__cause__.__traceback__ is not None
    with pytest.raises(SamplerFault, match="the sky fell"):
        await sampler.generate(request())
    with pytest.raises(SamplerFault, match="the sky fell"):
        await sampler.update_weights(models["tied_later"], 1)
    await sampler.close()


async def test_weights_that_diverged_fail_their_requests_and_good_ones_heal_the_engine(models, tmp_path):
    diverged = tmp_path / "diverged"
    shutil.copytree(models["tied"], diverged)
    tensors = load_file(diverged / "model.safetensors")
    tensors["model.layers.0.self_attn.v_proj.weight"][:] = 3e38  # finite, but no product with it is
    save_file(tensors, diverged / "model.safetensors")
    sampler = make(models["tied"], deterministic=True)
    before = await sampler.generate(request(max_tokens=9))
    await sampler.update_weights(diverged, 1)
    with pytest.raises(SamplerFault, match="not finite numbers under policy version 1"):
        await sampler.generate(request(range(1, 60), max_tokens=9))
    await sampler.update_weights(models["tied"], 2)
    after = await sampler.generate(request(max_tokens=9))
    await sampler.close()
    assert after.logprobs.tobytes() == before.logprobs.tobytes()
    assert sampler.stats().sampled_tokens == 18


async def test_two_engines_give_the_same_bits(models):
    requests = [request(np.arange(1, 5 + 7 * i), seed=i, max_tokens=30) for i in range(6)]
    results = []
    for order in (1, -1):
        sampler = make(models["untied"], deterministic=True)
        done = await asyncio.gather(*(sampler.generate(r) for r in requests[::order]))
        results.append([(c.ids.tobytes(), c.logprobs.tobytes()) for c in done[::order]])
        await sampler.close()
    assert results[0] == results[1]


async def test_threads_of_the_engine_are_not_those_of_the_caller(models):
    before = torch.get_num_threads()
    sampler = TorchSampler(
        models["tied"], config=TorchSettings(device="cpu", max_batch_size=2), context_length=64, num_threads=before + 1
    )
    await sampler.generate(request(max_tokens=2))
    assert torch.get_num_threads() == before
    await sampler.close()


async def test_bfloat16_runs_and_stays_near_float32(models, references):
    sampler = make(models["tied"], dtype="bfloat16")
    completion = await sampler.generate(request(max_tokens=30))
    await sampler.close()
    expected = reference(references["tied"], [1, 2, 3, *completion.ids])[2:]
    assert np.median(np.abs(completion.logprobs - expected)) < 0.1
    assert (completion.logprobs <= 0).all()


def test_a_context_longer_than_the_models_positions_is_refused(models):
    with pytest.raises(ModelError, match=r"context_length = 513.*end at 512"):
        make(models["tied"], context_length=513)


def test_position_encodings_that_depend_on_the_batch_are_refused(tmp_path):
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=64,
        rope_parameters={
            "rope_type": "longrope",
            "factor": 2.0,
            "rope_theta": 10000.0,
            "short_factor": [1.0] * 8,
            "long_factor": [2.0] * 8,
            "original_max_position_embeddings": 24,
        },
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"'longrope' rope.*at most 24"):
        make(tmp_path, context_length=32)


@pytest.mark.parametrize(
    "wrong",
    [
        {"stop_token_ids": (2**31,)},
        {"stop_token_ids": (-1,)},
        {"top_k": 2**63},
        {"temperature": 1e-30},
        {"temperature": float("inf")},
        {"temperature": float("nan")},
    ],
)
def test_parameters_that_no_engine_holds_are_refused_by_name(wrong):
    with pytest.raises(ValueError, match=f"sampling: {next(iter(wrong))} = "):
        SamplingParams(**wrong)


@pytest.mark.parametrize("version", [-1, 2**31])
async def test_a_version_that_no_record_holds_is_refused_and_the_engine_goes_on(sampler, models, version):
    with pytest.raises(UsageError, match="expected an integer in"):
        await sampler.update_weights(models["tied"], version)
    assert set((await sampler.generate(request(max_tokens=4))).policy_versions.tolist()) == {0}


async def test_an_engine_that_fails_as_it_takes_a_request_answers_that_one_too(sampler, monkeypatch):
    def fail(request):
        raise MemoryError("no room")

    monkeypatch.setattr(decoder_of(sampler), "add", fail)
    async with asyncio.timeout(HANGS):
        found = await asyncio.gather(*(sampler.generate(request(seed=k)) for k in range(3)), return_exceptions=True)
    assert [type(error) for error in found] == [SamplerFault] * 3


class Cores(CoreShare):
    """A side's view that says whether the other side computes, with no patience."""

    @property
    def other_computes(self):
        return self._idle_since[self._other] < 0

    def threads_for_pass(self):
        self._pass_seconds, self._began = 0.0, None
        return super().threads_for_pass()


async def test_free_cores_are_taken_and_given_back(models, tmp_path, monkeypatch):
    """Both sides' views of the cores: the engine computes with all of them until the trainer computes too, and says
    that it has ended when nothing is left to do."""
    mine, trainer = (Cores(tmp_path / "cores", side, 2) for side in ("sampler", "trainer"))
    threads = []
    set_num_threads = torch.set_num_threads
    monkeypatch.setattr(torch, "set_num_threads", lambda n: (threads.append(n), set_num_threads(n)))
    sampler = TorchSampler(
        models["tied"], config=TorchSettings(device="cpu"), context_length=64, num_threads=1, cores=mine
    )
    await until(lambda: not trainer.other_computes)
    await sampler.generate(request(max_tokens=4))
    assert threads[-1] == 2
    await until(lambda: not trainer.other_computes)
    trainer.compute(True)
    await sampler.generate(request(max_tokens=4))
    assert threads[-1] == 1
    await until(lambda: not trainer.other_computes)
    await sampler.close()


@pytest.mark.parametrize("fails", [False, True])
async def test_an_engine_that_ends_amid_its_work_leaves_the_trainer_all_cores(models, tmp_path, monkeypatch, fails):
    mine, trainer = (Cores(tmp_path / "cores", side, 2) for side in ("sampler", "trainer"))
    sampler = TorchSampler(
        models["tied"], config=TorchSettings(device="cpu"), context_length=64, num_threads=1, cores=mine
    )
    step, seen = decoder_of(sampler).step, []

    def last_step():
        seen.append(trainer.other_computes)
        if fails:
            raise ValueError("a broken step")
        engine_of(sampler).stop()
        return step()

    monkeypatch.setattr(decoder_of(sampler), "step", last_step)
    (found,) = await asyncio.gather(sampler.generate(request(max_tokens=8)), return_exceptions=True)
    assert isinstance(found, SamplerFault) if fails else found.stop_reason == StopReason.CANCELLED
    await sampler.close()
    assert seen == [True]
    assert not trainer.other_computes and trainer.threads_for_pass() == 2
