"""Every tensor is made on a device that its code names, so that nothing meets a tensor of another device on a GPU.

`tests/cuda` runs the same code on fake CUDA tensors.
"""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

import verbatim

ROOT = Path(verbatim.__file__).parent

FACTORIES = frozenset({
    "arange", "as_tensor", "asarray", "complex", "empty", "empty_strided", "eye", "full", "linspace", "logspace",
    "normal", "ones", "rand", "randint", "randn", "randperm", "range", "scalar_tensor", "tensor", "tril_indices",
    "triu_indices", "zeros",
})  # fmt: skip
"""Functions of torch that make a tensor on the device that they are told, by default on the CPU."""
HOST_FACTORIES = frozenset({"from_numpy", "frombuffer"})
"""These know no other device: what they return is moved in the same expression."""
LEGACY = frozenset({"Tensor", "DoubleTensor", "FloatTensor", "LongTensor", "IntTensor", "BoolTensor", "ByteTensor"})
"""Constructors that make a tensor on the CPU, whatever the default device is."""

HOST_SIDE = {
    "inference/embedded/compiled/forward.py": "computes on the CPU alone",
    "inference/embedded/compiled/structures.py": "computes on the CPU alone",
    "inference/embedded/model_check.py": "a small copy on the CPU",
    "inference/embedded/pass_layout.py:as_tensor": "moved, unless the device is the CPU",
    "algorithms/losses/results.py": "a loss tried before a run; metrics that a loss reports as numbers",
    "models/mixing.py": "a small copy on the CPU",
    "models/own_attention.py": "a small copy on the CPU",
    "models/positions.py": "a small copy on the CPU",
    "models/round_trip.py": "a small copy on the CPU",
    "trainer/device_batch.py:_replay": "padded on the host, then moved",
    "trainer/model_check.py": "a small copy on the CPU",
    "trainer/parallel/ranks.py": "messages between processes, by gloo",
}
"""Where tensors are made without a device: files, or functions of them, that compute on the host; and what they do."""


@functools.cache
def homeless(source: str) -> list[tuple[int, str, str]]:
    """Calls that make a tensor without a device: line, name of the outermost function or class around it, the call."""
    tree = ast.parse(source)
    moved = {
        id(node.func.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "to"
    }
    found = []
    for outer in tree.body:
        for node in ast.walk(outer):
            name = _torch_function(node)
            if name is None or (name in HOST_FACTORIES and id(node) in moved):
                continue
            assert isinstance(node, ast.Call)
            if name not in FACTORIES or all(keyword.arg != "device" for keyword in node.keywords):
                found.append((node.lineno, getattr(outer, "name", ""), ast.unparse(node)))
    return found


def _torch_function(node: ast.AST) -> str | None:
    """ "zeros", where the node is a call of `torch.zeros`."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return None
    name, owner = node.func.attr, node.func.value
    is_factory = name in FACTORIES | HOST_FACTORIES | LEGACY
    return name if is_factory and isinstance(owner, ast.Name) and owner.id == "torch" else None


def _files() -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for path in ROOT.rglob("*.py"))


@pytest.mark.parametrize(
    "source",
    [
        "torch.zeros(3)",
        "torch.tensor([1], dtype=torch.int64)",
        "x + torch.arange(len(x))",
        "torch.from_numpy(a)",
        "torch.Tensor(3)",
        "def f():\n    return torch.full((2,), 1.0)",
        "torch.from_numpy(a)[0].to(device)",
    ],
)
def test_a_tensor_made_without_a_device_is_found(source):
    assert len(homeless(source)) == 1


@pytest.mark.parametrize(
    "source",
    [
        "torch.zeros(3, device=x.device)",
        "torch.zeros_like(x)",
        "x.new_zeros(3)",
        "torch.from_numpy(a).to(device)",
        "isinstance(x, torch.Tensor)",
        "torch.tensor(3, device='cpu')",
        "np.zeros(3)",
    ],
)
def test_a_tensor_made_on_a_named_device_or_on_another_one_s_is_not(source):
    assert not homeless(source)


@pytest.mark.slow
def test_no_factory_of_torch_is_imported_by_itself():
    for file in _files():
        for node in ast.walk(ast.parse((ROOT / file).read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "torch":
                taken = {alias.name for alias in node.names} & (FACTORIES | HOST_FACTORIES)
                assert not taken, f"{file}:{node.lineno}: call torch.{taken.pop()}, so that its device can be checked"


@pytest.mark.slow
def test_every_tensor_is_made_on_a_named_device_but_in_code_of_the_host():
    found = {file: homeless((ROOT / file).read_text()) for file in _files()}
    wrong = [
        f"{file}:{line}: {call}"
        for file, calls in found.items()
        for line, outer, call in calls
        if file not in HOST_SIDE and f"{file}:{outer}" not in HOST_SIDE
    ]
    assert not wrong, "\n".join(["say device=..., or name why this is code of the host:", *wrong])


def test_each_exception_is_still_one():
    for place in HOST_SIDE:
        file, _, function = place.partition(":")
        made = [outer for _, outer, _ in homeless((ROOT / file).read_text())]
        assert function in made if function else made, f"{place} makes no tensor without a device any more"
