"""Every shell keeps the same promises: over SSH (a real sshd), over any command, as steps of Slurm, here, in memory.

A promise that needs real processes is not asked of the one in memory; REAL marks these.
"""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from psctl.errors import CommandFailed, DiskFull, HostUnreachable, TimedOut
from psctl.remote import slurm
from psctl.remote.command import CommandShell
from psctl.remote.local import LocalShell
from psctl.remote.shell import Process, Shell
from psctl.spec.exec_template import ExecTemplate
from tests.helpers import slurm as slurm_library
from tests.helpers.fake_shell import FakeShell
from tests.helpers.running import until

SLURM = pytest.param("slurm", marks=pytest.mark.soak)
KINDS = ["ssh", "command", "step", SLURM, "local", "fake"]
MOUNT_SMALL = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs"]
LINE = "y" * 1000
"""A long line: srun takes minutes for 64 MB in lines of one letter."""

REAL = pytest.mark.parametrize("shell", ["ssh", "command", "step", SLURM, "local"], indirect=True)


@pytest.fixture(scope="module")
def allocation() -> Iterator[str]:
    """An allocation of one node of a real Slurm, which srun finds in this process's environment."""
    if reason := slurm_library.missing():
        pytest.skip(reason)
    with slurm_library.Slurm() as made, pytest.MonkeyPatch.context() as patch:
        for name, value in made.env.items():
            patch.setenv(name, value)
        yield made.allocate(1)["SLURM_JOB_ID"]


@pytest.fixture(params=KINDS)
def shell(request: pytest.FixtureRequest) -> Iterator[Shell]:
    made: Shell
    if request.param == "ssh":
        from psctl.remote.ssh import SshShell

        made = SshShell.connect(request.getfixturevalue("node_a"))
    elif request.param == "slurm":
        made = slurm.connect("node-a", "n1", request.getfixturevalue("allocation"))
    elif request.param in ("command", "step"):
        template = ExecTemplate.parse("env PSCTL_TEST_HOST={host} {command}")
        made = CommandShell.connect("node-a", "a", template, steps=request.param == "step")
    else:
        made = LocalShell("node-a") if request.param == "local" else FakeShell("node-a")
    yield made
    made.close()


@pytest.fixture
def place(shell: Shell, tmp_path: Path) -> str:
    """A folder on the host."""
    if isinstance(shell, FakeShell):
        shell.folders.add("/work")
        return "/work"
    (tmp_path / "work").mkdir()
    return str(tmp_path / "work")


def read_until(tail: Any, wanted: bytes) -> bytes:
    got = b""
    while wanted not in got:
        data = tail.read(10)
        assert data, f"only {got!r}"
        got += data
    return got


# ---- run ----


def test_words_arrive_as_they_were_given(shell: Shell) -> None:
    words = ["two  words", "$HOME", "*", "'", '"', "`id`", "a\\b", "line\nbreak", "", "ü", "~", "-n", "!x", "#"]
    assert shell.run(["echo", *words]).stdout == " ".join(words).encode() + b"\n"


def test_input_and_output_are_bytes(shell: Shell) -> None:
    every = bytes(range(256)) * 3
    assert shell.run(["cat"], stdin=every).stdout == every


def test_no_input_is_an_empty_one(shell: Shell) -> None:
    assert shell.run(["cat"]).stdout == b""


def test_a_command_that_fails_is_an_error_with_its_evidence(shell: Shell) -> None:
    with pytest.raises(CommandFailed) as caught:
        shell.run(["cat", "/there/is/no/such file"])
    assert (caught.value.host, caught.value.status) == ("node-a", 1)
    assert "No such file" in caught.value.tail
    assert caught.value.command == "cat '/there/is/no/such file'"


def test_without_check_the_status_is_returned(shell: Shell) -> None:
    assert shell.run(["false"], check=False).status == 1
    assert shell.run(["psctl-has-no-such-program"], check=False).status == 127


def test_a_command_runs_in_the_home_folder(shell: Shell) -> None:
    assert shell.run(["pwd"]).stdout.decode().strip() == os.path.realpath(shell.home)


