"""Keys of services, logins and passwords are told in values, lists, texts, JSON that stands in JSON, addresses and log
records, and harmless values that look like them are let be."""

import doctest
import json
import logging
import random
import string

import pytest

from verbatim.config.sure_keys import is_sure_key, keys_in
from verbatim.core import key_forms, key_names, logins, named_values, redaction
from verbatim.core.redaction import WithoutSecrets, redacted, without_secrets

REDACTED = redaction.REDACTED
_LETTERS = "aB3dE5gH7jK9mN1pQ2rS4tU6vW8xY0zA"


def mixed(length):
    """Letters of both cases and digits. Keys are made here, so that none stands in the repository."""
    return (_LETTERS * 8)[:length]


def hexed(length):
    return ("0a1b2c3d4e5f6789" * 12)[:length]


def upper(length):
    return ("A2B3C4D5E6F7" * 12)[:length]


UUID = "0f8fad5b-d9cb-469f-a165-70867728950e"
TOKENS = {
    "xai": "xai-" + mixed(80),
    "perplexity": "pplx-" + mixed(48),
    "replicate": "r8_" + mixed(37),
    "sendgrid": f"SG.{mixed(22)}.{mixed(43)}",
    "tavily": "tvly-" + mixed(32),
    "tavily dev": "tvly-dev-" + mixed(32),
    "langsmith": f"lsv2_pt_{hexed(32)}_{hexed(10)}",
    "langsmith service": f"lsv2_sk_{hexed(32)}_{hexed(10)}",
    "digitalocean": "dop_v1_" + hexed(64),
    "shopify": "shpat_" + hexed(32),
    "groq": "gsk_" + mixed(52),
    "hugging face": "hf_" + "abcdefghijklmnopqrSTUVWXYZabcdefgh",
    "gitlab": "glpat-" + mixed(20),
    "gitlab runner": "glrt-" + mixed(20),
    "npm": "npm_" + mixed(36),
    "pypi": "pypi-AgEIcHlwaS5vcmc" + mixed(60),
    "google": "AIza" + mixed(35),
    "google client": "GOCSPX-" + mixed(28),
    "google access": "ya29." + mixed(60),
    "aws": "AKIA" + upper(16),
    "aws session": "ASIA" + upper(16),
    "jwt": f"eyJ{mixed(30)}.eyJ{mixed(40)}.{mixed(43)}",
    "openai": "sk-proj-" + mixed(60),
    "openai old": "sk-" + mixed(48),
    "anthropic": f"sk-ant-api03-{mixed(93)}AA",
    "openrouter": "sk-or-v1-" + hexed(64),
    "langfuse": "sk-lf-" + UUID,
    "github": "ghp_" + mixed(36),
    "github fine": f"github_pat_{mixed(22)}_{mixed(59)}",
    "slack bot": f"xoxb-123456789012-123456789012-{mixed(24)}",
    "slack app": f"xapp-1-{upper(11)}-1234567890123-{hexed(64)}",
    "nvidia": "nvapi-" + mixed(64),
    "wandb": "wandb_v1_" + mixed(40),
    "databricks": "dapi" + hexed(32),
    "stripe": "sk_live_" + mixed(24),
    "stripe hook": "whsec_" + mixed(32),
    "linear": "lin_api_" + mixed(40),
    "notion": "ntn_" + mixed(46),
    "pinecone": "pcsk_" + mixed(70),
    "postman": f"PMAK-{hexed(24)}-{hexed(34)}",
    "together": "tgp_v1_" + mixed(43),
    "fireworks": "fw_" + mixed(24),
    "jina": "jina_" + mixed(60),
    "firecrawl": "fc-" + hexed(32),
    "e2b": "e2b_" + hexed(40),
    "cerebras": "csk-" + hexed(48),
    "docker": "dckr_pat_" + mixed(27),
    "sentry": "sntrys_" + mixed(100),
    "grafana": f"glsa_{mixed(32)}_{hexed(8)}",
    "vault": "hvs." + mixed(90),
    "rubygems": "rubygems_" + hexed(48),
    "supabase": "sbp_" + hexed(40),
    "age": "AGE-SECRET-KEY-1" + upper(58),
    "azure": f"abc8Q~{mixed(32)}",
    "telegram": f"123456789:AA{mixed(33)}",
    "gateway": f"vb-{hexed(16)}-{mixed(32)}",
}
ADDRESSES = {
    "slack hook": ("https://hooks.slack.com/services/{}", f"T{upper(8)}/B{upper(8)}/{mixed(24)}"),
    "slack workflow": ("https://hooks.slack.com/workflows/{}", f"T{upper(8)}/A{upper(8)}/123456/{mixed(24)}"),
    "discord hook": ("https://discord.com/api/webhooks/123456789012345678/{}", mixed(68)),
    "old discord hook": ("https://discordapp.com/api/v9/webhooks/123456789012345678/{}", mixed(68)),
    "teams hook": ("https://a.webhook.office.com/webhookb2/{}", f"{UUID}@{UUID}/IncomingWebhook/{hexed(32)}/{UUID}"),
    "telegram": ("https://api.telegram.org/bot{}/sendMessage", f"123456789:AA{mixed(33)}"),
    "azure signature": ("https://a.blob.core.windows.net/c/f?sp=r&sv=2022-11-02&sig={}", mixed(43) + "%3D"),
    "aws signature": ("https://b.s3.amazonaws.com/f?X-Amz-Expires=60&X-Amz-Signature={}", hexed(64)),
    "aws session": ("https://b.s3.amazonaws.com/f?X-Amz-Security-Token={}&X-Amz-Expires=60", mixed(120)),
    "google signature": ("https://storage.googleapis.com/b/f?X-Goog-Signature={}", hexed(128)),
    "user": ("https://me:{}@host.example/path", "swordfish"),
    "user with an at": ("https://me:{}@host.example/path", "sword@fish"),
    "user without a scheme": ("me:{}@proxy.example:3128", "swordfish"),
    "database": ("postgresql://me:{}@localhost:5432/db", "swordfish"),
    "cache": ("redis://:{}@localhost", "swordfish"),
    "account": ("DefaultEndpointsProtocol=https;AccountName=a;AccountKey={};b=c", mixed(86) + "=="),
}
PLACES = {
    "value": "{}",
    "text": "it is {}, as they said",
    "json": '{{"a": {{"b": ["{}"]}}}}',
    "address": "https://host.example/path?a={}&b=1",
    "line": "first line\n{}\nthird line",
}


