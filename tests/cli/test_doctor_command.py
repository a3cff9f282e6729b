"""`verbatim doctor` says what it found, to people and to machines, and answers with documented statuses."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

import warm
from inspection.doctor.corpus import ASK, END, NEXT, Case, assistant, cases, render, tokenizer, turn
from verbatim import Trajectory
from verbatim.cli.main import main
from verbatim.logs.monitors.trajectory_log import TrajectoryLog
from verbatim.models import native
from wrong_kernel import WrongKernel


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the corpus' tokenizer."""
    folder = tmp_path_factory.mktemp("doctor") / "model"
    tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    return folder


def write(path: Path, *trajectories: Trajectory) -> Path:
    log = TrajectoryLog(path)
    for trajectory in trajectories:
        log.write(1, trajectory)
    log.close()
    return path


def corpus_case(words: str) -> Case:
    (found,) = [case for case in cases() if words in str(case)]
    return found


QWEN3 = corpus_case("the Qwen3 example").logged.trajectory
SUB_AGENT = corpus_case("its name is recorded, and its parent goes on").logged.trajectory
WHOLE = Trajectory(example_id="x", turns=[turn(render(ASK), f"W{END}")])


def run(capsys, *arguments) -> tuple[int, str, str]:
    status = main(["doctor", *map(str, arguments)])
    out, err = capsys.readouterr()
    return status, out, err


@pytest.fixture
def _fresh_libraries(monkeypatch: pytest.MonkeyPatch):
    """Libraries are looked for as in a new process."""
    native.build.cache_clear()
    monkeypatch.delenv(native.SWITCH, raising=False)
    yield
    native.build.cache_clear()


@pytest.mark.realtime
@pytest.mark.skipif(native.find_compiler() is None, reason="this machine has no C compiler")
@pytest.mark.usefixtures("_fresh_libraries")
def test_a_machine_with_a_compiler_answers_0_and_names_what_is_compiled(capsys):
    status, out, _ = run(capsys, "--machine")
    assert status == 0
    assert [line.split()[:2] for line in out.splitlines()[3:]] == [
        ["kernel.c", "compiled"],
        ["tree.c", "compiled"],
        ["layers.c", "compiled"],
        ["bfloat16", "in"],
    ]
    assert str(native.library_folder()) in out
    status, out, _ = run(capsys, "--machine", "--json")
    found = json.loads(out)
    assert status == 0 and found["compiler"] == " ".join(native.find_compiler())
    paths = {"amx": "products and attention by AMX", "avx512_bf16": "AVX512-BF16", "float32": "only weights"}
    assert paths[found["sampler_bfloat16"]] in run(capsys, "--machine")[1]
    assert [part["compiled"] for part in found["parts"]] == [True] * 3


@pytest.mark.usefixtures("_fresh_libraries")
def test_a_machine_without_a_compiler_answers_1_and_says_what_to_install(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    status, out, _ = run(capsys, "--machine")
    assert status == 1
    assert "bfloat16   in the sampler: by PyTorch" in out
    assert "compiler   none; install one; on Debian and Ubuntu: apt install gcc" in out
    assert "kernel.c   missing: no C compiler was found (cc, gcc, clang, or what CC names). PyTorch computes" in out


@pytest.mark.realtime
@pytest.mark.skipif(native.find_compiler() is None, reason="this machine has no C compiler")
@pytest.mark.usefixtures("_fresh_libraries")
def test_a_kernel_that_computes_something_else_answers_1(monkeypatch, capsys):
    monkeypatch.setattr("verbatim.inference.embedded.forward.load_kernel", WrongKernel)
    status, out, _ = run(capsys, "--machine")
    assert status == 1
    assert "compiled, and not used: in float32, its results differ from those of LlamaForCausalLM: layer 0 " in out


@pytest.mark.realtime
@pytest.mark.skipif(native.find_compiler() is None, reason="this machine has no C compiler")
@pytest.mark.usefixtures("_fresh_libraries")
def test_a_machine_is_asked_for_one_model(tmp_path: Path, monkeypatch, capsys):
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 97}
    for name, inner in (("fits", 96), ("odd", 100)):
        LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=inner)).save_pretrained(tmp_path / name)
    status, out, _ = run(capsys, "--machine", str(tmp_path / "fits"))
    assert status == 0
    parts = ["kernel.c in float32", "layers.c", "kernel.c in bfloat16"]
    assert out.splitlines()[7:] == [
        f"model      {tmp_path / 'fits'}",
        *(f"{'':10} {part} computes it" for part in parts),
    ]
    status, out, _ = run(capsys, "--machine", str(tmp_path / "odd"), "--json")
    reason = "the inner width is 100, not a multiple of 16"
    assert status == 1
    assert json.loads(out)["model"] == {
        "name": str(tmp_path / "odd"),
        "not_computed": {"kernel.c in float32": reason, "layers.c": "", "kernel.c in bfloat16": reason},
    }
    status, _, err = run(capsys, "--machine", str(tmp_path / "none"))
    assert status == 2 and "none" in err


