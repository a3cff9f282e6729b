"""Every fenced block of the documentation is checked by its language, and every command by the parser that reads it."""

from __future__ import annotations

import ast
import importlib
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from docs_pages import MODULES, PAGES, ROOT, Snippet, lines_of, snippets
from verbatim.cli.main import COMMANDS, make_parser, split_overrides
from verbatim.config.backends import schema_with_backends
from verbatim.config.fields import keys
from verbatim.config.load import make_config
from verbatim.config.recipe_files import recipes
from verbatim.core.errors import ConfigError, UsageError
from verbatim.core.formats import FORMATS
from verbatim.run.tables import component_tables
from waiting import wait_until

LANGUAGES = ("", "python", "toml", "json", "bash", "console", "text", "yaml", "ini")
"""Blocks without a language hold commands, or a picture in characters; those of `text` hold no code that is run."""


def test_every_block_has_a_language_that_is_checked():
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert set(re.findall(r"^```(\w+)", text, re.MULTILINE)) <= set(LANGUAGES)


def names_of_ours(text: str) -> list[tuple[str, str]]:
    """Module and name of each import from this project."""
    imports = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)]
    found = []
    for node in imports:
        if isinstance(node, ast.ImportFrom):
            found += [(node.module or "", alias.name) for alias in node.names]
        else:
            found += [(alias.name, "") for alias in node.names]
    return [(module, name) for module, name in found if module.split(".")[0] == "verbatim"]


def exists(module: str, name: str) -> bool:
    try:
        return not name or hasattr(importlib.import_module(module), name)
    except ModuleNotFoundError:
        return False


def test_python_blocks_can_be_parsed_and_import_what_exists():
    """The tests of each feature run its blocks; a block that none runs has to be right in this much."""
    imports = [(str(s), module, name) for s in snippets("python", *PAGES) for module, name in names_of_ours(s.text)]
    assert len(imports) > 50
    assert [found for found in imports if not exists(*found[1:])] == []


def test_an_import_of_a_name_that_does_not_exist_is_seen():
    text = (
        "import verbatim\nfrom verbatim.algorithms.losses import LOSSES, LOSES\nfrom verbatim.loses import x\nimport os"
    )
    assert [exists(*found) for found in names_of_ours(text)] == [True, True, False, False]


# ---- files of runs