def written(key):
    """The key as it stands at each of the places, and in JSON that is a text in JSON, once and twice."""
    for place, form in PLACES.items():
        yield place, form.format(key)
    once = json.dumps({"outer": json.dumps({"inner": key, "lines": f"one\n{key}\ntwo"})})
    yield "json in json", once
    yield "json in json in json", json.dumps({"most": once})


@pytest.mark.parametrize("service", TOKENS)
def test_a_key_of_a_service_is_refused_and_redacted_at_every_place(service):
    for place, text in written(TOKENS[service]):
        assert is_sure_key("note", text), place
        assert TOKENS[service] not in without_secrets(text), place
        assert [path for path, _, _ in keys_in({"rows": ["a", {"note": text}]})] == [("rows", 1, "note")], place
        assert TOKENS[service] not in str(redacted({"rows": ["a", {"note": text}]})), place


@pytest.mark.parametrize("kind", ADDRESSES)
def test_an_address_that_lets_in_is_refused_and_redacted_at_every_place(kind):
    address, secret = ADDRESSES[kind]
    for place, text in written(address.format(secret)):
        assert is_sure_key("note", text), place
        assert secret not in without_secrets(text), place


def test_the_rest_of_an_address_stays():
    address, secret = ADDRESSES["aws signature"]
    assert without_secrets(f"GET {address.format(secret)}: 403") == f"GET {address.format(REDACTED)}: 403"


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({"basic_auth": "me:swordfish"}, ("basic_auth",)),
        ({"basicAuth": "me:swordfish"}, ("basicAuth",)),
        ({"http_auth": "me@host.example:swordfish"}, ("http_auth",)),
        ({"proxy-auth": "me:swordfish"}, ("proxy-auth",)),
        ({"CURLOPT_USERPWD": "me:swordfish"}, ("CURLOPT_USERPWD",)),
        ({"auth": "me:swordfish7"}, ("auth",)),
        ({"auth": ["me", "swordfish"]}, ("auth", 1)),
        ({"auth": ("me", "swordfish")}, ("auth", 1)),
        ({"credentials": ["me", "swordfish7"]}, ("credentials", 1)),
        ({"basic_auth": {"user": "me", "pass": "swordfish7"}}, ("basic_auth", "pass")),
        ({"env": [{"name": "BASIC_AUTH", "value": "me:swordfish"}]}, ("env", 0, "value")),
        ({"command": ["curl", "-u", "me:swordfish", "https://host"]}, ("command", 2)),
        ({"command": ["/usr/bin/curl", "-s", "--user", "me:swordfish"]}, ("command", 3)),
        ({"command": ["curl", "--user=me:swordfish"]}, ("command", 1)),
        ({"command": ["curl", "-ume:swordfish"]}, ("command", 1)),
        ({"command": ["curl", "-U", "me:swordfish"]}, ("command", 2)),
        ({"command": ["curl", "--proxy-user", "me:swordfish"]}, ("command", 2)),
        ({"command": ["http", "-a", "me:swordfish", "host"]}, ("command", 2)),
        ({"command": ["agent", "-u", "me:swordfish7"]}, ("command", 2)),
        ({"command": ["sshpass", "-p", "swordfish", "ssh", "host"]}, ("command", 2)),
        ({"command": ["mysql", "-pswordfish", "db"]}, ("command", 1)),
        ({"command": ["docker", "login", "-u", "me", "-p", "swordfish"]}, ("command", 5)),
        ({"command": ["redis-cli", "-a", "swordfish"]}, ("command", 2)),
        ({"command": "curl -s -u me:swordfish https://host"}, ("command",)),
        ({"command": "curl -s \\\n  --user 'me:swordfish' https://host"}, ("command",)),
        ({"command": ["bash", "-c", "cd /tmp && curl --user=me:swordfish https://host"]}, ("command", 2)),
        ({"note": '["curl", "-u", "me:swordfish"]'}, ("note",)),
        ({"note": '{"api_key": ["swordfish7"]}'}, ("note",)),
        ({"note": '{"api_key": {"of": ["x", "swordfish7"]}}'}, ("note",)),
        ({"note": "api_key=('x', 'swordfish7')"}, ("note",)),
        ({"note": "passwords: [one, swordfish7aB1cD2eF3gH4]"}, ("note",)),
        ({"note": "{'MY_PASS' => ['swordfish7']}"}, ("note",)),
        ({"note": json.dumps({"a": json.dumps({"api_key": "swordfish7"})})}, ("note",)),
        ({"note": json.dumps({"a": json.dumps({"b": json.dumps({"api_key": "swordfish7"})})})}, ("note",)),
        ({"note": json.dumps({"a": json.dumps({"api_key": ["swordfish7"]})})}, ("note",)),
        ({"note": json.dumps({"headers": [["X-Api-Key", "swordfish7"]]})}, ("note",)),
        ({"note": json.dumps({"a": json.dumps([["X-Api-Key", "swordfish7"]])})}, ("note",)),
        ({"note": json.dumps({"env": [{"name": "API_KEY", "value": "swordfish7"}]})}, ("note",)),
        ({"note": json.dumps({"a": json.dumps({"Authorization": "Token swordfish7"})})}, ("note",)),
        ({"note": "get(url, auth=HTTPBasicAuth('me', 'swordfish7'))"}, ("note",)),
        ({"note": "api-keys:\n  - one\n  - 'swordfish7aB1cD2eF3gH4'\nother: 1"}, ("note",)),
        ({"note": "api-key:\n- swordfish7"}, ("note",)),
        ({"note": "<password>swordfish7</password>"}, ("note",)),
        ({"note": "machine host login me password swordfish7"}, ("note",)),
        ({"note": 'api_key = """swordfish7"""'}, ("note",)),
        ({"password": {"secret": "swordfish"}}, ("password", "secret")),
        ({"note": json.dumps({"env": "A=1\napi_key=swordfish7\nB=2"})}, ("note",)),
        ({"note": json.dumps({"argv": json.dumps(["agent", "--api-key", "swordfish7"])})}, ("note",)),
        ({"note": "{\"api_key\": \"it's swordfish7\"}".replace(" swordfish7", "swordfish7")}, ("note",)),
    ],
)  # fmt: skip
def test_what_stands_beside_a_password_tells_it(value, place):
    assert [path for path, _, _ in keys_in(value)] == [place]
    assert "swordfish" not in str(redacted(value)) and REDACTED in str(redacted(value))


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("auth=('me', 'swordfish'), timeout=3", f"auth=('me', '{REDACTED}'), timeout=3"),
        ('{"auth": ["me", "swordfish"]}', f'{{"auth": ["me", "{REDACTED}"]}}'),
        ("basic_auth='me:swordfish'", f"basic_auth='{REDACTED}'"),
        ("ran curl -u me:swordfish https://host", f"ran curl -u {REDACTED} https://host"),
        ('{"password": "it\'s swordfish"}', f'{{"password": "{REDACTED}"}}'),
        ('{\\"password\\": \\"sword \\\\\\"fish\\"}', f'{{\\"password\\": \\"{REDACTED}\\"}}'),
        ('{"tokens": ["a", "b"], "auth": {"type": "basic"}}', '{"tokens": ["a", "b"], "auth": {"type": "basic"}}'),
        ('_TOKENS = ("input_ids", "starts")', '_TOKENS = ("input_ids", "starts")'),
        ('{"A_TOKEN": ["swordfish"]}', f'{{"A_TOKEN": ["{REDACTED}"]}}'),
        ("password: [see the manual]", "password: [see the manual]"),
        ("docker run -u 1000:1000 --user www-data:www-data x", "docker run -u 1000:1000 --user www-data:www-data x"),
        ("the key: (a) or [b, c]", "the key: (a) or [b, c]"),
    ],
)
def test_a_log_record_is_redacted_at_that_place_alone(text, left):
    record = logging.LogRecord("a", logging.ERROR, "", 0, "%s", (text,), None)
    assert WithoutSecrets("%(message)s").format(record) == left


