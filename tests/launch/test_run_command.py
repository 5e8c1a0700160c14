"""A command on all hosts: lines as they come, and how it ended on each."""

from __future__ import annotations

from psctl.errors import HostUnreachable
from psctl.launch.hosts.run_command import LONGEST, HostLines, run_everywhere
from psctl.remote.fleet import Fleet
from psctl.remote.local import LocalShell
from psctl.types import HostName


def test_bytes_become_lines_wherever_they_are_cut() -> None:
    text = "one\n\nzwei ü\r\nlast".encode()
    for size in (1, 2, 3, 100):
        lines: list[str] = []
        splitter = HostLines(lines.append)
        for start in range(0, len(text), size):
            splitter.add(text[start : start + size])
        splitter.end()
        assert lines == ["one", "", "zwei ü\r", "last"], size


def test_a_line_without_end_is_cut() -> None:
    lines: list[str] = []
    splitter = HostLines(lines.append)
    for _ in range(300):
        splitter.add(b"x" * 1000)
    splitter.end()
    assert len("".join(lines)) == 300_000
    assert max(map(len, lines)) == LONGEST


def test_every_host_has_its_lines_and_its_status() -> None:
    shells = {HostName(name): LocalShell(name) for name in ("a", "b")}
    gone = {HostName("c"): HostUnreachable("c: no route", where="c")}
    taken: list[tuple[str, str]] = []
    with Fleet(dict(shells), dict(gone)) as fleet:
        results, failed = run_everywhere(
            fleet, ["sh", "-c", "echo out; echo '$HOME' >&2; exit 3"], lambda host, line: taken.append((host, line))
        )
    assert sorted(taken) == [("a", "$HOME"), ("a", "out"), ("b", "$HOME"), ("b", "out")]
    assert [(each.name, each.status) for each in results] == [("a", 3), ("b", 3), ("c", None)]
    assert set(failed) == {"a", "b", "c"}
    assert "ended with 3" in failed["a"].message
