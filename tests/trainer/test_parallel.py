"""Several processes have the gradient, the metrics and the state of one."""

import json
import re
import shutil
import threading
from datetime import timedelta

import parallel_jobs as jobs
import pytest
import torch
import torch.distributed as dist
from parallel_ranks import crew
from safetensors import safe_open
from safetensors.torch import load_file
from trainer_helpers import write_experts, write_llama, write_qwen_moe

from verbatim.algorithms.losses import LOSSES
from verbatim.core.errors import CheckpointError
from verbatim.logs.checkpoints import find_damage, write_manifest
from verbatim.models.loading import load_model
from verbatim.trainer.parallel.publish import published_layout
from waiting import HANGS

pytestmark = [pytest.mark.slow, pytest.mark.realtime]

TIMES = ("seconds", "tokens_per_second")


@pytest.fixture(scope="module")
def two():
    """Two processes: their start costs more than the tests."""
    with crew(2) as found:
        yield found


def case(model, batches, **settings):
    return {"model": str(model), "batches": batches, **settings}


def cases(qwen, untied):
    """Rows and trees, losses of every level, tied and untied heads, recomputed activations, several optimizer steps."""
    return [
        case(qwen, [["usual", 0], ["usual", 1]], micro_batch_tokens=40),
        case(untied, [["usual", 2]], micro_batch_tokens=20, gradient_checkpointing=True),
        case(untied, [["shared", 0]], packing="tree", micro_batch_tokens=30),
        case(qwen, [["usual", 0]], loss="gspo", micro_batch_tokens=20),
        case(qwen, [["usual", 0]], loss="ipa"),
        case(qwen, [["shared", 3]], loss="gspo", packing="tree", micro_batch_tokens=24),
        case(qwen, [["usual", 0]], loss="sft", optimizer_steps_per_batch=2),
        case(qwen, [["one", 5]]),
    ]


def assert_as_one(found, tolerance=1e-12):
    assert max(found["gradient"]) < tolerance
    assert found["logprobs"] < 1e-6 and found["rounded"] < 1e-6
    assert found["tokens"] < 2e-6  # stored as float32
    for metrics, alone in zip(found["metrics"], found["alone"], strict=True):
        same = {
            k: v
            for k, v in alone.items()
            if k not in (*TIMES, "num_micro_batches", "packing/repeated_tokens", "num_tokens", "packing/tree")
        }
        assert {k: metrics[k] for k in same} == pytest.approx(same, rel=tolerance)
        assert metrics.keys() == alone.keys()


def test_two_processes_have_the_gradient_and_the_metrics_of_one(two, qwen, sliding_qwen):
    for found in two.run(jobs.compare, cases(qwen, sliding_qwen)):
        assert_as_one(found)


SHARED = {"parallel": {"sequence": 2}}


@pytest.mark.parametrize("how", [{}, SHARED], ids=["micro-batches of their own", "shared micro-batches"])
def test_kept_sets_go_where_their_targets_go(two, qwen, sliding_qwen, tmp_path, how):
    """To a reference's logprobs too, which are over the same sets."""
    llama = write_llama(tmp_path / "llama")
    reference = {"loss": {"type": "gspo", "kl_ref_tau": 0.5}, "frozen": {"reference": str(llama)}}
    cut = [
        case(qwen, [["cut", 0], ["usual", 1]], micro_batch_tokens=40),
        case(sliding_qwen, [["cut", 0]], packing="tree", micro_batch_tokens=30),
        case(qwen, [["cut", 3]], loss="ipa", packing="tree", micro_batch_tokens=24),
        case(qwen, [["cut", 6]], **reference),
    ]
    for found in two.run(jobs.compare, [{**one, **how} for one in cut]):
        assert_as_one(found)


def test_two_processes_that_share_micro_batches_have_the_gradient_and_the_metrics_of_one(
    two, qwen, sliding_qwen, tmp_path
):
    llama = write_llama(tmp_path / "llama")  # one key/value head, which both want
    reference = {"loss": {"type": "gspo", "kl_ref_tau": 0.5}, "frozen": {"reference": str(llama)}}
    shared = [
        *cases(qwen, sliding_qwen),
        case(llama, [["usual", 4]], loss="ipa", micro_batch_tokens=20),
        case(qwen, [["usual", 6]], **reference),
    ]
    for found in two.run(jobs.compare, [{**one, **SHARED} for one in shared]):
        assert_as_one(found)


