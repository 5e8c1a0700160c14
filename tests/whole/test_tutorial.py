"""Every command of the tutorial, in its order, on three test hosts, one of which is lost for a while."""

from __future__ import annotations

import re
import subprocess
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_documents import ROOT, shown
from tests.helpers import hosts as library
from tests.helpers.running import Ended, Psctl, assert_clean, until

pytestmark = [pytest.mark.whole, pytest.mark.soak]

LASTING = "40000"  # epochs, so that the job still trains while the tutorial looks at it


class Reader:
    """Runs the tutorial's commands, by their first words; each is to be run once."""

    def __init__(self, psctl: Psctl) -> None:
        self.psctl = psctl
        text = (ROOT / "docs" / "tutorial.md").read_text()
        inline = [found.split() for found in re.findall(r"`psctl ([^`]+)`", text)]
        self.left = [*shown(ROOT / "docs" / "tutorial.md"), *inline]

    def take(self, *words: str) -> list[str]:
        """Return the tutorial's command that begins with these words."""
        found = next(command for command in self.left if tuple(command[: len(words)]) == words)
        self.left.remove(found)
        return found

    def run(self, *words: str, more: tuple[str, ...] = ()) -> Ended:
        """Run a command to its end."""
        done = self.psctl.run(*self.take(*words), *more)
        assert done.code == 0, done
        return done

    def read(self, *words: str, seen: Callable[[str], Any] | None) -> None:
        """Start a command that follows the job, wait for a line (None: the script prints none), and kill it."""
        with self.psctl.start(*self.take(*words)) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            if seen is None:
                with pytest.raises(subprocess.TimeoutExpired):
                    raise AssertionError(f"{words} ended: {process.communicate(timeout=3)}")
            else:
                stream = process.stdout if words[0] == "ui" else process.stderr
                assert any(seen(line) for line in stream), words
            process.kill()  # in a pipe, Ctrl-C would stop the job
            process.communicate(timeout=30)


def make_lasting(folder: Path, python: str) -> None:
    """Edit the files as a reader would: the hosts' Python, and a training that lasts."""
    cluster, job = folder / "cluster.yaml", folder / "job.yaml"
    text = cluster.read_text()
    assert "runtime: {environment: existing}" in text
    settings = f"runtime: {{environment: existing, python: {python}, env: {{OMP_NUM_THREADS: 1}}}}"
    cluster.write_text(text.replace("runtime: {environment: existing}", settings))
    assert '[--epochs, "20"]' in job.read_text()
    job.write_text(job.read_text().replace('[--epochs, "20"]', f'[--epochs, "{LASTING}"]'))


def test_the_tutorials_commands_do_what_it_says(tmp_path: Path) -> None:
    if reason := library.missing():
        pytest.skip(reason)
    with library.Hosts(["node-a", "node-b", "node-c"]) as hosts:
        home = hosts.make_home(tmp_path / "user")
        reader = Reader(Psctl(home.path, environment=home.env))
        reader.run("init")
        make_lasting(home.path / "mine", hosts.python)
        assert "node-c" in reader.run("doctor").out
        assert "created" in reader.run("up").out
        assert "strategy" in reader.run("plan").out
        trained = reader.run("train", more=("-d",))
        assert "digits-1" in trained.out + trained.err
        psctl = reader.psctl

        def row() -> dict[str, Any]:
            found: dict[str, Any] = psctl.run("status", "digits", "-o", "json").document["jobs"][0]
            return found

        until(lambda: (row()["step"] or 0) > 150, 90, 0.5)
        assert "worker/2" in reader.run("status").out
        reader.take("status")  # the sentence about a job that waits
        reader.read("attach", seen=lambda line: "progress" in line)
        reader.read("logs", seen=None)
        reader.read("ui", seen=lambda line: urllib.request.urlopen(line.strip(), timeout=10).status == 200)
        assert "step" in reader.run("trace").out
        assert reader.run("profile").code == 0
        assert "train.py" in reader.run("stacks").out

        hosts.cut("node-b")
        until(lambda: row().get("recovering", {}).get("hosts") == ["node-b"], 60, 0.5)
        before = row()["step"]
        hosts.heal("node-b")
        until(lambda: (row()["step"] or 0) > before + 200, 120, 0.5)
        assert "digits-1@" in reader.run("checkpoint", "list").out
        reader.run("checkpoint", "verify")
        reader.run("stop")
        assert row()["state"] == "stopped"
        restored = reader.run("checkpoint", "restore", more=("-d", "-o", "json"))
        job = restored.document["job"]
        until(
            lambda: sum(rank["state"] == "running" for rank in row()["ranks"] if rank["role"] == "worker") == 2, 90, 0.5
        )
        until(lambda: psctl.run("checkpoint", "list", job, "-o", "json").document["checkpoints"], 90, 0.5)
        assert psctl.run("stop", job).code == 0
        reader.run("checkpoint", "export")
        assert (home.path / "model.safetensors").stat().st_size > 1000
        reader.run("down")
        assert reader.left == [], "commands of the tutorial that were not run"
        assert_clean(hosts)