HARMLESS = [
    UUID, UUID.upper(), UUID.replace("-", ""), hexed(40), hexed(64), hexed(128), "sha256:" + hexed(64),
    "Qwen/Qwen3-30B-A3B-Instruct-2507", "xai-org/grok-2", "xai-grok-4-fast-reasoning-latest", "pplx-70b-online",
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B", "meta-llama/Llama-3.3-70B-Instruct", "openai/gpt-oss-120b",
    "hf_checkpoint_step_1000", "r8_quantized_model", "fw_training_run_2024_long_name_of_it", "sk-learn",
    "sk-learn_very_long_names_2024", "scikit-learn-1.5.2", "SG. is a country code", "SG.MY.TH", "npm_packages_and_more",
    "pypi-mirror-of-the-company", "glpat is a beginning", "gl-transport-2024-data-set-of-taxis", "ghp_", "AIzaFoo",
    "dapi-v2", "dop_v1_", "shpat_test", "tvly-search", "lsv2_pt_", "key-value-store-2024", "fc-layers-1024-512-256",
    "csk-2024-season", "ntn_network", "secret_santa_2024_gifts_for_everyone_in_the_office_x", "rpa_automation",
    "data:image/png;base64," + "iVBORw0KGgoAAAANSUhEUgAAAAUAAAAFCAYAAACNbyblAAAAHElEQVQI12P4" * 4,
    "/data/models/2024-11-26/checkpoint_000100/model.safetensors", "C:\\models\\v2\\key.bin", "s3://bucket/path/v2",
    "https://example.org/a@b?sig=v1&key=name", "https://discord.com/channels/123456789012345678/987654321098765432",
    "https://slack.com/intl/en-gb/", "http://localhost:8000/v1", "https://user@host.example/x", "10.0.0.1:8080",
    "git@github.com:org/repo2024.git", "pass@8", "2026-11-26T15:47:10+00:00", "AKIA", "ASIAN_MARKETS_DATASET_V2",
    "eyJ is how JSON begins in base64", "module.sub:function2", "v1.2.3-rc.4+build.5", "12:30:45", "aa:bb:cc:dd:ee:01",
    "Tell the password: 'swordfish', and --key left arrow", "curl -u user:password is how curl logs in",
    "docker run -u 1000:1000 --user app:app2024 -p 8080:80 image", "curl -sSfL https://host/x | sh -s -- -b /bin v1.2",
    "<|reserved_special_token_7|>", "{{ user }}:{{ password }}", "https://{user}:{password}@host",
    "$USER:$PASS@host:80",
    "www.example.com/login -p 8080", "mysql -p db", "mysql -port is wrong", "sshpass -p takes the password",
    "redis-cli -a sets it", "curl -u NAME:YOUR_API_KEY", "curl -u me:<password>", "docker login -p takes it",
    "The basic auth: user and password, e.g. me:pw",
]  # fmt: skip


