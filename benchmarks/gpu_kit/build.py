"""Makes the folder gpu-kit/, which runs on a machine with a GPU and without a network: `make gpu-kit`.

    gpu-kit/run.sh              runs a part
    gpu-kit/benchmarks/         the parts, and the job that TRL is given too
    gpu-kit/tests/              its chat templates
    gpu-kit/wheels/             our wheel, and those that such a machine lacks

What such a machine has stands in `there.txt`. For the resolver these packages are wheels without content whose version
ends in `+there`, so that nothing of them is downloaded, and nothing that they need.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LIMIT = 45 << 20
"""Bytes of the whole folder: with the sources it has to fit through a gate of 64 MiB."""
SEEN = "+there"
OURS = "verbatim-rl[train,lora]"
TRL = ("trl==1.16.0", "jmespath")
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in range(39, 4, -1)]
PLATFORMS += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64"]
COPIED = (
    "benchmarks/beside_trl.py",
    "benchmarks/beside_trl_job.py",
    "benchmarks/beside_trl_run.py",
    "benchmarks/demo_runs.py",
    "tests/models/renderers/data/trl_templates",
)


class CannotBuild(Exception):
    """The kit cannot be made; the text says why."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the kit; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python-version", default="3.12", help="of the machine that it is for")
    parser.add_argument("--out", type=Path, default=ROOT / "gpu-kit", help="the folder, which is replaced")
    parser.add_argument(
        "--without-trl", action="store_true", help="leave TRL's wheels out; its check then says NOT RUN"
    )
    args = parser.parse_args(arguments)
    try:
        build(args.out, args.python_version, () if args.without_trl else TRL)
    except CannotBuild as error:
        print(f"gpu-kit: {error}", file=sys.stderr)
        return 1
    return 0


def build(out: Path, python_version: str, also: Sequence[str]) -> None:
    """Make the kit.

    Raises:
        CannotBuild: a wheel is missing, the kit is too large, or `out` holds something other than a kit.
    """
    if out.exists():
        if any(out.iterdir()) and not all((out / name).exists() for name in ("wheels", "benchmarks/gpu_kit")):
            raise CannotBuild(f"{out} exists and is not a kit, so it is not replaced; type --out FOLDER for another")
        shutil.rmtree(out)
    wheels = out / "wheels"
    wheels.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as name:
        own = build_wheel(Path(name))
        found = there((HERE / "there.txt").read_text(encoding="utf-8"), pins())
        stubs = Path(name) / "there"
        stubs.mkdir()
        for package, version in found.items():
            write_stub(stubs, package, version)
        limits = Path(name) / "constraints.txt"
        limits.write_text(constraints(found), encoding="utf-8")
        asked = [OURS, *also]
        shutil.copy2(own, wheels)
        resolve = ["--find-links", str(stubs), "-c", str(limits), *for_version(python_version), *asked]
        pip("download", "--dest", str(wheels), "--find-links", str(wheels), *resolve)
        for stub in wheels.glob(f"*{SEEN}*"):
            stub.unlink()
        # Once more without the index: what the kit and the machine have is enough.
        target = str(Path(name) / "target")
        pip("install", "--dry-run", "--no-index", "--target", target, "--find-links", str(wheels), *resolve)
    copy_parts(out, also)
    size = refuse_too_large(out)
    print(f"{out}: {size / (1 << 20):.1f} MiB, {len(list(wheels.iterdir()))} wheels, for Python {python_version}")


def build_wheel(folder: Path) -> Path:
    """Our wheel, built from a copy: in the checkout, files of earlier builds would get into it."""
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy2(ROOT / name, source)
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", source / "src", ignore=ignored)
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(source))
    (wheel,) = folder.glob("*.whl")
    return wheel


def pins() -> dict[str, str]:
    """The versions of constraints.txt."""
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    return {normal(name): version for name, version in re.findall(r"^([\w.-]+)==(\S+)", text, re.MULTILINE)}


def there(text: str, pinned: Mapping[str, str]) -> dict[str, str]:
    """Packages and versions of there.txt.

    Example: "# large\\ntorch==2.11.0\\npyarrow" with pyarrow pinned to 26.0.1: torch 2.11.0 and pyarrow 26.0.1.
    """
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    pairs = [line.partition("==") for line in lines if line]
    return {normal(name): version or pinned[normal(name)] for name, _, version in pairs}


def constraints(found: Mapping[str, str]) -> str:
    """The tested versions of what is carried, and for the rest the stand-ins alone."""
    limits = {name: version for name, version in pins().items() if name not in found}
    limits |= {name: version + SEEN for name, version in found.items()}
    return "".join(f"{name}=={version}\n" for name, version in limits.items())


def write_stub(folder: Path, package: str, version: str) -> Path:
    """A wheel without content or needs, which stands for a package of the machine."""
    name, seen = package.replace("-", "_"), version + SEEN
    info = f"{name}-{seen}.dist-info"
    files = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {package}\nVersion: {seen}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: gpu_kit\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
    path = folder / f"{name}-{seen}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in files.items():
            archive.writestr(file, text)
    return path


def for_version(python_version: str) -> list[str]:
    """pip's options for wheels of this Python on Linux."""
    platforms = [option for platform in PLATFORMS for option in ("--platform", platform)]
    return ["--only-binary=:all:", "--implementation", "cp", "--python-version", python_version, *platforms]


def pip(*arguments: str) -> None:
    """Run pip.

    Raises:
        CannotBuild: pip failed; its last lines say why.
    """
    command = [sys.executable, "-m", "pip", *arguments, "--quiet", "--disable-pip-version-check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CannotBuild(f"pip {arguments[0]} failed:\n{(done.stderr or done.stdout)[-3000:]}")


def normal(name: str) -> str:
    """A package's name as the index writes it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def copy_parts(out: Path, also: Sequence[str]) -> None:
    """What the kit runs."""
    ignored = shutil.ignore_patterns("__pycache__", "build.py", "run.sh", "there.txt")
    shutil.copytree(HERE, out / "benchmarks" / HERE.name, ignore=ignored)
    for name in COPIED:
        target = out / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target)
        else:
            shutil.copy2(ROOT / name, target)
    shutil.copy2(HERE / "run.sh", out / "run.sh")
    (out / "install.txt").write_text(OURS + "\n", encoding="utf-8")
    (out / "install-too.txt").write_text("".join(f"{each}\n" for each in also), encoding="utf-8")


def refuse_too_large(out: Path, limit: int = LIMIT) -> int:
    """The bytes of all files.

    Raises:
        CannotBuild: there are more than `limit`; names the largest files.
    """
    sizes = {path: path.stat().st_size for path in out.rglob("*") if path.is_file()}
    total = sum(sizes.values())
    if total > limit:
        largest = sorted(sizes, key=lambda path: -sizes[path])[:5]
        named = ", ".join(f"{path.name} ({sizes[path] / (1 << 20):.1f})" for path in largest)
        raise CannotBuild(
            f"{out} has {total / (1 << 20):.1f} MiB, and may have {limit / (1 << 20):.0f}; the largest files: {named}"
        )
    return total


if __name__ == "__main__":
    sys.exit(main())
