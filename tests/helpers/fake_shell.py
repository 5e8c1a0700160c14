"""A shell on a host in memory: files in a dict, a few built-in commands, and scripted ones.

The conformance test of psctl.remote.shell covers it. No time passes in it: `sleep 60` ends at once, or exceeds its
deadline at once.
"""

from __future__ import annotations

import posixpath
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import msgspec

from psctl.errors import CommandFailed, DiskFull, HostUnreachable, TimedOut
from psctl.remote.posix import output_too_large
from psctl.remote.shell import OUTPUT_LIMIT, CommandResult, InputStream, Process, command_line, expand, printable

Answer = Callable[[Sequence[str], bytes], CommandResult]
"""A scripted command: words and input to result."""


class FakeProcess(msgspec.Struct):
    """A process on the host. It runs until `end`, or until it receives signal 2, 9 or 15."""

    pid: int
    argv: tuple[str, ...]
    cwd: str
    env: dict[str, str]
    log: str
    running: bool = True
    signals: list[int] = msgspec.field(default_factory=list)

    def end(self) -> None:
        """End the process."""
        self.running = False


class FakeShell:
    """A shell on a host in memory.

    Args:
        name: the host's name.
        home: its home folder.
        room: bytes of its disk; None: no limit.

    Attributes:
        files: content by absolute path.
        modes: permission bits by absolute path, of files written by `put`.
        processes: the processes that `start` has started, by pid.
        calls: the words of every `run` and `start`, in order.
        changed: notified, and locked, where files or the connection change.
    """

    def __init__(self, name: str = "fake", home: str = "/home/user", room: int | None = None) -> None:
        self.meter = None
        self.name, self.home, self.room = name, home, room
        self.files: dict[str, bytes] = {}
        self.modes: dict[str, int] = {}
        self.folders: set[str] = {"/", "/tmp", home}
        self.processes: dict[int, FakeProcess] = {}
        self.calls: list[tuple[str, ...]] = []
        self._answers: dict[str, Answer] = {}
        self._lasting: dict[str, Callable[[FakeProcess], None]] = {}
        self.changed = threading.Condition(threading.RLock())
        self._gone = ""

    # ---- set up by a test ----

    def on(self, program: str, answer: Answer | CommandResult) -> None:
        """Script a command: `program` is its first word; it answers `run`, and `start` as one that ends at once."""
        self._answers[program] = answer if callable(answer) else lambda argv, stdin: answer

    def on_start(self, program: str, behave: Callable[[FakeProcess], None]) -> None:
        """Script a long-running program: `behave` is called when it starts; it runs until it is ended or signalled."""
        self._lasting[program] = behave

    def append(self, path: str, data: bytes) -> None:
        """Append to a file, as a process on the host does."""
        with self.changed:
            path = expand(path, self.home)
            self._write(path, self.files.get(path, b"") + data)

    def vanish(self, why: str = "nothing was heard from it") -> None:
        """Make the host unreachable: from now on every call raises HostUnreachable."""
        with self.changed:
            self._gone = why
            self.changed.notify_all()

    # ---- the shell ----

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes | InputStream = b"",
        timeout: float | None = 60,
        check: bool = True,
        limit: int = OUTPUT_LIMIT,
        take: Callable[[bytes], object] | None = None,
    ) -> CommandResult:
        shown = printable(argv)
        with self.changed:
            self.check_reachable()
            self.calls.append(tuple(argv))
            if argv[0] == "sleep" and "sleep" not in self._answers and timeout is not None and float(argv[1]) > timeout:
                raise TimedOut(
                    f"{self.name}: `{shown}` did not end within {timeout:g} s; it was ended", where=self.name
                )
            given = stdin if isinstance(stdin, bytes) else b"".join(stdin.chunks())
            result = self._command(argv)(argv, given)
        if take is not None:
            take(result.stdout)
            result = CommandResult(result.status, b"", result.stderr)
        if len(result.stdout) > limit:
            raise output_too_large(self.name, shown, limit)
        if check and result.status != 0:
            tail = (result.stderr.strip() or result.stdout).decode("utf-8", "replace")
            raise CommandFailed(self.name, shown, result.status, tail)
        return result

    def put(self, data: bytes | Path, path: str, mode: int = 0o600) -> None:
        content = data.read_bytes() if isinstance(data, Path) else bytes(data)
        with self.changed:
            self.check_reachable()
            target = expand(path, self.home)
            if target in self.folders:
                raise CommandFailed(self.name, f"write {target}", 1, f"{target}: is a folder")
            self._write(target, content)
            self.modes[target] = mode

    def fetch(self, path: str, take: Callable[[bytes], object], limit: int) -> int:
        with self.changed:
            self.check_reachable()
            target = expand(path, self.home)
            if target not in self.files:
                raise CommandFailed(self.name, f"read {target}", 1, f"{target}: No such file or directory")
            content = self.files[target]
        if len(content) > limit:
            said = f"it has {len(content)} bytes, expected {limit} at most"
            raise CommandFailed(self.name, f"read {target}", 1, said)
        if content:
            take(content)
        return len(content)

    def start(self, argv: Sequence[str], *, log: str, cwd: str, env: Mapping[str, str]) -> Process:
        with self.changed:
            self.check_reachable()
            command_line(argv)
            folder = expand(cwd, self.home)
            if folder not in self.folders:
                raise CommandFailed(self.name, f"start {printable(argv)}", 1, f"cd: can't cd to {folder}")
            self.calls.append(tuple(argv))
            pid = 1000 + len(self.processes)
            process = FakeProcess(pid, tuple(argv), folder, dict(env), expand(log, self.home))
            self.processes[pid] = process
            self._write(process.log, self.files.get(process.log, b""))
            behave = self._lasting.get(argv[0])
            if behave is not None:
                behave(process)
            elif argv[0] != "sleep":
                result = self._command(argv, env)(argv, b"")
                self._write(process.log, self.files[process.log] + result.stdout + result.stderr)
                process.end()
            return Process(pid, f"fake:{pid}")

    def alive(self, process: Process) -> bool:
        with self.changed:
            self.check_reachable()
            return self._running(process) is not None

    def signal(self, process: Process, number: int) -> bool:
        with self.changed:
            self.check_reachable()
            found = self._running(process)
            if found is None:
                return False
            found.signals.append(number)
            if number in (2, 9, 15):
                found.end()
            return True

    def tail(self, path: str, offset: int = 0) -> FakeTail:
        if offset < 0:
            raise ValueError("an offset counts from 0")
        with self.changed:
            self.check_reachable()
            return FakeTail(self, expand(path, self.home), offset)

    def close(self) -> None:
        self.vanish("this connection was closed")

    # ---- internals ----

    def check_reachable(self) -> None:
        """Raise HostUnreachable after `vanish`."""
        if self._gone:
            raise HostUnreachable(f"{self.name}: {self._gone}", where=self.name)

    def _running(self, process: Process) -> FakeProcess | None:
        found = self.processes.get(process.pid)
        same = found is not None and found.running and process.started == f"fake:{process.pid}"
        return found if same else None

    def _write(self, path: str, data: bytes) -> None:
        used = sum(len(content) for other, content in self.files.items() if other != path)
        if self.room is not None and used + len(data) > self.room:
            raise DiskFull(f"{self.name}: write {path}: No space left on device", "make room there", where=self.name)
        self.files[path] = data
        folder = posixpath.dirname(path)
        while folder not in self.folders:
            self.folders.add(folder)
            folder = posixpath.dirname(folder)
        self.changed.notify_all()

    def _command(self, argv: Sequence[str], env: Mapping[str, str] | None = None) -> Answer:
        command_line(argv)
        program = argv[0]
        if program in self._answers:
            return self._answers[program]
        built_in: dict[str, Answer] = {
            "true": lambda words, stdin: CommandResult(0, b"", b""),
            "sleep": lambda words, stdin: CommandResult(0, b"", b""),
            "false": lambda words, stdin: CommandResult(1, b"", b""),
            "echo": lambda words, stdin: CommandResult(0, " ".join(words[1:]).encode() + b"\n", b""),
            "pwd": lambda words, stdin: CommandResult(0, self.home.encode() + b"\n", b""),
            "printenv": lambda words, stdin: self._printenv(words, env or {}),
            "cat": self._cat,
            "test": self._test,
            "mkdir": self._mkdir,
            "rm": self._rm,
            "mv": self._mv,
        }
        return built_in.get(program, lambda words, stdin: CommandResult(127, b"", f"{program}: not found\n".encode()))

    def _printenv(self, words: Sequence[str], env: Mapping[str, str]) -> CommandResult:
        value = {"HOME": self.home, **env}.get(words[1])
        return CommandResult(1, b"", b"") if value is None else CommandResult(0, value.encode() + b"\n", b"")

    def _absolute(self, path: str) -> str:
        return posixpath.normpath(posixpath.join(self.home, path))

    def _cat(self, words: Sequence[str], stdin: bytes) -> CommandResult:
        paths = [word for word in words[1:] if word != "--"]
        if not paths:
            return CommandResult(0, stdin, b"")
        missing = [path for path in paths if self._absolute(path) not in self.files]
        content = b"".join(self.files.get(self._absolute(path), b"") for path in paths)
        errors = "".join(f"cat: {path}: No such file or directory\n" for path in missing)
        return CommandResult(1 if missing else 0, content, errors.encode())

    def _test(self, words: Sequence[str], stdin: bytes) -> CommandResult:
        kind, path = words[1], self._absolute(words[2])
        is_file, is_folder = path in self.files, path in self.folders
        holds = {"-e": is_file or is_folder, "-f": is_file, "-d": is_folder}[kind]
        return CommandResult(0 if holds else 1, b"", b"")

    def _mkdir(self, words: Sequence[str], stdin: bytes) -> CommandResult:
        for word in words[1:]:
            if not word.startswith("-"):
                folder = self._absolute(word)
                while folder not in self.folders:
                    self.folders.add(folder)
                    folder = posixpath.dirname(folder)
        return CommandResult(0, b"", b"")

    def _rm(self, words: Sequence[str], stdin: bytes) -> CommandResult:
        for word in words[1:]:
            if not word.startswith("-"):
                path = self._absolute(word)
                for found in [name for name in self.files if name == path or name.startswith(path + "/")]:
                    del self.files[found]
                self.folders -= {name for name in self.folders if name == path or name.startswith(path + "/")}
        return CommandResult(0, b"", b"")

    def _mv(self, words: Sequence[str], stdin: bytes) -> CommandResult:
        source, target = (self._absolute(word) for word in [word for word in words[1:] if not word.startswith("-")])
        if source not in self.files:
            return CommandResult(1, b"", f"mv: cannot stat '{source}': No such file or directory\n".encode())
        self._write(target, self.files.pop(source))
        return CommandResult(0, b"", b"")


class FakeTail:
    """Follows a file of a FakeShell."""

    def __init__(self, shell: FakeShell, path: str, offset: int) -> None:
        self._shell, self._path, self._offset = shell, path, offset
        self._closed = False

    def read(self, timeout: float | None = None) -> bytes | None:
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._shell.changed:
            while True:
                if self._closed:
                    return None
                self._shell.check_reachable()
                content = self._shell.files.get(self._path, b"")
                if len(content) > self._offset:
                    data = content[self._offset :]
                    self._offset = len(content)
                    return data
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return b""
                self._shell.changed.wait(left)

    def close(self) -> None:
        with self._shell.changed:
            self._closed = True
            self._shell.changed.notify_all()

    def __iter__(self) -> Iterator[bytes]:
        while (data := self.read()) is not None:
            yield data

    def __enter__(self) -> FakeTail:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