def merged(base: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    both = dict(base)
    for key, value in other.items():
        old = both.get(key)
        both[key] = merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return both


BASE = {"model": {"name": "some/model"}, "orchestrator": {"train": {"env": [{"id": "guess_number"}]}}}


def test_toml_blocks_are_accepted_by_the_schema(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Alone where it is a whole run, else beside a model and an environment."""
    own_code = {
        "my_module": "def my_loss(inputs, clip_eps: float = 0.1):\n    return None\n",
        "my_env": "class MyEnv:\n    async def score(self, trajectory):\n        return 1.0\n",
    }
    monkeypatch.syspath_prepend(tmp_path)
    for name, text in {**MODULES, **own_code}.items():
        (tmp_path / f"{name}.py").write_text(text)
    own = {*MODULES, *own_code} - set(sys.modules)
    blocks = snippets("toml", *PAGES)
    assert len(blocks) > 40
    assert [f"{snippet}: {wrong}" for snippet in blocks if (wrong := refusal(snippet))] == []
    for name in own:
        sys.modules.pop(name, None)  # other tests have modules of these names


def refusal(snippet: Snippet) -> str | None:
    """What the schema has against a block of TOML."""
    given = tomllib.loads(snippet.text)
    base = {**BASE, "model": {}} if "model" in given else BASE
    try:
        make_config(merged(base, given), tables=component_tables())
    except ConfigError as error:
        return str(error)
    return None


def test_a_key_that_is_misspelt_in_a_block_would_be_seen():
    with pytest.raises(ConfigError, match=r"did you mean .*batch_size"):
        make_config(merged(BASE, tomllib.loads("[orchestrator]\nbatch_sise = 4")), tables=component_tables())


# ---- commands


def commands() -> list[tuple[str, str, bool]]:
    """Each line of a block that calls one of our programs, or pip or make; and each such command in the text."""
    found = []
    for page in PAGES:
        if page.name.startswith("reference_"):
            continue
        for language in ("", "bash", "console"):
            for snippet in snippets(language, page):
                found += [(str(snippet), line, True) for line in lines_of(snippet.text)]
        prose = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        spans = re.findall(r"`([^`]+)`", prose)
        spans = [" ".join(span.split()) for span in spans]
        found += [(page.name, span, False) for span in spans if re.match(r"(verbatim|make|pip install) ", span)]
    known = re.compile(r"((\w+=\S+|exec|srun.*|torchrun.*|ray .*) )*?(verbatim(\.cli)? |make |pip install |python )")
    return [(where, line, whole) for where, line, whole in found if known.match(line)]


def test_the_commands_of_the_documentation_can_be_typed():
    wrong = []
    for where, line, whole in commands():
        try:
            check_command(line, whole=whole)
        except (AssertionError, SystemExit, UsageError) as error:
            wrong.append(f"{where}: {line}: {error!r}")
    assert wrong == []


@pytest.mark.parametrize(
    "line",
    [
        "verbatim rll run.toml",
        "verbatim rl run.toml --max-stepps 3",
        "make tests",
        "python benchmarks/none.py",
        "verbatim eval --no-such-option 1",
        "pip install 'verbatim-rl[trian]'",
        "pip install 'verbatim_rl-0.1.0-py3-none-any.whl[train]'",
    ],
)
def test_a_command_that_cannot_be_typed_is_seen(line: str):
    with pytest.raises((AssertionError, SystemExit, UsageError)):
        check_command(line)


def check_command(line: str, *, whole: bool = True) -> None:
    """A line that calls one of our programs, pip, make or Python. One that stands in the text (`whole=False`) may leave
    out what it is given."""
    if (script := re.search(r"bash -c '.*exec (.*)'", line)) is not None:
        line = script[1].replace('"$@"', "")
    words = shlex.split(re.sub(r"\"\$\{\w+\[@\]\}\"|&$|\.\.\.$|> \S+", "", line))
    while words and words[0] not in ("verbatim", "verbatim.cli", "make", "pip", "python"):
        words.pop(0)
    program, *arguments = words
    if program.startswith("verbatim"):
        check_verbatim(arguments, whole=whole)
    elif program == "make":
        targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
        assert {word for word in arguments if "=" not in word} <= targets
    elif program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        for named in re.findall(r"verbatim[_-]rl[^\[]*\[([\w,]+)\]", " ".join(arguments)):
            assert set(named.split(",")) <= set(extras)
        if "verbatim_rl-" in line:
            assert {"-c", "--extra-index-url"} <= set(arguments), "without both pip takes torch for CUDA"
    elif arguments[0] != "-m":
        assert (ROOT / arguments[0]).is_file(), arguments[0]


def check_verbatim(arguments: list[str], *, whole: bool = True) -> None:
    """The command exists, its parser reads the arguments, and every other option is a key of the configuration."""
    name = next((word for word in arguments if not word.startswith("-")), None)
    if name is None or name in ("COMMAND", "SHELL"):
        return
    assert name in COMMANDS
    parser = make_parser(name)
    own, overrides = split_overrides(arguments, known=parser.commands[name]._option_string_actions)
    if whole:
        parser.parse_args([re.sub(r"^N$", "1", word) for word in own])
    schema, _ = schema_with_backends({}, component_tables())
    known = {key for key, _ in keys(schema)}
    tables = {".".join(key.split(".")[:depth]) for key in known for depth in range(1, key.count(".") + 1)}
    for option in overrides:
        if option.startswith("--"):
            key = option.removeprefix("--").partition("=")[0].replace("-", "_")
            assert key in known | tables or key.rpartition(".")[0] in tables, option


def test_the_recipes_that_commands_name_exist():
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    named = set(re.findall(r"verbatim (?:rl|config) ([a-z_]+)\b(?![./])", text)) - {"run", "projects"}
    assert named <= set(recipes())


@pytest.mark.realtime
def test_scripts_are_read_by_bash():
    bash = shutil.which("bash")
    assert bash is not None
    for snippet in snippets("bash", *PAGES):
        done = subprocess.run([bash, "-n"], input=snippet.text, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, ""), snippet


SBATCH = {
    "job-name",
    "nodes",
    "ntasks",
    "ntasks-per-node",
    "gpus-per-node",
    "cpus-per-task",
    "time",
    "signal",
    "requeue",
    "open-mode",
}
"""Options that sbatch has, of those that are used."""


BATCH_SCRIPTS = [s for s in snippets("bash", *PAGES) if "#SBATCH" in s.text]


@pytest.mark.parametrize("snippet", BATCH_SCRIPTS, ids=str)
def test_a_batch_script_asks_for_what_slurm_knows(snippet: Snippet):
    assert snippet.text.startswith("#!/bin/bash\n#SBATCH ")
    head, _, script = snippet.text.partition("\n\n") if "\n\n" in snippet.text else (snippet.text, "", snippet.text)
    assert set(re.findall(r"--([\w-]+)", " ".join(re.findall(r"^#SBATCH (.+)$", head, re.MULTILINE)))) <= SBATCH
    assert "#SBATCH" not in script or script == snippet.text


def start_bash(snippet: Snippet, folder: Path, programs: Mapping[str, str]) -> subprocess.Popen[str]:
    """Start a batch script with doubles of the programs that a cluster has. `folder/calls` has their calls."""
    bin_folder = folder / "bin"
    bin_folder.mkdir()
    for name, body in programs.items():
        path = bin_folder / name
        path.write_text(f'#!/bin/bash\necho "{name} $*" >> {folder / "calls"}\n{body}\n')
        path.chmod(0o755)
    script = folder / "script"
    script.write_text(snippet.text.replace("/shared/runs", str(folder / "runs")))
    slurm = {"JOB_NODELIST": "n[1-3]", "JOB_ID": "7", "NNODES": "3", "CPUS_PER_TASK": "64", "GPUS_ON_NODE": "8"}
    env = {"PATH": f"{bin_folder}:/usr/bin:/bin", "TMPDIR": str(folder), **{f"SLURM_{k}": v for k, v in slurm.items()}}
    return subprocess.Popen(["bash", str(script)], env=env, stderr=subprocess.PIPE, text=True)


def calls_of(folder: Path) -> list[str]:
    return sorted((folder / "calls").read_text().splitlines())


def run_bash(snippet: Snippet, folder: Path, programs: Mapping[str, str]) -> list[str]:
    """What a batch script calls, sorted."""
    running = start_bash(snippet, folder, programs)
    _, said = running.communicate()
    assert running.returncode == 0, said
    return calls_of(folder)


def batch_script(name: str) -> Snippet:
    (found,) = [s for s in snippets("bash", ROOT / "docs" / "operations.md") if f"`{name}`:" in s.before[-60:]]
    return found


@pytest.mark.realtime
def test_the_script_for_one_node_begins_a_run_and_goes_on(tmp_path: Path):
    script = batch_script("one_node.sbatch")
    (tmp_path / "first").mkdir()
    assert run_bash(script, tmp_path / "first", {"verbatim": ""}) == [
        f"verbatim rl run.toml --run-dir {tmp_path}/first/runs/one"
    ]
    (tmp_path / "then" / "runs" / "one").mkdir(parents=True)
    (tmp_path / "then" / "runs" / "one" / "config.toml").touch()
    assert run_bash(script, tmp_path / "then", {"verbatim": ""}) == [
        f"verbatim rl run.toml --resume {tmp_path}/then/runs/one"
    ]


# On the first node, symmetric-run starts Ray's head and runs the command; on the others it returns when the head ends.
ON_A_CLUSTER = {
    "scontrol": "[ $1 = show ] && printf 'n1\\nn2\\nn3\\n' || true",
    "srun": '"$@"',
    "ray": 'while [ "$1" != -- ]; do shift; done; shift; "$@"',
}


@pytest.mark.realtime
def test_the_script_for_three_nodes_runs_one_command_on_a_cluster(tmp_path: Path):
    script = batch_script("three_nodes.sbatch")
    calls = run_bash(script, tmp_path, {**ON_A_CLUSTER, "verbatim": ""})
    assert f"verbatim rl run.toml --run-dir {tmp_path}/runs/one" in calls
    (started,) = [call for call in calls if call.startswith("ray ")]
    assert started.startswith(
        "ray symmetric-run --address n1:6379 --min-nodes 3 --num-cpus 64 --num-gpus 8 -- bash -c "
    )
    assert not [call for call in calls if "requeue" in call]
    then = tmp_path / "then"
    (then / "runs" / "one").mkdir(parents=True)
    (then / "runs" / "one" / "config.toml").touch()
    assert f"verbatim rl run.toml --resume {then}/runs/one" in run_bash(script, then, {**ON_A_CLUSTER, "verbatim": ""})


@pytest.mark.realtime
def test_the_end_of_slurms_time_reaches_the_command_alone_and_the_job_is_queued_again(tmp_path: Path):
    """The double of `verbatim` writes its checkpoint when it is told to end; Ray would not survive the signal."""
    waits = "trap 'echo checkpoint >> $0.calls; exit 130' TERM; touch $0.waits; while true; do sleep 0.05; done"
    lives = "trap 'echo dead >> $0.calls; exit 143' TERM; "
    running = start_bash(
        batch_script("three_nodes.sbatch"),
        tmp_path,
        {**ON_A_CLUSTER, "ray": lives + ON_A_CLUSTER["ray"], "verbatim": waits},
    )
    wait_until(lambda: (tmp_path / "bin" / "verbatim.waits").exists() or running.poll() is not None)
    # Once the command runs, the script sleeps nowhere but in its `wait`.
    wait_until(lambda: Path(f"/proc/{running.pid}/stat").read_text().rpartition(")")[2].split()[0] in "SZ")
    running.terminate()
    _, said = running.communicate()
    assert running.returncode == 143, said  # of the `wait` that the signal interrupted
    assert (tmp_path / "bin" / "verbatim.calls").read_text() == "checkpoint\n"
    assert not (tmp_path / "bin" / "ray.calls").exists()
    assert "scontrol requeue 7" in calls_of(tmp_path)


# ---- manifests and other formats


def test_the_page_has_the_number_of_each_format():
    page = (ROOT / "docs/configuration.md").read_text("utf-8")
    table = re.findall(r"^\| `([^`]+)` \| .* \| (\d+) \|$", page, re.MULTILINE)
    assert {kind: int(number) for kind, number in table} == dict(FORMATS)


def test_json_blocks_are_json():
    for snippet in snippets("json", *PAGES):
        assert json.loads(snippet.text), snippet


MANIFESTS = snippets("yaml", *PAGES)


@pytest.mark.parametrize("snippet", MANIFESTS, ids=str)
def test_manifests_fit_the_schemas_of_kubernetes(snippet: Snippet):
    import kubernetes_validate
    import yaml

    for document in yaml.safe_load_all(snippet.text):
        kubernetes_validate.validate(document, "1.34", strict=True)


def test_the_manifests_fit_each_other():
    import yaml

    (snippet,) = MANIFESTS
    documents = {(d["kind"], d["metadata"]["name"]): d for d in yaml.safe_load_all(snippet.text)}
    servers = documents["StatefulSet", "verbatim-sampler"]["spec"]
    job = documents["Job", "verbatim-run"]["spec"]["template"]["spec"]
    run = tomllib.loads(documents["ConfigMap", "verbatim-run"]["data"]["run.toml"])
    make_config(run, tables=component_tables())
    for pod in (servers["template"]["spec"], job):
        assert {m["name"] for m in pod["containers"][0]["volumeMounts"]} == {v["name"] for v in pod["volumes"]}
        for volume in pod["volumes"]:
            if "configMap" in volume:
                assert ("ConfigMap", volume["configMap"]["name"]) in documents
            if "persistentVolumeClaim" in volume:
                assert ("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]) in documents
    # The servers' port is the service's and that of the urls, one for each pod; the GPUs are the trainer's.
    serving = servers["template"]["spec"]["containers"][0]["command"]
    check_verbatim(serving[1:])
    port = serving[serving.index("--port") + 1]
    assert documents["Service", servers["serviceName"]]["spec"]["ports"][0]["port"] == int(port)
    script = job["containers"][0]["command"][-1]
    (training,) = [line for line in lines_of(script) if line.startswith("exec verbatim")]
    check_verbatim(shlex.split(training.replace('"${WHERE[@]}"', "--run-dir /runs/one"))[2:])
    urls = json.loads(re.findall(r"'(\[.*\])'", script)[0])
    assert urls == [f"http://verbatim-sampler-{i}.{servers['serviceName']}:{port}" for i in range(servers["replicas"])]
    assert job["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == run["trainer"]["parallel"]["processes"]
