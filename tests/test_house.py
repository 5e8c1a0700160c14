"""The house holds: imports go down, rooms of one floor do not know each other, one door for each outside library."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

PSCTL = Path(__file__).resolve().parent.parent / "psctl"

FLOORS = {
    "errors": 0, "units": 0, "words": 0, "clock": 0, "orders": 0, "permits": 0,
    "spec": 1, "topology": 1, "schedule": 1, "store": 1, "wire": 1, "job": 1,
    "plan": 2, "net": 2, "remote": 2, "checkpoint": 2,
    "runtime": 3, "launch": 3, "": 3, "nn": 3,
    "view": 4, "cli": 5, "__main__": 6,
}  # fmt: skip

DOORS = {
    "yaml": ("spec/",), "rich": ("view/",), "typer": ("cli/",), "click": ("cli/",),
    "fabric": ("remote/ssh",), "paramiko": ("remote/ssh",), "invoke": ("remote/ssh",),
    "torch": ("store/", "runtime/"), "numpy": ("store/", "runtime/"),
    "fsspec": ("checkpoint/",), "cryptography": ("wire/",), "ssl": ("wire/", "net/"),
    "socket": ("net/", "runtime/", "launch/", "remote/"), "subprocess": ("remote/", "runtime/", "launch/"),
    "psutil": ("runtime/", "launch/"), "msgspec": ("",), "networkx": ("topology/",),
}  # fmt: skip

TORCHLESS = (
    "psctl.runtime.agent", "psctl.runtime.coordinator", "psctl.runtime.call", "psctl.runtime.bootstrap",
    "psctl.launch.submit", "psctl.launch.follow", "psctl.cli.app", "psctl",
)  # fmt: skip


PATHS = [
    path for path in sorted(each.relative_to(PSCTL).as_posix() for each in PSCTL.rglob("*.py"))
    if not path.startswith("_templates")
]  # fmt: skip


@functools.cache
def tree_of(path: str) -> ast.Module:
    return ast.parse((PSCTL / path).read_text())


def modules() -> list[tuple[str, ast.Module]]:
    return [(path, tree_of(path)) for path in PATHS]


def room_of(path: str) -> str:
    head = path.split("/")[0] if "/" in path else path.removesuffix(".py")
    return "" if head == "__init__" else head


def imports(tree: ast.Module) -> list[tuple[int, str, bool]]:
    """Every import as (line, dotted name, only for types)."""
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    rows = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            rows += [(node.lineno, alias.name, id(node) in typing_only) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            within = [f"psctl.{alias.name}" for alias in node.names] if node.module == "psctl" else [node.module or ""]
            rows += [(node.lineno, name, id(node) in typing_only) for name in within]
    return rows


@pytest.mark.parametrize("path", PATHS)
def test_imports_only_go_down_and_rooms_of_a_floor_do_not_meet(path: str) -> None:
    room = room_of(path)
    assert room in FLOORS, f"{path}: a room that has no floor yet"
    for line, name, _ in imports(tree_of(path)):
        if name.split(".")[0] != "psctl":
            continue
        parts = name.split(".")
        other = parts[1] if len(parts) > 1 else ""
        if other == room or name in ("psctl", "psctl.__version__"):
            continue  # the package itself is a lazy door that loads nothing
        assert other in FLOORS, f"{path}:{line} imports {name}, which has no floor"
        below = FLOORS[other] < FLOORS[room] or (FLOORS[other] == FLOORS[room] == 0)
        lazy_door = room == "" and other == "runtime"
        assert below or lazy_door, f"{path}:{line} imports {name}: not below floor {FLOORS[room]}"


@pytest.mark.parametrize("path", PATHS)
def test_each_outside_library_comes_in_by_its_own_door(path: str) -> None:
    for line, name, _ in imports(tree_of(path)):
        library = name.split(".")[0]
        if library == "psctl" or (library in sys.stdlib_module_names and library not in DOORS):
            continue
        assert library in DOORS, f"{path}:{line}: {library} has no door"
        assert path.startswith(DOORS[library]), f"{path}:{line}: {library} may only be imported in {DOORS[library]}"


@pytest.mark.parametrize("module", TORCHLESS)
def test_what_steers_a_job_never_loads_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=PSCTL.parent).returncode == 0


def test_inner_packages_are_empty() -> None:
    for path in PSCTL.glob("*/__init__.py"):
        assert path.read_text() == "", f"{path} must stay empty, so that no room loads another by accident"


def test_files_and_functions_stay_small() -> None:
    """400 lines a file and 60 a function; a longer one says why in a comment `long:`."""
    rows = []
    for path in sorted(PSCTL.rglob("*.py")):
        text = path.read_text()
        lines = text.splitlines()
        if len(lines) > 400 and "# long:" not in text:
            rows.append(f"{path.relative_to(PSCTL)}: {len(lines)} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and (size := (node.end_lineno or 0) - node.lineno + 1) > 60:
                body = "\n".join(lines[node.lineno - 2 : node.end_lineno])
                if "# long:" not in body:
                    rows.append(f"{path.relative_to(PSCTL)}:{node.lineno} {node.name}: {size} lines")
    assert not rows, "\n".join(rows)


def test_modules_open_with_a_sentence() -> None:
    for path, tree in modules():
        if path.endswith("__init__.py") and "/" in path:
            continue
        first = (ast.get_docstring(tree) or "").split("\n\n")[0]
        assert first, f"{path}: no docstring"


def test_no_error_is_swallowed_and_no_stub_is_left() -> None:
    for path, tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.ExceptHandler) and len(node.body) == 1 and isinstance(node.body[0], ast.Pass):
                caught = ast.unparse(node.type) if node.type else ""
                assert caught not in ("", "Exception", "BaseException"), f"{path}:{node.lineno}: swallows everything"
            if isinstance(node, ast.Raise) and node.exc is not None:
                assert "NotImplementedError" not in ast.unparse(node.exc), f"{path}:{node.lineno}: a stub"


def test_no_asyncio_pickle_eval_or_shell() -> None:
    for path, tree in modules():
        for line, name, _ in imports(tree):
            assert name.split(".")[0] not in ("asyncio", "pickle", "marshal", "shelve"), f"{path}:{line}: {name}"
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                own_script = path == "runtime/bootstrap.py" and called == "exec"  # it is there to run the user's
                assert own_script or called not in ("eval", "exec", "os.system"), f"{path}:{node.lineno}: {called}"
                for keyword in node.keywords:
                    shell = keyword.arg == "shell" and ast.unparse(keyword.value) == "True"
                    assert not shell, f"{path}:{node.lineno}: shell=True"