def test_a_machine_is_no_log(capsys):
    status, _, err = run(capsys, "--machine", "--limit", "3")
    assert status == 2 and "--limit cannot be used with --machine" in err


def test_a_log_without_breaks_answers_0(tmp_path: Path, capsys):
    status, out, _ = run(capsys, write(tmp_path / "log.jsonl", WHOLE))
    assert status == 0
    assert "0 breaks" in out
    assert "add --model FOLDER_OR_ID" in out


def test_a_break_answers_1_and_is_shown_token_by_token(tmp_path: Path, model: Path, capsys):
    status, out, _ = run(capsys, write(tmp_path / "log.jsonl", WHOLE, QWEN3), "--model", model)
    assert status == 1
    assert "break 1  thinking stripped" in out
    assert "line 2, trajectory 'the-Qwen3-example-of-the-documents', turn 1, token 10" in out
    assert "the <think> block of turn 0 is not in turn 1's prompt: “R1”" in out
    assert "{%- if loop.index0 > ns.last_query_index %}" in out
    (marked,) = [line.split() for line in out.splitlines() if "▶" in line]
    assert marked[:2] == ["▶", "10"]
    assert marked[-1] == "<think>"


def test_the_first_turn_of_a_sub_agent_is_listed_and_answers_0(tmp_path: Path, model: Path, capsys):
    status, out, _ = run(capsys, write(tmp_path / "log.jsonl", SUB_AGENT), "--model", model)
    assert status == 0
    assert "1 break, 1 of them by design" in out


def test_a_sub_agent_beside_another_break_answers_1(tmp_path: Path, model: Path, capsys):
    assert run(capsys, write(tmp_path / "log.jsonl", SUB_AGENT, QWEN3), "--model", model)[0] == 1


def test_an_unreadable_line_answers_2_after_the_rest_was_reported(tmp_path: Path, model: Path, capsys):
    path = write(tmp_path / "log.jsonl", QWEN3)
    path.write_text("{\n" + path.read_text())
    status, out, _ = run(capsys, path, "--model", model)
    assert status == 2
    assert "line 1: not JSON" in out
    assert "break 1  thinking stripped" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["no/such.jsonl"], "there is no log no/such.jsonl; expected a run folder"),
        (["{log}", "--model", "./no/such/model"], "there is no model folder"),
        (["{log}", "--limits", "3"], "verbatim doctor has no option --limits"),
    ],
)
def test_a_mistake_answers_2_and_says_what_to_type(tmp_path: Path, capsys, arguments: list[str], said: str):
    log = write(tmp_path / "log.jsonl", WHOLE)
    status, out, err = run(capsys, *(argument.format(log=log) for argument in arguments))
    assert (status, out) == (2, "")
    assert said in err


def test_a_folder_without_a_log_is_refused_with_what_is_in_it(tmp_path: Path, capsys):
    (tmp_path / "run.toml").write_text("")
    status, out, err = run(capsys, tmp_path)
    assert (status, out) == (2, "")
    assert f"there is no log in the folder {tmp_path}: found run.toml; expected a run folder" in err


def test_a_folder_that_cannot_be_read_is_refused(tmp_path: Path, capsys, monkeypatch):
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", refuse)
    status, out, err = run(capsys, tmp_path)
    assert (status, out) == (2, "")
    assert f"the folder {tmp_path} cannot be read: Permission denied; expected a run folder" in err


def test_a_tokenizer_without_a_chat_template_is_refused(tmp_path: Path, model: Path, capsys):
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in model.iterdir():
        if file.name != "chat_template.jinja":
            (bare / file.name).write_bytes(file.read_bytes())
    status, _, err = run(capsys, write(tmp_path / "log.jsonl", WHOLE), "--model", bare)
    assert status == 2
    assert "has no chat template" in err