def test_processes_that_share_micro_batches_try_the_first_trees_together(two, sliding_qwen):
    assert two.run(jobs.first_trees, str(sliding_qwen), 2) == [True, "tree", 1.0]


def test_experts_are_shared_out_by_tokens_too(two, tmp_path):
    model = write_experts(tmp_path / "experts")
    (found,) = two.run(jobs.compare, [case(model, [["usual", 0]], dtype="float32", micro_batch_tokens=40, **SHARED)])
    assert max(found["gradient"]) < 1e-5


def test_four_processes_in_two_groups_have_the_gradient_and_the_metrics_of_one(qwen, sliding_qwen):
    with crew(4) as four:
        _, recomputed, trees, _, chunks, *_ = cases(qwen, sliding_qwen)
        for found in four.run(jobs.compare, [{**one, **SHARED} for one in (recomputed, trees, chunks)]):
            assert_as_one(found)


def near(loss):
    """A loss with a term to the reference."""
    return {"type": loss, "kl_ref_tau": 0.5}


def test_adapters_and_their_base_as_reference_are_those_of_one_process(two, qwen, sliding_qwen, tmp_path):
    def adapted(model, batches, **settings):
        """Three rows of A, two of them on the first process; the reference is the base under the adapters."""
        usual = {"lora": {"r": 3, "alpha": 6}, "frozen": {"reference": str(model)}, "loss": near("default")}
        return case(model, batches, **{**usual, **settings})

    copied = shutil.copytree(qwen, tmp_path / "copied")
    batches = [["usual", 0], ["usual", 1], ["shared", 2]]  # A has a gradient from the second on, because B begins at 0
    *own, another = two.run(
        jobs.compare,
        [
            adapted(qwen, batches, micro_batch_tokens=40),
            adapted(
                sliding_qwen,
                [["shared", 0], ["shared", 1]],
                packing="tree",
                micro_batch_tokens=30,
                loss=near("gspo"),
                gradient_checkpointing=True,
            ),
            adapted(qwen, batches[1:], parallel={"sequence": 2}),  # both compute each micro-batch together
            adapted(
                qwen, [["one", 5], ["one", 6]], lora={"r": 1, "alpha": 2, "target_modules": ["q_proj", "down_proj"]}
            ),
            adapted(qwen, batches[:2], frozen={"reference": str(copied)}),  # a model of its own, sharded
            case(
                qwen, batches[:2], frozen={"reference": str(sliding_qwen)}, loss=near("default"), micro_batch_tokens=20
            ),
        ],
    )
    for found in (*own, another):
        assert_as_one(found)
        assert found["metrics"][-1]["ref_kl"] > 1e-6
    assert all(found["metrics"][0]["ref_kl"] == found["alone"][0]["ref_kl"] == 0 for found in own)
    assert another["metrics"][0]["ref_kl"] > 1e-6


PACKINGS = ({"packing": "tree", "micro_batch_tokens": 30}, {"packing": "rows", "micro_batch_tokens": 20})


@pytest.mark.parametrize(("number", "loss"), enumerate(sorted(LOSSES)))
def test_every_loss_with_a_teacher_and_a_reference_is_that_of_one_process(two, qwen, sliding_qwen, number, loss):
    """Rows and trees in turns, micro-batches so small that trajectories are cut, and one rank without work."""
    how = {"loss": loss} if loss == "sft" else {"loss": near(loss), "frozen": {"reference": str(sliding_qwen)}}
    (found,) = two.run(jobs.compare, [case(qwen, [["taught", 0], ["taught", 1]], **PACKINGS[number % 2], **how)])
    assert_as_one(found)


def test_experts_are_loaded_by_rows_and_trained_as_by_one_process(two, tmp_path):
    model = write_experts(tmp_path / "experts")
    (found,) = two.run(jobs.compare, [case(model, [["usual", 0]], dtype="float32", micro_batch_tokens=40)])
    assert max(found["gradient"]) < 1e-5
    two.run(jobs.save_in_small_files, str(model), str(tmp_path / "out"))
    assert jobs.same_weights(tmp_path / "out", model) == 0.0


