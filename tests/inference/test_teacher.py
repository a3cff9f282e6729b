"""A teacher gives the logprobs of exactly the ids that it was asked about, or the run is told why not."""

import asyncio
import http.server
import json
import math
import threading

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import verbatim.inference.teacher as teachers
from verbatim.config.schema import TeacherConfig
from verbatim.core.errors import ModelError, RunStopped, UsageError
from verbatim.core.types import KeptSets
from verbatim.inference.http import client, protocol
from verbatim.inference.teacher import LocalTeacher, make_teacher

pytestmark = pytest.mark.realtime
KEY = "sk-canary-of-the-teacher"


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEACHER_KEY", KEY)


def test_a_named_variable_without_a_key_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TEACHER_KEY")
    with pytest.raises(UsageError, match="TEACHER_KEY is empty; put the key of http://h/v1 into it"):
        make_teacher(TeacherConfig(model="big", base_url="http://h/v1", api_key_env="TEACHER_KEY"))


def ids(*values):
    return np.array(values, dtype=np.int32)


class Server(http.server.BaseHTTPRequestHandler):
    """Answers as vLLM does: for each prompt id the most likely one and itself; or as `script` says."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == protocol.GENERATE and not self.server.has_token_endpoint:
            self.send_error(self.server.refusal)
            return
        self.server.seen.append((self.path, body, self.headers.get("Authorization")))
        status, answer = self.server.script.pop(0) if self.server.script else (200, None)
        if status == 0:
            self.connection.close()
            return
        rows = [None] + [
            {"7": {"logprob": -0.1, "rank": 1}, str(i): {"logprob": -i / 4, "rank": 2}}
            for i in body.get("prompt", body.get("token_ids"))[1:]
        ]
        told = (
            {"prompt_logprobs": rows, "choices": []}
            if self.path == protocol.GENERATE
            else {"choices": [{"text": "x", "prompt_logprobs": rows}]}
        )
        text = answer if answer is not None else json.dumps(told)
        data = text.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(client, "FIRST_PAUSE", 0.001)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
    server.seen, server.script = [], []
    server.has_token_endpoint, server.refusal = False, 404
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def asked(server, token_ids):
    config = TeacherConfig(model="big", base_url=f"http://127.0.0.1:{server.server_port}/v1", api_key_env="TEACHER_KEY")

    async def ask():
        teacher = make_teacher(config)
        try:
            return await teacher.logprobs(token_ids, 1.0)
        finally:
            await teacher.close()

    return asyncio.run(ask())


def test_a_server_with_a_token_endpoint_is_asked_there(server, monkeypatch):
    monkeypatch.setenv("TEACHER_KEY", KEY)
    server.has_token_endpoint = True
    assert asked(server, ids(5, 6, 8))[1:].tolist() == [-1.5, -2.0]
    ((path, body, key),) = server.seen
    assert path == "/inference/v1/generate"
    assert body["token_ids"] == [5, 6, 8]
    assert body["model"] == "big"
    assert body["sampling_params"]["prompt_logprobs"] == 0
    assert key == f"Bearer {KEY}"


@pytest.mark.parametrize("status", [401, 403, 404, 405, 501])
def test_a_server_that_refuses_the_token_endpoint_is_asked_for_completions(server, status):
    server.refusal = status
    assert asked(server, ids(5, 6, 8))[1:].tolist() == [-1.5, -2.0]
    assert [path for path, _, _ in server.seen] == ["/v1/completions"]


def test_a_server_is_asked_with_exact_ids_and_read_by_id(server, monkeypatch):
    monkeypatch.setenv("TEACHER_KEY", KEY)
    found = asked(server, ids(5, 6, 8))
    assert found.dtype == np.float32
    assert math.isnan(found[0])
    assert found[1:].tolist() == [-1.5, -2.0]
    ((path, body, authorization),) = server.seen
    assert path == "/v1/completions"
    assert (body["model"], body["prompt"], body["prompt_logprobs"]) == ("big", [5, 6, 8], 1)
    assert authorization == f"Bearer {KEY}"


@pytest.mark.parametrize("trouble", [(500, "oops"), (429, "slow down"), (0, ""), (200, "no json")])
def test_what_passes_is_asked_again(server, trouble):
    server.script = [trouble, trouble]
    assert asked(server, ids(1, 2)).tolist()[1:] == [-0.5]
    assert len(server.seen) == 3


def test_a_server_that_fails_for_good_stops_the_run_and_its_key_is_never_told(server, monkeypatch):
    monkeypatch.setenv("TEACHER_KEY", KEY)
    server.script = [(503, "overloaded")] * 10
    with pytest.raises(RunStopped, match="status 503: overloaded") as caught:
        asked(server, ids(1, 2))
    assert len(server.seen) == teachers.ATTEMPTS
    assert KEY not in str(caught.value)


def test_a_refusal_is_not_asked_again(server):
    server.script = [(400, "no such model")]
    with pytest.raises(RunStopped, match="status 400: no such model"):
        asked(server, ids(1, 2))
    assert len(server.seen) == 1


@pytest.mark.parametrize(
    "answer",
    [
        {"choices": [{"text": "x"}]},
        {"choices": [{"prompt_logprobs": None}]},
        {"choices": [{"prompt_logprobs": [None, {"3": {"logprob": -1.0}}]}]},
        {"choices": [{"prompt_logprobs": [None, {"2": {"logprob": -1.0}}, {"2": {"logprob": -1.0}}]}]},
        {"choices": [{"prompt_logprobs": [None, {"2": {"logprob": None}}]}]},
        [],
    ],
)
def test_an_answer_without_the_logprobs_of_these_ids_is_never_filled_in(server, answer):
    server.script = [(200, json.dumps(answer))]
    with pytest.raises(RunStopped, match=r"without the prompt_logprobs of the 2 ids"):
        asked(server, ids(1, 2))


async def test_a_local_teacher_gives_the_logprobs_of_transformers(models):
    teacher = make_teacher(TeacherConfig(model=str(models["tied"]), device="cpu"))
    assert isinstance(teacher, LocalTeacher)
    tokens = ids(3, 9, 4, 4, 1)
    model = AutoModelForCausalLM.from_pretrained(models["tied"])
    with torch.no_grad():
        logits = model(input_ids=torch.tensor(tokens)[None].long()).logits[0, :-1]
    for temperature in (1.0, 0.5):
        expected = (logits / temperature).log_softmax(-1).gather(1, torch.tensor(tokens[1:]).long()[:, None])[:, 0]
        found = await teacher.logprobs(tokens, temperature)
        assert math.isnan(found[0])
        np.testing.assert_allclose(found[1:], expected.numpy(), atol=2e-6)
    with pytest.raises(RunStopped, match="cannot score what the policy sampled"):
        await teacher.logprobs(ids(1, 10**6), 1.0)
    kept = KeptSets.of([[], [9, 0, 5], [], [4, 8], [1]])
    found = await teacher.logprobs(tokens, 0.5, kept)
    scaled, over_all = logits / 0.5, found.copy()
    over_all[1] = scaled[0, 9] - scaled[0, [0, 5, 9]].logsumexp(0)
    over_all[3] = scaled[2, 4] - scaled[2, [4, 8]].logsumexp(0)
    over_all[4] = 0.0
    np.testing.assert_allclose(found[1:], over_all[1:], atol=2e-6)
    assert found[2] == (await teacher.logprobs(tokens, 0.5))[2]
    with pytest.raises(RunStopped, match="cannot score what the policy sampled"):
        await teacher.logprobs(tokens, 1.0, KeptSets.of([[], [10**6], [], [], []]))


async def test_a_server_that_scores_the_whole_vocabulary_is_not_asked_about_cut_tokens():
    teacher = make_teacher(TeacherConfig(model="big", base_url="http://127.0.0.1:1/v1"))
    with pytest.raises(RunStopped, match="gives logprobs over the whole vocabulary"):
        await teacher.logprobs(ids(3, 9), 1.0, KeptSets.of([[], [9]]))
    await teacher.close()


def test_a_teacher_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ModelError, match="no model folder"):
        make_teacher(TeacherConfig(model=str(tmp_path / "nowhere" / "at" / "all")))
