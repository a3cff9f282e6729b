"""The viewer's API: its answers beside what was written."""

from __future__ import annotations

import asyncio
import base64
import json
import re
from pathlib import Path

import aiohttp
import numpy as np
import pytest
from serving_page import serving_page
from viewer_runs import make_run, serving, trained, trajectory

from verbatim.core.trajectories import TrajectoryOutcome
from verbatim.core.types import Trajectory, Turn, TurnTiming
from verbatim.logs.checkpoints.origin import Origin, write_origin
from waiting import HANGS

pytestmark = pytest.mark.realtime

LONG = Turn(prompt_ids=[1, 2, 3, 4, 5, 6], completion_ids=[7], logprobs=[-1.0], advantage=0.75)
BROKEN = Turn(prompt_ids=[1, 2, 9], completion_ids=[8, 8], logprobs=[-2.0, -1.0])
FIRST = Turn(
    prompt_ids=[1, 2, 3],
    completion_ids=[4, 5],
    logprobs=[-0.5, -0.25],
    policy_versions=[3, 4],
    kept_sets=[[4, 6, 9], []],
    timing=TurnTiming(queued=0.5, generated=1.0, tools=2.0),
    temperature=0.5,
)
THREE = trajectory(
    "three",
    turns=(FIRST, LONG, BROKEN),
    reward=0.5,
    advantage=-0.25,
    sample_index=1,
    seed=2**60 + 1,
    messages=({"role": "user", "content": "What is <b>bold</b>?"},),
    reward_parts={"right": 1.0, "short": float("nan")},
    info={"level": 3},
    env="game",
)
THREE_OUTCOME = TrajectoryOutcome(
    trajectory=THREE,
    turns=("trained", "over_length", "trained"),
    flags=("gibberish",),
    trainer_logprobs=(np.float32([-0.5, -0.75]), None, np.float32([-2.0, -1.0])),
    gradients=(np.float32([0.125, 0.0]), None, np.float32([1.0, 1.0])),
)
WON = trained(trajectory("won", reward=1.0, sample_index=0))
LOST = trained(trajectory("lost", reward=-1.0, env="maze", group_id="h", stop_reason="length", truncated=True))
UNSCORED = TrajectoryOutcome.of_dropped(
    trajectory("bad", env="maze", group_id="h", error="environment: KeyError 'x'"), "error"
)
NOT_A_NUMBER = TrajectoryOutcome.of_dropped(trajectory("nan", reward=float("nan"), group_id="k"), "error")
EMPTY = TrajectoryOutcome.of_dropped(
    Trajectory(example_id="none", trajectory_id="empty", group_id="k"), "stale", ["repetition"]
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(
        tmp_path_factory.mktemp("api") / "run",
        {1: [THREE_OUTCOME, WON], 2: [LOST, UNSCORED], 12: [NOT_A_NUMBER, EMPTY]},
        evaluated={0: [trajectory("eval-0-0", reward=0.25)], 5: [trajectory("eval-0-0", reward=0.75)]},
    )


async def test_the_runs_are_listed(folder: Path, tmp_path: Path):
    other = make_run(tmp_path / "b", metrics=[(1, {"loss": 1.0}), (2, {"loss": 0.5})], config='name = "b"\n')
    async with serving(folder, other) as client, client.session.get(f"{client.url}/api/runs") as answer:
        first, second = await answer.json()
    assert (first["id"], first["name"], first["max_steps"], first["num_trajectories"]) == (0, "tries", 7, 8)
    assert (second["id"], second["step"], second["num_trajectories"], second["indexed"]) == (1, 2, 0, 1.0)
    assert first["problems"] == [] and first["tokenizer"] is None and "--model FOLDER" in first["tokenizer_problem"]
    assert first["state"] == "unknown"  # no process has ever locked it


async def test_a_fork_names_what_it_was_forked_from(tmp_path: Path):
    fork, damaged, other = (make_run(tmp_path / name) for name in ("fork", "damaged", "other"))
    write_origin(fork, Origin(run="/runs/a/0", step=40, changes=("trainer.optim.lr: 1e-06 -> 5e-06",)))
    (damaged / "forked_from.json").write_text("{")
    async with serving(fork, damaged, other) as client, client.session.get(f"{client.url}/api/runs") as answer:
        forks = [run["forked_from"] for run in await answer.json()]
    assert forks == [{"run": "/runs/a/0", "step": 40, "changes": ["trainer.optim.lr: 1e-06 -> 5e-06"]}, None, None]


async def test_a_teachers_logprobs_stand_beside_the_others(tmp_path: Path):
    taught = trajectory("taught")
    outcome = trained(
        taught,
        trainer_logprobs=(np.float32([-0.5, -0.25]),),
        gradients=(np.float32([1, 1]),),
        teacher_logprobs=(np.float32([-0.125, -2.0]),),
    )
    async with serving(make_run(tmp_path / "run", {1: [outcome]})) as client:
        (turn,) = (await client.get("trajectories/taught"))["turns"]
    assert turn["teacher_logprobs"] == [-0.125, -2.0]


async def test_runs_of_one_name_say_what_differs_of_their_folders(tmp_path: Path):
    folders = [make_run(tmp_path / name) for name in ("a/0", "b/0", "b/1")]
    other = make_run(tmp_path / "c", config='name = "other"\n')
    async with serving(*folders, other) as client, client.session.get(f"{client.url}/api/runs") as answer:
        assert [run["name"] for run in await answer.json()] == ["tries (a/0)", "tries (b/0)", "tries (b/1)", "other"]


async def test_metrics_are_columns_with_gaps_and_say_what_they_mean(tmp_path: Path):
    folder = make_run(tmp_path / "run", metrics=[(1, {"loss": 0.5}), (2, {"loss": float("nan"), "mine": 7}), (4, {})])
    with (folder / "metrics.jsonl").open("a") as lines:
        lines.write(
            '{"format": 1, "step": 4, "kind": "eval", "env": "game", "metrics": {"success": 0.5, "success/low": 0.25, '
            '"success/high": 0.75, "reward/mean": 1.5, "reward/low": "NaN", "reward/high": "NaN"}}\n'
            'no json\n{"format": 1, "step": 5, "kind": "train", "metrics": {"loss": 0.1}}\n{"step": 6, "ki'
        )
    async with serving(folder) as client:
        found = await client.get("metrics")
        later = await client.get("metrics", after=2)
        (problem,) = client.runs[0].about()["problems"]
    assert found["steps"] == [1, 2, 4, 5]
    assert found["columns"] == {"loss": [0.5, None, None, 0.1], "mine": [None, 7.0, None, None]}
    (evaluation,) = found["evals"]
    assert (evaluation["step"], evaluation["env"]) == (4, "game")
    assert evaluation["metrics"]["intervals"] == {"success": [0.25, 0.75]}
    assert evaluation["metrics"]["reward/low"] is None
    assert later["steps"] == [4, 5] and later["columns"] == {"loss": [None, 0.1], "mine": [None, None]}
    assert found["names"]["loss"]["about"] and "mine" not in found["names"]
    assert problem.startswith("metrics.jsonl, byte ") and problem.endswith(": not JSON")


async def test_the_configuration_is_shown_without_secrets(tmp_path: Path):
    config = 'name = "tries"\n[monitor.mine]\napi_key = "sk-very-secret"\n'
    folder = make_run(tmp_path / "run", config=config)
    (folder / "summary.txt").write_text("it went well")
    async with serving(folder) as client:
        shown = (await client.get("config"))["toml"]
        assert "very-secret" not in shown and "[redacted]" in shown and 'name = "tries"' in shown
        assert await client.get("summary") == {"text": "it went well"}


def test_a_run_says_whether_it_goes_on(tmp_path: Path):
    from verbatim.inspection.viewer.run_state import read_state
    from verbatim.logs.checkpoints.lock import FolderLock

    folder = make_run(tmp_path / "run")
    assert read_state(folder).state == "unknown"
    lock = FolderLock(folder, "orchestrator.lock")
    assert read_state(folder).state == "running"
    lock.release()
    assert read_state(folder).state == "stopped"
    (folder / "logs").mkdir()
    (folder / "logs" / "orchestrator.log").write_text("2026-01-01 00:00:00,000 ERROR stopped: no memory\n")
    assert read_state(folder).state == "failed"
    (folder / "summary.json").write_text("{}")
    assert read_state(folder).state == "finished"


async def test_a_row_says_what_was_written(folder: Path):
    async with serving(folder) as client:
        answer = await client.get("trajectories", step="1", sort="sample_index")
    assert (answer["total"], answer["matched"], answer["pending"]) == (8, 2, False)
    won, three = answer["rows"]
    assert {name: three[name] for name in three if name not in ("key", "group_key")} == {
        "trajectory_id": "three",
        "kind": "train",
        "step": 1,
        "env": "game",
        "example_id": "example of three",
        "group_id": "g",
        "sample_index": 1,
        "reward": 0.5,
        "advantage": -0.25,
        "reason": None,
        "flags": ["gibberish"],
        "error": None,
        "stop_reason": "stop",
        "truncated": False,
        "num_turns": 3,
        "num_sampled_tokens": 2 + 1 + 2,
        "num_trained_tokens": 4,
        "num_breaks": 1,
    }
    assert (won["key"], three["key"]) == ("~1.1", "~1.0") and won["group_key"] == three["group_key"]


FILTERED = [
    ({}, ["nan", "empty", "eval-0-0", "lost", "bad", "three", "won", "eval-0-0"]),
    ({"kind": "eval"}, ["eval-0-0", "eval-0-0"]),
    ({"env": "maze"}, ["lost", "bad"]),
    ({"env": ["maze", "(none)"], "kind": "train"}, ["lost", "bad"]),
    ({"step": "2-12"}, ["nan", "empty", "eval-0-0", "lost", "bad"]),
    ({"reward": "-1--0.5"}, ["lost"]),
    ({"reward": "0.5-", "kind": "train"}, ["three", "won"]),
    ({"stop_reason": "length"}, ["lost"]),
    ({"stop_reason": "(none)"}, ["empty"]),
    ({"reason": ["error", "stale"]}, ["nan", "empty", "bad"]),
    ({"reason": "(none)", "kind": "train"}, ["lost", "three", "won"]),
    ({"flag": "gibberish"}, ["three"]),
    ({"flag": ["repetition", "gibberish"]}, ["empty", "three"]),
    ({"breaks": "1"}, ["three"]),
    ({"errors": "1"}, ["bad"]),
    ({"group": "h"}, ["lost", "bad"]),
    ({"text": "KEYERROR"}, ["bad"]),
    ({"text": "of wo"}, ["won"]),
    ({"env": "maze", "errors": "1"}, ["bad"]),
    ({"env": "nowhere"}, []),
    ({"env": "", "text": "", "kind": "eval", "sort": "step"}, ["eval-0-0", "eval-0-0"]),
]
SORTED = [
    ("-reward", ["won", "three", "lost", "nan", "empty", "bad"]),
    ("reward", ["lost", "three", "won", "nan", "empty", "bad"]),
    ("step", ["three", "won", "lost", "bad", "nan", "empty"]),
    ("trajectory_id", ["bad", "empty", "lost", "nan", "three", "won"]),
    ("-num_turns", ["three", "nan", "lost", "bad", "won", "empty"]),
    ("-env", ["lost", "bad", "nan", "three", "won", "empty"]),
    ("error", ["bad", "nan", "empty", "lost", "three", "won"]),
]


async def test_filters(folder: Path):
    async with serving(folder) as client:
        for query, names in FILTERED:
            assert await client.names(**query) == names, query


async def test_sorting_puts_what_is_missing_last(folder: Path):
    async with serving(folder) as client:
        for sort, names in SORTED:
            assert await client.names(sort=sort, kind="train") == names, sort


async def test_pages_follow_each_other(folder: Path):
    async with serving(folder) as client:
        whole = await client.names()
        pages = [await client.names(offset=offset, limit=3) for offset in (0, 3, 6, 9)]
    assert [name for page in pages for name in page] == whole and list(map(len, pages)) == [3, 3, 2, 0]


async def test_facets_count_the_values(folder: Path):
    async with serving(folder) as client:
        found = await client.get("facets")
    assert found["kind"] == {"train": 6, "eval": 2}
    assert found["env"] == {"game": 5, "maze": 2, "": 1}
    assert found["stop_reason"] == {"stop": 6, "length": 1, "(none)": 1}
    assert found["reason"] == {"error": 2, "stale": 1, "evaluation": 2, "(none)": 3}
    assert found["flag"] == {"gibberish": 1, "repetition": 1, "(none)": 6}
    assert found["step"] == [0, 12] and found["reward"] == [-1.0, 1.0]


async def test_a_trajectory_with_every_token(folder: Path):
    async with serving(folder) as client:
        found = await client.get("trajectories/three")
        assert found == await client.get("trajectories/~1.0")
    first, second, third = found["turns"]
    assert found["reward_parts"] == {"right": 1.0, "short": "NaN"} and found["info"] == {"level": 3}
    assert found["messages"] == [{"role": "user", "content": "What is <b>bold</b>?"}]
    assert found["seed"] == str(2**60 + 1) and found["run_id"] == "tries" and found["tokens_omitted"] == 0
    assert (first["prompt_of_turn"], first["prompt_shared"], first["prompt_new_ids"]) == (None, 0, [1, 2, 3])
    assert (first["completion_ids"], first["logprobs"], first["policy_versions"]) == ([4, 5], [-0.5, -0.25], [3, 4])
    assert (first["trainer_logprobs"], first["gradients"]) == ([-0.5, -0.75], [0.125, 0.0])
    assert first["timing"] == {"queued": 0.5, "generated": 1.0, "tools": 2.0} and first["temperature"] == 0.5
    assert (first["outcome"], first["num_trained"], first["extends"], first["break"]) == ("trained", 2, None, None)
    assert (second["prompt_of_turn"], second["prompt_shared"], second["prompt_new_ids"]) == (0, 5, [6])
    assert (second["extends"], second["outcome"], second["num_trained"]) == (0, "over_length", 0)
    assert second["advantage"] == 0.75 and second["trainer_logprobs"] is None and second["num_prompt_tokens"] == 6
    assert (third["prompt_of_turn"], third["prompt_shared"], third["prompt_new_ids"]) == (1, 2, [9])
    assert third["extends"] is None and third["policy_versions"] is None and third["teacher_logprobs"] is None
    assert first["kept_counts"] == [3, 0] and third["kept_counts"] is None
    # Two tokens are the same as in turn 1; what follows is computed again: all three of the prompt.
    assert third["break"]["reason"] == "unknown"
    assert "differs from token 2 on" in third["break"]["words"][1]


async def test_the_same_id_in_two_evaluations_is_told_apart_by_key(folder: Path):
    async with serving(folder) as client:
        rows = (await client.get("trajectories", kind="eval", sort="step"))["rows"]
        rewards = [(await client.get(f"trajectories/{row['key']}"))["reward"] for row in rows]
        groups = [(await client.get(f"groups/{row['group_key']}"))["rows"] for row in rows]
    assert rewards == [0.25, 0.75]
    assert [[row["key"] for row in group] for group in groups] == [[rows[0]["key"]], [rows[1]["key"]]]


async def test_the_raw_record_is_a_line_of_an_export(folder: Path, tmp_path: Path):
    from verbatim.cli.main import main

    assert main(["export", str(folder), "--out", str(tmp_path / "all.jsonl"), "--steps", "1"]) == 0
    lines = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    async with serving(folder) as client:
        assert await client.get("trajectories/three/raw") == lines[0]
        async with client.session.get(f"{client.url}/api/runs/0/trajectories/won/raw") as answer:
            assert answer.headers["Content-Disposition"] == 'attachment; filename="trajectory-won.json"'


async def test_a_group_is_drawn_as_a_tree(tmp_path: Path):
    def of(name: str, *turns: Turn) -> Trajectory:
        return trajectory(name, turns=turns, group_id="one")

    a = of("a", Turn(prompt_ids=[1, 2, 3], completion_ids=[4, 5]))
    b = of("b", Turn(prompt_ids=[1, 2, 3], completion_ids=[4, 6, 7]), Turn(prompt_ids=[1, 9], completion_ids=[8]))
    folder = make_run(
        tmp_path / "run",
        {
            1: [
                trained(a),
                TrajectoryOutcome(trajectory=b, turns=("trained", "untrained")),
                trained(trajectory("c", group_id="two")),
            ]
        },
    )
    async with serving(folder) as client:
        found = await client.get("groups/one")
    assert [row["trajectory_id"] for row in found["rows"]] == ["a", "b"]
    nodes = [{name: value for name, value in node.items() if name != "text"} for node in found["tree"]["nodes"]]
    assert nodes == [
        {"id": 0, "parent": None, "start": 0, "num_tokens": 1, "trajectories": [0, 1], "trained": 0},
        {"id": 1, "parent": 0, "start": 1, "num_tokens": 3, "trajectories": [0, 1], "trained": 1},  # 2 3 [4]
        {"id": 2, "parent": 1, "start": 4, "num_tokens": 1, "trajectories": [0], "trained": 1},  # [5]
        {"id": 3, "parent": 1, "start": 4, "num_tokens": 2, "trajectories": [1], "trained": 2},  # [6 7]
        {"id": 4, "parent": 0, "start": 1, "num_tokens": 2, "trajectories": [1], "trained": 0},  # 9 8
    ]


async def test_long_turns_come_in_parts(tmp_path: Path):
    prompt, completion = list(range(15_000)), list(range(30_000))
    turn = Turn(prompt_ids=prompt, completion_ids=completion, logprobs=[-float(i) for i in completion])
    folder = make_run(tmp_path / "run", {3: [trained(trajectory("long", turns=(turn,)))]})
    async with serving(folder) as client:
        whole = await client.get("trajectories/long")
        (first,) = whole["turns"]
        assert (first["prompt_new_ids"], first["completion_ids"]) == (prompt, completion[:5_000])
        assert first["logprobs"] == [-float(i) for i in completion[:5_000]]
        assert first["tokens_omitted"] == whole["tokens_omitted"] == 25_000
        second = (await client.get("trajectories/long", turn=0, offset=20_000))["turn"]
        assert (second["prompt_new_ids"], second["completion_ids"]) == ([], completion[5_000:25_000])
        last = (await client.get("trajectories/long", turn=0, offset=40_000))["turn"]
        assert last["completion_ids"] == completion[25_000:] and last["tokens_omitted"] == 0
        inside = (await client.get("trajectories/long", turn=0, offset=14_999))["turn"]
        assert inside["prompt_new_ids"] == [14_999] and inside["completion_ids"] == completion[:19_999]
        assert inside["logprobs"] == [-float(i) for i in completion[:19_999]]
        wrong = await client.get("trajectories/long", turn=1, status=400)
    assert wrong == {"error": "turn = 1; the trajectory has turns 0 to 0"}


async def test_many_turns_share_one_budget(tmp_path: Path):
    turns = [Turn(prompt_ids=[i], completion_ids=[7] * 15_000) for i in range(5)]
    folder = make_run(tmp_path / "run", {3: [trained(trajectory("long", turns=turns))]})
    async with serving(folder) as client:
        found = await client.get("trajectories/long")
    here = [1 + 15_000 - turn["tokens_omitted"] for turn in found["turns"]]
    assert here == [15_001] * 3 + [60_000 - 3 * 15_001, 0] and found["tokens_omitted"] == 5 * 15_001 - 60_000


async def test_long_texts_are_cut_and_fetched_whole(tmp_path: Path):
    text = "é" * 250_000
    messages = ({"role": "user", "content": "hi"}, {"role": "tool", "a/b~c": {"x": [text]}})
    folder = make_run(tmp_path / "run", {1: [trained(trajectory("t", messages=messages))]})
    async with serving(folder) as client:
        found = await client.get("trajectories/t")
        assert found["messages"][1]["a/b~c"]["x"][0] == "é" * 200_000
        (cut,) = found["cut"]
        assert cut == {"path": "messages/1/a~1b~0c/x/0", "length": 250_000, "shown": 200_000}
        assert await client.get("trajectories/t/text", path=cut["path"]) == {"path": cut["path"], "text": text}
        wrong = await client.get("trajectories/t/text", path="messages/7/content", status=400)
        assert wrong == {"error": "path = 'messages/7/content': there is nothing at this path"}
        await client.get("trajectories/t/text", path="messages", status=400)


async def test_messages_are_searched_while_pages_ask_again(tmp_path: Path):
    def says(name: str, content: str) -> Trajectory:
        return trajectory(name, messages=({"role": "user", "content": content},), example_id="")

    folder = make_run(
        tmp_path / "run",
        {
            1: [trained(says("a", 'The Ünïcode "quote" needle')), trained(says("b", "hay"))],
            2: [trained(says("needle-in-its-id", "hay"))],
        },
        evaluated={
            2: [says("e", "a NEEDLE in an evaluation")],
            3: [says("v", "a needle in the file of another"), says("o", 'hay, "quote"')],
        },
    )

    async def ask(text: str) -> list[str]:
        async with asyncio.timeout(HANGS):
            while (found := await client.get("trajectories", text=text, sort="trajectory_id"))["pending"]:
                pass
        return [row["trajectory_id"] for row in found["rows"]]

    async with serving(folder) as client:
        assert await ask("needle") == ["a", "e", "needle-in-its-id", "v"]
        assert await ask('"quote"') == ["a", "o"]
        assert await ask("Ünïcode") == ["a"]
        assert await ask("no such text") == []


HOSTILE_KEYS = [
    "~4294967296.0", "~999999999999.5", "~1.99999999999999999999", "~1.9223372036854775808", "~e9223372036854775808",
    "~o-1", "~-1.0", "~1.", "~.1", "~v", "~v5", "~e1.5", "~", "~~", "~1.1.1", "~١.٢",
    *("~" + base64.urlsafe_b64encode(json.dumps(parts).encode()).decode().rstrip("=") for parts in (
        ["eval", "game", 10**30, "g"], ["eval", "game", -(2**63), "g"], ["eval", "game", True, "g"], [1, 2, 3, 4], {},
        ["eval", "\ud800", 5, "g"], ["eval", "game", 5, "\ud800"], ["eval", "game", 5, ["g"]], "1234",
    )),
    "~" + base64.urlsafe_b64encode(b"[" * 300).decode(), "~" + base64.urlsafe_b64encode(b"\xff\xfe1").decode(),
]  # fmt: skip
"""Names that look like keys, and are none of this run's."""


REFUSED = [
    ("trajectories?colour=red", 400, "there is no filter 'colour'; the filters are breaks, env, errors, flag, group, "),
    ("trajectories?step=abc", 400, "step = 'abc'; expected a number or a range, such as 7, 3-9, 3- or -1--0.5"),
    ("trajectories?sort=tokens", 400, "sort = 'tokens'; expected one of kind, step, trajectory_id"),
    ("trajectories?limit=100000", 400, "offset = 0, limit = 100000; expected an offset of at least 0"),
    ("trajectories?limit=many", 400, "limit: expected an integer"),
    ("trajectories/nobody", 404, "no trajectory 'nobody' here"),
    ("trajectories/~1.99", 404, "no trajectory '~1.99' here"),
    ("trajectories/~e5", 404, "no trajectory '~e5' here"),
    ("trajectories/~v1.0", 404, "no trajectory '~v1.0' here"),
    *((f"trajectories/{key}", 404, f"no trajectory '{key[:90]}") for key in HOSTILE_KEYS),
    *((f"groups/{key}", 404, f"no group '{key[:90]}") for key in HOSTILE_KEYS),
    ("groups/nobody", 404, "no group 'nobody' here"),
]


async def test_what_cannot_be_answered_is_said_in_a_sentence(folder: Path):
    async with serving(folder) as client:
        for path, status, error in REFUSED:
            assert error in (await client.get(path, status=status))["error"], path


def test_the_script_of_the_documentation_reads_the_api(folder: Path, capsys: pytest.CaptureFixture[str]):
    page = (Path(__file__).parents[3] / "docs" / "viewer.md").read_text(encoding="utf-8")
    (script,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    with serving_page(folder) as url:
        exec(compile(script.replace("http://127.0.0.1:8642", url), "viewer.md", "exec"), {})
    assert capsys.readouterr().out == "bad environment: KeyError 'x'\n"


async def test_only_this_machine_is_served(folder: Path):
    async with serving(folder) as client:
        port = client.url.rpartition(":")[2]

        async def status(host: str, path: str = "/api/runs", method: str = "GET") -> int:
            async with client.session.request(method, client.url + path, headers={"Host": host}) as answer:
                return answer.status

        assert client.url == f"http://127.0.0.1:{port}"
        for host in (f"127.0.0.1:{port}", "localhost", f"LOCALHOST:{port}", f"[::1]:{port}"):
            assert await status(host) == 200
        for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", "localhost.evil", "10.0.0.1"):
            assert await status(host) == 403 and await status(host, "/") == 403
        assert await status("localhost", method="POST") == 405
        assert await status("localhost", "/api/runs/7/config") == 404
        assert await status("localhost", "/../pyproject.toml") == 404
        assert await status("localhost", "/%2e%2e/%2e%2e/etc/passwd") == 404


async def test_every_answer_keeps_browsers_strict(folder: Path):
    async with serving(folder) as client:
        for path in ("/", "/api/runs", "/api/runs/0/trajectories", "/missing.js", "/api/runs/9/config"):
            async with client.session.get(client.url + path) as answer:
                policy = answer.headers["Content-Security-Policy"]
                assert "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'" in policy
                assert "unsafe" not in policy and "http" not in policy
                assert answer.headers["X-Content-Type-Options"] == "nosniff"
                assert answer.headers["Referrer-Policy"] == "no-referrer"
                assert not [name for name in answer.headers if name.lower().startswith("access-control")]
        async with client.session.get(client.url + "/") as answer:
            assert answer.content_type == "text/html" and await answer.text() == "<!doctype html><title>a page</title>"


async def test_the_server_listens_on_the_loopback_only(folder: Path):
    """Which has more addresses than 127.0.0.1: what listens on every address answers at 127.0.0.2 too."""
    async with serving(folder) as client:
        port = client.url.rpartition(":")[2]
        with pytest.raises(aiohttp.ClientConnectorError):
            await client.session.get(f"http://127.0.0.2:{port}/api/runs")


@pytest.mark.parametrize("hosts", [b"host: 127.0.0.1\r\nhost: evil.example\r\n", b"", b"host: a\r\nhost: a\r\n"])
async def test_a_request_without_one_host_is_refused_without_a_word_in_the_log(tmp_path, hosts, caplog):
    async with serving(make_run(tmp_path / "run")) as client:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(client.url.rpartition(":")[2]))
        writer.write(b"GET /api/runs HTTP/1.1\r\n" + hosts + b"\r\n")
        assert b" 400 " in await reader.readline()
        writer.close()
    assert caplog.records == []


async def test_half_a_head_holds_no_viewer(tmp_path, monkeypatch):
    monkeypatch.setattr("verbatim.inspection.viewer.serve._CONNECTIONS", 8)
    async with serving(make_run(tmp_path / "run")) as client:
        port = int(client.url.rpartition(":")[2])
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(40)]
        for _, writer in held:
            writer.write(b"GET /api/runs HTTP/1.1\r\nhost: 127.0.0.1\r\n")
        async with client.session.get(f"{client.url}/api/runs") as answer:
            assert answer.status == 200
        for _, writer in held:
            writer.close()