def test_output_is_handed_over_as_it_comes(shell: Shell) -> None:
    parts: list[bytes] = []
    done = shell.run(["echo", "a"], take=parts.append)
    assert (b"".join(parts), done.stdout, done.status) == (b"a\n", b"", 0)


def test_a_deadline_ends_the_wait(shell: Shell) -> None:
    began = time.monotonic()
    with pytest.raises(TimedOut, match="node-a: `sleep 300` did not end within"):
        shell.run(["sleep", "300"], timeout=0.3)
    assert time.monotonic() - began < 4


def test_an_empty_command_and_a_null_byte_are_our_own_mistakes(shell: Shell) -> None:
    for argv in ([], ["echo", "a\0b"]):
        with pytest.raises((ValueError, IndexError)):
            shell.run(argv)


@REAL
def test_big_streams_both_ways_do_not_wait_for_each_other(shell: Shell) -> None:
    data = os.urandom(1 << 20) * 24
    result = shell.run(["sh", "-c", "tee /dev/stderr"], stdin=data)
    assert (result.stdout == data, result.stderr == data) == (True, True)


@REAL
def test_more_output_than_allowed_is_refused(shell: Shell) -> None:
    data = b"x" * 10_000
    assert shell.run(["cat"], stdin=data, limit=10_000).stdout == data
    with pytest.raises(CommandFailed, match="it printed more than 5 kB") as caught:
        shell.run(["cat"], stdin=data, limit=5_000)
    assert caught.value.hint


@REAL
def test_a_command_that_prints_without_end_is_ended(shell: Shell, place: str, gone_soon: Callable[[int], bool]) -> None:
    with pytest.raises(CommandFailed, match="it printed more than 1 MB"):
        shell.run(["sh", "-c", f"echo $$ >{place}/pid; exec yes {LINE}"], limit=1_000_000)
    assert gone_soon(int(shell.run(["cat", f"{place}/pid"]).stdout))
    with pytest.raises(CommandFailed, match="it printed more than 64 MB"):
        shell.run(["sh", "-c", f"exec yes {LINE} >&2"])


def test_a_command_that_reads_no_input_still_ends(shell: Shell) -> None:
    assert shell.run(["echo", "done"], stdin=bytes(8 << 20)).stdout == b"done\n"


@REAL
def test_a_signal_shows_as_128_and_its_number(shell: Shell) -> None:
    assert shell.run(["sh", "-c", "kill -9 $$"], check=False).status == 137


@REAL
@pytest.mark.parametrize("stdin", [b"", b"short", bytes(4 << 20)], ids=["none", "short", "more than it reads"])
def test_after_a_deadline_nothing_of_the_command_remains(
    shell: Shell, place: str, gone_soon: Callable[[int], bool], stdin: bytes
) -> None:
    script = "echo $$ >pids; sleep 300 & echo $! >>pids; wait"
    for timeout in (0.5, 2.0, 8.0):
        with pytest.raises(TimedOut):
            shell.run(["sh", "-c", f"cd {place} && {{ {script}; }}"], stdin=stdin, timeout=timeout)
        if Path(place, "pids").exists():  # on a busy machine it may not even have begun
            break
    for pid in Path(place, "pids").read_text().split():
        assert gone_soon(int(pid))


@REAL
def test_a_deadline_that_passes_before_the_command_has_begun_leaves_nothing(shell: Shell, place: str) -> None:
    with pytest.raises(TimedOut):
        shell.run(["sh", "-c", f"sleep 300; cd {place}"], stdin=bytes(4 << 20), timeout=0.001)
    shell.run(["true"])  # so the one before has begun by now, if it still can

    def left() -> list[list[str]]:
        lines = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
        return [line for line in lines if f"sleep 300; cd {place}" in line]

    until(lambda: not left())


