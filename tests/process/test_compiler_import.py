"""torch's compiler is imported when a script uses it, and the script then finds what it would have found."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BOOTSTRAP = ROOT / "psctl" / "process" / "bootstrap.py"

SLOWER = "ignore:Guards may run slower:RuntimeWarning"
"""What torch's compiler says of Python 3.13.0, with psctl or without."""


def run(folder: Path, script: str, *, bare: bool = False) -> str:
    """What a script prints under psctl's bootstrap, or under Python alone."""
    (folder / "train.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-W", SLOWER, *([] if bare else [str(BOOTSTRAP)]), "train.py"], cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert not done.returncode, done.stderr
    return done.stdout.strip()


TRAINS = """
import sys, torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
rate = torch.optim.lr_scheduler.StepLR(optimizer, 2)

def step(model):
    optimizer.zero_grad()
    model(torch.ones(3, 4)).square().sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    rate.step()

for _ in range(3):
    step(model)
"""

AND_LOOKS = """
print("torch._dynamo.eval_frame" in sys.modules)
print([value.hex() for parameter in model.parameters() for value in parameter.flatten().tolist()])
"""

AND_COMPILES = """
compiled = torch.compile(model, backend="eager")
for _ in range(3):
    step(compiled)
import torch._dynamo.config as config
from torch._dynamo import OptimizedModule
from torch.optim.optimizer import Optimizer
print(sys.modules["torch._dynamo"] is torch._dynamo, type(torch._dynamo).__name__, torch._dynamo.__spec__.name)
print(config is torch._dynamo.config is sys.modules["torch._dynamo.config"], type(config.__spec__.loader).__name__)
print(isinstance(compiled, OptimizedModule))

def part(model):
    optimizer.zero_grad()
    return model(torch.ones(3, 4)).sum()

traced = torch._dynamo.explain(part)(model)
print(traced.graph_count, traced.graph_break_count, [str(each.reason).splitlines()[0] for each in traced.break_reasons])
print(vars(Optimizer.zero_grad.__wrapped__)["__dynamo_disable"].__code__.co_filename)
print(vars(torch.optim.AdamW.add_param_group.__wrapped__)["__dynamo_disable"].__code__.co_filename)
print([value.hex() for parameter in model.parameters() for value in parameter.flatten().tolist()])
"""


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What the script that compiles prints under Python alone, and the values before it compiles."""
    return run(tmp_path_factory.mktemp("bare"), TRAINS + AND_LOOKS + AND_COMPILES, bare=True).splitlines()


def test_a_script_that_does_not_compile_imports_no_compiler(tmp_path: Path, bare: list[str]) -> None:
    assert run(tmp_path, TRAINS + AND_LOOKS).splitlines() == ["False", bare[1]]


def test_a_script_that_compiles_after_its_first_steps_finds_all_as_it_would_have_been(
    tmp_path: Path, bare: list[str]
) -> None:
    found = run(tmp_path, TRAINS + AND_LOOKS + AND_COMPILES).splitlines()
    assert (found[0], bare[0]) == ("False", "True")
    assert found[1:] == bare[1:]
    assert "eval_frame" in found[-2]
    assert found[2].split() == ["True", "module", "torch._dynamo"]


PACKAGE = """
import importlib

def __getattr__(name):  # torch has such a one
    if name == "_dynamo":
        return importlib.import_module("torch._dynamo")
    raise AttributeError(name)
"""

FAKE = """
import builtins
builtins.imports = getattr(builtins, "imports", 0) + 1
{first}
def disable(function=None, *arguments, **settings):
    return ("disabled", function, arguments, settings)
there = 1
"""


def fake(folder: Path, script: str, first: str = "") -> str:
    """What a script prints whose torch has a compiler made up for this test."""
    made = folder / "torch" / "_dynamo"
    made.mkdir(parents=True)
    (folder / "torch" / "__init__.py").write_text(PACKAGE)
    (made / "__init__.py").write_text(FAKE.format(first=first))
    (made / "part.py").write_text("import torch._dynamo\nowner = torch._dynamo\n")
    return run(folder, script)


USES = {
    "an attribute": "print(torch._dynamo.there)",
    "a name from it": "from torch._dynamo import there\nprint(there)",
    "a submodule": "from torch._dynamo.part import owner\nprint(owner.there)",
    "a submodule from it": "from torch._dynamo import part\nprint(part.owner.there)",
    "a function of the script that it skips": "print(int(torch._dynamo.disable(print, 2, key=3)[0] == 'disabled'))",
    "an attribute that is set": "torch._dynamo.there = 1\nprint(vars(sys.modules['torch._dynamo'])['there'])",
    "its names": "print(int('there' in dir(torch._dynamo)))",
    "an attribute where its finder is gone": "sys.meta_path[:2] = []\nprint(torch._dynamo.there)",
    "a decorator with settings": "print(int(torch._dynamo.disable(recursive=False)[3] == {'recursive': False}))",
}


@pytest.mark.parametrize("use", USES)
def test_every_use_imports_it_once(tmp_path: Path, use: str) -> None:
    script = f"""
import builtins, sys
import torch._dynamo
before = torch._dynamo
torch._dynamo.graph_break()
print(getattr(builtins, "imports", 0))
{USES[use]}
print(imports, torch._dynamo is sys.modules["torch._dynamo"], torch._dynamo is before, before.there)
import torch._dynamo.part
print(imports, torch._dynamo.part.owner is torch._dynamo, torch._dynamo.part.__spec__.name)
"""
    found = fake(tmp_path, script).splitlines()
    assert found == ["0", "1", "1 True False 1", "1 True torch._dynamo.part"]


def test_threads_that_use_it_at_once_find_one_whole_module(tmp_path: Path) -> None:
    script = """
import threading
import torch._dynamo
ready, found = threading.Barrier(8), []
def use(module):
    ready.wait()
    found.append(module.there)
threads = [threading.Thread(target=use, args=(torch._dynamo,)) for _ in range(8)]
for each in threads:
    each.start()
for each in threads:
    each.join()
print(found, imports)
"""
    assert fake(tmp_path, script, "import time; time.sleep(0.3)") == "[1, 1, 1, 1, 1, 1, 1, 1] 1"


def test_a_compiler_that_cannot_be_imported_is_an_error_at_each_use(tmp_path: Path) -> None:
    script = """
import torch._dynamo
for _ in range(2):
    try:
        torch._dynamo.there
    except OSError as error:
        print(error)
    try:
        import torch._dynamo
    except OSError as error:
        print(error)
"""
    assert fake(tmp_path, script, "raise OSError('no library')").splitlines() == ["no library"] * 4


def test_a_missing_submodule_is_pythons_error(tmp_path: Path) -> None:
    script = "try:\n    import torch._dynamo.gone\nexcept ModuleNotFoundError as error:\n    print(error, error.name)\n"
    assert fake(tmp_path, script) == "No module named 'torch._dynamo.gone' torch._dynamo.gone"
