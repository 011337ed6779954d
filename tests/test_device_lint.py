"""No tensor of the library is made on the wrong device: every torch factory says where its tensor lives.

A forgotten `device=` works on the machine of its author and fails, or copies voxels to and fro, on a GPU machine.
The rule, read off the syntax tree: a call of a torch factory has a `device=` keyword. `as_tensor`, `tensor` and
`from_numpy` may instead be moved at once: `torch.as_tensor(x).to(device)`. Modules and functions whose tensors belong
on the host say `device="cpu"` or are named below with the reason.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BORDER = {"as_tensor", "tensor", "from_numpy"}
FACTORIES = BORDER | {
    "arange",
    "empty",
    "empty_strided",
    "eye",
    "full",
    "hann_window",
    "linspace",
    "logspace",
    "normal",
    "ones",
    "rand",
    "randint",
    "randn",
    "randperm",
    "scalar_tensor",
    "zeros",
}
ON_THE_HOST = {
    "segcal/checks/glance.py": "a few voxels of a file's array; no device is involved",
    "segcal/checks/value_counts.py": "reads files to check them; no device is involved",
    "segcal/fitting/adam.py": "parameters and their gradients, a few numbers beside the rows",
    "segcal/calibrators/base.py:as_tensor": "the caller's array as it is: tensors keep their device",
    "segcal/calibrators/class_conditional.py:from_theta": "parameters; they follow the rows when they are used",
    "segcal/calibrators/matrix.py:from_theta": "parameters; they follow the rows when they are used",
    "segcal/calibrators/matrix.py:split_matrix": "parameters; they follow the rows when they are used",
    "segcal/fitting/patches.py:_tile_of_arrays": "kept patches lie on the host",
    "segcal/nnunet/pooled_logits.py:_calibrated": "nnU-Net exports on the host, in its own workers too",
    "segcal/pooling.py:add": "a view of the file's array, moved to the device in pieces",
}


def missing_devices(source: str) -> list[tuple[int, str]]:
    """(line, innermost function) of torch factory calls that do not say where their tensor lives."""
    tree = ast.parse(source)
    torch_names, factory_names = _imported(tree)
    moved = {
        id(node.func.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "to"
        and (node.args or any(keyword.arg == "device" for keyword in node.keywords))
    }
    found: list[tuple[int, str]] = []

    def visit(node: ast.AST, function: str) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function = node.name
        if isinstance(node, ast.Call):
            name = _factory(node.func, torch_names, factory_names)
            has_device = any(keyword.arg == "device" for keyword in node.keywords)
            if name is not None and not has_device and not (name in BORDER and id(node) in moved):
                found.append((node.lineno, function))
        for child in ast.iter_child_nodes(node):
            visit(child, function)

    visit(tree, "")
    return found


def _imported(tree: ast.Module) -> tuple[set[str], dict[str, str]]:
    """Names the module calls torch by, and factories it imported from torch by name."""
    torch_names: set[str] = set()
    factory_names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            torch_names |= {alias.asname or alias.name for alias in node.names if alias.name == "torch"}
        elif isinstance(node, ast.ImportFrom) and node.module == "torch":
            factory_names |= {alias.asname or alias.name: alias.name for alias in node.names if alias.name in FACTORIES}
    return torch_names, factory_names


def _factory(called: ast.expr, torch_names: set[str], factory_names: dict[str, str]) -> str | None:
    if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name) and called.value.id in torch_names:
        return called.attr if called.attr in FACTORIES else None
    return factory_names.get(called.id) if isinstance(called, ast.Name) else None


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("import torch\nx = torch.zeros(3)", [2]),
        ("import torch\nx = torch.zeros(3, device=d)", []),
        ("import torch\nx = torch.zeros(3).to(d)", [2]),
        ("import torch as t\nx = t.arange(3)", [2]),
        ("from torch import ones as one\nx = one(3)", [2]),
        ("import torch\nx = torch.as_tensor(a)", [2]),
        ("import torch\nx = torch.as_tensor(a).to(d)", []),
        ("import torch\nx = torch.from_numpy(a).to(device=d)", []),
        ("import torch\nx = torch.from_numpy(a).to(dtype=torch.float64)", [2]),
        ("import torch\nx = torch.zeros_like(a) + torch.where(b, a, c)", []),
        ("import numpy as np\nx = np.zeros(3)", []),
    ],
)
def test_the_lint_finds_what_it_should(source: str, lines: list[int]) -> None:
    assert [line for line, _ in missing_devices(source)] == lines


def test_a_finding_names_its_innermost_function() -> None:
    source = "import torch\nclass A:\n    def f(self):\n        def g():\n            return torch.eye(2)\n"
    assert missing_devices(source) == [(5, "g")]


def findings() -> list[tuple[str, int, str]]:
    """(module, line, function) over the whole library."""
    paths = sorted((ROOT / "segcal").rglob("*.py"))
    return [
        (path.relative_to(ROOT).as_posix(), line, function)
        for path in paths
        for line, function in missing_devices(path.read_text(encoding="utf-8"))
    ]


def test_every_factory_call_of_the_library_names_its_device() -> None:
    wrong = [
        f"{module}:{line}"
        for module, line, function in findings()
        if not {module, f"{module}:{function}"} & set(ON_THE_HOST)
    ]
    assert not wrong, "torch factories without device=: " + ", ".join(wrong)


def test_the_list_of_exceptions_is_not_longer_than_needed() -> None:
    used = {name for module, _, function in findings() for name in (module, f"{module}:{function}")}
    idle = set(ON_THE_HOST) - used
    assert not idle, f"these no longer need an exception: {sorted(idle)}"
