"""The command line: its two streams and its exit code; nothing here starts a job."""

from __future__ import annotations

import json
import os
import re
import resource
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from psctl.cli.app import make_command
from tests.cli.inside import Told, psctl

ROOT = Path(__file__).resolve().parent.parent.parent
VERBS = (
    "init", "validate", "explain", "doctor", "up", "down", "use", "clusters", "topo", "plan", "train", "attach", "logs",
    "status",    "jobs", "stacks", "trace", "profile", "ui", "report", "stop", "scale", "store", "checkpoint", "bench",
    "run", "ssh", "pull",
)  # fmt: skip
BELOW = ("list", "show", "verify", "restore", "export", "pull", "prune")


def process(home: Path, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Run psctl as a process, for what another process must not or cannot share."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("PSCTL_", "FORCE_"))}
    run = subprocess.run(
        [sys.executable, "-m", "psctl", *arguments],
        capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, cwd=home,
        env={**clean, "PYTHONPATH": str(ROOT), "HOME": str(home), "PSCTL_HOME": str(home / "state")},
    )  # fmt: skip
    assert run.returncode == code, f"exit {run.returncode}\n{run.stdout}\n{run.stderr}"
    return run


def error_of(run: Told) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(run.stdout)["error"]
    assert set(document) == {"code", "exit", "message", "hint", "where"}
    assert document["exit"] == run.returncode
    return document


def test_every_command_has_help_that_names_it(tmp_path: Path) -> None:
    shown = process(tmp_path, "--help").stdout
    for verb in VERBS:
        assert re.search(rf"^  {verb} ", shown, re.MULTILINE), verb
    for words in [*((verb,) for verb in VERBS), *(("checkpoint", below) for below in BELOW)]:
        text = psctl(tmp_path, *words, "--help").stdout
        assert text.startswith(f"Usage: psctl {' '.join(words)}"), text
        assert "\x1b" not in text


@pytest.mark.parametrize("words", [(), ("checkpoint",)])
def test_no_summary_of_a_command_is_cut_on_a_terminal_of_80_columns(tmp_path: Path, words: tuple[str, ...]) -> None:
    done = psctl(tmp_path, *words, "--help", COLUMNS="80")
    listed = [line for line in done.stdout.partition("\nOptions:\n")[2].splitlines() if re.match(r"  [a-z]+  ", line)]
    assert len(listed) >= 7
    assert not [line for line in listed if line.endswith("...") or len(line) > 80]


def commands_of(group: Any, above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands_of(command, (*above, name))
        else:
            yield (*above, name), command


def test_every_command_has_examples_that_can_be_typed(tmp_path: Path) -> None:
    root = make_command()
    above = root.make_context("psctl", ["jobs"], obj=[])
    for words, command in commands_of(root):
        text = psctl(tmp_path, *words, "--help", COLUMNS="80").stdout
        examples = re.findall(r"^    (psctl .*)$", text.partition("  Examples:\n")[2], re.MULTILINE)
        assert examples, f"{words} shows no example"
        for example in examples:
            assert len(example) <= 76, example
            typed = shlex.split(example)[1:]
            assert typed[: len(words)] == list(words)
            command.make_context(words[-1], typed[len(words) :], parent=above)  # raises for an unknown option


def test_the_help_lists_every_command_in_one_group(tmp_path: Path) -> None:
    shown = psctl(tmp_path, "--help").stdout
    for verb in VERBS:
        assert len(re.findall(rf"^  {verb} ", shown, re.MULTILINE)) == 1, verb
    assert [line for line in shown.splitlines() if re.fullmatch(r"[A-Z].*:", line)] == [
        "Options:", "Begin:", "Machines:", "Predict and measure:", "Train:", "Watch:", "Save and restore:",
    ]  # fmt: skip


def test_the_help_of_strategy_lists_its_values(tmp_path: Path) -> None:
    for words in (["train"], ["plan"]):
        text = " ".join(psctl(tmp_path, *words, "--help").stdout.split())
        if "--strategy" in text:
            assert "auto, or one of: native, root," in text and text.count("halving-doubling") == 1


def test_help_is_fast_and_loads_neither_torch_nor_ssh(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom psctl.cli.app import run\nrun(['--help'])\n"
        "bad = {'torch', 'paramiko', 'rich', 'yaml', 'cryptography', 'numpy', 'networkx', 'pydantic'}\n"
        "bad &= set(sys.modules)\n"
        "sys.exit(f'loaded {bad}' if bad else 0)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    times = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        process(tmp_path, "--help")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(times) < 0.6, times  # 0.1 s of a processor that nobody else wants


def test_the_version_is_printed_in_every_format(tmp_path: Path) -> None:
    assert re.fullmatch(r"psctl \d+\.\d+\.\d+\n", process(tmp_path, "--version").stdout)
    for format_ in (["-o", "json"], ["-ojson"], ["-o=json"], ["--output=json"]):
        assert set(json.loads(psctl(tmp_path, "--version", *format_).stdout)) == {"version"}
        assert set(json.loads(psctl(tmp_path, "jobs", *format_).stdout)) == {"jobs"}


@pytest.mark.parametrize("position", ["before", "after"])
@pytest.mark.parametrize("format_", ["json", "jsonl"])
def test_usage_errors_are_documents_too(tmp_path: Path, position: str, format_: str) -> None:
    for words in (
        ["nope"],
        ["train"],
        ["train", "--nope"],
        ["logs", "--tail", "many"],
        ["checkpoint", "prune", "x"],
        [],
    ):
        arguments = ["-o", format_, *words] if position == "before" else [*words, "-o", format_]
        error = error_of(psctl(tmp_path, *arguments, code=2))
        assert (error["code"], error["exit"]) == ("usage", 2)
        assert error["hint"].startswith("psctl")


def test_scale_needs_a_number_and_a_running_job(tmp_path: Path) -> None:
    assert "neither --workers nor --servers is given" in psctl(tmp_path, "scale", code=2).stderr
    assert error_of(psctl(tmp_path, "scale", "digits", "--servers", "2", "-o", "json", code=6))["code"] == "no-such-job"


def test_an_error_is_one_line_and_a_line_with_a_hint(tmp_path: Path) -> None:
    run = process(tmp_path, "attach", "digits", code=6)
    assert run.stdout == ""
    assert run.stderr == 'error: no job is named "digits"; known: none yet\n  hint: psctl jobs\n'
    debug = psctl(tmp_path, "attach", "digits", "--debug", code=6)
    assert "Traceback" in debug.stderr
    assert error_of(psctl(tmp_path, "attach", "digits", code=6, PSCTL_OUTPUT="json"))["code"] == "no-such-job"


@pytest.mark.parametrize(
    ("words", "code", "name"),
    [
        (["up", "lab"], 6, "no-such-cluster"),
        (["up", "nowhere.yaml"], 6, "no-such-cluster"),
        (["stop"], 6, "no-such-job"),
        (["checkpoint", "show", "digits-1@5"], 6, "no-such-job"),
        (["checkpoint", "show", "digits-1"], 2, "usage"),
        (["checkpoint", "verify", "./nowhere"], 6, "no-such-checkpoint"),
        (["train", "nowhere.yaml"], 2, "invalid-file"),
        (["logs", "-r", "gpu"], 2, "usage"),
        (["plan", "--size", "huge"], 2, "usage"),
        (["init", "--template", "digit"], 2, "usage"),
        (["train", "minimal/job.yaml", "--size", "huge"], 2, "usage"),
        (["train", "minimal/job.yaml", "--dry-run", "--resume", "soon"], 2, "usage"),
        (["train", "minimal/job.yaml", "--dry-run", "--resume", "digits-1@5"], 6, "no-such-job"),
        (["train", "minimal/job.yaml", "--dry-run", "--on-interrupt", "cry"], 2, "usage"),
        (["train", "minimal/job.yaml", "--dry-run", "--set", "secrets=[KEY]", "--env", "KEY=swordfish"], 2, "usage"),
        (["validate"], 2, "usage"),
        (["jobs", "-o", "xml"], 2, "usage"),
    ],
)
def test_each_error_has_its_code(tmp_path: Path, words: list[str], code: int, name: str) -> None:
    (tmp_path / "minimal").symlink_to(ROOT / "templates" / "minimal")
    if words[-1] == "xml":
        assert psctl(tmp_path, *words, code=code).stderr.startswith("error: -o xml: unknown format")
        return
    assert error_of(psctl(tmp_path, *words, "-o", "json", code=code))["code"] == name


def test_init_writes_a_job_and_a_cluster_and_overwrites_nothing(tmp_path: Path) -> None:
    made = psctl(tmp_path, "init", "mine", "--template", "minimal", "--hosts", "node-a,node[1-2]")
    assert "psctl train mine/job.yaml" in made.stderr
    job = (tmp_path / "mine" / "job.yaml").read_text()
    assert "cluster: ./cluster.yaml" in job
    assert psctl(tmp_path, "validate", "mine/job.yaml", "mine/cluster.yaml").stdout.count("valid") == 2
    assert "node2" in (tmp_path / "mine" / "cluster.yaml").read_text()
    again = psctl(tmp_path, "init", "mine", "--template", "minimal", code=2)
    assert "there already" in again.stderr
    assert "--yes" in again.stderr
    psctl(tmp_path, "init", "mine", "--template", "minimal", "--yes")
    assert "cluster:" not in (tmp_path / "mine" / "job.yaml").read_text()


def test_init_reads_a_hostfile(tmp_path: Path) -> None:
    (tmp_path / "hostfile").write_text("worker-0 slots=4\nworker-1 slots=4\n")
    psctl(tmp_path, "init", "--from-hostfile", "hostfile", "--template", "minimal")
    assert "slots: 4" in (tmp_path / "cluster.yaml").read_text()


def test_validate_reports_every_file_and_the_position_of_a_mistake(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print(1)\n")
    (tmp_path / "good.yaml").write_text("name: digits\nscript: train.py\n")
    (tmp_path / "bad.yaml").write_text("name: digits\nscript: train.py\nworkes: 2\n")
    run = psctl(tmp_path, "validate", "good.yaml", "bad.yaml", "-o", "json", code=2)
    document = json.loads(run.stdout)
    assert [row["valid"] for row in document["files"]] == [True, False]
    assert document["error"]["code"] == "invalid-file"
    assert document["files"][1]["error"]["where"].startswith("bad.yaml:3:")
    shown = psctl(tmp_path, "validate", "good.yaml", "bad.yaml", code=2)
    assert shown.stdout == "good.yaml: valid job file\n"
    assert "workers" in shown.stderr
    assert set(json.loads(psctl(tmp_path, "validate", "--schema").stdout)) == {"cluster", "job"}
    assert set(json.loads(psctl(tmp_path, "validate", "--schema", "bad.yaml").stdout)) == {"job"}


def test_validate_and_train_report_all_mistakes_and_validate_reads_the_script(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "train.py").write_text("import os\n\nprint(1)\n")
    job.write_text("name: digits\nscript: src/train.py\nstrategy: ring\nsync:\n  period: 0\n")
    for words in (["validate", "job.yaml"], ["train", "job.yaml"], ["plan", "job.yaml"]):
        lines = psctl(tmp_path, *words, code=2).stderr.splitlines()
        assert [line.partition(":")[0] for line in lines] == ["error", "  hint"] * 2
        assert "job.yaml:3:1: strategy: unknown key here: `strategy` belongs under `sync:`" in lines[0]
        assert "job.yaml:5:11: sync.period: " in lines[2]
    row = json.loads(psctl(tmp_path, "validate", "job.yaml", "-o", "json", code=2).stdout)["files"][0]
    assert [row["error"]["where"], *(other["where"] for other in row["error"]["others"])] == [
        "job.yaml:3:1", "job.yaml:5:11",
    ]  # fmt: skip
    job.write_text("name: digits\nscript: trian.py\nworkes: 2\n")
    said = psctl(tmp_path, "validate", "job.yaml", code=2).stderr.splitlines()
    assert ["trian.py is not there" in said[0], "workes: unknown key" in said[2]] == [True, True]
    job.write_text("name: digits\nscript: trian.py\n")
    for words in (["validate", "job.yaml"], ["train", "job.yaml", "--dry-run"]):
        said = psctl(tmp_path, *words, code=2).stderr
        assert 'trian.py is not there, did you mean "src/train.py"?' in said
        assert "job.yaml:2:9" in said
    job.write_text("name: digits\nscript: src/train.py\ngroups:\n  - {name: serve, script: serv.py}\n")
    for words in (["validate", "job.yaml"], ["train", "job.yaml", "--dry-run"]):
        said = psctl(tmp_path, *words, code=2).stderr
        assert "job.yaml:4:27: groups[0].script: " in said
        assert "serv.py is not there" in said
    job.write_text("name: digits\nscript: src/train.py\n")
    (tmp_path / "src" / "train.py").write_text("import os\n\nfor x in 3\n    print(x)\n")
    said = psctl(tmp_path, "validate", "job.yaml", code=2).stderr
    assert "src/train.py:3:11: script: SyntaxError: expected ':'" in said
    assert "stops at: for x in 3" in said
    (tmp_path / "src" / "train.py").write_text("print(1)\n")
    assert psctl(tmp_path, "validate", "job.yaml").stdout == "job.yaml: valid job file\n"


def test_labels_are_shown_with_their_host(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(
        "name: lab\nruntime: {environment: existing, workdir: ./w}\nhosts: [{address: local, labels: {rack: r1}}]\n"
    )
    topo = json.loads(psctl(tmp_path, "topo", "c.yaml", "-o", "json").stdout)
    assert topo["hosts"][0]["labels"] == {"rack": "r1"}
    assert "rack=r1" in psctl(tmp_path, "status", PSCTL_CLUSTER="./c.yaml").stdout


def test_v_prints_the_cluster_and_how_hosts_were_reached(tmp_path: Path) -> None:
    said = psctl(tmp_path, "topo", "-v").stderr
    assert said.startswith("cluster: local (this machine)\ncluster file: none, this machine alone\nlocal: connected")
    assert psctl(tmp_path, "topo", "-q").stderr == ""
    assert psctl(tmp_path, "-v", "topo", "-o", "json").stderr == ""


def test_this_machine_needs_no_cluster_file(tmp_path: Path) -> None:
    assert json.loads(psctl(tmp_path, "jobs", "-o", "json").stdout) == {"jobs": []}
    assert json.loads(psctl(tmp_path, "checkpoint", "list", "-o", "json").stdout) == {"checkpoints": []}
    topo = json.loads(psctl(tmp_path, "topo", "-o", "json").stdout)
    assert topo["hosts"][0]["name"] == "local"
    assert {"name", "reason", "groups"} <= set(topo["strategy"])
    plan = json.loads(psctl(tmp_path, "plan", "--size", "160MB", "-o", "json").stdout)
    assert (plan["size"], plan["decided"]) == (160_000_000, False)
    assert len({each["strategy"] for each in plan["candidates"]}) == len(plan["candidates"]) == 18
    doctor = json.loads(psctl(tmp_path, "doctor", "-o", "json").stdout)
    assert all(check["ok"] for check in doctor["hosts"][0]["checks"])


def test_up_makes_this_machine_ready_once_and_down_clears_it(tmp_path: Path) -> None:
    dry = json.loads(psctl(tmp_path, "up", "--dry-run", "-o", "json").stdout)["hosts"][0]
    assert not (tmp_path / "state").exists()
    first = json.loads(psctl(tmp_path, "up", "-o", "json").stdout)["hosts"][0]
    assert (first["state"], first["actions"]) == ("created", dry["actions"])
    second = psctl(tmp_path, "up")
    assert "local\tunchanged\tnothing to do" in second.stdout
    psctl(tmp_path, "down", "--purge", "--yes")
    assert not (tmp_path / "state" / "host").exists()


def test_a_dry_run_of_train_prints_all_and_touches_nothing(tmp_path: Path) -> None:
    job = str(ROOT / "templates" / "digits")
    run = psctl(tmp_path, "train", job, "--dry-run", "--workers", "1", "--servers", "1", "-o", "json",
                "--set", "metrics.prometheus=9464")  # fmt: skip
    document = json.loads(run.stdout)
    assert document["prometheus"] == "127.0.0.1:9464"
    assert [(each["role"], each["rank"]) for each in document["processes"]] == [
        ("coordinator", 0), ("agent", 0), ("server", 0), ("worker", 0),
    ]  # fmt: skip
    assert {file["path"] for file in document["files"]} >= {"train.py", "job.yaml"}
    assert document["plan"]["decided"] is False
    assert document["cluster"] == "local"
    assert not (tmp_path / "state").exists()


def test_timeout_is_the_longest_wait_for_a_host_that_does_not_answer(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        (tmp_path / "c.yaml").write_text(
            f"name: lab\nhosts: [{{address: 127.0.0.1, name: silent, port: {silent.getsockname()[1]}}}]\n"
        )
        began = time.monotonic()
        error = error_of(psctl(tmp_path, "up", "c.yaml", "--timeout", "500ms", "-o", "json", code=3))
        assert error["code"] == "host-unreachable"
        assert "0.5 s" in error["message"]
        assert time.monotonic() - began < 8, "the file's own connect_timeout is 10 s"


def test_a_reader_that_leaves_is_no_error(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PSCTL_HOME": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-m", "psctl", "validate", "--schema"], env=environment, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(30) == 0


def test_what_bench_cannot_measure_is_refused_before_anything_runs(tmp_path: Path) -> None:
    for words in (
        ["bench"],
        ["bench", "average"],
        ["bench", "allreduce", "--sizes", "big"],
        ["bench", "allreduce", "--strategy", "rings"],
        ["bench", "pushpull", "--strategy", "ring"],
        ["bench", "allreduce", "--servers", "0", "--strategy", "ps"],
        ["bench", "allreduce", "--workers", "1", "--strategy", "ring"],
    ):
        refused = psctl(tmp_path, *words, "-o", "json", code=2)
        assert set(json.loads(refused.stdout)) == {"error"}
    assert json.loads(psctl(tmp_path, "jobs", "-o", "json").stdout) == {"jobs": []}


def test_debug_prints_no_control_sequence_of_a_host(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    from psctl.cli import app
    from psctl.errors import HostUnreachable

    def fail(*_: object, **__: object) -> None:
        raise HostUnreachable("node-a: \x1b]0;owned\x07\x1b[2Jsaid \x9b31m this", "look \x1b[5m there")

    monkeypatch.setattr("psctl.launch.clusters.choose_cluster", fail)
    assert app.run(["--debug", "plan"]) == 3
    printed = capsys.readouterr()
    assert "Traceback" in printed.err and "said" in printed.err
    assert not set("\x1b\x07\x9b") & set(printed.out + printed.err)
