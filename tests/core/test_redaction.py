"""What leaves the process holds no keys."""

import base64
import logging
import sys

import pytest

from verbatim.core import redaction
from verbatim.core.key_names import names_key
from verbatim.core.redaction import WithoutSecrets, hide, redacted, without_secrets
from verbatim.core.texts import error_text


def test_keys_are_redacted_wherever_they_are_and_nothing_else_is():
    config = {
        "name": "run",
        "orchestrator": {
            "teacher": {"base_url": "https://me:pw@host/v1?key=abc&x=1", "api_key_env": "OPENAI_API_KEY"},
            "train": {
                "env": [
                    {"args": {"api_key": "abc", "headers": {"Authorization": "abc"}, "tokens": ["a"], "key": "answer"}}
                ]
            },
            "sampling": {"max_tokens": 8, "temperature": 1.0, "token": ""},
        },
        "monitor": {"mine": {"kwargs": {"HF-Token": "a1b2c3d4e5f6g7h8", "keyboard": "de", "password": {"of": "me"}}}},
    }
    assert redacted(config) == {
        "name": "run",
        "orchestrator": {
            "teacher": {"base_url": "https://[redacted]@host/v1?key=[redacted]&x=1", "api_key_env": "OPENAI_API_KEY"},
            "train": {
                "env": [
                    {
                        "args": {
                            "api_key": "[redacted]",
                            "headers": {"Authorization": "[redacted]"},
                            "tokens": ["a"],
                            "key": "answer",
                        }
                    }
                ]
            },
            "sampling": {"max_tokens": 8, "temperature": 1.0, "token": ""},
        },
        "monitor": {"mine": {"kwargs": {"HF-Token": "[redacted]", "keyboard": "de", "password": {"of": "[redacted]"}}}},
    }


@pytest.mark.parametrize(
    "secret",
    [
        "sk-proj-abcdefghijklmnop",
        "hf_abcdefghijklmnop",
        "0123456789abcdef0123456789abcdef01234567",
        "local-0123456789abcdef0123456789abcdef01234567",
        "wandb_v1_abcdefghijklmnopqrst",
    ],
)
def test_what_looks_like_a_key_is_cut_out_of_a_text(secret: str):
    assert without_secrets(f"403 for {secret}, sorry") == "403 for [redacted], sorry"


def test_the_values_of_variables_that_hold_keys_are_cut_out_of_a_text(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MY_SERVICE_API_KEY", "open sesame")
    monkeypatch.setenv("MY_TOKEN", "short")
    monkeypatch.setenv("MY_PATH", "open door")
    assert without_secrets("open sesame, said the open door in short") == "[redacted], said the open door in short"


@pytest.mark.parametrize(
    ("value", "text", "left"),
    [
        ("number", "guess_number.toml has a number", "guess_number.toml has a number"),
        ("guessing", "it is guessing", "it is guessing"),
        ("12345678", "12345678 tokens", "12345678 tokens"),
        ("Guess-num", "Guess-number, Guess-num", "Guess-number, [redacted]"),
        ("Guess-num", "a%2FGuess-num 'a\\nGuess-num'", "a%2F[redacted] 'a\\n[redacted]'"),
        ("a1b2c3d4e5f6g7h8", "Xa1b2c3d4e5f6g7h8X", "X[redacted]X"),
        ("+open-sesame/", "a+open-sesame/b", "a[redacted]b"),
    ],
)
def test_the_value_of_a_variable_is_found_as_a_whole_word(value: str, text: str, left: str, monkeypatch):
    monkeypatch.setenv("POSTGRES_PASSWORD", value)
    assert without_secrets(text) == left


@pytest.mark.parametrize(
    "name",
    [
        "openaiKey",
        "MY_PASS",
        "OPENAI_API_KEY_2",
        "API_KEY_PROD",
        "clientSecret",
        "db.password",
        "myapikey",
        "--api-key",
        "HF-Token",
        "x-goog-api-key",
        "PGPASSWORD",
        "pwd",
    ],
)
def test_names_of_keys(name: str):
    assert names_key(name)


@pytest.mark.parametrize(
    "name",
    [
        "api_key_env",
        "password_file",
        "keyboard",
        "monkey",
        "tokenizer",
        "SSH_AUTH_SOCK",
        "GIT_ASKPASS",
        "PWD",
        "OLDPWD",
        "compass",
        "keys_in_config",
        "DATABASE_URL",
        "",
    ],
)
def test_names_of_other_things(name: str):
    assert not names_key(name)


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ('["agent", "--api-key", "hunter2"]', '["agent", "--api-key", "[redacted]"]'),
        ("agent --api-key hunter2 --fast", "agent --api-key [redacted] --fast"),
        ("agent --api-key=hunter2", "agent --api-key=[redacted]"),
        ("MY_PASS=hunter2 agent", "MY_PASS=[redacted] agent"),
        ('{"password": "hunter2", "n": 1}', '{"password": "[redacted]", "n": 1}'),
        ("Client(openai_api_key='hunter2')", "Client(openai_api_key='[redacted]')"),
        ("X-Api-Key: hunter2\nHost: a", "X-Api-Key: [redacted]\nHost: a"),
        ("authorization: Digest hunter2", "authorization: [redacted]"),
        ("AWS_SECRET_ACCESS_KEY: abcd/efg+hi\nb: c", "AWS_SECRET_ACCESS_KEY: [redacted]\nb: c"),
        ("  db_password: hunter2", "  db_password: [redacted]"),
        ("password: missing", "password: missing"),
        ("error in the password: hunter2 is too short", "error in the password: hunter2 is too short"),
        ("x-token: 5 tokens left", "x-token: 5 tokens left"),
        ("X-Api-Key: hunter2 was refused", "X-Api-Key: [redacted] was refused"),
        ("cookie: chocolate and oats", "cookie: chocolate and oats"),
        ("Set-Cookie: session=abc; Path=/\nHost: a", "Set-Cookie: [redacted]\nHost: a"),
        ("Basic arithmetic, the Bearer of news", "Basic arithmetic, the Bearer of news"),
        ("Basic dXNlcjpodW50ZXIy", "Basic [redacted]"),
        ("trainer.loss.key: 'a' -> 'b'; type --key KEY", "trainer.loss.key: 'a' -> 'b'; type --key KEY"),
        ("name the variable: --api-key-env NAME", "name the variable: --api-key-env NAME"),
    ],
)
def test_what_stands_behind_the_name_of_a_key_is_cut_out_of_a_text(text: str, left: str):
    assert without_secrets(text) == left


