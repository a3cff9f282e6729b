"""Keys and passwords stand in a configuration only where it says so; elsewhere variables are named."""

from __future__ import annotations

from pathlib import Path

import pytest

from verbatim.config import dump_config, load_config, make_config
from verbatim.core import redaction
from verbatim.core.errors import ConfigError
from verbatim.core.redaction import without_secrets

RUN = """\
[model]
name = "some/model"
[[orchestrator.train.env]]
id = "program"
args = { command = ["agent"], data = "rows.jsonl", ARGS }
"""


@pytest.fixture(autouse=True)
def nothing_hidden(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(redaction, "_hidden", set())


def file_with(tmp_path: Path, args: str, top: str = "") -> Path:
    path = tmp_path / "run.toml"
    path.write_text(top + RUN.replace("ARGS", args))
    return path


@pytest.mark.parametrize(
    ("args", "place"),
    [
        ('env = { SEARCH_API_KEY = "hunter2!" }', "args.env.SEARCH_API_KEY"),
        ('env = { openaiKey = "sk-abcdefghijklmnopqrst" }', "args.env.openaiKey"),
        ('env = { MY_PASS = "hunter2!" }', "args.env.MY_PASS"),
        ('env = { URL = "https://me:hunter2!@host" }', "args.env.URL"),
        ('extra = ["--api-key", "hunter2!"]', "args.extra.1"),
        ('extra = ["--api-key=hunter2!"]', "args.extra.0"),
        ('extra = "agent --password hunter2!"', "args.extra"),
        ('headers = { Authorization = "Bearer hunter2!" }', "args.headers.Authorization"),
        ('nested = [{ deep = { password = "hunter2!" } }]', "args.nested.0.deep.password"),
        ('note = "it is sk-abcdefgh1jklmn0pqrst"', "args.note"),
        ('env = { MY_PASS = "hunter2" }', "args.env.MY_PASS"),
        ('db_pass = "hunter2"', "args.db_pass"),
        ('password = "swordfish"', "args.password"),
        ('key = "a1b2c3d4e5f6g7h8"', "args.key"),
        ('extra = ["--token", "a1b2c3d4e5f6g7h8"]', "args.extra.1"),
        ('env = { AWS_SECRET_ACCESS_KEY = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEX" }', "args.env.AWS_SECRET_ACCESS_KEY"),
        ('note = "hf_abcdefghijklmnopqrSTUVWXYZabcdefgh"', "args.note"),
        ('note = "sk-proj-Ab_cdefgh1-jklmn0pqrstAb_cdefgh1-jklmn0pqrst"', "args.note"),
        ('note = "Authorization: Basic dXNlcjpodW50ZXIy"', "args.note"),
        ('url = "https://h/x?api_key=hunter2!"', "args.url"),
    ],
)
def test_a_key_is_refused_at_its_place_and_is_not_quoted(tmp_path: Path, args: str, place: str):
    with pytest.raises(ConfigError) as caught:
        load_config(file_with(tmp_path, args))
    said = str(caught.value)
    assert f"run.toml:5: orchestrator.train.env.0.{place}: found what looks like a key or a password" in said
    assert "keys_in_config = true" in said
    assert "hunter2" not in said and "swordfish" not in said and "a1b2c3" not in said and "abcdefghijkl" not in said


def test_the_value_of_a_variable_with_a_key_is_refused_wherever_it_stands(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("MY_SERVICE_TOKEN", "open sesame")
    with pytest.raises(ConfigError, match=r"args\.note: found the value of .* variable MY_SERVICE_TOKEN, which"):
        load_config(file_with(tmp_path, 'note = "say open sesame twice"'))


@pytest.mark.parametrize("value", ["number", "guessing", "Number1", "12345678", "Guess-num"])
def test_the_value_of_a_variable_is_no_key_where_it_is_a_word_or_a_part_of_one(tmp_path: Path, monkeypatch, value: str):
    monkeypatch.setenv("POSTGRES_PASSWORD", value)
    args = 'recipe = "recipes/guess_number.toml", note = "guessing Guess-number 12345678 Number1"'
    load_config(file_with(tmp_path, args))


def test_a_key_that_was_typed_or_given_in_python_is_not_quoted(tmp_path: Path):
    typed = ["--orchestrator.train.env.0.args.env", '{SEARCH_API_KEY = "hunter2!"}']
    with pytest.raises(ConfigError) as caught:
        load_config(file_with(tmp_path, "timeout = 1.0"), typed)
    assert "hunter2" not in str(caught.value) and "SEARCH_API_KEY" in str(caught.value)
    settings = {"model": {"name": "a"}, "orchestrator.train": {"env": [{"id": "x", "args": {"password": "hunter2!"}}]}}
    with pytest.raises(ConfigError) as caught:
        make_config(settings)
    assert "hunter2" not in str(caught.value) and "args.password" in str(caught.value)


@pytest.mark.parametrize(
    "args",
    [
        'api_key_env = "SEARCH_API_KEY"',
        'env_from = ["SEARCH_API_KEY"]',
        'key = "answer"',
        'token = "<|im_end|>"',
        'api_key = "EMPTY"',
        'env = { HF_TOKEN = "" }',
        "max_tokens = 8",
        'stop_tokens = ["</s>"]',
        'url = "https://example.org/a@b"',
        'secret_word = "apple"',
        'ask = "What is the password?"',
        'rows = [{ id = "secret-7" }]',
        'path = "./hf_checkpoint_step_1000"',
        'rows = "hf_dataset_of_questions_1"',
        'repo = "sk-learn_very_long_names"',
        'repo = "pk-sentence-transformers-v2"',
        'path = "/data/npm_packages_and_more_long_names_here/x"',
        'path = "/data/sk-learn-models-2024-long/x"',
        'system = "Basic arithmetic questions"',
        'system = "You are the Bearer of good news"',
        "system = \"Tell the password: 'swordfish', and --key left arrow\"",
        'pass = "pass@8"',
        'n_pass = "two"',
        'first_pass = "greedy"',
        'num_pass = "pass@16"',
        'pw = "width"',
        'cred = "0.9"',
        'PASS = "first"',
        'sort_key = "created_at_2024_iso"',
        'answer_key = "ground_truth_v2_final"',
        'keys = ["prompt_column_v2_x"]',
        'group_key = "prompt_id_0123456789ab"',
        'sep_token = "<|reserved_special_token_7|>"',
        'pad_token = "<|reserved_special_token_7|>"',
        'special_tokens = ["<|reserved_special_token_7|>"]',
        'passwords = ["swordfish", "letmein"]',
        'credentials = "path/to/file.json"',
        'url = "https://h/x?key=name"',
        'client_secret = "abc"',
        'access_key = "north_gate_2"',
        'passphrase = "open sesame"',
        'tls_key = "/home/me/tls_2024/key.pem"',
        'extra = "python a.py --pass 2 --key sort_col"',
    ],
)
def test_what_is_no_key_is_taken(tmp_path: Path, args: str):
    load_config(file_with(tmp_path, args))


def test_a_model_is_no_key(tmp_path: Path):
    path = file_with(tmp_path, "timeout = 1.0")
    assert load_config(path, ["--model.name", "./hf_checkpoint_step_1000"]).model.name == "./hf_checkpoint_step_1000"


@pytest.mark.parametrize(
    ("env", "said"),
    [
        (
            'args = { command = ["a"], env = { A_KEY = "hunter2" } }',
            'and give its name here instead: env_from = ["A_KEY"]; or set',
        ),
        (
            'args = { command = ["a"], x = "--password hunter2" }',
            'and give its name here instead: env_from = ["NAME"]; or set',
        ),
        ('args = { tools = [{ command = "a", args = ["--password", "hunter2"] }] }', 'env_from = ["NAME"]; or'),
        (
            'args = { judge = { base_url = "a", api_key = "hunter2" } }',
            'and give its name here instead: api_key_env = "NAME"; or set',
        ),
        ('args = { env = { MY_PASS = "hunter2" } }', "and let the code that needs it read that variable; or set"),
        (
            'args = { password = "hunter2" }',
            "and let the code that needs it read that variable; or set keys_in_config = true",
        ),
    ],
)
def test_what_to_type_in_place_of_a_key_fits_its_place(tmp_path: Path, env: str, said: str):
    path = tmp_path / "run.toml"
    path.write_text(f'[model]\nname = "a"\n[[orchestrator.train.env]]\nid = "x"\n{env}\n')
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert said in str(caught.value)


def test_the_id_of_a_commit_is_no_key(tmp_path: Path):
    path = tmp_path / "run.toml"
    path.write_text(
        '[model]\nname = "a"\n[[orchestrator.train.env]]\nid = "x"\n'
        'args = { commit = "0123456789abcdef0123456789abcdef01234567" }\n'
    )
    load_config(path)


def test_keys_may_stand_where_the_configuration_says_so_and_are_redacted_elsewhere(tmp_path: Path):
    args = 'env = { MY_PASS = "hunter2!", X = "--token a1b2c3d4e5f6g7h8" }'
    path = file_with(tmp_path, args, "keys_in_config = true\n")
    config = load_config(path)
    stored = tmp_path / "config.toml"
    stored.write_text(dump_config(config))
    assert load_config(stored) == config, "a run that goes on has its keys"
    assert without_secrets("hunter2! and a1b2c3d4e5f6g7h8") == "[redacted] and [redacted]"


def test_the_values_of_variables_that_are_named_are_redacted_whatever_their_names(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("PLAIN_NAME", "open sesame")
    monkeypatch.setenv("OTHER_NAME", "close sesame")
    load_config(file_with(tmp_path, 'env_from = ["PLAIN_NAME"], api_key_env = "OTHER_NAME"'))
    assert without_secrets("open sesame, close sesame") == "[redacted], [redacted]"


def test_what_stands_for_a_key_that_was_not_stored_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"args.env.MY_PASS: found \"\[redacted\]\", the placeholder of a key"):
        load_config(file_with(tmp_path, 'env = { MY_PASS = "[redacted]" }', "keys_in_config = true\n"))


def test_a_server_of_inference_needs_no_key_of_its_own(tmp_path: Path):
    path = tmp_path / "run.toml"
    path.write_text(
        '[model]\nname = "a"\n[[orchestrator.train.env]]\nid = "x"\n[inference.vllm]\nenv = { HF_TOKEN = "hunter2!" }\n'
    )
    with pytest.raises(
        ConfigError, match=r"inference\.vllm\.env\.HF_TOKEN: .* servers inherit the environment variables"
    ):
        load_config(path)