@REAL
def test_ctrl_c_leaves_nothing_of_the_command(shell: Shell, place: str, gone_soon: Callable[[int], bool]) -> None:
    pids = Path(place, "pids")

    def interrupt() -> None:
        until(lambda: pids.exists() and len(pids.read_text().split()) == 2)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            shell.run(["sh", "-c", f"echo $$ >{pids}; sleep 300 & echo $! >>{pids}; wait"], timeout=20)
    finally:
        thread.join()
        signal.signal(signal.SIGINT, before)
    for pid in pids.read_text().split():
        assert gone_soon(int(pid))


@pytest.mark.parametrize("shell", ["ssh", "command", "step", "local"], indirect=True)
def test_a_child_that_holds_the_output_delays_no_one_and_ends_too(
    shell: Shell, place: str, gone_soon: Callable[[int], bool]
) -> None:
    # not under Slurm, which ends a step's processes itself: those of other sessions only by its plug-in for cgroups
    began = time.monotonic()
    result = shell.run(["sh", "-c", "sleep 300 & echo $!"], timeout=20)
    assert time.monotonic() - began < 5
    assert gone_soon(int(result.stdout))


@REAL
def test_many_threads_share_a_shell(shell: Shell) -> None:
    found: dict[int, bytes] = {}

    def one(number: int) -> None:
        found[number] = shell.run(["echo", str(number)]).stdout

    threads = [threading.Thread(target=one, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: f"{number}\n".encode() for number in range(16)}


def test_a_closed_shell_raises_an_error_that_says_so(shell: Shell) -> None:
    shell.close()
    with pytest.raises(HostUnreachable, match="node-a"):
        shell.run(["true"])


# ---- put, fetch ----


def fetched(shell: Shell, path: str, limit: int = 1 << 20) -> bytes:
    taken: list[bytes] = []
    assert shell.fetch(path, taken.append, limit) == sum(map(len, taken))
    return b"".join(taken)


def test_a_file_is_put_with_its_parents_and_fetched_as_it_was(shell: Shell, place: str) -> None:
    content = os.urandom(300_000)
    shell.put(content, f"{place}/new/folder/a 'file'")
    assert fetched(shell, f"{place}/new/folder/a 'file'", 300_000) == content


def test_a_file_of_this_machine_is_put(shell: Shell, place: str) -> None:
    source = Path(__file__)
    shell.put(source, f"{place}/copy")
    assert shell.run(["cat", f"{place}/copy"]).stdout == source.read_bytes()


def test_an_empty_file_can_be_put_and_fetched(shell: Shell, place: str) -> None:
    shell.put(b"", f"{place}/empty")
    assert fetched(shell, f"{place}/empty", 0) == b""


def test_a_put_replaces(shell: Shell, place: str) -> None:
    shell.put(b"old", f"{place}/file")
    shell.put(b"new", f"{place}/file")
    assert shell.run(["cat", f"{place}/file"]).stdout == b"new"


def test_a_tilde_is_the_home_there(shell: Shell) -> None:
    name = f".psctl-test-{os.getpid()}"
    shell.put(b"here", f"~/{name}")
    try:
        assert shell.run(["cat", f"{shell.home}/{name}"]).stdout == b"here"
        assert fetched(shell, f"~/{name}") == b"here"
    finally:
        shell.run(["rm", "-f", f"{shell.home}/{name}"])


def test_a_missing_file_cannot_be_fetched(shell: Shell, place: str) -> None:
    with pytest.raises(CommandFailed, match="No such file"):
        fetched(shell, f"{place}/none")


def test_no_more_is_taken_of_a_file_than_it_may_have(shell: Shell, place: str) -> None:
    shell.put(b"x" * 300_000, f"{place}/long")
    taken: list[bytes] = []
    with pytest.raises(CommandFailed, match="it has 300000 bytes, expected 1000 at most"):
        shell.fetch(f"{place}/long", taken.append, 1000)
    assert sum(map(len, taken)) <= 1000


def test_a_folder_is_not_overwritten(shell: Shell, place: str) -> None:
    with pytest.raises(CommandFailed, match="is a folder"):
        shell.put(b"x", place)


@REAL
def test_a_secret_is_never_readable_to_others(shell: Shell, place: str) -> None:
    shell.put(b"secret", f"{place}/key", mode=0o600)
    assert stat.S_IMODE(os.stat(f"{place}/key").st_mode) == 0o600
    shell.put(b"public", f"{place}/script", mode=0o755)
    assert stat.S_IMODE(os.stat(f"{place}/script").st_mode) == 0o755
    assert os.listdir(place) in (["key", "script"], ["script", "key"]), "no temporary name is left"


@REAL
def test_no_room_is_reported_and_nothing_is_left(shell: Shell, place: str) -> None:
    small = Path(place, "small")
    small.mkdir()
    if os.getuid() != 0 or subprocess.run([*MOUNT_SMALL, str(small)], check=False).returncode != 0:
        pytest.skip("a full disk needs root (tmpfs)")
    try:
        with pytest.raises(DiskFull, match=f"node-a: write {small}/big: .*No space left"):
            shell.put(bytes(5 << 20), f"{small}/big")
        assert os.listdir(small) == []
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_a_host_in_memory_has_no_room_either() -> None:
    shell = FakeShell(room=10)
    shell.put(b"0123456", "/a")
    with pytest.raises(DiskFull):
        shell.put(b"0123456", "/b")
    assert list(shell.files) == ["/a"]


# ---- start, alive, signal ----


def test_a_started_process_runs_until_it_is_signalled(shell: Shell, place: str) -> None:
    process = shell.start(["sleep", "300"], log=f"{place}/log", cwd=place, env={})
    assert shell.alive(process)
    assert shell.signal(process, signal.SIGTERM)
    until(lambda: not shell.alive(process))
    assert not shell.signal(process, signal.SIGTERM)


def test_another_process_with_the_same_number_is_left_alone(shell: Shell, place: str) -> None:
    process = shell.start(["sleep", "300"], log=f"{place}/log", cwd=place, env={})
    older = Process(process.pid, "another boot:17")
    assert (shell.alive(older), shell.signal(older, signal.SIGKILL)) == (False, False)
    assert shell.alive(process)
    shell.signal(process, signal.SIGKILL)


def test_its_output_is_added_to_the_log(shell: Shell, place: str) -> None:
    shell.put(b"before\n", f"{place}/logs/new/log")
    shell.start(["echo", "a  b", "$HOME"], log=f"{place}/logs/new/log", cwd=place, env={})
    wanted = b"before\na  b $HOME\n"
    until(lambda: shell.run(["cat", f"{place}/logs/new/log"]).stdout == wanted)


def test_its_environment_may_hold_anything(shell: Shell, place: str) -> None:
    value = 'it\'s\na "$HOME" `id` \\ value \n\n'
    shell.start(["printenv", "PSCTL_VALUE"], log=f"{place}/log", cwd=place, env={"PSCTL_VALUE": value})
    until(lambda: shell.run(["cat", f"{place}/log"]).stdout == value.encode() + b"\n")


def test_a_program_that_does_not_exist_is_reported_in_the_log(shell: Shell, place: str) -> None:
    process = shell.start(["psctl-has-no-such-program"], log=f"{place}/log", cwd=place, env={})
    until(lambda: not shell.alive(process))
    assert b"not found" in shell.run(["cat", f"{place}/log"]).stdout


def test_a_folder_that_is_not_there_is_an_error(shell: Shell, place: str) -> None:
    with pytest.raises(CommandFailed):
        shell.start(["true"], log=f"{place}/log", cwd=f"{place}/none", env={})


@REAL
def test_an_environment_is_on_no_command_line(shell: Shell, place: str) -> None:
    process = shell.start(["sleep", "300"], log=f"{place}/log", cwd=place, env={"TOKEN": "hush-hush-7"})
    try:
        lines = shell.run(["ps", "-eo", "args"]).stdout
        environment = Path(f"/proc/{process.pid}/environ").read_bytes()
    finally:
        shell.signal(process, signal.SIGKILL)
    assert b"hush-hush-7" not in lines
    assert b"TOKEN=hush-hush-7" in environment
    assert b"PSCTL_START_ENV" not in environment


@REAL
def test_a_started_process_has_its_own_session_no_input_and_can_be_interrupted(shell: Shell, place: str) -> None:
    process = shell.start(["sleep", "300"], log=f"{place}/log", cwd=place, env={})
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    session, group = int(fields[3]), int(fields[2])
    assert (session, group, os.readlink(f"/proc/{process.pid}/fd/0")) == (process.pid, process.pid, "/dev/null")
    # until the program itself runs, what starts it takes the signal
    until(lambda: Path(f"/proc/{process.pid}/comm").read_text().strip() == "sleep")
    # a program that is being loaded holds its libraries open for a moment
    until(lambda: sorted(int(fd) for fd in os.listdir(f"/proc/{process.pid}/fd")) == [0, 1, 2])
    assert os.readlink(f"/proc/{process.pid}/cwd") == os.path.realpath(place)
    assert shell.signal(process, signal.SIGINT)
    until(lambda: not shell.alive(process), 20.0)


@REAL
def test_a_started_process_survives_the_connection(shell: Shell, place: str) -> None:
    process = shell.start(["sleep", "300"], log=f"{place}/log", cwd=place, env={})
    shell.close()
    here = LocalShell("here")
    time.sleep(0.2)  # what would end it would do so by now
    assert here.alive(process)
    assert here.signal(process, signal.SIGKILL)
    until(lambda: not here.alive(process))


# ---- tail ----


def test_a_tail_brings_what_is_there_from_an_offset(shell: Shell, place: str) -> None:
    shell.put(b"012345678\n", f"{place}/log")  # a whole line: srun holds the others back
    with shell.tail(f"{place}/log", 4) as tail:
        assert read_until(tail, b"\n") == b"45678\n"
        assert tail.read(0.05) == b""


def test_a_tail_brings_what_is_added_later(shell: Shell, place: str) -> None:
    with shell.tail(f"{place}/log") as tail:
        assert tail.read(0.05) == b""
        if isinstance(shell, FakeShell):
            shell.append(f"{place}/log", b"first\n")
        else:
            Path(place, "log").write_bytes(b"first\n")
        assert read_until(tail, b"first\n") == b"first\n"
        if isinstance(shell, FakeShell):
            shell.append(f"{place}/log", b"second\n")
        else:
            with Path(place, "log").open("ab") as log:
                log.write(b"second\n")
        assert read_until(tail, b"second\n") == b"second\n"


def test_a_closed_tail_ends(shell: Shell, place: str) -> None:
    shell.put(b"x\n", f"{place}/log")
    tail = shell.tail(f"{place}/log")
    read_until(tail, b"x\n")
    threading.Timer(0.1, tail.close).start()
    assert list(tail) == []
    assert tail.read(1) is None


@REAL
def test_a_closed_tail_leaves_no_reader(shell: Shell, place: str) -> None:
    for name in ("there", "never-there"):
        if name == "there":
            shell.put(b"x", f"{place}/{name}")
        tail = shell.tail(f"{place}/{name}")
        until(lambda name=name: _readers(f"{place}/{name}"))
        tail.close()
        until(lambda name=name: not _readers(f"{place}/{name}"))


def _readers(path: str) -> list[str]:
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            try:
                line = Path(f"/proc/{entry}/cmdline").read_bytes()
            except OSError:
                continue
            if path.encode() in line.split(b"\0"):
                found.append(entry)
    return found


def test_a_negative_offset_is_our_own_mistake(shell: Shell) -> None:
    with pytest.raises(ValueError, match="offset"):
        shell.tail("/x", -1)


def test_a_home_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    here = LocalShell("here", home=str(tmp_path / "gone"))
    with pytest.raises(HostUnreachable) as refused:
        here.run(["true"])
    assert f"home folder {tmp_path}/gone: No such file or directory" in refused.value.message
    assert "set HOME" in refused.value.hint
    here.close()