def test_a_log_of_another_model_is_refused(tmp_path: Path, model: Path, capsys):
    log = write(tmp_path / "log.jsonl", Trajectory(example_id="x", turns=[turn([1, 150_000], [2])]))
    status, _, err = run(capsys, log, "--model", model)
    assert status == 2
    assert "the log contains the id 150000" in err


@pytest.mark.parametrize("folder", ["model", "final", "warm_start"])
def test_the_tokenizer_of_a_run_is_found_beside_its_log(tmp_path: Path, model: Path, capsys, folder: str):
    shutil.copytree(model, tmp_path / folder)
    assert "found next to the log" in run(capsys, write(tmp_path / "log.jsonl", QWEN3))[1]


@pytest.mark.parametrize("place", ["config.toml", "model", "final", "model/tokenizer.json", "model/sub/more.jinja"])
def test_a_link_beside_the_log_is_refused(tmp_path: Path, model: Path, capsys, place: str):
    """A run's folder may come from anybody: what a link leads to is no part of it."""
    run_folder, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    run_folder.mkdir()
    if "/" in place:
        shutil.copytree(model, run_folder / "model")
    (run_folder / place).parent.mkdir(exist_ok=True)
    (run_folder / place).unlink(missing_ok=True)
    if place == "config.toml":
        elsewhere.write_text("hidden = 'words'\n[")
    (run_folder / place).symlink_to(elsewhere if place == "config.toml" else model)
    status, out, err = run(capsys, write(run_folder / "log.jsonl", QWEN3))
    assert (status, out) == (2, "")
    assert f"{place} is a link, which is not followed" in " ".join(err.split())
    assert "hidden" not in err


