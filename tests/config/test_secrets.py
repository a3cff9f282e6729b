"""What leaves the process holds no keys."""

import pytest

from verbatim.config.secrets import redacted, without_secrets


def test_keys_are_redacted_wherever_they_are_and_nothing_else_is():
    config = {
        "name": "run",
        "orchestrator": {
            "teacher": {"base_url": "https://me:pw@host/v1?key=abc&x=1", "api_key_env": "OPENAI_API_KEY"},
            "train": {"env": [{"args": {"api_key": "abc", "headers": {"Authorization": "abc"}, "tokens": ["a"]}}]},
            "sampling": {"max_tokens": 8, "temperature": 1.0, "token": ""},
        },
        "monitor": {"mine": {"kwargs": {"HF-Token": "abc", "keyboard": "de", "password": {"of": "me"}}}},
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
                            "tokens": "[redacted]",
                        }
                    }
                ]
            },
            "sampling": {"max_tokens": 8, "temperature": 1.0, "token": ""},
        },
        "monitor": {"mine": {"kwargs": {"HF-Token": "[redacted]", "keyboard": "de", "password": "[redacted]"}}},
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