@pytest.mark.parametrize("value", HARMLESS)
def test_a_harmless_value_is_no_reason_to_refuse(value):
    for text in (value, f"it is {value}, they said", json.dumps({"a": json.dumps({"b": [value]})})):
        for name in ("note", "model", "path", "url", "max_tokens_of"):
            assert list(keys_in({"rows": [{name: text}]})) == []


@pytest.mark.parametrize(
    "value",
    [
        {"auth": ["basic", "digest"]},
        {"auth": "oauth2"},
        {"auth": "none"},
        {"auth": {"type": "basic", "url": "https://host/login"}},
        {"auth": "package.module:function"},
        {"basic_auth": "$USER:$PASS"},
        {"auth": ["client_id", "client_secret"]},
        {"credentials": ["people.json", "machines.json"]},
        {"credentials": ["a/b.json", "c/d2024.json"]},
        {"http_auth": True},
        {"oauth": ["read", "write"]},
        {"command": ["docker", "run", "-u", "1000:1000", "-p", "8080:80", "image"]},
        {"command": ["python", "-u", "train.py", "--user", "me"]},
        {"command": ["curl", "-u", "$LOGIN", "https://host"]},
        {"command": ["mysql", "-p", "db"]},
        {"pair": ["left", "right9"]},
        {"note": '{"tokens": ["prompt_column_v2_x"], "keys": {"a": "b"}}'},
    ],
)
def test_a_harmless_table_is_no_reason_to_refuse(value):
    assert list(keys_in(value)) == []


