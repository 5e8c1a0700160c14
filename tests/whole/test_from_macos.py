"""Jobs that are started from macOS, simulated: every step of a job's life works without what only Linux has."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.running import ROOT, STEADY, Psctl, assert_clean, next_event, set_args

pytestmark = pytest.mark.whole

AS_MACOS = (sys.executable, str(ROOT / "tests/helpers/as_macos.py"))


def test_jobs_are_started_followed_and_restored_from_macos(make_hosts: Callable[..., Any], tmp_path: Path) -> None:
    hosts = make_hosts(2)
    home = hosts.make_home(tmp_path / "home")
    psctl = Psctl(home.path, AS_MACOS, home.env)
    (home.path / "cluster.yaml").write_text(hosts.cluster_text())
    for words in (["up", "cluster.yaml"], ["doctor"], ["topo"]):
        done = psctl.run(*words)
        assert done.code == 0, done

    trained = psctl.run("train", str(STEADY), "--servers", "1", "-o", "jsonl", *set_args("--epochs", "2"))
    assert trained.code == 0, trained
    job = trained.of("started")[0]["job"]
    for words in (
        ["checkpoint", "verify", f"{job}@latest"], ["checkpoint", "pull", f"{job}@latest", "pulled"], ["logs", job],
        ["status"], ["report", job],
    ):  # fmt: skip
        done = psctl.run(*words)
        assert done.code == 0, done
    restored = ["checkpoint", "restore", f"{job}@latest", "--workers", "1", "-d", "-o", "json"]
    again = psctl.run(*restored, *set_args("--epochs", "500")).document["job"]
    with psctl.start("attach", again, "-o", "jsonl") as follower:
        next_event(follower, "progress")
        follower.kill()
    for words in (["ssh", again, "-r", "worker:0", "--", "true"], ["stop", again], ["down", "-y"]):
        done = psctl.run(*words)
        assert done.code == 0, done
    assert_clean(hosts)


def test_the_simulation_lacks_what_macos_lacks(tmp_path: Path) -> None:
    """Else the other test would prove nothing."""
    code = (
        "import os, socket, sys, psctl\nassert sys.platform == 'darwin'\n"
        "assert not any(hasattr(*each) for each in [(os, 'listxattr'), (socket, 'SO_PEERCRED')])\n"
        "try: open('/proc/self/stat')\nexcept FileNotFoundError: print('none')\n"
    )
    (tmp_path / "psctl").mkdir()
    (tmp_path / "psctl" / "__init__.py").touch()
    (tmp_path / "psctl" / "__main__.py").write_text(code)
    done = Psctl(tmp_path, AS_MACOS, {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}).run()
    assert (done.code, done.out) == (0, "none\n"), done