@pytest.mark.parametrize("written", ['it said "{}"', "%2F{}", "quoted: {}"], ids=["plain", "address", "end"])
def test_a_key_that_was_given_is_cut_out_wherever_it_stands(written: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(redaction, "_hidden", set())
    hide('a/b"c d')
    for form in ('a/b"c d', "a%2Fb%22c%20d", 'a/b\\"c d', base64.b64encode(b'a/b"c d').decode()):
        assert without_secrets(written.format(form)) == written.format("[redacted]")


def test_a_longer_key_is_cut_out_before_one_that_it_begins_with(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(redaction, "_hidden", {"open sesame", "open sesame twice"})
    assert without_secrets("open sesame twice, open sesame") == "[redacted], [redacted]"


def test_values_of_options_in_lists_and_of_tables_with_a_name_are_redacted():
    command, env = ["agent", "--api-key", "hunter2", "--n", "2"], [{"name": "MY_PASS", "value": "hunter2"}]
    assert redacted(command) == ["agent", "--api-key", "[redacted]", "--n", "2"]
    assert redacted({"env": env}) == {"env": [{"name": "MY_PASS", "value": "[redacted]"}]}


def test_log_records_and_their_tracebacks_hold_no_keys():
    formatter = WithoutSecrets("%(message)s")
    try:
        raise ValueError("MY_PASS=hunter2")
    except ValueError:
        record = logging.LogRecord("a", logging.ERROR, "", 0, "sent %s", ("api_key='hunter2'",), sys.exc_info())
    written = formatter.format(record)
    assert "hunter2" not in written and written.count("[redacted]") >= 2


def test_the_text_of_an_exception_holds_no_keys():
    assert error_text(ValueError("MY_PASS=hunter2")) == "ValueError: MY_PASS=[redacted]"


@pytest.mark.parametrize(
    "value",
    [
        {"password": 12345678},
        {"args": {"api_key": 1234567890123456}},
        {"env": [["API_KEY", "swordfish9"]]},
        {"env": [{"key": "API_KEY", "value": "swordfish9"}]},
        {"env": [{"Name": "API_KEY", "Value": "swordfish9"}]},
        {"headers": [["X-Api-Key", "swordfish9"]]},
    ],
)
def test_a_key_that_is_a_number_or_stands_in_a_pair_is_one(value):
    shown = str(redaction.redacted(value))
    assert "swordfish9" not in shown and "12345678" not in shown and redaction.REDACTED in shown
    assert any(redaction.is_key(name, text) for _, name, text in redaction.named_texts(value))


def test_numbers_and_pairs_that_are_no_keys_stay():
    value = {
        "max_tokens": 1234567,
        "key": 1234567,
        "pair": ["left", "right9"],
        "passes": 3,
        "value": 1,
        "password": True,
    }
    assert redaction.redacted(value) == value


def test_of_a_vast_log_record_both_ends_are_kept_without_keys():
    key, a, b, c = "sk-" + "k3y" * 10, "a" * 32_746, "b" * 10_000_000, "c" * 32_759
    text = f"{key} {a} {key} {b} {key} {c}"
    record = logging.LogRecord("x", logging.ERROR, "x.py", 1, "%s", (text,), None)
    begin, note, end = WithoutSecrets("%(message)s").format(record).split("\n")
    assert begin == f"[redacted] {a} [redacted]" and len(begin) == 32_768
    assert end == f"edacted] {c}" and len(end) == 32_768
    assert note == f"[cut: {len(text) - 65_536:,} of {len(text):,} characters]"