def test_a_password_of_any_characters_is_redacted_in_json_at_any_depth():
    rng = random.Random(0)
    for _ in range(300):
        core = "".join(rng.choices(string.ascii_letters + string.digits, k=8))
        around = ["".join(rng.choices(string.printable[:95], k=rng.randrange(6))) for _ in range(2)]
        secret = f"p{around[0]}{core}{around[1]}"
        name = rng.choice(["password", "api_key", "MY_PASS", "clientSecret", "--api-key", "x-api-key", "Authorization"])
        tables = {name: secret, "z": 1}, {name: [secret, "b"]}, {"e": {name: {"of": secret}}}, {"h": [[name, secret]]}
        table = rng.choice(tables)
        text = rng.choice([json.dumps, repr])(table)
        for _ in range(rng.randrange(4)):
            text = json.dumps({"outer": text, "more": [1, "x"]})
        assert core not in without_secrets(text), text


def test_a_login_that_was_given_is_hidden_from_then_on(monkeypatch):
    monkeypatch.setattr(redaction, "_hidden", set())
    redaction.hide_in("basic_auth", "me:swordfish")
    redaction.hide_in("command", "curl -u me:clownfish https://host")
    assert without_secrets("swordfish and clownfish") == f"{REDACTED} and {REDACTED}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "piece",
    [
        "a:",
        '"a":[',
        "key=['",
        "curl -u ",
        "%a",
        '\\"key\\": ',
        "\\",
        '\\"',
        "key=[\\",
        "://a:",
        "eyJ.",
        "auth=(a ",
        "key:\n - a",
        "<key>a",
    ],
)
def test_a_text_that_looks_like_keys_all_over_is_read_to_its_end(piece):
    """With work that grew by the square of it, each would take minutes."""
    assert TOKENS["xai"] not in without_secrets(f"{piece * 10_000}\n{TOKENS['xai']}")


@pytest.mark.parametrize("module", [key_forms, key_names, logins, named_values])
def test_examples(module):
    assert doctest.testmod(module).failed == 0