def expert_cases(model, **settings):
    """Rows and trees, uneven micro-batches, a rank without work, whole trajectories, recomputed layers."""
    settings = {"router_aux_loss_coef": 0.7, **settings}
    return [
        case(model, [["usual", 0], ["one", 5]], micro_batch_tokens=40, **settings),
        case(model, [["shared", 0]], packing="tree", micro_batch_tokens=24, gradient_checkpointing=True, **settings),
        case(model, [["shared", 3]], loss="gspo", packing="tree", micro_batch_tokens=24, **settings),
        case(model, [["usual", 0]], optimizer_steps_per_batch=2, **settings),
    ]


def test_two_processes_compute_with_the_recorded_experts(two, tmp_path):
    model = write_qwen_moe(tmp_path / "experts")
    cases = [
        case(model, [["routed", 0]], packing="tree", micro_batch_tokens=24, router_aux_loss_coef=0.7),
        case(model, [["routed", 0]], micro_batch_tokens=40, **SHARED),
    ]
    for found in two.run(jobs.compare, cases):
        assert_as_one(found)
        assert 0.5 < found["metrics"][0]["router/replayed"] < 1


def test_the_load_balancing_loss_of_two_processes_is_that_of_one(two, tmp_path):
    """Two layers with experts and one, which costs half as much."""
    model = write_qwen_moe(tmp_path / "experts")
    small = write_qwen_moe(tmp_path / "small", layers=2, dense=(0,))
    cases = [*expert_cases(model)[:1], *expert_cases(small)[1:], *expert_cases(small, parallel={"sequence": 2})[:2]]
    for found in two.run(jobs.compare, cases):
        assert_as_one(found)
        assert all(metrics["router/aux_loss"] > 2 for metrics in found["metrics"])


def test_bfloat16_has_the_gradient_of_one_up_to_its_rounding(two, qwen):
    (found,) = two.run(jobs.compare, [case(qwen, [["usual", 0]], dtype="float32")])
    assert max(found["gradient"]) < 1e-5
    settings = {"model": str(qwen), "batches": [["usual", 0]]}
    for found in two.run(jobs.compare_bfloat16, [settings, {**settings, **SHARED}]):
        assert max(found["gradient"]) < 0.05


@pytest.mark.parametrize("model", ["qwen", "sliding_qwen"])
def test_a_reference_with_the_policys_own_weights_is_at_a_divergence_of_exactly_0_in_bfloat16(two, model, request):
    """Sharded and gathered as the policy is: its layers, norms too, are bfloat16, embedding and head are not."""
    folder = str(request.getfixturevalue(model))
    for settings in ({"packing": "auto"}, {"lora": {"r": 4, "alpha": 8}}, SHARED):
        assert two.run(jobs.own_weights_as_reference, folder, settings) == [0.0, 0.0]


@pytest.mark.parametrize("with_reference", [False, True])
def test_each_rank_holds_its_share_of_parameters_gradients_and_state(two, sliding_qwen, qwen, with_reference):
    found = two.run(jobs.storage, str(sliding_qwen), {"reference": str(qwen)} if with_reference else None)
    for held in found["held"]:
        assert held <= 1.1 * found["alone"] / 2 + found["layer"]
    assert sum(found["held"]) <= 1.1 * found["alone"]


@pytest.fixture(scope="module")
def saved(two, sliding_qwen, tmp_path_factory):
    """What two processes saved after two optimizer steps, and their weights after a third one."""
    folder = tmp_path_factory.mktemp("saved")
    metrics = two.run(jobs.save_and_load, str(sliding_qwen), str(folder))
    return folder, metrics


def test_a_run_resumes_bit_for_bit_on_as_many_processes(two, saved, tmp_path):
    folder, metrics = saved
    again = two.run(jobs.resume, str(folder), str(tmp_path / "out"))
    assert jobs.same_weights(tmp_path / "out", folder / "next") == 0.0
    assert again["loss"] == metrics["loss"]