def test_a_pipe_in_the_model_beside_the_log_is_refused_and_not_waited_for(tmp_path: Path, model: Path, capsys):
    shutil.copytree(model, tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").unlink()
    os.mkfifo(tmp_path / "model" / "tokenizer.json")
    status, _, err = run(capsys, write(tmp_path / "log.jsonl", QWEN3))
    assert status == 2 and "tokenizer.json is not a regular file" in " ".join(err.split())


def test_the_tokenizer_of_a_run_is_found_by_its_configuration(tmp_path: Path, model: Path, capsys):
    (tmp_path / "config.toml").write_text(f'[model]\nname = "{model}"\n')
    status, out, _ = run(capsys, write(tmp_path / "log.jsonl", QWEN3))
    assert status == 1
    assert f"{model}, named in" in " ".join(out.split())


def test_the_tokenizer_of_a_run_is_that_of_a_model_of_the_catalog(tmp_path: Path, model: Path, capsys, monkeypatch):
    monkeypatch.setenv("VERBATIM_MODELS", str(tmp_path / "kept"))
    shutil.copytree(model, tmp_path / "kept" / "smollm2-135m")
    (tmp_path / "config.toml").write_text('[model]\nname = "smollm2-135m"\n')
    status, out, _ = run(capsys, write(tmp_path / "log.jsonl", QWEN3))
    assert status == 1
    assert "tokenizer  smollm2-135m, named in" in " ".join(out.split("\n"))


def test_a_hub_id_in_the_configuration_is_offered_not_looked_up(tmp_path: Path, capsys):
    (tmp_path / "config.toml").write_text('[model]\nname = "some/model"\n')
    assert "add --model some/model" in run(capsys, write(tmp_path / "log.jsonl", WHOLE))[1]


@pytest.mark.parametrize("other", ["model = 3\n", "[model]\nname = 3\n", "name = 'x'\n"])
def test_another_configuration_beside_the_log_is_left_alone(tmp_path: Path, capsys, other: str):
    (tmp_path / "config.toml").write_text(other)
    assert run(capsys, write(tmp_path / "log.jsonl", WHOLE))[0] == 0


def test_a_broken_configuration_beside_the_log_is_named(tmp_path: Path, capsys):
    (tmp_path / "config.toml").write_text("[model\n")
    status, _, err = run(capsys, write(tmp_path / "log.jsonl", WHOLE))
    assert status == 2
    assert "config.toml next to the log is not TOML" in err


def test_nothing_in_a_log_reaches_the_terminal_as_a_command(tmp_path: Path, model: Path, capsys):
    hostile = Trajectory(
        example_id="x",
        trajectory_id="\x1b[2J[red]",
        turns=[
            turn(render(ASK), f"<think>\n\x1b[31mR\n</think>\n\nA\x1b[0m{END}"),
            turn(render(ASK, assistant("A\x1b[0m"), NEXT), f"W{END}", agent="main"),
            turn(render(NEXT), f"W{END}", agent="\x1b]0;title"),
        ],
    )
    log = write(tmp_path / "log.jsonl", hostile)
    log.write_text(log.read_text() + '{"\\u001b[2J": 1}\n')
    status, out, _ = run(capsys, log, "--model", model)
    assert status == 2
    assert "\x1b" not in out
    assert "\\x1b[2J[red]" in out


def test_breaks_beyond_the_limit_are_counted(tmp_path: Path, model: Path, capsys):
    log = write(tmp_path / "log.jsonl", *[QWEN3] * 12)
    _, out, _ = run(capsys, log, "--model", model)
    assert "break 10 " in out
    assert "break 11 " not in out
    assert "2 more breaks" in out
    assert "12 breaks" in out
    _, out, _ = run(capsys, log, "--model", model, "--limit", 0)
    assert "break 1 " not in out
    assert "12 breaks" in out


def test_one_break_of_each_class_is_shown_before_a_second_one(tmp_path: Path, model: Path, capsys):
    others = [corpus_case(words).logged.trajectory for words in ("two spaces made one", "a call that is no JSON")]
    log = write(tmp_path / "log.jsonl", *[QWEN3] * 12, SUB_AGENT, *others)
    _, out, _ = run(capsys, log, "--model", model, "--limit", 4)
    shown = [line.split("  ")[1].strip() for line in out.splitlines() if line.startswith("break ")]
    assert shown == ["thinking stripped", "sub-agent", "whitespace", "part of an answer not read back"]
    _, out, _ = run(capsys, log, "--model", model, "--limit", 3, "--json")
    report = json.loads(out)
    assert [found["class"] for found in report["breaks"]] == ["thinking_stripped", "whitespace", "not_read_back"]
    assert report["summary"]["breaks"] == 15


def test_a_log_without_ids_is_not_said_to_be_whole(tmp_path: Path, capsys):
    log = write(tmp_path / "log.jsonl", *[Trajectory(example_id="x", trajectory_id=f"t{n}") for n in range(3)])
    status, out, _ = run(capsys, log)
    assert status == 2
    assert "nothing was checked: no turn in 3 trajectories has the token ids" in " ".join(out.split())
    assert "0 breaks" not in out
    status, out, _ = run(capsys, log, "--json")
    assert (status, json.loads(out)["summary"]["checked"]) == (2, False)


def test_advice_about_servers_is_not_given_about_a_run_of_ours(tmp_path: Path, model: Path, capsys):
    found = [corpus_case(words).logged.trajectory for words in ("sampled letter by letter", "Qwen3 example")]
    _, out, _ = run(capsys, write(tmp_path / "log.jsonl", *found), "--model", model)
    shown = " ".join(out.split())
    assert "the conversation was rendered again" in shown
    assert "endpoint" not in shown
    assert "Send token ids" not in shown


def test_the_advice_of_a_class_is_given_once(tmp_path: Path, model: Path, capsys):
    _, out, _ = run(capsys, write(tmp_path / "log.jsonl", QWEN3, QWEN3), "--model", model)
    assert " ".join(out.split()).count("the model's format drops the earlier thinking") == 1


@pytest.mark.slow
@pytest.mark.parametrize("columns", [80, 120])
def test_no_line_is_wider_than_the_terminal(tmp_path: Path, model: Path, capsys, monkeypatch, columns: int):
    monkeypatch.setenv("COLUMNS", str(columns))
    log = write(tmp_path / "log.jsonl", *(case.logged.trajectory for case in cases()))
    _, out, _ = run(capsys, log, "--model", model, "--limit", 100)
    shown = out.split("\n\n", 1)[1]  # paths above are kept whole
    assert max(map(len, shown.splitlines())) <= columns


def test_json_holds_every_break_with_the_documented_keys(tmp_path: Path, model: Path, capsys):
    log = write(tmp_path / "log.jsonl", *[QWEN3] * 12, SUB_AGENT)
    status, out, _ = run(capsys, log, "--json", "--model", model)
    report = json.loads(out)
    assert status == 1
    assert (report["format"], report["tokenizer"], report["file"]) == ("verbatim", str(model), str(log))
    assert len(report["breaks"]) == 13
    first, last = report["breaks"][0], report["breaks"][-1]
    assert (first["class"], first["by_design"], last["class"], last["by_design"]) == (
        "thinking_stripped",
        False,
        "sub_agent",
        True,
    )
    assert (first["line"], first["turn"], first["position"]) == (1, 1, 10)
    at = first["recorded"]["positions"].index(10)
    assert first["recorded"]["tokens"][at] == "<think>"
    assert first["recorded"]["ids"][at] == tokenizer().convert_tokens_to_ids("<think>")
    assert first["sent"]["tokens"][first["sent"]["positions"].index(10)] == "A"
    assert first["template_line"]["text"] == "{%- if loop.index0 > ns.last_query_index %}"
    assert report["summary"]["breaks"] == 13
    assert report["summary"]["by_design"] == 1
    tokens = report["summary"]["tokens"]
    assert tokens["again"] == sum(found["cost"]["tokens_again"] for found in report["breaks"])
    assert tokens["share"] == tokens["again"] / tokens["rows"]
    assert report["unreadable"] == {"count": 0, "lines": []}


def test_json_keys_are_those_of_the_documentation(tmp_path: Path, model: Path, capsys):
    path = write(tmp_path / "log.jsonl", QWEN3)
    path.write_text(path.read_text() + "{\n")
    report = json.loads(run(capsys, path, "--json", "--model", model)[1])
    page = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text(encoding="utf-8")
    (documented,) = [json.loads(block) for block in page.split("```json\n")[1:2] for block in [block.split("```")[0]]]

    def keys(value):
        if isinstance(value, dict):
            return {key: keys(inner) for key, inner in value.items()}
        return [keys(value[0])] if isinstance(value, list) and value and isinstance(value[0], dict) else None

    assert keys(report) == keys(documented)


def test_json_of_a_log_without_a_tokenizer_has_ids_only(tmp_path: Path, capsys):
    (found,) = json.loads(run(capsys, write(tmp_path / "log.jsonl", QWEN3), "--json")[1])["breaks"]
    assert found["recorded"]["tokens"] is None
    assert found["class"] == "unknown"
    assert len(found["recorded"]["ids"]) == len(found["recorded"]["positions"]) > 0


def test_the_same_break_is_found_in_a_log_of_vllm(tmp_path: Path, model: Path, capsys):
    log = tmp_path / "vllm.jsonl"
    with log.open("w") as file:
        for step in QWEN3.turns:
            choice = {"index": 0, "token_ids": step.completion_ids.tolist(), "finish_reason": "stop"}
            record = {"id": "x", "prompt_token_ids": step.prompt_ids.tolist(), "choices": [choice]}
            file.write(json.dumps({"conversation_id": "c", "response": record}) + "\n")
    status, out, _ = run(capsys, log, "--model", model)
    assert status == 1
    assert 'format     vllm: answers of vLLM, grouped by "conversation_id"' in out
    assert "the <think> block of turn 0 is not in turn 1's prompt" in out


@pytest.mark.slow
@pytest.mark.realtime
def test_neither_torch_nor_transformers_is_imported_without_a_tokenizer(tmp_path: Path):
    log = write(
        tmp_path / "log.jsonl",
        WHOLE,
        Trajectory(
            example_id="x", turns=[turn(render(ASK), f"W{END}"), turn(render(ASK, assistant("C"), NEXT), f"W{END}")]
        ),
    )
    script = (
        "import sys; from verbatim.cli.main import main; status = main(['doctor', sys.argv[1]]); "
        "print([m for m in ('torch', 'transformers', 'jinja2') if m in sys.modules], file=sys.stderr); sys.exit(status)"
    )
    with warm.cold("it tells what is imported"):
        done = subprocess.run([sys.executable, "-c", script, str(log)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "[]\n")


TEMPLATES = Path(__file__).parents[1] / "models" / "renderers" / "data" / "trl_templates"


def probes(out: str) -> dict[tuple[str, str], dict[str, Any]]:
    rows = json.loads(out)["tables"]["default"]
    return {(row["appended"], row["situation"]): row for row in rows}


def test_probes_of_a_template_name_the_turn_and_the_line_that_rewrites_it(capsys: pytest.CaptureFixture[str]) -> None:
    file = TEMPLATES / "qwen3.jinja"
    assert main(["doctor", "--template", str(file), "--json"]) == 0
    found = probes(capsys.readouterr().out)
    assert {row["outcome"] for (appended, _), row in found.items() if appended == "a tool's answer"} == {"bridged"}
    user = {situation: row for (appended, situation), row in found.items() if appended == "a user's message"}
    refused = {name: row["turn"] for name, row in user.items() if row["outcome"] == "refused"}
    assert refused == {"the turn thinks": 0, "thinks before every call": 0}
    thinks = user["the turn thinks"]
    # The branch for turns before the last question, which writes no thinking.
    assert thinks["text"] == "{{- '<|im_start|>' + message.role + '\\n' + content }}"
    assert thinks["text"] == file.read_text(encoding="utf-8").splitlines()[thinks["line"] - 1].strip()
    assert "<think>\\nzq turn 0 thinks" in thinks["reason"]


def test_a_kind_of_message_that_is_never_bridged_is_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--template", str(TEMPLATES / "gptoss.jinja")]) == 1
    shown = capsys.readouterr().out
    assert "a user's message" in shown
    assert "(turn 0) '<|return|>' becomes '<|end|><|start|>user" in " ".join(shown.split())


def test_messages_that_a_template_refuses_or_leaves_out_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", "--template", str(TEMPLATES / "gemma3.jinja"), "--json"])
    row = probes(capsys.readouterr().out)["a tool's answer", "plain"]
    assert (row["outcome"], row["line"]) == ("raises", None)
    assert row["reason"].startswith("TemplateError: Conversation roles must alternate")
    main(["doctor", "--template", str(TEMPLATES / "deepseekv3.jinja"), "--json"])
    assert probes(capsys.readouterr().out)["a system message", "plain"]["outcome"] != "bridged"


def test_a_template_without_tools_is_told_and_status_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "chat_template.jinja"
    file.write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    assert main(["doctor", "--template", str(file), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    rows = found["tables"]["default"]
    assert {row["outcome"] for row in rows if row["appended"] == "a user's message"} == {"bridged"}
    told = {(row["outcome"], row["reason"]) for row in rows if row["appended"] == "a system message"}
    assert told == {("refused", "the environment appended a message that is neither a tool's nor a user's")}
    assert found["tools"] == {
        "shown": False,
        "shown_below_system": False,
        "called": False,
        "read": False,
        "answered": True,
        "hermes": "schemas in a system message, answers in a tool message",
    }
    assert main(["doctor", "--template", str(file)]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "Tools: the chat template shows no tools and writes no tool calls" in shown
    assert 'set tools = "hermes" under [orchestrator.renderer]' in shown


@pytest.mark.parametrize(
    ("name", "lacks"),
    [
        ("qwen3", []),
        ("llama3_1", []),
        ("deepseekv3", ["shown", "shown_below_system"]),
        ("gemma4", ["read"]),
        ("lfm2", ["called", "read"]),
        ("phi3", ["shown", "shown_below_system", "called", "read", "answered"]),
    ],
)
def test_what_published_templates_write_of_tools(
    name: str, lacks: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    main(["doctor", "--template", str(TEMPLATES / f"{name}.jinja"), "--json"])
    tools = json.loads(capsys.readouterr().out)["tools"]
    assert [key for key, value in tools.items() if value is False] == lacks


def test_the_table_of_a_model_says_which_renderer_it_has(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--template", str(model)]) in (0, 1)
    assert "The renderer of this model: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (None, "there is no model folder"),
        ("{% for m in", "not valid Jinja (line 1"),
        ("", "is empty; expected a template that writes messages as a prompt"),
        ("{% if 1 %}" * 200 + "{% endif %}" * 200, "cannot be compiled"),
    ],
)
def test_a_template_that_is_none_is_a_clear_error(
    text: str | None, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "chat_template.jinja"
    if text is not None:
        file.write_text(text)
    assert main(["doctor", "--template", str(file)]) == 2
    assert complaint in capsys.readouterr().err


def test_lines_of_a_template_are_counted_as_jinja_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "chat_template.jinja"
    file.write_bytes("{# \u2028 \x0b \x0c \x85 #}\r\n{{ messages | length }}\n{{ messages }}".encode())
    assert main(["doctor", "--template", str(file), "--json"]) == 1
    found = probes(capsys.readouterr().out)["a user's message", "plain"]
    assert (found["line"], found["text"]) == (2, "{{ messages | length }}")


@pytest.mark.parametrize("options", [["--limit", "3"], ["--model", "x"], ["--model", "x", "--limit", "0"]])
def test_options_of_logs_are_refused_with_a_template(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--template", str(TEMPLATES / "qwen3.jinja"), *options]) == 2
    assert f"{options[-2]} cannot be used with --template" in capsys.readouterr().err


def test_one_json_value_over_many_lines_is_no_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log.json"
    log.write_text(json.dumps([{"id": "x", "prompt_token_ids": [1]}], indent=1))
    assert main(["doctor", str(log)]) == 2
    assert "one JSON value over many lines; expected JSON lines" in capsys.readouterr().err
