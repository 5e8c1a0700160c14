"""Which functions "module:function" can reach: those that a file below the job's folder defines, and no others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from psctl.errors import UsageError
from psctl.process.user_functions import JobFunctions

SOURCE = """
import functools, json, os
from json import dumps
from os import getpid
import torch
from outside_of_job import stolen

limit = 3
half = functools.partial(pow, 2)

def sgd(held, pushed):
    return held - pushed

@torch.no_grad()
def decorated(held, pushed):
    return held - pushed

class Rule:
    def __call__(self, held, pushed):
        return held

rule = Rule()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job's folder beside one that is on Python's path too; both are forgotten afterwards."""
    job, outside = tmp_path / "job", tmp_path / "outside"
    (job / "package").mkdir(parents=True)
    (job / "spaces").mkdir()
    (outside / "elsewhere").mkdir(parents=True)
    trap = "import pathlib\npathlib.Path(__file__).with_suffix('.ran').touch()\ndef stolen(*_): return 0\n"
    (outside / "outside_of_job.py").write_text("def stolen(*_): return 0\n")
    (outside / "trap.py").write_text(trap)
    (outside / "elsewhere" / "__init__.py").write_text(trap)
    (outside / "elsewhere" / "rules.py").write_text(trap)
    (job / "jobrules.py").write_text(SOURCE)
    (job / "package" / "__init__.py").write_text("")
    (job / "package" / "inner.py").write_text("def best(a, b): return a\n")
    (job / "spaces" / "inner.py").write_text("def best(a, b): return a\n")
    (job / "linked.py").symlink_to(outside / "trap.py")
    (job / "broken.py").write_text("raise KeyError('at import')\n")
    (job / "leaves.py").write_text("raise SystemExit(3)\n")
    venv = job / ".venv" / "lib" / "site-packages"
    venv.mkdir(parents=True)
    (venv / "installed_there.py").write_text(trap)
    monkeypatch.syspath_prepend(str(venv))
    monkeypatch.syspath_prepend(str(outside))
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield job
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None)
        if file is None or str(tmp_path) in file:
            del sys.modules[name]


@pytest.mark.parametrize("name", ["jobrules:sgd", "jobrules:decorated", "package.inner:best", "spaces.inner:best"])
def test_functions_of_the_job_are_found(folder: Path, name: str) -> None:
    assert JobFunctions(str(folder)).function(name)(torch.ones(1), torch.zeros(1)).item() == 1


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("os:kill", "os.py"),
        ("os:system", "os.py"),
        ("posix:kill", "built-in"),
        ("builtins:eval", "built-in"),
        ("sys:exit", "built-in"),
        ("subprocess:call", "subprocess.py"),
        ("json.tool:main", "json"),
        ("torch.serialization:load", "torch"),
        ("psctl.process.user_functions:name_of", "psctl"),
        ("jobrules:getpid", "jobrules.py is a builtin_function_or_method"),
        ("jobrules:dumps", "is imported there from"),
        ("jobrules:stolen", "outside_of_job.py"),
        ("jobrules:half", "is a partial"),
        ("jobrules:Rule", "is a type"),
        ("jobrules:rule", "is a Rule"),
        ("jobrules:limit", "is a int"),
        ("jobrules:nothing", "defines no 'nothing'"),
        ("trap:stolen", "trap.py"),
        ("elsewhere.rules:stolen", "__init__.py"),
        ("installed_there:stolen", "installed_there.py"),
        ("linked:stolen", "trap.py|linked.py"),
        ("spaces:best", "namespace package"),
        ("missing:f", "no module 'missing'"),
        ("package.missing:f", "no module 'package.missing'"),
        ("missing.inner:f", "no module 'missing'"),
        ("broken:f", "broken.py failed: KeyError"),
        ("leaves:f", "leaves.py failed: SystemExit"),
    ],
)
def test_all_others_are_refused_and_their_modules_do_not_run(folder: Path, name: str, said: str) -> None:
    with pytest.raises(UsageError, match=said) as refused:
        JobFunctions(str(folder)).function(name)
    assert name in refused.value.message
    assert str(folder) in refused.value.hint or "job's folder" in refused.value.hint
    assert not list(folder.parent.rglob("*.ran"))


def test_a_name_in_sys_modules_does_not_hide_where_it_came_from(folder: Path, monkeypatch) -> None:
    (folder / "json.py").write_text("def dumps(*_): return 0\n")
    assert json.__name__ in sys.modules
    with pytest.raises(UsageError, match=r"json:dumps: module 'json' is .*__init__.py"):
        JobFunctions(str(folder)).function("json:dumps")


def test_a_store_without_a_job_takes_functions_next_to_the_script_and_ends_no_process(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("def twice(keys, rows):\n    return rows * 2\n")
    (tmp_path / "script.py").write_text(
        "import os, subprocess, torch, psctl\n"
        "os.chdir('/')\n"
        "store = psctl.init().store()\n"
        "store.push('v', torch.ones(1))\n"
        "store.call('beside:twice', 'v')\n"
        "print(store.pull('v').item())\n"
        "other = subprocess.Popen(['sleep', '60'])\n"
        "try:\n"
        "    store.call('os:kill', 'v', sig=9)\n"
        "except psctl.errors.UsageError as error:\n"
        "    print(error.message)\n"
        "print(other.poll())\n"
        "other.kill(); other.wait()\n"
    )
    root = str(Path(__file__).parents[2])
    made = subprocess.run(
        [sys.executable, tmp_path / "script.py"], capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "PYTHONPATH": root},
    )  # fmt: skip
    lines = made.stdout.splitlines()
    assert lines[0] == "2.0", made.stderr
    assert "os:kill: module 'os' is" in lines[1]
    assert lines[2] == "None"