def test_one_process_resumes_what_two_saved_and_two_what_one_saved(two, saved, sliding_qwen, tmp_path):
    folder, _ = saved
    jobs.resume(None, str(folder), str(tmp_path / "one"))
    assert jobs.same_weights(tmp_path / "one", folder / "next") < 1e-12
    alone = jobs.trainer_of(sliding_qwen, None)
    for seed in (0, 1):
        alone.train_batch(jobs.make_batch(seed))
    alone.save_weights(tmp_path / "state" / "weights")
    alone.save_state(tmp_path / "state" / "trainer")
    two.run(jobs.resume, str(tmp_path / "state"), str(tmp_path / "two"))
    assert jobs.same_weights(tmp_path / "two", folder / "next") < 1e-12


def test_adapters_are_resumed_on_another_number_of_processes_and_bit_for_bit_on_the_same(two, qwen, tmp_path):
    lora = {"r": 3, "alpha": 6}
    folders = {count: tmp_path / f"saved-{count}" for count in (1, 2)}
    two.run(jobs.save_adapters, str(qwen), str(folders[2]), lora)
    jobs.save_adapters(None, str(qwen), str(folders[1]), lora)
    names = {path.name for path in (folders[2] / "weights").iterdir()}
    assert names == {"adapter_config.json", "adapter_model.safetensors", "base_model.json"}
    for by, on in ((2, 2), (1, 2), (2, 1)):
        arguments = str(qwen), str(folders[by]), str(tmp_path / f"out-{by}-{on}"), lora
        if on == 2:
            two.run(jobs.resume_adapters, *arguments)
        else:
            jobs.resume_adapters(None, *arguments)
        apart = jobs.same_weights(arguments[2], folders[by] / "next")
        assert apart == 0.0 if by == on else 0.0 < apart < 1e-12


def test_adapters_of_another_shape_are_refused_by_all_processes_which_go_on(two, qwen, tmp_path):
    two.run(jobs.save_adapters, str(qwen), str(tmp_path / "saved"), {"r": 3, "alpha": 6})
    arguments = str(qwen), str(tmp_path / "saved"), str(tmp_path / "out")
    said = two.run(jobs.resume_adapters, *arguments, {"r": 4, "alpha": 8})
    assert "resume with trainer.lora.r = 3 and trainer.lora.alpha = 6" in said
    said = two.run(jobs.resume_adapters, *arguments, {"r": 3, "alpha": 6, "target_modules": ["q_proj"]})
    assert "resume with trainer.lora.target_modules" in said


def test_a_checkpoint_is_safetensors_and_json_that_can_be_sealed(saved, tmp_path):
    folder, _ = saved
    names = sorted(path.name for path in (folder / "trainer").iterdir())
    assert names == ["optimizer-00001-of-00002.safetensors", "optimizer-00002-of-00002.safetensors", "trainer.json"]
    shutil.copytree(folder, tmp_path / "copy")
    write_manifest(tmp_path / "copy")
    assert find_damage(tmp_path / "copy") is None
    for path in folder.rglob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            assert list(file.keys())


def test_resuming_opens_no_pickle(saved, tmp_path, monkeypatch):
    import pickle

    folder, _ = saved

    def refused(*_, **__):
        raise AssertionError("a pickle was opened")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refused)
    jobs.resume(None, str(folder), str(tmp_path / "out"))


def test_a_missing_or_foreign_file_of_a_rank_is_named(saved, qwen, tmp_path):
    folder, _ = saved
    state = shutil.copytree(folder / "trainer", tmp_path / "trainer")
    (state / "optimizer-00002-of-00002.safetensors").unlink()
    trainer = jobs.trainer_of(folder / "weights", None)
    with pytest.raises(CheckpointError, match="the optimizer state of 1 processes, expected 2"):
        trainer.load_state(state)
    with pytest.raises(CheckpointError, match="lm_head"):  # its head is tied
        jobs.trainer_of(qwen, None).load_state(folder / "trainer")
    assert not trainer.optimizer.state


