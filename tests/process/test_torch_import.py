"""torch is imported without the garbage collector, and is afterwards as if Python had imported it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BOOTSTRAP = ROOT / "psctl" / "process" / "bootstrap.py"

TORCH = """
import gc
during = gc.isenabled()
garbage = [[] for _ in range(10_000)]
"""


def python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True,
        text=True, timeout=60, check=False,
    )  # fmt: skip


def run(folder: Path, script: str, torch: str = TORCH, *, bare: bool = False) -> str:
    """What a script prints that has a package of the name torch."""
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text(torch)
    for name in ("nn", "_dynamo"):
        (folder / "torch" / f"{name}.py").write_text("import gc\nduring = gc.isenabled()\n")
    (folder / "train.py").write_text(script)
    done = python(folder, *([] if bare else [str(BOOTSTRAP)]), "train.py")
    assert not done.returncode, done.stderr
    return done.stdout.strip()


def test_the_collector_is_off_during_the_import_and_what_was_made_is_frozen(tmp_path: Path) -> None:
    script = (
        "import gc\nbefore = gc.get_freeze_count()\nimport torch\n"
        "print(torch.during, gc.isenabled(), before < 1000, gc.get_freeze_count() > 10_000)\n"  # 3.12 itself has some
        "import torch.nn, torch._dynamo\nprint(torch.nn.during, torch._dynamo.during, gc.isenabled())\n"
    )
    assert run(tmp_path, script) == "False True True True\nTrue False True"


@pytest.mark.parametrize("bare", [False, True], ids=["bootstrap", "python"])
def test_the_module_and_its_spec_are_pythons_own(tmp_path: Path, bare: bool) -> None:
    script = (
        "import importlib.util, inspect\n"
        "found = importlib.util.find_spec('torch')\n"
        "print(found.name, found.origin, found.submodule_search_locations)\n"
        "import torch\n"
        "print(type(torch.__loader__), torch.__spec__.loader is torch.__loader__, torch.__file__, torch.__path__)\n"
        "print(inspect.getsource(torch) == open(torch.__file__).read())\n"
    )
    found = run(tmp_path, script, bare=bare).splitlines()
    assert found[0].startswith(f"torch {tmp_path}")
    assert found[1].startswith("<class '_frozen_importlib_external.SourceFileLoader'> True")
    assert found[2] == "True"


def test_a_finder_of_the_script_comes_first_as_it_would(tmp_path: Path) -> None:
    script = (
        "import importlib.util, sys\n"
        "class Finder:\n"
        "    @staticmethod\n"
        "    def find_spec(name, path, target=None):\n"
        "        return importlib.util.spec_from_file_location(name, 'other.py') if name == 'torch' else None\n"
        # after psctl's two; the first of these is of the old protocol, which Python passes over
        "sys.meta_path[2:2] = [object(), Finder]\n"
        "import torch\nprint(torch.__file__, torch.during)\n"
    )
    (tmp_path / "other.py").write_text(TORCH)
    assert run(tmp_path, script).split() == [str(tmp_path / "other.py"), "False"]


def test_a_script_that_disabled_the_collector_keeps_it_off(tmp_path: Path) -> None:
    script = (
        "import gc\ngc.disable()\nbefore = gc.get_freeze_count()\nimport torch\n"
        "print(torch.during, gc.isenabled(), gc.get_freeze_count() == before)\n"
    )
    assert run(tmp_path, script) == "False False True"


def test_an_import_that_fails_leaves_the_collector_on(tmp_path: Path) -> None:
    script = "import gc\ntry:\n    import torch\nexcept OSError as error:\n    print(error, gc.isenabled())\n"
    assert run(tmp_path, script, "raise OSError('libcudart.so is missing')\n") == "libcudart.so is missing True"


def test_without_torch_the_error_is_pythons(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import torch\n")
    done = python(tmp_path, "-S", str(BOOTSTRAP), "train.py")
    assert done.returncode == 1
    assert "ModuleNotFoundError: No module named 'torch'" in done.stderr
