import json

import pytest
import torch
from test_trainer_steps import make_trainer, same, weights
from tokenizers import Tokenizer, models, pre_tokenizers
from trainer_helpers import VOCAB, make_batch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from verbatim.core.errors import CheckpointError
from verbatim.models.loading import load_tokenizer

SCHEDULE = {"schedule": "cosine", "warmup_steps": 2, "weight_decay": 0.1}


@pytest.mark.parametrize("steps_per_batch", [1, 2])
def test_a_resumed_run_is_bit_for_bit_the_run_that_never_stopped(qwen, tmp_path, steps_per_batch):
    settings = {"total": 5 * steps_per_batch, "optim": SCHEDULE, "optimizer_steps_per_batch": steps_per_batch}
    straight = make_trainer(qwen, **settings)
    expected = [straight.train_batch(make_batch(seed)) for seed in range(5)]

    first = make_trainer(qwen, **settings)
    for seed in range(3):
        first.train_batch(make_batch(seed))
    first.save_weights(tmp_path / "weights")
    first.save_state(tmp_path / "state")

    second = make_trainer(tmp_path / "weights", **settings)
    second.load_state(tmp_path / "state")
    found = [second.train_batch(make_batch(seed)) for seed in (3, 4)]

    assert same(weights(second), weights(straight))
    for parameter, twin in zip(second.model.parameters(), straight.model.parameters(), strict=True):
        for key, value in straight.optimizer.state[twin].items():
            assert torch.equal(second.optimizer.state[parameter][key], value), key
    clock = {"seconds", "tokens_per_second"}
    for a, b in zip(found, expected[3:], strict=True):
        assert {k: v for k, v in a.items() if k not in clock} == {k: v for k, v in b.items() if k not in clock}


def test_state_on_disk_is_safetensors_and_json_only(qwen, tmp_path):
    trainer = make_trainer(qwen)
    trainer.train_batch(make_batch())
    trainer.save_state(tmp_path / "state")
    assert sorted(path.name for path in (tmp_path / "state").iterdir()) == ["optimizer.safetensors", "trainer.json"]
    assert json.loads((tmp_path / "state" / "trainer.json").read_text())["num_optimizer_steps"] == 1


def test_state_before_the_first_step_can_be_saved_and_loaded(qwen, tmp_path):
    make_trainer(qwen).save_state(tmp_path)
    trainer = make_trainer(qwen)
    trainer.load_state(tmp_path)
    assert trainer.schedule.num_done == 0 and not trainer.optimizer.state


def test_state_that_is_missing_damaged_or_of_another_model_is_explained(qwen, sliding_qwen, tmp_path):
    trainer = make_trainer(qwen)
    with pytest.raises(CheckpointError, match=r"trainer\.json is not a trainer state"):
        trainer.load_state(tmp_path)
    other = make_trainer(sliding_qwen)  # its head is untied: one parameter more
    other.train_batch(make_batch())
    other.save_state(tmp_path)
    with pytest.raises(CheckpointError, match="lm_head"):
        trainer.load_state(tmp_path)
    assert trainer.schedule.num_done == 0 and not trainer.optimizer.state
    (tmp_path / "optimizer.safetensors").write_bytes(b"cut short")
    with pytest.raises(CheckpointError, match="is not a readable optimizer state"):
        other.load_state(tmp_path)


def test_more_steps_done_than_the_run_has_are_refused(qwen, tmp_path):
    trainer = make_trainer(qwen, total=3)
    for _ in range(3):
        trainer.train_batch(make_batch())
    trainer.save_state(tmp_path)
    with pytest.raises(CheckpointError, match="raise max_steps"):
        make_trainer(qwen, total=2).load_state(tmp_path)


def test_the_optimizer_of_a_resumed_run_has_the_settings_that_it_is_given_and_the_moments_of_then(qwen, tmp_path):
    first = make_trainer(qwen, optim={"weight_decay": 0.1, "beta1": 0.9})
    first.train_batch(make_batch())
    first.save_state(tmp_path)
    second = make_trainer(qwen, optim={"weight_decay": 0.5, "beta1": 0.7, "beta2": 0.8, "eps": 1e-6})
    second.load_state(tmp_path, left=1)
    matrices = second.optimizer.param_groups[0]
    assert (matrices["weight_decay"], matrices["betas"], matrices["eps"]) == (0.5, (0.7, 0.8), 1e-6)
    for parameter, twin in zip(second.model.parameters(), first.model.parameters(), strict=True):
        assert torch.equal(second.optimizer.state[parameter]["exp_avg"], first.optimizer.state[twin]["exp_avg"])


@pytest.mark.parametrize("model", ["qwen", "sliding_qwen"])
def test_saved_weights_are_a_hugging_face_folder(model, tmp_path, request):
    trainer = make_trainer(request.getfixturevalue(model))
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer.tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    trainer.tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    samples = make_batch()
    trainer.train_batch(samples)
    trainer.save_weights(tmp_path)

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.dtype == torch.float32
    assert loaded.config._attn_implementation == "sdpa"
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, trainer.model.get_parameter(name))
    ids = torch.tensor(samples[0].token_ids).long()
    with torch.no_grad():
        logprobs = loaded(input_ids=ids[None]).logits[0, :-1] / torch.tensor(samples[0].temperatures[1:, None])
    expected = logprobs.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    found = torch.tensor(trainer.logprobs(samples[:1])[0][1:])
    mask = torch.tensor(samples[0].loss_mask[1:])
    torch.testing.assert_close(found[mask], expected[mask], atol=1e-5, rtol=0)
    assert AutoTokenizer.from_pretrained(tmp_path)("w3 w5")["input_ids"] == [3, 5]
    assert load_tokenizer(tmp_path).chat_template == trainer.tokenizer.chat_template