def test_a_large_model_is_saved_in_several_files_with_an_index(two, sliding_qwen, tmp_path):
    two.run(jobs.save_in_small_files, str(sliding_qwen), str(tmp_path / "out"))
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2 and files[0].startswith("model-00001-of-0000")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(files)
    assert jobs.same_weights(tmp_path / "out", sliding_qwen) == 0.0
    reader = jobs.trainer_of(tmp_path / "out", None)
    assert reader.model.config.architectures == ["Qwen3ForCausalLM"]


@pytest.mark.parametrize("kind", ["tied", "untied", "experts"])
def test_every_tensor_is_sent_as_it_is_published_bit_for_bit_and_one_at_a_time(
    two, qwen, sliding_qwen, tmp_path, monkeypatch, kind
):
    """To a process in a gloo group, which stands for NCCL's; it knows names, dtypes and shapes beforehand."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    model = write_experts(tmp_path / "experts") if kind == "experts" else {"tied": qwen, "untied": sliding_qwen}[kind]
    layout = published_layout(load_model(model))
    received = {}

    def receive():
        group = dist.ProcessGroupGloo(dist.FileStore(str(tmp_path / "store"), 2), 1, 2, timedelta(seconds=HANGS))
        for name, (dtype, shape) in layout.items():
            received[name] = torch.full(shape, torch.nan, dtype=dtype)
            group.broadcast([received[name]]).wait()

    receiver = threading.Thread(target=receive)
    receiver.start()
    names, most = two.run(jobs.send, str(model), str(tmp_path / "store"), str(tmp_path / "out"))
    receiver.join(timeout=HANGS)
    assert names == list(layout)
    saved, before = (
        {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
        for folder in (tmp_path / "out", model)
    )
    assert received.keys() == saved.keys() == before.keys()
    assert all(torch.equal(received[name], tensor) for name, tensor in saved.items())
    assert not any(torch.equal(received[name], tensor) for name, tensor in before.items())
    assert most <= max(tensor.nbytes for tensor in saved.values())


def test_receivers_that_fail_are_agreed_on_by_all_ranks_which_train_on(two, qwen, tmp_path):
    """Without waiting for the deadline: the other rank gathers to the end, and hears of it."""
    gone, nccl, memory = two.run(jobs.send_in_vain, str(qwen), str(tmp_path / "out"))
    first, *_ = published_layout(load_model(qwen))
    assert gone == ["replica 1 is gone", 3]
    assert nccl == [f"{first} could not be sent: NCCL error: remote process exited", 0]
    assert "could not be sent: out of memory: 1 GiB" in memory[0] and memory[1] == 5
    assert jobs.same_weights(tmp_path / "out", qwen) > 0


@pytest.mark.parametrize("sequence", [1, 2])
def test_a_loss_that_fails_on_one_rank_stops_all_of_them_in_step(two, qwen, sequence):
    nan, refused = two.run(jobs.bad_losses, str(qwen), sequence)
    assert nan[0] == "RunStopped" and "the loss is nan on 1 trajectories: c" in nan[1] and "optimizer step 0" in nan[1]
    assert refused[0] == "ComponentError" and "no such chunk" in refused[1]
    for *_, untouched, trained in (nan, refused):
        assert untouched and trained > 0


def test_a_rank_that_keeps_the_others_waiting_is_named(two, tmp_path):
    first, again, leader = two.run(jobs.hang, str(tmp_path))
    assert re.fullmatch(
        r"rank 1 of the trainer \(process \d+ on \S+\) kept the other processes waiting for 1 s "
        r"\(trainer\.parallel\.deadline\), or is gone",
        first,
    )
    assert str(leader) not in first and again == f"the trainer's processes have ended: {first}"


def test_a_rank_that_ends_while_weights_are_sent_stops_the_run_and_is_not_taken_for_a_receiver(qwen):
    with crew(2) as found:
        said, num_sent = found.run(jobs.die_in_send, str(qwen))
    assert re.fullmatch(r"rank 1 of the trainer \(process \d+ on \S+\) failed: out of memory: 1 GiB.*", said)
    assert num_sent == 0


def test_what_ends_a_rank_is_told_by_rank_0():
    with crew(2) as found:
        said = found.run(jobs.die, "reports")
    assert re.fullmatch(r"rank 1 of the trainer \(process \d+ on \S+\) failed: out of memory: 1 GiB.*", said)
