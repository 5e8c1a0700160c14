"""Login shells: every one hands psctl's commands on unchanged; a start-up file that prevents it is named.

sshd runs `SHELL -c COMMAND` with the shell of the user's passwd entry; its ForceCommand here does the same.
"""

from __future__ import annotations

import shlex
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from psctl.errors import LoginShellFailed
from psctl.remote.ssh import SshShell

SHELLS = {
    "sh": ".profile", "dash": ".profile", "bash": ".bashrc", "zsh": ".zshenv", "csh": ".cshrc", "tcsh": ".tcshrc",
    "fish": ".config/fish/config.fish",
}  # fmt: skip
"""Login shells, and the start-up file that each reads."""

ODD = [
    "", "a b", "it's", '"', "!", "!!", "!$", "a\nb", "\n", "\\", "\\\\", "\\n", "$HOME", "`id`", "$(id)", "*", "~",
    "{a,b}", "#", ";", "|", "&", "<", ">", "^", "%", "=", "'\n'", "\t", "ä€", "-n", "\\'", "x" * 60_000,
]  # fmt: skip
"""Words that some shell would change."""

Login = Callable[[str, str], SshShell]


@pytest.fixture
def login(lab: Any) -> Iterator[Login]:
    """Log in as a user with this login shell and this text in its start-up file."""
    made: list[SshShell] = []

    def log_in(shell: str, startup: str) -> SshShell:
        program = shutil.which(shell)
        if program is None:
            pytest.skip(f"{shell} is not installed (make system)")
        home = Path(lab.folder) / "home"
        file = home / SHELLS[shell]
        file.parent.mkdir(parents=True)
        file.write_text(startup)
        # SHLVL: bash reads ~/.bashrc when sshd, not another shell, started it
        environment = f"HOME={shlex.quote(str(home))} SHELL={program} SHLVL=0"
        server = lab.sshd(extra=f'ForceCommand {environment} exec {program} -c "$SSH_ORIGINAL_COMMAND"')
        lab.know(server)
        made.append(SshShell.connect(lab.target(server, connect_timeout=2.0)))
        return made[-1]

    yield log_in
    for each in made:
        each.close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have psctl wait 5 s, in place of 10, for a shell that begins no command."""
    monkeypatch.setattr(SshShell, "patience", 5.0)
    monkeypatch.setattr("psctl.remote.login_shell.WAIT", 4.5)


@pytest.mark.parametrize("shell", SHELLS)
def test_every_login_shell_hands_commands_on_unchanged(login: Login, shell: str, tmp_path: Path) -> None:
    there = login(shell, "echo welcome\n")
    assert there.home == f"{tmp_path}/home"
    got = there.run(["sh", "-c", 'printf "%s\\0" "$@"; cat', "sh", *ODD], stdin=b"first\nsecond")
    assert got.stdout.decode().split("\0") == [*ODD, "first\nsecond"]
    there.put(b"psctl\n" * 3, "~/file")
    back: list[bytes] = []
    there.fetch("~/file", back.append, 100)
    assert b"".join(back) == b"psctl\n" * 3
    process = there.start(
        ["sh", "-c", 'echo "$ODD"; exec sleep 60'], log="~/log", cwd="~", env={"ODD": "it's !\n$HOME"}
    )
    assert there.alive(process)
    with there.tail("~/log") as tail:
        assert tail.read(10) == b"it's !\n$HOME\n"
    assert there.signal(process, 9)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh", "fish"])
def test_a_startup_file_that_takes_a_line_of_standard_input_is_named_at_once(login: Login, shell: str) -> None:
    text = {"tcsh": "set answer = $<\n", "fish": "read answer\n"}.get(shell, "read -r answer\n")
    began = time.monotonic()
    with pytest.raises(LoginShellFailed, match=r"node-a: .*it reads standard input") as caught:
        login(shell, text)
    assert SHELLS[shell].rpartition("/")[2] in caught.value.message
    assert f"login shell {shutil.which(shell)}" in caught.value.message
    assert "interactive" in caught.value.hint
    assert time.monotonic() - began < 20


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("shell", "text", "what"),
    [
        ("bash", "exit 3\n", "ended with exit status 3 before psctl's command, and printed: goodbye"),
        ("zsh", "exit 0\n", "ended with exit status 0 before psctl's command, and printed: goodbye"),
        ("bash", "sleep 30\n", "does not end"),
        ("tcsh", "sleep 30\n", "does not end"),
        ("bash", "cat >/dev/null\n", "reads standard input"),
        ("zsh", "cat >/dev/null\n", "reads standard input"),
        ("bash", "exec >/dev/null\n", "sends standard output elsewhere"),
        ("zsh", "exec >/dev/null\n", "sends standard output elsewhere"),
    ],
)
def test_a_startup_file_that_keeps_commands_from_running_is_named(
    login: Login, shell: str, text: str, what: str
) -> None:
    with pytest.raises(LoginShellFailed, match=f"node-a: .*{what}") as caught:
        login(shell, "echo goodbye >&2\n" + text)
    assert SHELLS[shell].rpartition("/")[2] in caught.value.message
    assert caught.value.exit == 3
    assert caught.value.where == "node-a"
