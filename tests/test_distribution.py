"""The wheel stands alone: built from the tree and installed elsewhere, it does in an empty folder what docs/ say."""

from __future__ import annotations

import email
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import warm
from verbatim import __version__
from waiting import HANGS

ROOT = Path(__file__).parents[1]
BUILD = "import sys, setuptools.build_meta as b; _, out, *names = sys.argv; [getattr(b, name)(out) for name in names]"
TREE = (
    "pyproject.toml",
    "MANIFEST.in",
    "README.md",
    "LICENSE",
    "CHANGELOG.md",
    "CITATION.cff",
    "constraints.txt",
    "docs",
    "src",
)

pytestmark = [pytest.mark.slow, pytest.mark.realtime]


def build(source: Path, out: Path, *hooks: str) -> None:
    """What these hooks of the build backend make of a folder."""
    subprocess.run([sys.executable, "-c", BUILD, str(out), *hooks], cwd=source, check=True, capture_output=True)


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An sdist and a wheel of this tree, built in a copy of it."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in TREE:
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            shutil.copy(path, source / name)
    build(source, out, "build_sdist", "build_wheel")
    return next(out.glob("*.tar.gz")), next(out.glob("*.whl"))


def names(wheel: Path) -> set[str]:
    return {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name or "/plugin/" in name}


def test_the_metadata_is_what_an_index_takes(distributions: tuple[Path, Path]):
    done = subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict", *map(str, distributions)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_users_get_ranges_and_an_extra_for_everything(distributions: tuple[Path, Path]):
    archive = zipfile.ZipFile(distributions[1])
    (path,) = [name for name in archive.namelist() if name == f"verbatim_rl-{__version__}.dist-info/METADATA"]
    metadata = email.message_from_bytes(archive.read(path))
    requires = [line for line in metadata.get_all("Requires-Dist") if "extra == 'dev'" not in line]
    assert [line for line in requires if "==" in line.partition(";")[0]] == ['verifiers==0.4.*; extra == "verifiers"']
    (everything,) = [line for line in requires if line.startswith("verbatim-rl[")]
    named = set(everything.partition("[")[2].partition("]")[0].split(","))
    assert named == set(metadata.get_all("Provides-Extra")) - {"all", "dev", "dev-s3"}


def test_every_file_of_the_package_is_in_the_wheel_and_the_sdist_makes_the_same_wheel(
    distributions: tuple[Path, Path], tmp_path: Path
):
    sdist, wheel = distributions
    package = ROOT / "src" / "verbatim"
    files = {f"verbatim/{path.relative_to(package).as_posix()}" for path in package.rglob("*") if path.is_file()}
    assert names(wheel) == {name for name in files if "__pycache__" not in name}
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    build(next(tmp_path.iterdir()), tmp_path / "dist", "build_wheel")
    assert names(next((tmp_path / "dist").glob("*.whl"))) == names(wheel)


def test_the_installed_wheel_checks_writes_and_trains_in_an_empty_folder(
    distributions: tuple[Path, Path], tmp_path: Path
):
    site, here = tmp_path / "site", tmp_path / "empty"
    here.mkdir()
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site), str(distributions[1])],
        check=True,
    )
    environment = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}

    def typed(*command: str) -> str:
        with warm.cold("the files of the wheel are imported, not those of this tree"):
            done = subprocess.run(
                [sys.executable, *command], cwd=here, env=environment, capture_output=True, text=True, check=False
            )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    verbatim = str(site / "bin" / "verbatim")
    assert Path(typed("-c", "import verbatim; print(verbatim.__file__)").strip()) == site / "verbatim" / "__init__.py"
    assert typed(verbatim, "--version") == f"verbatim {__version__}\n"
    assert "guess_number: An agent learns binary search" in typed(verbatim, "recipes")
    typed(verbatim, "recipes", "copy", "first_steps")
    assert (here / "first_steps.ipynb").read_bytes() == (ROOT / "examples" / "first_steps.ipynb").read_bytes()
    typed(verbatim, "init", "project")
    assert "nothing wrong" in typed(verbatim, "env", "check", "project/my_env.py", "--timeout", str(HANGS))
    few = [
        "--max-steps",
        "2",
        "--warm-start.steps",
        "30",
        "--orchestrator.batch-size",
        "8",
        "--orchestrator.group-size",
        "4",
        "--orchestrator.eval.episodes",
        "4",
        "--orchestrator.seq-len",
        "160",
        "--orchestrator.buffer.online-difficulty-filtering",  # else nothing is trained if every group is of one reward
        "true",
    ]
    typed(verbatim, "rl", "parcel_desk", *few)
    summary = json.loads((here / "runs" / "parcel_desk" / "latest" / "summary.json").read_text())
    assert summary["steps"] == 2
