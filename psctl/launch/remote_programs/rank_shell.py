"""Starts a shell or a command beside a process of a job: in its folder, with its environment.

    python rank_shell.py JOB PID FOLDER [COMMAND ...]

Where the process runs no more, or hides its memory as servers do (then only root can read its environment), the folder
is FOLDER, the one in which the job's workers ran, and the environment is that of the login. It stands in for a login
shell, so it prints nothing but that notice.
"""

import os
import pwd
import signal
import subprocess
import sys

PRIVATE = "PSCTL_ORDERS"  # names what only the process itself may read


def environment_of(pid: str, job: str) -> "dict[str, str] | None":
    """Return the environment of a process of a job; None when the process is gone, or is another one."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            items = [os.fsdecode(item) for item in file.read().split(b"\0") if b"=" in item]
    except OSError:
        return None
    found = dict(item.split("=", 1) for item in items)
    if found.get("PSCTL_JOB") != job:
        return None
    found.pop(PRIVATE, None)
    return found


def hides(pid: str, job: str) -> bool:
    """Return whether a process is one of the job's: its command line, which all may read, has the job's folder."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            items = file.read().split(b"\0")
    except OSError:
        return False
    return any(item.startswith(f"{PRIVATE}=".encode()) and f"/{job}/".encode() in item for item in items)


def run(words: "list[str]", environment: "dict[str, str]") -> int:
    """Run a command; return its exit status, 128 + n when signal n ended it: ssh has no status for that."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the command
    try:
        with subprocess.Popen(
            words,
            env=environment,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
        ) as running:
            status = running.wait()
    except OSError as error:
        print(f"{words[0]}: {error.strerror}", file=sys.stderr)
        return 127
    return status if status >= 0 else 128 - status


def main(job: str, pid: str, begun: str, *command: str) -> None:
    """Replace this process by the shell or the command."""
    environment, folder = environment_of(pid, job), os.path.expanduser(begun)
    if environment is None:
        why = "the process hides its environment" if hides(pid, job) else "the process does not run"
        print(f"{why}: this is its folder, with the environment of a login", file=sys.stderr)
        environment = dict(os.environ)
    else:
        folder = os.readlink(f"/proc/{pid}/cwd")
    environment["TERM"] = os.environ.get("TERM", "dumb")
    os.chdir(folder)
    shell = pwd.getpwuid(os.getuid()).pw_shell or "/bin/sh"
    if command:
        sys.exit(run(list(command), environment))
    words = [shell if os.access(shell, os.X_OK) else "/bin/sh", "-i"]
    try:
        os.execvpe(words[0], words, environment)  # noqa: S606  the user's own command
    except OSError as error:
        print(f"{words[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(127)


if __name__ == "__main__":
    main(*sys.argv[1:])
