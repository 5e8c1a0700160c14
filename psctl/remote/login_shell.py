"""Commands that any login shell passes to `sh` unchanged, and the error where its start-up file prevents that.

sshd passes a command to the login shell as one line of text, and csh, fish and POSIX shells read quotes differently.
The line used here has no character that they read differently: it starts `sh`, which reads the real command from
standard input, as one line after a random marker (`read` reads byte by byte, so that the command's own input is left
over). A second line follows, so that a start-up file which reads the first one is noticed at once.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Sequence

from psctl.errors import LoginShellFailed
from psctl.remote.posix import CommandPipe
from psctl.remote.shell import command_line

WAIT = 5.0
"""Seconds that the test of a login shell waits for its answer, before and after its standard input is closed."""

_SHOWN = 300
"""Characters of the login shell's output that an error repeats."""

_KEPT = 1 << 20
"""Bytes of the login shell's output that are kept in a test: the last ones."""

_FILES = {
    "bash": "~/.bashrc",
    "zsh": "~/.zshenv",
    "csh": "~/.cshrc",
    "tcsh": "~/.tcshrc, else ~/.cshrc",
    "fish": "~/.config/fish/config.fish",
}
"""By login shell: the start-up file that it reads for a command of sshd. Others (dash, ksh) read none of the user's."""

_ANY = "; ".join(f"{shell}: {file}" for shell, file in _FILES.items())

_RETURN = {
    "bash": "[ -t 0 ] || return",
    "zsh": "[[ -o interactive ]] || return",
    "csh": "if (! $?prompt) exit",
    "fish": "status is-interactive; or return",
}


_READS = "it reads standard input, which holds psctl's command"

_TAKEN = re.compile(rb"^[0-9a-f]{16} (/\S*)$", re.MULTILINE)
"""What the line of `login_line` prints where it did not read its marker: the shell."""


def login_line(argv: Sequence[str]) -> tuple[str, bytes]:
    """Return the line for the login shell, and the first input of the `sh` that it starts."""
    marker = secrets.token_hex(8)
    take = f'case $P in {marker}*) eval "${{P#{marker}}}";; *) echo {marker} $SHELL >&2;; esac'
    line = f"exec sh -c 'read -r P; {take}'"
    # quoted words have their newlines inside single quotes
    command = command_line(argv).replace("\n", "'\"$N\"'")
    text = f'{marker} read -r P; N=$(printf "\\n_"); N=${{N%_}}; exec {command}\n{marker}\n'
    return line, text.encode("utf-8", "surrogateescape")


def find_failure(
    host: str, start: Callable[[str], CommandPipe], status: int | None, output: bytes
) -> LoginShellFailed | None:
    """Test a login shell that did not run a command, and return why.

    Args:
        host: its name.
        start: starts a line in that login shell.
        status: the exit status it ended with; None: it did not end.
        output: its output and error output.

    Returns:
        the error; None where the login shell works now.
    """
    if taken := _TAKEN.search(output):
        return _failure(host, _READS, taken[1].decode("utf-8", "replace"))
    marker = secrets.token_hex(8)
    pipe = start(f"exec sh -c 'echo {marker} $SHELL; echo {marker} $SHELL >&2'")
    try:
        (out, errors), ended = _read_answers(pipe, marker, received := [b"", b""])
        waited = not ended and not out and not errors
        if waited:
            pipe.end()
            (out, errors), ended = _read_answers(pipe, marker, received)
        if ended and status is None:
            status, output = pipe.status(), b"\n".join(received)
    finally:
        pipe.close()
    if out:
        return _failure(host, _READS, out) if waited else None
    if errors:
        return _failure(host, "it sends standard output elsewhere, where psctl cannot read it", errors)
    if not ended:
        return _failure(host, "it does not end: it hangs, or waits for a terminal or for another command", "")
    text = " ".join(output.decode("utf-8", "replace").split())[-_SHOWN:]
    how = f"ended with exit status {status}" if status is not None else "ended"
    printed = f", and printed: {text}" if text else ""
    return _failure(host, f"the login shell {how} before psctl's command{printed}", "")


def _read_answers(pipe: CommandPipe, marker: str, received: list[bytes]) -> tuple[tuple[str, str], bool]:
    """Add output and error output to `received`; return the shell that each names, and whether the pipe ended."""
    pattern = re.compile(rb"(?:^|\n)" + marker.encode() + rb" (\S*)\n")
    until, ended = time.monotonic() + WAIT, False
    while not ended and (left := until - time.monotonic()) > 0:
        got = pipe.read(left)
        ended = got is None
        received[:] = [(old + new)[-_KEPT:] for old, new in zip(received, got or (b"", b""), strict=True)]
    return (_shell_in(pattern, received[0]), _shell_in(pattern, received[1])), ended


def _shell_in(pattern: re.Pattern[bytes], text: bytes) -> str:
    found = pattern.search(text)
    return (found[1].decode("utf-8", "replace") or "?") if found else ""


def _failure(host: str, what: str, shell: str) -> LoginShellFailed:
    kind = shell.rpartition("/")[2]
    file = _FILES.get(kind)
    of = f"{file} (login shell {shell})" if file else f"the login shell's start-up file ({_ANY})"
    early = _RETURN.get(kind) or _RETURN.get(kind.lstrip("t"))
    cure = f"`{early}`" if early else "; ".join(f"{name}: `{line}`" for name, line in _RETURN.items())
    return LoginShellFailed(
        f"{host}: no command runs there because of {of}: {what}",
        f"look at {file or 'that file'} on {host}; at its top, leave it when the shell is not interactive: {cure}",
        where=host,
    )
