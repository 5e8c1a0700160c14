"""A shell over a command: the words that it starts, and its errors when the way to the host fails, not the command."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from psctl.errors import CommandFailed, HostUnreachable
from psctl.remote.command import CommandShell
from psctl.spec.exec_template import ExecTemplate
from tests.helpers.running import until


def reach(text: str, patience: float | None = None) -> CommandShell:
    return CommandShell.connect("pod-0", "a-b.c", ExecTemplate.parse(text), patience)


def by_tool(folder: Path, script: str, words: str = "{command}") -> str:
    """Write a program that carries commands, in which DIR is the folder; return an `exec:` with it."""
    path = folder / "tool"
    path.write_text("#!/bin/sh\n" + script.replace("DIR", str(folder)) + "\n")
    path.chmod(0o755)
    return f"{path} {words}"


def failure(text: str, patience: float | None = None) -> HostUnreachable:
    with pytest.raises(HostUnreachable) as caught:
        reach(text, patience)
    assert caught.value.where == "pod-0"
    return caught.value


def test_a_tool_that_passes_one_line_to_a_shell_works_too(tmp_path: Path) -> None:
    shell = reach(by_tool(tmp_path, 'shift; sh -c "$*"', "{host} {line}"))
    words = ["two  words", "$HOME", "'", '"', "`id`", "line\nbreak", "", "ü"]
    assert shell.run(["printf", "[%s]", *words]).stdout == "".join(f"[{word}]" for word in words).encode()
    shell.close()


def test_the_address_reaches_the_tool_as_one_word(tmp_path: Path) -> None:
    shell = reach(by_tool(tmp_path, 'echo "$1" >DIR/said; shift; exec "$@"', "--pod={host} {command}"))
    assert (tmp_path / "said").read_text() == "--pod=a-b.c\n"
    shell.close()


def test_nothing_that_a_command_is_given_is_on_the_command_line_of_the_tool(tmp_path: Path) -> None:
    shell = reach(by_tool(tmp_path, 'echo "$*" >>DIR/said; exec "$@"'))
    shell.run(["echo", "hush-hush-7"])
    assert "hush-hush-7" not in (tmp_path / "said").read_text()
    assert shell.run(["echo", "x" * 100_000]).stdout == b"x" * 100_000 + b"\n"
    shell.close()


def test_what_the_tool_says_on_standard_error_is_not_the_commands(tmp_path: Path) -> None:
    noisy = 'echo "Defaulted container" >&2; "$@"; s=$?; echo "command terminated" >&2; exit $s'
    shell = reach(by_tool(tmp_path, noisy))
    result = shell.run(["sh", "-c", "echo mine >&2; printf 'no newline' >&2; exit 3"], check=False)
    assert (result.status, result.stderr) == (3, b"mine\nno newline")
    shell.close()


def test_the_exit_status_is_the_commands_where_the_tool_has_one_of_its_own(tmp_path: Path) -> None:
    shell = reach(by_tool(tmp_path, '"$@" || exit 1'))
    with pytest.raises(CommandFailed) as caught:
        shell.run(["sh", "-c", "exit 42"])
    assert caught.value.status == 42
    shell.close()


def test_a_tool_that_fails_is_a_host_that_is_not_reached(tmp_path: Path) -> None:
    error = failure(by_tool(tmp_path, 'echo "pods a-b.c not found" >&2; exit 1', "{host} {command}"))
    assert "tool a-b.c` ended with exit status 1 and began nothing there: pods a-b.c not found" in error.message
    assert "tool a-b.c sh -c 'echo yes'" in error.hint


def test_a_tool_that_is_not_there_is_named() -> None:
    error = failure("psctl-has-no-such-program {command}")
    assert error.message == "pod-0: `psctl-has-no-such-program` cannot be started: No such file or directory"


def test_a_tool_that_passes_no_input_is_told_apart(tmp_path: Path) -> None:
    assert "need -i?" in failure(by_tool(tmp_path, 'exec "$@" </dev/null')).message


def test_a_host_without_setsid_says_so(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/sh").symlink_to("/bin/sh")
    error = failure(f"env PATH={tmp_path}/bin HOME=/ /bin/sh -c {{line}}")
    assert "setsid: not found" in error.message


def test_a_tool_that_hangs_ends_by_the_deadline(tmp_path: Path) -> None:
    began = time.monotonic()
    error = failure(by_tool(tmp_path, "exec sleep 300"), patience=0.5)
    assert "no command began in 0.5 s" in error.message
    assert time.monotonic() - began < 8


def carrier(folder: Path) -> int:
    """Return the process of the tool that carries a running command."""
    return int(until(lambda: (folder / "carrier").exists() and (folder / "carrier").read_text().strip()))


def test_a_way_that_is_lost_is_no_failure_of_the_command(tmp_path: Path) -> None:
    shell = reach(by_tool(tmp_path, 'echo $$ >DIR/carrier; "$@"; exit 7'))
    (tmp_path / "carrier").unlink()
    log = tmp_path / "log"
    log.write_text("x")
    with shell.tail(str(log)) as tail:
        assert tail.read(10) == b"x"
        os.kill(carrier(tmp_path), signal.SIGKILL)
        with pytest.raises(HostUnreachable, match="before the command there had ended"):
            list(tail)
    shell.close()


def test_a_host_has_its_home_and_no_ssh_connection_of_psctls_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSH_CONNECTION", "10.0.0.1 50000 10.0.0.2 22")
    monkeypatch.delenv("HOME")
    shell = reach("env {command}")
    assert shell.home == os.path.expanduser("~")
    assert shell.run(["sh", "-c", 'echo "$HOME [${SSH_CONNECTION-}]"']).stdout.decode() == f"{shell.home} []\n"
    shell.close()


def test_works_with_busybox_alone(tmp_path: Path) -> None:
    busybox = shutil.which("busybox")
    if busybox is None:
        pytest.skip("busybox is not installed (make system)")
    (tmp_path / "bin").mkdir()
    subprocess.run([busybox, "--install", "-s", str(tmp_path / "bin")], check=True)
    shell = reach(f"env -i PATH={tmp_path}/bin HOME={tmp_path} {{command}}")
    shell.put(b"x" * 100_000, "~/file")
    assert shell.run(["wc", "-c"], stdin=b"12345").stdout.strip() == b"5"
    process = shell.start(["sleep", "300"], log="~/log", cwd="~", env={"A": "b"})
    assert shell.alive(process)
    assert shell.signal(process, signal.SIGKILL)
    with shell.tail("~/file", 99_990) as tail:
        assert tail.read(10) == b"x" * 10
    shell.close()
