"""Imports point down, stages meet in files and not by import, and torch stays where models are."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
OURS = ("data", "solvers", "enumerate", "capture", "analysis", "figures", "eviction", "benchmarks")
MAY_IMPORT = {
    "data": {"data"},
    "solvers": {"data", "solvers"},
    "enumerate": {"data", "solvers", "enumerate"},
    "capture": {"data", "solvers", "capture"},
    "analysis": {"data", "analysis"},
    "figures": {"data", "analysis", "figures"},
    "eviction": {"data", "solvers", "capture", "eviction"},
    "benchmarks": {"data", "solvers", "enumerate", "capture", "eviction", "benchmarks"},
}
FORBIDDEN_NAMES = {"selectors", "types", "statistics", "queue"}  # as modules they would hide the standard library's
TORCH_ROOMS = {"capture", "eviction", "benchmarks"}

FILES = [path for package in OURS for path in sorted((ROOT / package).rglob("*.py"))]


def imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module)
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down(path: Path) -> None:
    room = path.relative_to(ROOT).parts[0]
    roots = {name.split(".")[0] for name in imported(path)}
    assert roots & set(OURS) <= MAY_IMPORT[room]
    if room not in TORCH_ROOMS:
        assert not roots & {"torch", "transformers"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_names_that_would_hide_others(path: Path) -> None:
    assert path.stem not in FORBIDDEN_NAMES
    tree = ast.parse(path.read_text("utf-8"))
    for node in ast.walk(tree):  # `import enumerate` would replace the builtin in that module
        if isinstance(node, ast.Import):
            assert "enumerate" not in {alias.asname or alias.name for alias in node.names}


def test_kernels_call_no_compiled_function_of_another_file() -> None:
    # numba's cache does not see an edit to a callee in another file, so only kernels.py compiles anything
    for path in FILES:
        if path.name != "kernels.py":
            assert "njit" not in path.read_text("utf-8"), path


def test_main_modules_hold_no_worker_functions() -> None:
    # a function of __main__ cannot be sent to a spawned process
    for path in FILES:
        if path.name == "__main__.py":
            assert not imported(path) & {"multiprocessing", "concurrent.futures"}, path


def test_the_project_refers_to_nothing_outside_itself() -> None:
    scripts = [*sorted((ROOT / "tests").glob("*.py")), *sorted((ROOT / "peers").rglob("*.py"))]
    for path in [*FILES, *scripts, ROOT / "Makefile", ROOT / "README.md"]:
        text = path.read_text("utf-8")
        for word in ("../" + "shared", "/" + "work/", "/" + "tmp/"):
            assert word not in text, f"{path}: {word}"
